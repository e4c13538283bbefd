"""Packed rows: samples in one row are kept apart, whatever the attention function."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flash_stand_in import CALLS, use_flash
from torch import Tensor

from lightning_vdp import UlyssesVisionDPStrategy, token_log_probs
from lightning_vdp.families.find import find_models
from lightning_vdp.forward.divide import divide_models
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.packing import pack_samples
from lightning_vdp.settings import Settings
from lightning_vdp.testing import (
    Batches,
    ParityModule,
    PromoteFloat32,
    RankFailed,
    assert_parity,
    quiet_trainer,
    run_ranks,
    tiny_batch,
    tiny_model,
)

CONTENT: list[dict[str, Any]] = [
    {"rows": [[(1, 4, 4)]], "text": 4},
    {"rows": [[(1, 6, 8), (1, 4, 4)]], "text": 3},
    {"rows": [[]], "text": 9},
]


def samples(family: str, seed: int = 0) -> list[dict[str, Tensor]]:
    return [tiny_batch(family, seed=seed + index, **content) for index, content in enumerate(CONTENT)]


def make_model(family: str, attention: str) -> Any:
    model = tiny_model(family, "sdpa" if attention == "flash" else attention)
    return use_flash(model) if attention == "flash" else model


def _packed_and_apart(family: str, attention: str) -> list[tuple[Tensor, Tensor]]:
    dist.init_process_group("gloo")
    model = make_model(family, attention).double().eval()
    parts = samples(family)
    with PromoteFloat32(), torch.no_grad():
        plain = make_model(family, "eager").double().eval()
        apart = [token_log_probs(plain(**part).logits, part["labels"])[0] for part in parts]
        division = divide_models(find_models(model), SequenceMesh("cpu", 1, 2), Settings())
        packed = pack_samples(parts, model)
        outputs = model(**packed)
        together = token_log_probs(outputs.logits, packed["labels"], outputs.sequence_shard)[0]
        loss = float(outputs.loss)
        division.undo()
    counted = torch.cat(apart)
    torch.testing.assert_close(loss, float(-counted.sum() / (counted != 0).sum()), rtol=1e-9, atol=0)
    lengths = [part["input_ids"].shape[1] for part in parts]
    # between samples stands a label that does not count
    found = [part[1:] for part in torch.nn.functional.pad(together, (1, 0)).split(lengths)]
    assert (CALLS["varlen"] > 0) == (attention == "flash")
    return list(zip(found, apart))


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_packed_samples_equal_samples_apart(family: str, attention: str) -> None:
    for results in run_ranks(_packed_and_apart, 2, family, attention):
        for found, apart in results:
            torch.testing.assert_close(found, apart, rtol=1e-9, atol=1e-12)


class _WithoutCache(ParityModule):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        # with a cache, which transformers makes by itself, it would not look for packed samples
        if int(self.trainer.world_size) == 1:
            batch = {**batch, "use_cache": False}
        return super().training_step(batch, batch_idx)


def _module(family: str, attention: str) -> ParityModule:
    return _WithoutCache(make_model(family, attention).train())


@pytest.mark.parametrize(
    ("family", "attention", "size"), [("qwen2_5_vl", "sdpa", 4), ("qwen3_vl", "eager", 2), ("qwen2_5_vl", "flash", 2)]
)
def test_parity_of_packed_rows(family: str, attention: str, size: int) -> None:
    model = tiny_model(family)
    packed = [pack_samples(samples(family, seed), model) for seed in range(3)]
    assert_parity(partial(_module, family, attention), packed, world_size=size, sequence_parallel_size=size)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_parity_of_padded_rows_under_flash_attention(padding: str) -> None:
    padded = [
        tiny_batch("qwen2_5_vl", seed=seed, rows=[[(1, 4, 4)], [(1, 6, 8), (1, 4, 8)]], padding=padding)
        for seed in range(3)
    ]
    assert_parity(partial(_module, "qwen2_5_vl", "flash"), padded, world_size=4, sequence_parallel_size=4)


def test_padded_samples_are_refused() -> None:
    padded = tiny_batch("qwen2_5_vl", rows=[[(1, 4, 4)]], length=40)
    with pytest.raises(ValueError, match="Sample 1 has 1 rows or padding"):
        pack_samples([samples("qwen2_5_vl")[0], padded])


def test_positions_of_text_alone_count_from_zero_in_each_sample() -> None:
    parts = [{"input_ids": torch.ones(1, length, dtype=torch.int64)} for length in (3, 2)]
    assert pack_samples(parts)["position_ids"].tolist() == [[0, 1, 2, 0, 1]]


def _pack_linear_attention() -> None:
    strategy = UlyssesVisionDPStrategy(sequence_parallel_size=2)
    model = tiny_model("qwen3_5")
    parts = [tiny_batch("qwen3_5", seed=index, dtype=torch.float32, **content) for index, content in enumerate(CONTENT)]
    loader = Batches([pack_samples(parts, model)])
    quiet_trainer(devices=2, strategy=strategy).fit(ParityModule(model), loader)


def test_packed_rows_are_refused_where_linear_attention_would_mix_samples() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_pack_linear_attention, 2)
    assert len(set(caught.value.failures.values())) == 1
    assert "linear attention would carry its state from one to the next" in caught.value.failures[0]
