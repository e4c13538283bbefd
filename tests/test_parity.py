"""Rows of the exactness harness: each compares a fit in simulated ranks with one plain process, in float64."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from conftest import slow
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_vdp.testing import ParityModule, RankFailed, assert_parity, measure_parity, tiny_batch, tiny_model

STEPS = 3
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")


def make_module(family: str, checkpointing: bool = False, **model: Any) -> ParityModule:
    module = ParityModule(tiny_model(family, **model))
    if checkpointing:
        module.model.gradient_checkpointing_enable()
    return module.train()


def batches(family: str, count: int = STEPS, **batch: Any) -> list[dict[str, torch.Tensor]]:
    return [tiny_batch(family, seed=seed, **batch) for seed in range(count)]


# at four ranks the three that are slow have rows among the batches and models below
@pytest.mark.parametrize(
    ("family", "size"),
    [
        *((family, 2) for family in FAMILIES),
        *(("qwen3_vl_moe", 4), ("qwen3_5", 4)),
        *slow(("qwen2_vl", 4), ("qwen2_5_vl", 4), ("qwen3_vl", 4)),
    ],
)
def test_family_at_size(family: str, size: int) -> None:
    assert_parity(partial(make_module, family), batches(family), world_size=size, sequence_parallel_size=size)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_two_replicas_of_two_ranks(family: str) -> None:
    assert_parity(partial(make_module, family), batches(family, 2 * STEPS), world_size=4, sequence_parallel_size=2)


def test_one_rank_to_a_group_is_plain_fsdp() -> None:
    assert_parity(
        partial(make_module, "qwen2_5_vl"), batches("qwen2_5_vl", 2 * STEPS), world_size=2, sequence_parallel_size=1
    )


ROWS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one image for four ranks": ("qwen3_vl", 4, {"rows": [[(1, 6, 8)]]}),
    "one image for four ranks, windows": ("qwen2_5_vl", 4, {"rows": [[(1, 6, 8)]]}),
    # 3 + 2 + 24 + 3 positions: the image covers the cut between all shards
    "an image across every shard boundary": ("qwen3_vl", 4, {"rows": [[(1, 12, 8)]], "text": 3}),
    "length not divisible": ("qwen2_vl", 4, {"rows": [[(1, 4, 4), (1, 4, 6)]], "length": 31}),
    "right padding": ("qwen2_5_vl", 2, {"rows": [[(1, 4, 4)], [(1, 6, 8), (1, 4, 8)]]}),
    "left padding": ("qwen3_vl", 4, {"rows": [[(1, 4, 4)], [(1, 6, 8), (1, 4, 8)]], "padding": "left"}),
    "left padding, experts": ("qwen3_vl_moe", 2, {"rows": [[(1, 4, 4)], [(1, 6, 8)]], "padding": "left"}),
    "a row without image": ("qwen2_vl", 2, {"rows": [[], [(1, 6, 8), (1, 4, 8)]]}),
    "text only": ("qwen2_5_vl", 2, {"rows": [[], []], "text": 9}),
    "a shard of one position": ("qwen2_5_vl", 4, {"rows": [[]], "text": 5}),
    "a video": ("qwen2_5_vl", 2, {"rows": [[]], "videos": [[(3, 4, 6)]]}),
    "images and a video": ("qwen3_vl", 2, {"rows": [[(1, 4, 4), (1, 6, 8)]], "videos": [[(3, 4, 6)]]}),
    "images and videos, four ranks": ("qwen2_vl", 4, {"rows": [[(1, 4, 4)]], "videos": [[(2, 4, 4), (3, 4, 6)]]}),
}


@pytest.mark.parametrize("row", ROWS)
def test_batch(row: str) -> None:
    family, size, batch = ROWS[row]
    assert_parity(partial(make_module, family), batches(family, **batch), world_size=size, sequence_parallel_size=size)


MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "eager": ("qwen2_5_vl", 2, {"attention": "eager"}),
    "eager, kv heads repeated": ("qwen3_vl", 4, {"attention": "eager"}),
    "as many kv heads": ("qwen2_5_vl", 4, {"key_value_heads": 4}),
    "one kv head": ("qwen2_vl", 2, {"key_value_heads": 1}),
    "eight heads, two kv heads, four ranks": ("qwen2_5_vl", 4, {"heads": 8, "key_value_heads": 2}),
    "four heads, two kv heads, three ranks": ("qwen3_vl", 3, {}),
    "four heads, four kv heads, three ranks, eager": ("qwen2_5_vl", 3, {"key_value_heads": 4, "attention": "eager"}),
    "experts, three ranks": ("qwen3_vl_moe", 3, {}),
    "eight heads, one kv head, three ranks": ("qwen2_vl", 3, {"heads": 8, "key_value_heads": 1}),
    "sliding windows": (
        "qwen2_5_vl",
        2,
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "tied embeddings": ("qwen3_vl", 2, {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("row", MODELS)
def test_model(row: str) -> None:
    family, size, model = MODELS[row]
    padded = batches(family, rows=[[(1, 4, 4)], [(1, 6, 8), (1, 4, 8)]])
    assert_parity(partial(make_module, family, **model), padded, world_size=size, sequence_parallel_size=size)


@pytest.mark.parametrize(("family", "size"), [("qwen2_5_vl", 2), ("qwen3_vl", 4)])
def test_activation_checkpointing_of_hugging_face(family: str, size: int) -> None:
    assert_parity(
        partial(make_module, family, checkpointing=True), batches(family), world_size=size, sequence_parallel_size=size
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl_moe"])
def test_activation_checkpointing_of_lightning(family: str) -> None:
    blocks = {type(m) for m in tiny_model(family).modules() if isinstance(m, GradientCheckpointingLayer)}
    assert_parity(
        partial(make_module, family),
        batches(family),
        strategy_arguments={"activation_checkpointing_policy": blocks},
    )


def test_accumulation_with_two_replicas() -> None:
    assert_parity(
        partial(make_module, "qwen2_5_vl"),
        batches("qwen2_5_vl", 4 * STEPS),
        world_size=4,
        sequence_parallel_size=2,
        accumulate_grad_batches=2,
    )


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_clipping(algorithm: str) -> None:
    report = assert_parity(
        partial(make_module, "qwen3_vl"),
        batches("qwen3_vl"),
        trainer_arguments={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm},
    )
    assert report.steps == STEPS


@pytest.mark.parametrize(
    "strategy",
    [
        {"vision_assignment": "contiguous", "vision_balance": "memory"},
        {"vision_data_parallel": False},
        {"logits": "whole"},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"auto_wrap_policy": {nn.Embedding}},
    ],
    ids=lambda strategy: ", ".join(f"{name}={value}" for name, value in strategy.items()),
)
def test_strategy_argument(strategy: dict[str, Any]) -> None:
    assert_parity(partial(make_module, "qwen3_vl"), batches("qwen3_vl"), strategy_arguments=strategy)


def test_hybrid_sharding() -> None:
    assert_parity(
        partial(make_module, "qwen2_5_vl"),
        batches("qwen2_5_vl", 2 * STEPS),
        world_size=4,
        sequence_parallel_size=2,
        strategy_arguments={"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)},
    )


def _frozen(part: str) -> ParityModule:
    module = make_module("qwen3_vl")
    for name, parameter in module.named_parameters():
        if part in name:
            parameter.requires_grad_(False)
    return module


@pytest.mark.parametrize("part", ["model.visual", "visual.blocks", "language_model", "embed_tokens"])
def test_frozen_part_with_a_rank_without_image(part: str) -> None:
    one_image = batches("qwen3_vl", rows=[[(1, 6, 8)]])
    assert_parity(partial(_frozen, part), one_image, strategy_arguments={"use_orig_params": True})


# replica 0 and replica 1 alternate: their towers must run alike whatever each batch holds
MIXES: dict[str, list[dict[str, Any]]] = {
    "text beside images": [{"rows": [[]], "text": 9}, {"rows": [[(1, 4, 4), (1, 6, 8)]]}],
    "images beside text": [{"rows": [[(1, 4, 4), (1, 6, 8)]]}, {"rows": [[]], "text": 9}],
    "images beside a video": [{"rows": [[(1, 4, 4)]]}, {"rows": [[]], "videos": [[(3, 4, 6)]]}],
    "a video beside both": [
        {"rows": [[]], "videos": [[(3, 4, 6)]]},
        {"rows": [[(1, 4, 4), (1, 6, 8)]], "videos": [[(2, 4, 4)]]},
    ],
}


MIXED_FAMILIES = dict(zip(MIXES, ["qwen2_5_vl", "qwen3_vl", "qwen3_vl", "qwen2_vl"]))
CHECKPOINTED = ("images beside text", "a video beside both")


# pairwise, also with the rows of the second version of FSDP
@pytest.mark.parametrize(
    ("mix", "family", "checkpointing"),
    [
        *((mix, family, mix in CHECKPOINTED) for mix, family in MIXED_FAMILIES.items()),
        *slow(*((mix, family, mix not in CHECKPOINTED) for mix, family in MIXED_FAMILIES.items())),
    ],
)
def test_replicas_with_other_modalities(mix: str, family: str, checkpointing: bool) -> None:
    alternating = [tiny_batch(family, seed=seed, **MIXES[mix][seed % 2]) for seed in range(2 * STEPS)]
    assert_parity(
        partial(make_module, family, checkpointing=checkpointing), alternating, world_size=4, sequence_parallel_size=2
    )


def _global_tokens_module() -> ParityModule:
    return make_module("qwen2_5_vl")


def _thinned(labels: torch.Tensor) -> torch.Tensor:
    """Shifted labels, of which every third does not count."""
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].clone()
    shifted[:, ::3] = -100
    return shifted


class _Shifted(ParityModule):
    """Labels that are shifted already, of which a replica counts fewer than it has."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return super().training_step({**batch, "shift_labels": _thinned(batch["labels"])}, batch_idx)


