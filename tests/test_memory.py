"""What the decoder keeps for backward on each rank, as a part of what one process keeps."""

import pytest

from benchmarks.decoder_memory import share_kept


@pytest.mark.parametrize(("size", "limit"), [(2, 0.53), (4, 0.27)])
def test_the_decoder_keeps_its_share(size: int, limit: float) -> None:
    assert 1 / size <= share_kept(size, 512) <= limit


@pytest.mark.slow
@pytest.mark.parametrize(("size", "limit"), [(2, 0.53), (4, 0.27)])
def test_the_decoder_keeps_its_share_of_a_long_sequence(size: int, limit: float) -> None:
    share = share_kept(size, 4096)
    print(f"unpadded, S = {size}: {share:.4f}")
    assert 1 / size <= share <= limit


@pytest.mark.slow
def test_what_does_not_shrink_is_told() -> None:
    """A padded row keeps its whole mask, and repeated key-value heads are kept on more ranks than one."""
    padded, few = share_kept(4, 4096, padded=True), share_kept(4, 4096, key_value_heads=2)
    print(f"padded: {padded:.4f}, two key-value heads on four ranks: {few:.4f}")
    assert 0.25 < few < 0.4
    assert 0.25 < padded < 1
