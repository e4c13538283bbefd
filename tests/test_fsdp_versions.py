"""Both versions of FSDP: rows of the exactness harness under the first, and what each takes and refuses."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import slow
from test_parity import MIXES, MODELS, ROWS, STEPS, _frozen, _two_forwards, batches, make_module
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_vdp import UlyssesVisionDPStrategy
from lightning_vdp.fsdp.gradients import clip_gradient_norm, gradient_norm
from lightning_vdp.testing import Batches, ParityModule, assert_parity, quiet_trainer, run_ranks, tiny_batch, tiny_model

FAMILY = "qwen2_5_vl"


# the default is the second version, in which the rows of the other test modules run
assert_parity_1 = partial(assert_parity, fsdp_version=1)


@pytest.mark.parametrize(
    ("family", "size"),
    [("qwen3_vl_moe", 2), *slow(("qwen2_vl", 4), ("qwen3_vl", 2), ("llava", 2), ("internvl", 2))],
)
def test_family(family: str, size: int) -> None:
    assert_parity_1(partial(make_module, family), batches(family), world_size=size, sequence_parallel_size=size)


@pytest.mark.parametrize("row", ["images and a video", *slow("one image for four ranks", "left padding", "text only")])
def test_batch(row: str) -> None:
    family, size, batch = ROWS[row]
    assert_parity_1(
        partial(make_module, family), batches(family, **batch), world_size=size, sequence_parallel_size=size
    )


@pytest.mark.parametrize("row", ["tied embeddings", *slow("four heads, two kv heads, three ranks")])
def test_model(row: str) -> None:
    family, size, model = MODELS[row]
    padded = batches(family, rows=[[(1, 4, 4)], [(1, 6, 8), (1, 4, 8)]])
    assert_parity_1(partial(make_module, family, **model), padded, world_size=size, sequence_parallel_size=size)


@pytest.mark.parametrize(
    ("mix", "family", "checkpointing"),
    [
        ("text beside images", "qwen2_5_vl", True),
        ("a video beside both", "qwen2_vl", False),
        *slow(("images beside text", "qwen3_vl", False), ("images beside a video", "qwen3_vl", True)),
    ],
)
def test_replicas_with_other_modalities(mix: str, family: str, checkpointing: bool) -> None:
    alternating = [tiny_batch(family, seed=seed, **MIXES[mix][seed % 2]) for seed in range(2 * STEPS)]
    assert_parity_1(
        partial(make_module, family, checkpointing=checkpointing), alternating, world_size=4, sequence_parallel_size=2
    )


@pytest.mark.parametrize("part", ["visual.blocks", *slow("model.visual", "language_model", "embed_tokens")])
def test_frozen_part_with_a_rank_without_image(part: str) -> None:
    assert_parity_1(partial(_frozen, part), batches("qwen3_vl", rows=[[(1, 6, 8)]]))


def test_frozen_tower_kept_whole() -> None:
    assert_parity_1(
        partial(_frozen, "model.visual"), batches("qwen3_vl"), strategy_arguments={"shard_frozen_tower": False}
    )


class _Unused(ParityModule):
    """A parameter that only replicas with an even number of rows use, as an image separator is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.separator = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))
        self.block = nn.Linear(3, 2, dtype=torch.float64)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if len(batch["input_ids"]) % 2 == 0:
            loss = loss + self.block(self.separator).square().sum()
        return loss


def _unused() -> ParityModule:
    return _Unused(make_module(FAMILY).model)


def test_a_parameter_that_one_replica_uses() -> None:
    rows: list[Any] = [[[(1, 4, 4)], [(1, 6, 8)]], [[(1, 4, 4)]]]
    mixed = [tiny_batch(FAMILY, seed=seed, rows=rows[seed % 2]) for seed in range(2 * STEPS)]
    assert_parity(_unused, mixed, world_size=4, sequence_parallel_size=2)


def test_two_forwards_before_one_backward_checkpointed() -> None:
    pairs = [
        {"chosen": tiny_batch(FAMILY, seed=seed), "rejected": tiny_batch(FAMILY, seed=seed + 9, rows=[[]], text=3)}
        for seed in range(STEPS)
    ]
    assert_parity_1(partial(_two_forwards, FAMILY), pairs)


def _blocks() -> set[type]:
    return {type(m) for m in tiny_model(FAMILY).modules() if isinstance(m, GradientCheckpointingLayer)}


ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "no reshard after forward": lambda: {"sharding_strategy": "SHARD_GRAD_OP"},
    "own policy": lambda: {"auto_wrap_policy": _blocks()},
    "embeddings apart": lambda: {"auto_wrap_policy": {nn.Embedding}},
    "lightning's activation checkpointing": lambda: {"activation_checkpointing_policy": _blocks()},
    "contiguous, gathered, whole": lambda: {
        "vision_assignment": "contiguous",
        "vision_exchange": "gather",
        "logits": "whole",
    },
}


