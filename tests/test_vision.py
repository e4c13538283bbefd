"""Vision DP: what ranks encode, what they receive, and that gradients stay exact whatever a batch holds."""

import copy
import os
import random
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from benchmarks.mixes import MIXES, documents, grid_of
from lightning_vdp import StepError, UlyssesVisionDPStrategy
from lightning_vdp.batch.contents import read_modality
from lightning_vdp.call.units import UnitPlan
from lightning_vdp.callbacks import VisionLoadMonitor
from lightning_vdp.families.family import Family
from lightning_vdp.families.find import family_of, find_models
from lightning_vdp.forward.divide import divide_models
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.settings import Settings
from lightning_vdp.shards import ShardLayout
from lightning_vdp.testing import (
    Batches,
    GradientRecorder,
    ParityModule,
    assert_parity,
    quiet_trainer,
    run_ranks,
    tiny_batch,
    tiny_model,
)
from lightning_vdp.testing.measure import ByteCounter
from lightning_vdp.vision.assign import balanced, contiguous, loads
from lightning_vdp.vision.cost import TowerCost, patches, tower_cost
from lightning_vdp.vision.plan import UnitDraft, assign_units, list_units, split_frames
from lightning_vdp.vision.routes import plan_routes

THREE = [[(1, 4, 4), (1, 6, 8), (1, 8, 4)]]


def make_module(family: str, prepare: Callable[[nn.Module], None] | None = None, rate: float = 0.05) -> ParityModule:
    model = tiny_model(family).train()
    if prepare is not None:
        prepare(model)
    return ParityModule(model, rate)


def batches(family: str, count: int = 3, **batch: Any) -> list[dict[str, Tensor]]:
    return [tiny_batch(family, seed=seed, **batch) for seed in range(count)]


# ---- balance


