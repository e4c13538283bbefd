import pytest
import torch

from lightning_vdp.sequence.heads import head_splits
from lightning_vdp.shards import even_sizes


@pytest.mark.parametrize(
    ("heads", "key_value", "ranks"),
    [
        (4, 2, 2),
        (4, 2, 4),
        (4, 4, 4),
        (8, 1, 4),
        (6, 3, 2),
        (12, 4, 6),
        (28, 4, 4),
        (64, 8, 8),
        (4, 4, 1),
        (28, 4, 8),
        (4, 2, 3),
        (5, 1, 3),
        (6, 2, 4),
    ],
)
def test_every_query_head_reads_its_own_kv_head(heads: int, key_value: int, ranks: int) -> None:
    splits = head_splits(heads, key_value, ranks).ranks
    assert [head for split in splits for head in split.query] == list(range(heads))
    for split in splits:
        for head, read in zip(split.query, split.reads):
            assert split.key_value[read] == head // (heads // key_value)
        # nothing is sent that no query head reads
        assert set(split.reads) == set(range(len(split.key_value)))


def test_groups_are_none_where_query_heads_share_unevenly() -> None:
    assert [split.groups for split in head_splits(6, 3, 2).ranks] == [None, None]
    assert [split.groups for split in head_splits(8, 4, 2).ranks] == [2, 2]
    assert [split.groups for split in head_splits(4, 2, 4).ranks] == [1, 1, 1, 1]


def test_fewer_heads_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="4 query heads cannot be divided over 8 ranks"):
        head_splits(4, 4, 8)


@pytest.mark.parametrize(("length", "ranks"), [(8, 2), (7, 2), (5, 4), (4, 4), (3, 4), (0, 2), (101, 8)])
def test_shard_sizes_differ_by_at_most_one(length: int, ranks: int) -> None:
    sizes = even_sizes(length, ranks)
    assert sum(sizes) == length
    assert len(sizes) == ranks
    assert max(sizes) - min(sizes) <= 1
    assert torch.tensor(sizes).diff().le(0).all()