@pytest.mark.parametrize("name", [*list(ARGUMENTS)[:1], *slow(*list(ARGUMENTS)[1:])])
def test_strategy_argument(name: str) -> None:
    assert_parity_1(partial(make_module, FAMILY), batches(FAMILY), strategy_arguments=ARGUMENTS[name]())


@pytest.mark.parametrize(("sizes", "accumulate"), [((4, 1), 2), *slow(((2, 2), 1))])
def test_hybrid_sharding(sizes: tuple[int, int], accumulate: int) -> None:
    assert_parity(
        partial(make_module, FAMILY),
        batches(FAMILY, 4 * accumulate),
        world_size=4,
        sequence_parallel_size=2,
        accumulate_grad_batches=accumulate,
        strategy_arguments={"sharding_strategy": "HYBRID_SHARD", "device_mesh": sizes},
    )


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_clipping(algorithm: str) -> None:
    assert_parity_1(
        partial(make_module, "qwen3_vl"),
        batches("qwen3_vl"),
        trainer_arguments={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm},
    )


def _norm_with_an_ignored_parameter(version: int) -> tuple[float, float]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # the last layer's weight has one row, of which the second rank holds nothing
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1)).double()
    module: nn.Module = copy.deepcopy(plain)
    if version == 1:
        ignored = [module[1]]
        module = FullyShardedDataParallel(
            module, ignored_modules=ignored, device_id=torch.device("cpu"), use_orig_params=True
        )
    else:
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), ignored_params=set(module[1].parameters()))
    batch = torch.linspace(-1, 1, 14, dtype=torch.float64).view(2, 7)
    for side in (plain, module):
        side(batch).square().sum().backward()
    whole = torch.nn.utils.get_total_norm([value.grad for value in plain.parameters()])
    found = clip_gradient_norm(module, module.parameters(), float(whole) / 2)
    clipped = gradient_norm(module, module.parameters())
    assert float(clipped) == pytest.approx(float(whole) / 2, rel=1e-5)
    return float(found), float(whole)


@pytest.mark.parametrize("version", [1, 2])
def test_gradients_that_fsdp_ignores_count_once(version: int) -> None:
    for found, whole in run_ranks(_norm_with_an_ignored_parameter, 2, version):
        assert found == pytest.approx(whole, rel=1e-14)


REFUSED: dict[str, dict[str, Any]] = {
    "`forward_prefetch` is an argument of FSDP1": {"forward_prefetch": True},
    "`param_init_fn` is an argument of FSDP1": {"param_init_fn": print},
    "`use_orig_params=False` makes flat parameters": {"use_orig_params": False},
    "`sharding_strategy='NO_SHARD'` has no counterpart": {"sharding_strategy": "NO_SHARD"},
    "takes a set of module classes or a policy object": {"auto_wrap_policy": lambda **_: True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_arguments_of_the_first_version_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UlyssesVisionDPStrategy(fsdp_version=2, **REFUSED[message])


def _after_another_version() -> None:
    module = ParityModule(tiny_model(FAMILY))
    loader = Batches([tiny_batch(FAMILY, dtype=torch.float32)])
    quiet_trainer(devices=2, strategy=UlyssesVisionDPStrategy(2, fsdp_version=1)).fit(module, loader)
    with pytest.raises(ValueError, match=r"other values of .*`fsdp_version`"):
        quiet_trainer(devices=2, strategy=UlyssesVisionDPStrategy(2, fsdp_version=2)).fit(module, loader)


def test_another_version_for_a_wrapped_module_is_refused() -> None:
    run_ranks(_after_another_version, 2)


def _parameters_after_evaluation() -> tuple[set[str], list[str]]:
    module = ParityModule(tiny_model(FAMILY))
    loader = Batches([tiny_batch(FAMILY, dtype=torch.float32)])
    trainer = quiet_trainer(devices=2, strategy=UlyssesVisionDPStrategy(2, fsdp_version=2))
    trainer.validate(module, loader, verbose=False)
    assert isinstance(module, FSDPModule)
    methods = [name for name in vars(module) if name.endswith("_step")]
    return {type(parameter).__name__ for parameter in module.parameters()}, methods


def test_evaluation_leaves_sharded_parameters_and_no_method_behind() -> None:
    assert run_ranks(_parameters_after_evaluation, 2) == [({"DTensor"}, [])] * 2


def _hybrid_over_one_shard() -> None:
    strategy = UlyssesVisionDPStrategy(2, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 1), fsdp_version=1)
    with pytest.raises(ValueError, match=r"shard size of 1 .* FSDP1; .* `fsdp_version=2`"):
        quiet_trainer(devices=2, strategy=strategy).fit(ParityModule(tiny_model(FAMILY)), Batches([]))


def test_one_shard_is_refused_under_the_first_version() -> None:
    run_ranks(_hybrid_over_one_shard, 2)