# Qwen2.5-VL's tower
COSTS: dict[str, Callable[[Any], list[int]]] = {
    "memory": patches,
    "time": TowerCost(
        per_patch=32 * (4 * 1280**2 + 3 * 1280 * 3420), per_pair=2 * 1280, full_blocks=4, window_blocks=28, window=64
    ),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("balance", COSTS)
def test_load_is_never_above_the_contiguous_optimum(mix: str, ranks: int, balance: str) -> None:
    for seed in range(20):
        costs = COSTS[balance](split_frames(MIXES[mix](seed)))
        assert max(loads(costs, balanced(costs, ranks), ranks)) <= max(loads(costs, contiguous(costs, ranks), ranks))


@pytest.mark.parametrize("balance", COSTS)
def test_documents_are_even_over_four_ranks(balance: str) -> None:
    ratios = []
    for seed in range(50):
        costs = COSTS[balance](documents(seed))
        if max(costs) * 4 <= sum(costs):
            ratios.append(max(loads(costs, balanced(costs, 4), 4)) * 4 / sum(costs))
    assert len(ratios) > 20
    assert sum(ratios) / len(ratios) <= 1.05


@pytest.mark.parametrize("balance", COSTS)
def test_one_video_is_even_over_four_ranks(balance: str) -> None:
    costs = COSTS[balance](split_frames([grid_of(640, 360, frames=32)]))
    assert max(loads(costs, balanced(costs, 4), 4)) * 4 / sum(costs) <= 1.05


@pytest.mark.parametrize(("units", "ranks", "limit_ms"), [(10_000, 64, 50), (32, 8, 0.2)])
def test_planning_is_fast(units: int, ranks: int, limit_ms: float) -> None:
    draw = random.Random(0)
    costs = [int(draw.lognormvariate(13, 1)) for _ in range(units)]
    # the least of many, since other processes share the machine
    assert min(timeit.repeat(lambda: balanced(costs, ranks), number=1, repeat=30)) * 1000 <= limit_ms


def test_memory_is_balanced_over_images_and_videos_together_and_time_within_each() -> None:
    drafts = {"image": UnitDraft((12,), None), "video": UnitDraft((3, 2, 2, 5), None)}

    def sums(balance: Any) -> list[list[int]]:
        plans = assign_units(drafts, Family(), Settings(vision_balance=balance), 2)
        return [loads(plans[name].costs, plans[name].owners, 2) for name in ("image", "video")]

    # what ranks keep of both adds up
    assert [sum(of_rank) for of_rank in zip(*sums("memory"))] == [12, 12]
    # the towers run one after the other
    assert [max(of_modality) for of_modality in sums("time")] == [12, 7]


# ---- routes


@pytest.mark.parametrize("seed", range(20))
def test_routes_bring_every_row_to_its_shard_in_order(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(1, 4)
    rows = [draw.randint(1, 9) for _ in range(draw.randint(1, 6))]
    sizes = [sum(rows) // ranks + 3] * ranks
    # two rows of a batch, each with placeholders in ascending columns
    first = draw.randint(0, sum(rows))
    columns = [sorted(draw.sample(range(sum(sizes)), count)) for count in (first, sum(rows) - first)]
    flat = torch.tensor(columns[0] + columns[1], dtype=torch.int64)
    owners = [draw.randrange(ranks) for _ in rows]
    plan = UnitPlan(tuple(rows), tuple(rows), tuple(rows), tuple(owners), ranks)
    owner_of_row = [owner for owner, count in zip(owners, rows) for _ in range(count)]
    layout = ShardLayout.contiguous(sum(sizes), ranks)
    routes = [plan_routes(layout.owners(flat.numpy()), plan, rank) for rank in range(ranks)]
    sent: list[list[list[int]]] = []
    for rank in range(ranks):
        own = torch.tensor([row for row, owner in enumerate(owner_of_row) if owner == rank], dtype=torch.int64)
        sent.append([part.tolist() for part in own[routes[rank].send_order].split(list(routes[rank].send_counts))])
    for rank in range(ranks):
        received = torch.tensor([row for source in range(ranks) for row in sent[source][rank]], dtype=torch.int64)
        assert tuple(len(sent[source][rank]) for source in range(ranks)) == routes[rank].receive_counts
        start, stop = sum(sizes[:rank]), sum(sizes[: rank + 1])
        wanted = [row for row, column in enumerate(flat.tolist()) if start <= column < stop]
        assert received[routes[rank].receive_order].tolist() == wanted


def _received(exchange: Any) -> tuple[list[int], list[int], int, int]:
    dist.init_process_group("gloo")
    model = tiny_model("qwen3_vl").double()
    mesh = SequenceMesh("cpu", 1, 4)
    settings = Settings(vision_exchange=exchange, verify_first_batch=False)
    division = divide_models(find_models(model), mesh, settings)
    batch = tiny_batch("qwen3_vl", rows=[[(1, 4, 4), (1, 12, 8), (1, 8, 4)]])
    seen: list[Any] = []
    mesh.vision_observers.append(seen.append)
    counter = ByteCounter()
    with counter:
        loss = model(**batch).loss
        forward = len(counter.received)
        loss.backward()
    division.undo()
    return counter.received[:forward], counter.received[forward:], seen[0].bytes_received, mesh.rank


def test_routed_exchange_receives_what_is_needed_and_not_owned() -> None:
    batch = tiny_batch("qwen3_vl", rows=[[(1, 4, 4), (1, 12, 8), (1, 8, 4)]])
    columns = (batch["input_ids"] == 120).nonzero()[:, 1]
    row_bytes = 3 * 64 * 8
    length = batch["input_ids"].shape[1]
    sizes = [length // 4 + (rank < length % 4) for rank in range(4)]
    ends = torch.tensor(sizes).cumsum(0)
    destination = torch.bucketize(columns, ends, right=True)
    results = run_ranks(_received, 4, "routed")
    costs_rows = [4, 24, 8]
    # the vision exchange is the first of the forward, after the header, and the last of the backward
    totals = [forward[1] for forward, _, _, _ in results]
    assert [told for _, _, told, _ in results] == totals
    owners = _owners(batch)
    owner = torch.repeat_interleave(torch.tensor(owners), torch.tensor(costs_rows))
    for rank, (forward, backward, _, _) in enumerate(results):
        needed = int(((destination == rank) & (owner != rank)).sum())
        given = int(((destination != rank) & (owner == rank)).sum())
        assert forward[1] == needed * row_bytes
        assert backward[-1] == given * row_bytes


def test_gathered_bytes_are_told_as_they_are_moved() -> None:
    results = run_ranks(_received, 4, "gather")
    # three levels of 64 float64 values; every share is padded to the largest, of 24 rows
    assert [(forward[1], told) for forward, _, told, _ in results] == [(3 * 24 * 3 * 64 * 8,) * 2] * 4


def _owners(batch: dict[str, Tensor]) -> list[int]:
    base = tiny_model("qwen3_vl").model
    family = family_of(base)
    draft = list_units(family.modalities[0], read_modality(batch, family.modalities[0]), base.config, family.facts)
    cost = tower_cost(base.config.vision_config, family.facts.tower_mlp_matrices)
    return list(assign_units({"image": draft}, family, Settings(), 4, cost)["image"].owners)


# ---- exactness, pairwise over exchange, assignment, family, size and case

CASES: dict[str, dict[str, Any]] = {
    "few": {"rows": [[(1, 6, 8)]]},
    "many": {"rows": [[(1, 4, 4)] * 3, [(1, 8, 4), (1, 4, 4), (1, 6, 8)]], "padding": "left"},
    "none": {"rows": [[]], "text": 11},
    "video": {"rows": [[]], "videos": [[(3, 4, 6)]]},
    "both": {"rows": [[(1, 6, 8), (1, 4, 4)]], "videos": [[(2, 4, 4), (1, 4, 6)]]},
}
# every pair of values of the five columns stands in a row
PAIRWISE = [
    ("both", 2, 1, "routed", "balanced", "qwen2_5_vl"),
    ("both", 2, 2, "routed", "balanced", "qwen2_5_vl"),
    ("both", 4, 1, "gather", "contiguous", "qwen3_vl"),
    ("few", 2, 1, "gather", "balanced", "llava"),
    ("few", 2, 2, "gather", "balanced", "qwen3_vl"),
    ("few", 4, 1, "routed", "contiguous", "qwen2_5_vl"),
    ("many", 2, 1, "routed", "contiguous", "qwen3_vl"),
    ("many", 2, 2, "routed", "balanced", "qwen2_5_vl"),
    ("many", 4, 1, "gather", "balanced", "llava"),
    ("none", 2, 1, "gather", "balanced", "qwen2_5_vl"),
    ("none", 2, 2, "routed", "contiguous", "llava"),
    ("none", 4, 1, "routed", "contiguous", "qwen3_vl"),
    ("video", 2, 1, "routed", "balanced", "qwen2_5_vl"),
    ("video", 2, 2, "gather", "contiguous", "qwen3_vl"),
    ("video", 4, 1, "routed", "balanced", "qwen3_vl"),
]


@pytest.mark.parametrize(("case", "size", "replicas", "exchange", "assignment", "family"), PAIRWISE)
def test_parity(case: str, size: int, replicas: int, exchange: str, assignment: str, family: str) -> None:
    assert_parity(
        partial(make_module, family),
        batches(family, 3 * replicas, **CASES[case]),
        world_size=size * replicas,
        sequence_parallel_size=size,
        strategy_arguments={"vision_exchange": exchange, "vision_assignment": assignment},
    )


FURTHER = [
    ("qwen2_vl", 2, "video", {}),
    ("qwen3_vl_moe", 2, "video", {"vision_balance": "memory"}),
    ("qwen3_vl", 2, "both", {"vision_data_parallel": False}),
    ("internvl", 4, "many", {}),
    ("internvl", 2, "few", {"vision_exchange": "gather"}),
]


@pytest.mark.parametrize(("family", "size", "case", "strategy"), FURTHER)
def test_parity_of_further_families(family: str, size: int, case: str, strategy: dict[str, Any]) -> None:
    assert_parity(
        partial(make_module, family),
        batches(family, **CASES[case]),
        world_size=size,
        sequence_parallel_size=size,
        strategy_arguments=strategy,
    )


@pytest.mark.parametrize("exchange", ["routed", "gather"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_parity_of_replicas_with_and_without_images(family: str, exchange: str) -> None:
    mixed = [
        tiny_batch(family, seed=seed, rows=[[]] if seed % 4 in (1, 2) else [[(1, 6, 8)] * (1 + seed % 3)], text=8)
        for seed in range(6)
    ]
    assert_parity(
        partial(make_module, family),
        mixed,
        world_size=4,
        sequence_parallel_size=2,
        strategy_arguments={"vision_exchange": exchange},
    )


# ---- towers that are frozen as a whole or in part


def _freeze(model: nn.Module, keep: tuple[str, ...] = (), tower: str = "visual") -> None:
    for name, parameter in model.get_submodule(f"model.{tower}").named_parameters():
        parameter.requires_grad_(any(part in name for part in keep))


class _Adapted(nn.Module):
    """A linear layer with a low-rank path beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _adapt(model: nn.Module) -> None:
    torch.manual_seed(3)
    for block in model.model.visual.blocks:
        block.attn.qkv = _Adapted(block.attn.qkv)
    _freeze(model, keep=("down", "up"))


FROZEN: dict[str, tuple[Callable[[nn.Module], None], dict[str, Any]]] = {
    "frozen": (_freeze, {}),
    "frozen and whole on every rank": (_freeze, {"shard_frozen_tower": False}),
    "frozen and whole, gathered": (_freeze, {"shard_frozen_tower": False, "vision_exchange": "gather"}),
    "partly frozen": (partial(_freeze, keep=("blocks.1", "merger")), {}),
    "adapters alone": (_adapt, {}),
    "checkpointed": (lambda model: model.gradient_checkpointing_enable(), {}),
    "frozen and checkpointed": (
        lambda model: (_freeze(model), model.gradient_checkpointing_enable())[0],
        {},
    ),
}


@pytest.mark.parametrize("kind", FROZEN)
def test_parity_of_frozen_towers_beside_ranks_and_replicas_without_images(kind: str) -> None:
    prepare, strategy = FROZEN[kind]
    mixed = [tiny_batch("qwen3_vl", seed=seed, rows=[[]] if seed % 2 else [[(1, 6, 8)]], text=9) for seed in range(6)]
    assert_parity(
        partial(make_module, "qwen3_vl", prepare),
        mixed,
        world_size=4,
        sequence_parallel_size=2,
        strategy_arguments=strategy,
    )


def _trainable_and_whole() -> None:
    strategy = UlyssesVisionDPStrategy(sequence_parallel_size=2, shard_frozen_tower=False)
    with pytest.raises(ValueError, match=r"needs a frozen vision tower, but `patch_embed\.proj\.weight` of"):
        quiet_trainer(devices=2, strategy=strategy).fit(make_module("qwen2_vl"), Batches([]))


def test_whole_tower_must_be_frozen() -> None:
    run_ranks(_trainable_and_whole, 2)


class _Unfreezes(ParityModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.model.model.visual.requires_grad_(True)


def _unfreeze() -> None:
    model = tiny_model("qwen2_5_vl")
    _freeze(model)
    strategy = UlyssesVisionDPStrategy(sequence_parallel_size=2, shard_frozen_tower=False)
    loader = Batches(batches("qwen2_5_vl", dtype=torch.float32))
    with pytest.raises(StepError, match="the vision tower was unfrozen after `shard_frozen_tower=False`"):
        quiet_trainer(devices=2, strategy=strategy).fit(_Unfreezes(model), loader)


def test_unfreezing_a_whole_tower_is_refused() -> None:
    run_ranks(_unfreeze, 2)


def _projector_apart() -> None:
    model = tiny_model("llava")
    _freeze(model, tower="vision_tower")
    policy = {type(model.model.multi_modal_projector)}
    for synced, message in ((False, "wraps LlavaMultiModalProjector beside a tower"), (True, "`sync_module_states`")):
        strategy = UlyssesVisionDPStrategy(
            sequence_parallel_size=2, shard_frozen_tower=False, auto_wrap_policy=policy, sync_module_states=synced
        )
        with pytest.raises(ValueError, match=message):
            quiet_trainer(devices=2, strategy=strategy).fit(ParityModule(copy.deepcopy(model)), Batches([]))


def test_what_a_whole_tower_does_not_go_with_is_refused() -> None:
    run_ranks(_projector_apart, 2)


def _cut_off() -> str:
    batch = tiny_batch("llava", rows=[[(1, 1, 1)]], dtype=torch.float32)
    batch["input_ids"][0, batch["input_ids"][0] == 120] = torch.tensor([120] * 10 + [5] * 6)
    with pytest.raises(StepError) as caught:
        quiet_trainer(devices=2, strategy="ulysses_vdp").fit(make_module("llava"), Batches([batch]))
    return str(caught.value)


def test_truncated_images_of_one_size_are_found_when_the_tower_has_run() -> None:
    first, second = run_ranks(_cut_off, 2)
    assert first == second
    assert "rank 1: the batch has 10 placeholder tokens, but its images or videos yield 16 features" in first


class _CountsTower(ParityModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.runs = 0
        model.model.visual.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.runs += 1


def _tower_runs(whole: bool) -> int:
    model = tiny_model("qwen2_5_vl")
    _freeze(model)
    module = _CountsTower(model)
    strategy = UlyssesVisionDPStrategy(sequence_parallel_size=2, shard_frozen_tower=not whole, verify_first_batch=False)
    with_image = tiny_batch("qwen2_5_vl", rows=[[(1, 6, 8)]], dtype=torch.float32)
    without = tiny_batch("qwen2_5_vl", rows=[[]], text=9, dtype=torch.float32)
    mine = [with_image] * 2 if int(os.environ["RANK"]) < 2 else [without] * 2
    quiet_trainer(devices=4, strategy=strategy).fit(module, Batches(mine))
    return module.runs


def test_replica_without_images_runs_no_dummy_when_towers_are_whole() -> None:
    assert run_ranks(_tower_runs, 4, True)[2:] == [0, 0]
    assert run_ranks(_tower_runs, 4, False) == [2, 2, 2, 2]


# ---- validation, generation and towers under no_grad


class _Validating(ParityModule):
    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.losses = [*getattr(self, "losses", []), float(self.model(**batch).loss)]


def _validate(own: list[list[dict[str, Tensor]]], alone: bool) -> list[float]:
    module = _Validating(tiny_model("qwen3_vl"))
    arguments: dict[str, Any] = {"devices": 1} if alone else {"devices": 4, "strategy": "ulysses_vdp_sp2"}
    mine = own[0] if alone else own[int(os.environ["RANK"]) // 2]
    quiet_trainer(**arguments).validate(module, Batches(mine), verbose=False)
    return module.losses


def test_validation_of_replicas_with_other_modalities() -> None:
    def batch(seed: int, **content: Any) -> dict[str, Tensor]:
        return tiny_batch("qwen3_vl", seed=seed, dtype=torch.float32, **content)

    own = [
        [batch(0, rows=[[]], text=9), batch(1, rows=THREE), batch(2, rows=[[]], videos=[[(2, 4, 4)]])],
        [batch(3, rows=THREE), batch(4, rows=[[]], text=9), batch(5, rows=[[]], text=9)],
    ]
    truths = [run_ranks(_validate, 1, [part], True)[0] for part in own]
    for rank, losses in enumerate(run_ranks(_validate, 4, own, False)):
        assert losses == pytest.approx(truths[rank // 2], rel=1e-5)


# ---- dummies


def _overflow() -> tuple[bool, bool]:
    dist.init_process_group("gloo")
    model = tiny_model("qwen2_5_vl")
    division = divide_models(find_models(model), SequenceMesh("cpu", 1, 2), Settings())
    batch = tiny_batch("qwen2_5_vl", rows=[[(1, 6, 8)]], dtype=torch.float32)
    batch["pixel_values"] *= 1e38
    batch["pixel_values"] *= 1e38
    model(**batch).loss.backward()
    division.undo()
    gradients = [parameter.grad for parameter in model.model.visual.parameters()]
    finite = all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
    zero = all(gradient is not None and not gradient.any() for gradient in gradients)
    return finite, zero


def test_dummy_brings_no_nan_when_pixels_overflow() -> None:
    # without FSDP, so that each rank's own contribution can be seen: one image has one owner
    assert sorted(run_ranks(_overflow, 2)) == [(False, False), (True, True)]


# ---- precision


def _gradients(precision: str, family: str, rows: Any) -> list[dict[str, Tensor]]:
    ranks = int(os.environ["WORLD_SIZE"])
    arguments: dict[str, Any] = {"strategy": UlyssesVisionDPStrategy(sequence_parallel_size=ranks)} if ranks > 1 else {}
    recorder = GradientRecorder()
    dtype = torch.float64 if precision == "64-true" else torch.float32
    batch = tiny_batch(family, rows=rows, dtype=dtype)
    trainer = quiet_trainer(devices=ranks, precision=precision, callbacks=[recorder], **arguments)
    trainer.fit(make_module(family), Batches([batch]))
    return recorder.record.gradients


@pytest.mark.parametrize(
    ("family", "rows"),
    [("qwen2_5_vl", THREE), ("qwen3_vl", THREE), ("qwen3_vl", [[(1, 6, 8)]]), ("llava", [[(1, 1, 1)]])],
)
def test_bf16_error_is_at_most_half_above_that_of_one_process(family: str, rows: Any) -> None:
    truth = run_ranks(_gradients, 1, "64-true", family, rows)[0][0]

    def error(ranks: int) -> float:
        (gradients,) = run_ranks(_gradients, ranks, "bf16-mixed", family, rows)[0]
        squares = sum(float((gradients[name].double() - value).square().sum()) for name, value in truth.items())
        return (squares / sum(float(value.square().sum()) for value in truth.values())) ** 0.5

    alone = error(1)
    assert 1e-4 < alone < 0.05
    assert error(2) <= 1.5 * alone


# ---- what ranks report


class _Log(Logger):
    """Keeps what is logged, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = version = "log"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        seen = {key.removeprefix("vision/"): value for key, value in metrics.items() if key.startswith("vision/")}
        if seen:
            self.rows.append((step or 0, seen))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def _monitor(
    strategy: dict[str, Any], batch: dict[str, Tensor], trainer: dict[str, Any], steps: int
) -> tuple[int, Any]:
    monitor, log = VisionLoadMonitor(), _Log()
    size = int(os.environ["WORLD_SIZE"])
    chosen = UlyssesVisionDPStrategy(**{"sequence_parallel_size": size, **strategy})
    arguments = {"log_every_n_steps": 2, **trainer}
    runner = quiet_trainer(devices=size, strategy=chosen, callbacks=[monitor], logger=log, **arguments)
    runner.fit(
        make_module("qwen2_5_vl"),
        Batches([batch] * steps),
        Batches([batch]) if "limit_val_batches" in trainer else None,
    )
    assert not runner.strategy.mesh.vision_observers
    return monitor.total_units, log.rows


FOUR = [[(1, 4, 4), (1, 8, 8), (1, 4, 4), (1, 4, 8)]]


def test_monitor_logs_what_each_rank_did() -> None:
    batch = tiny_batch("qwen2_5_vl", rows=FOUR, dtype=torch.float32)
    results = run_ranks(_monitor, 2, {}, batch, {}, 2)
    assert sum(units for units, _ in results) == 2 * 4
    ((step, metrics),) = results[0][1]
    assert step == 1
    assert metrics["patches_0"] == metrics["patches_1"] == 2 * 64
    assert {metrics["units_0"], metrics["units_1"]} == {2.0, 6.0}
    assert 1 <= metrics["load"] < 1.5
    assert metrics["tower_seconds_0"] > 0
    assert metrics["bytes_received_0"] > 0


@pytest.mark.parametrize(
    ("trainer", "steps", "expected"),
    [
        # steps count on over epochs
        ({"max_epochs": 3, "log_every_n_steps": 5}, 4, [(4, 20.0), (9, 20.0)]),
        # a step of four micro-batches counts all four
        ({"accumulate_grad_batches": 4}, 8, [(1, 32.0)]),
        # validation is not mixed in
        ({"max_epochs": 2, "log_every_n_steps": 1, "limit_val_batches": 1}, 1, [(0, 4.0), (1, 4.0)]),
        ({"log_every_n_steps": 0}, 4, []),
    ],
)
def test_monitor_logs_with_lightnings_steps(trainer: dict[str, Any], steps: int, expected: list[Any]) -> None:
    batch = tiny_batch("qwen2_5_vl", rows=FOUR, dtype=torch.float32)
    _, rows = run_ranks(_monitor, 2, {}, batch, trainer, steps)[0]
    assert [(step, metrics["units_0"] + metrics["units_1"]) for step, metrics in rows] == expected


def test_frames_of_one_video_are_encoded_by_several_ranks() -> None:
    batch = tiny_batch("qwen2_5_vl", rows=[[]], videos=[[(4, 4, 6)]], dtype=torch.float32)
    assert [units for units, _ in run_ranks(_monitor, 2, {}, batch, {}, 2)] == [4, 4]


def test_every_rank_encodes_every_image_without_vision_data_parallel() -> None:
    batch = tiny_batch("qwen2_5_vl", rows=THREE, dtype=torch.float32)
    results = run_ranks(_monitor, 2, {"vision_data_parallel": False}, batch, {}, 2)
    assert [units for units, _ in results] == [6, 6]
    assert results[0][1][0][1]["load"] == 1


# ---- anything goes


def _random_batch(family: str, draw: random.Random, seed: int) -> dict[str, Tensor]:
    rows = draw.randint(1, 2)
    sizes = [(1, 4, 4), (1, 2, 4), (1, 6, 8), (1, 8, 2), (1, 2, 2)]
    images: list[list[Any]] = [[] for _ in range(rows)]
    videos: list[list[Any]] = [[] for _ in range(rows)]
    if draw.random() > 0.25:
        for _ in range(draw.randint(0, 12)):
            images[draw.randrange(rows)].append(draw.choice(sizes))
        for _ in range(draw.randint(0, 2)):
            videos[draw.randrange(rows)].append((draw.randint(1, 3), *draw.choice(sizes)[1:]))
    return tiny_batch(
        family,
        rows=images,
        videos=videos,
        text=draw.randint(2, 4),
        seed=seed,
        padding=draw.choice(["left", "right"]),
        length=4,
    )


@pytest.mark.parametrize(
    ("family", "steps"),
    [
        ("qwen3_vl", 16),
        pytest.param("qwen3_vl", 200, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", 200, marks=pytest.mark.slow),
    ],
)
def test_random_batches_on_two_replicas_of_two_ranks(family: str, steps: int) -> None:
    draw = random.Random(family)
    drawn = [_random_batch(family, draw, seed) for seed in range(2 * steps)]
    # at rest: momentum goes on where FSDP has zeros for a tower that nobody ran, and one process has no gradient
    report = assert_parity(
        partial(make_module, family, None, 0.0), drawn, world_size=4, sequence_parallel_size=2, timeout=300
    )
    assert report.steps == steps