class _TokenWeighted(ParityModule):
    """One process that weighs its two micro-batches by their labels."""

    def __init__(self, model: nn.Module, counts: list[int]) -> None:
        super().__init__(model)
        self.counts = counts

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        pair = self.counts[batch_idx // 2 * 2 : batch_idx // 2 * 2 + 2]
        return super().training_step(batch, batch_idx) * self.counts[batch_idx] / (sum(pair) / 2)


def _weighted_or_global(counts: list[int]) -> ParityModule:
    model = tiny_model("qwen2_5_vl").train()
    alone = int(os.environ["WORLD_SIZE"]) == 1
    return _TokenWeighted(model, counts) if alone else ParityModule(model)


def _shifted(counts: list[int]) -> ParityModule:
    class Weighted(_Shifted):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            pair = counts[batch_idx // 2 * 2 : batch_idx // 2 * 2 + 2]
            return super().training_step(batch, batch_idx) * counts[batch_idx] / (sum(pair) / 2)

    model = tiny_model("qwen2_5_vl").train()
    return Weighted(model) if int(os.environ["WORLD_SIZE"]) == 1 else _Shifted(model)


def test_global_token_weights_of_shifted_labels() -> None:
    mixed = [tiny_batch("qwen2_5_vl", seed=seed, rows=[[(1, 4, 4)]], text=4 + 5 * (seed % 2)) for seed in range(6)]
    counts = []
    for batch in mixed:
        counts.append(int((_thinned(batch["labels"]) != -100).sum()))
    assert_parity(
        partial(_shifted, counts),
        mixed,
        world_size=4,
        sequence_parallel_size=2,
        strategy_arguments={"loss_tokens": "global"},
    )


def test_global_token_weights() -> None:
    mixed = [tiny_batch("qwen2_5_vl", seed=seed, rows=[[(1, 4, 4)]], text=4 + 5 * (seed % 2)) for seed in range(6)]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in mixed]
    assert len(set(counts)) > 1
    assert_parity(
        partial(_weighted_or_global, counts),
        mixed,
        world_size=4,
        sequence_parallel_size=2,
        strategy_arguments={"loss_tokens": "global"},
    )


class _TwoForwards(ParityModule):
    """Two forwards of other lengths and other images before one backward, as preference losses have them."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        chosen, rejected = self.model(**batch["chosen"]).loss, self.model(**batch["rejected"]).loss
        return torch.nn.functional.softplus(chosen - rejected) + chosen


def _two_forwards(family: str) -> ParityModule:
    module = _TwoForwards(tiny_model(family).train())
    module.model.gradient_checkpointing_enable()
    return module


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_two_forwards_before_one_backward_checkpointed(family: str) -> None:
    pairs = [
        {
            "chosen": tiny_batch(family, seed=seed),
            "rejected": tiny_batch(family, seed=seed + 10, rows=[[(1, 6, 8)]], text=3),
        }
        for seed in range(STEPS)
    ]
    assert_parity(partial(_two_forwards, family), pairs)


def _router_losses() -> ParityModule:
    return make_module("qwen3_vl_moe", output_router_logits=True, router_aux_loss_coef=0.5)


@pytest.mark.parametrize("size", [2, 4])
def test_auxiliary_loss_of_routers(size: int) -> None:
    padded = batches("qwen3_vl_moe", rows=[[(1, 4, 4)], [(1, 6, 8), (1, 4, 8)]])
    assert_parity(_router_losses, padded, world_size=size, sequence_parallel_size=size)


class _Penalized(ParityModule):
    """Adds what every rank of a group repeats, a loss on gathered logits and one on shards."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        from lightning_vdp import gather_sequence, sequence_mean

        outputs = self.model(**batch)
        shard = getattr(outputs, "sequence_shard", None)
        squares = outputs.logits.square().mean(-1)
        mean = squares.mean(1) if shard is None else sequence_mean(squares, shard)
        whole = outputs.logits if shard is None else gather_sequence(outputs.logits, shard)
        penalty = self.model.get_input_embeddings().weight.square().sum()
        return outputs.loss + 0.1 * mean.sum() + 0.1 * whole[:, -1].logsumexp(-1).sum() + 0.01 * penalty


def _penalized() -> ParityModule:
    return _Penalized(tiny_model("qwen2_5_vl").train())


def test_penalties_and_losses_on_gathered_logits() -> None:
    assert_parity(_penalized, batches("qwen2_5_vl"))


def test_harness_names_the_parameter_when_gradients_differ() -> None:
    report = measure_parity(_wrong_on_ranks, batches("qwen2_5_vl"))
    assert report.gradient > 1e-3
    assert "lm_head" in report.worst_gradient or "model" in report.worst_gradient
    with pytest.raises(AssertionError, match="gradient"):
        assert_parity(_wrong_on_ranks, batches("qwen2_5_vl"))


class _WrongOnRanks(ParityModule):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.trainer.world_size


def _wrong_on_ranks() -> ParityModule:
    return _WrongOnRanks(tiny_model("qwen2_5_vl").train())


def test_harness_reports_a_failing_rank() -> None:
    with pytest.raises(RankFailed, match="out of range for this test"):
        assert_parity(_failing, batches("qwen2_5_vl"))


class _Failing(ParityModule):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1:
            raise IndexError("out of range for this test")
        return super().training_step(batch, batch_idx)


def _failing() -> ParityModule:
    return _Failing(tiny_model("qwen2_5_vl").train())
