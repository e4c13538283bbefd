"""What the decoder keeps for backward on each rank, as a part of what one process keeps."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from lightning_vdp.call import Settings
from lightning_vdp.divide import divide_models
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.models import find_models
from lightning_vdp.testing import run_ranks
from lightning_vdp.testing.measure import SavedBytes


def _saved(length: int, key_value_heads: int, padded: bool, ranks: int) -> int:
    dist.init_process_group("gloo")
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=key_value_heads,
        vocab_size=128,
        max_position_embeddings=length,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    batch: dict[str, Any] = {"input_ids": torch.randint(128, (1, length))}
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][:, -5:] = 0
    settings = Settings(verify_first_batch=False)
    division = divide_models(find_models(model), SequenceMesh("cpu", dist.get_world_size() // ranks, ranks), settings)
    saved = SavedBytes(model)
    with saved:
        hidden = model.model(**batch, use_cache=False).last_hidden_state
    division.undo()
    assert hidden.requires_grad
    return saved.total


def _share(length: int, size: int, key_value_heads: int = 8, padded: bool = False) -> float:
    (alone,) = run_ranks(_saved, 1, length, key_value_heads, padded, 1)
    return max(run_ranks(_saved, size, length, key_value_heads, padded, size)) / alone


@pytest.mark.parametrize(("size", "limit"), [(2, 0.53), (4, 0.27)])
def test_the_decoder_keeps_its_share(size: int, limit: int) -> None:
    assert 1 / size <= _share(512, size) <= limit


@pytest.mark.slow
@pytest.mark.parametrize(("size", "limit"), [(2, 0.53), (4, 0.27)])
def test_the_decoder_keeps_its_share_of_a_long_sequence(size: int, limit: int) -> None:
    share = _share(4096, size)
    print(f"unpadded, S = {size}: {share:.4f}")
    assert 1 / size <= share <= limit


@pytest.mark.slow
def test_what_does_not_shrink_is_told() -> None:
    """A padded row keeps its whole mask, and repeated key-value heads are kept on more ranks than one."""
    padded, few = _share(4096, 4, padded=True), _share(4096, 4, key_value_heads=2)
    print(f"padded: {padded:.4f}, two key-value heads on four ranks: {few:.4f}")
    assert 0.25 < few < 0.4
    assert 0.25 < padded < 1
