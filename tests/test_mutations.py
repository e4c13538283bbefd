"""Deliberately wrong variants: the exactness harness must fail on each, or it would not see them in earnest either."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_vdp.call.call as call_module
import lightning_vdp.collectives as collectives
import lightning_vdp.sequence.decoder as decoder
import lightning_vdp.sequence.heads as heads
import lightning_vdp.sequence.loss as loss
import lightning_vdp.sequence.ulysses as attention
import lightning_vdp.vision.exchange as exchange
import lightning_vdp.vision.tower as tower
from lightning_vdp.call.call import CALL
from lightning_vdp.shards import SequenceShard, shard_sequence
from lightning_vdp.testing import ParityModule, assert_parity, measure_parity, tiny_batch, tiny_model

FAMILY = "qwen3_vl"
Batch = dict[str, Tensor]


# Each runs in the forked ranks alone, and never in the one process that they are compared with.


def extra_factor_in_the_loss() -> None:
    own = loss.all_reduce
    loss.all_reduce = lambda value, group, *mark: own(value, group, *mark) * dist.get_world_size(group)


def factor_in_the_gradient_alone() -> None:
    own = collectives._AllReduce.backward
    collectives._AllReduce.backward = staticmethod(lambda ctx, gradient: own(ctx, gradient * 2))


def labels_cut_before_the_shift() -> None:
    def cut(whole: Tensor, shard: SequenceShard, dim: int = 1) -> Tensor:
        labels = torch.nn.functional.pad(whole, (1, 0), value=-100)[..., :-1]
        return torch.nn.functional.pad(shard_sequence(labels, shard, dim), (0, 1), value=-100)[..., 1:]

    loss.shard_sequence = cut


def mean_over_own_labels() -> None:
    own = loss.all_reduce
    loss.all_reduce = lambda value, group, *mark: own(value.detach(), group, *mark) + value - value.detach()


def gather_with_a_slice_for_adjoint() -> None:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.split(ctx.sizes)[dist.get_rank(ctx.group)].contiguous(), None, None, None

    collectives._AllGather.backward = staticmethod(backward)


def routes_without_a_way_back() -> None:
    exchange._put = lambda rows, places: rows.clone()


def attention_without_a_way_back() -> None:
    own = collectives._AllToAll.way_back

    def way_back(ctx: Any, flat: Tensor) -> Tensor:
        back = own(ctx, flat)
        return torch.zeros_like(back) if isinstance(ctx.layout, heads._ToHeads | heads._ToSequence) else back

    collectives._AllToAll.way_back = staticmethod(way_back)


def mask_dropped() -> None:
    own = attention._dispatching

    def dispatching(function: Any) -> Any:
        divided = own(function)

        def unmasked(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            kept = None if kwargs.get(CALL) is not None else attention_mask
            return divided(module, query, key, value, kept, **kwargs)

        return unmasked

    attention._dispatching = dispatching


def rotary_tables_of_another_shard() -> None:
    call_module.shard_sequence = lambda whole, shard, dim=1: shard_sequence(
        whole.roll(whole.shape[dim] // 2, dim), shard, dim
    )


def dummies_missing() -> None:
    def run_none(call: Any, before: Any = None) -> None:
        while call.pending and call.pending[0] != before:
            call.pending.pop(0)

    tower.run_absent_towers = decoder.run_absent_towers = run_none


def dummy_outputs_missing() -> None:
    decoder.attach = lambda carrier, attached: carrier


def rows_of_features_swapped() -> None:
    own = tower.route_features
    tower.route_features = lambda *args: [[level.flip(0) for level in levels] for levels in own(*args)]


def one_ranks_batch_shuffled() -> None:
    own = ParityModule.training_step

    def training_step(self: ParityModule, batch: Batch, batch_idx: int) -> Tensor:
        if self.global_rank == 1:
            names = ("input_ids", "labels")
            batch = {**batch, **{name: _swapped(batch[name]) for name in names}}
        return own(self, batch, batch_idx)

    ParityModule.training_step = training_step  # type: ignore[method-assign]


def _swapped(x: Tensor) -> Tensor:
    """The last two words of each row, which are in this rank's shard, in the other order."""
    return torch.cat([x[:, :-2], x[:, -1:], x[:, -2:-1]], dim=1)


def make_module(mutate: Callable[[], None] | None) -> ParityModule:
    # the one process that the ranks are compared with stays as it is
    if mutate is not None and int(os.environ["WORLD_SIZE"]) > 1:
        mutate()
    return ParityModule(tiny_model(FAMILY).train())


PADDED = [tiny_batch(FAMILY, rows=[[(1, 4, 4)], [(1, 6, 8), (1, 4, 8)]], padding="left")]
# images across the cut and owners out of order, so that features go from rank to rank and are sorted on the way
ACROSS = [tiny_batch(FAMILY, rows=[[(1, 4, 4), (1, 12, 8), (1, 8, 4)]], text=3)]
WORDS = [tiny_batch(FAMILY, rows=[[(1, 4, 4)]], text=7)]
# replica 0 has words alone where replica 1 has an image
MIXED = [tiny_batch(FAMILY, seed=seed, rows=[[(1, 6, 8)]] if seed % 2 else [[]], text=9) for seed in range(2)]

UNCHECKED = {"verify_first_batch": False, "check_batches_every_n_steps": 0}


def parity(mutate: Callable[[], None] | None, batches: list[Batch], world_size: int = 2, **strategy: Any) -> float:
    report = measure_parity(
        partial(make_module, mutate),
        batches,
        world_size=world_size,
        strategy_arguments={**UNCHECKED, **strategy},
        timeout=30,
    )
    return max(report.loss, report.gradient, report.norm, report.parameter)


MUTATIONS: dict[Callable[[], None], dict[str, Any]] = {
    extra_factor_in_the_loss: {"batches": PADDED},
    factor_in_the_gradient_alone: {"batches": PADDED},
    labels_cut_before_the_shift: {"batches": PADDED},
    mean_over_own_labels: {"batches": PADDED},
    gather_with_a_slice_for_adjoint: {"batches": ACROSS, "vision_exchange": "gather"},
    routes_without_a_way_back: {"batches": ACROSS},
    attention_without_a_way_back: {"batches": PADDED},
    mask_dropped: {"batches": PADDED},
    rotary_tables_of_another_shard: {"batches": PADDED},
    rows_of_features_swapped: {"batches": ACROSS},
    one_ranks_batch_shuffled: {"batches": WORDS},
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda function: function.__name__)
def test_harness_fails_on(mutate: Callable[[], None]) -> None:
    assert parity(mutate, **MUTATIONS[mutate]) > 1e-3


@pytest.mark.parametrize(
    "mutate",
    [
        pytest.param(dummies_missing, id="dummies_missing"),
        pytest.param(dummy_outputs_missing, id="dummy_outputs_missing", marks=pytest.mark.slow),
    ],
)
def test_harness_fails_on_ranks_out_of_step(mutate: Callable[[], None]) -> None:
    # ranks that run other collectives lose each other, or add up what does not belong together
    arguments = {**UNCHECKED, "timeout": timedelta(seconds=4)}
    with pytest.raises(AssertionError):
        assert_parity(
            partial(make_module, mutate), MIXED, world_size=4, strategy_arguments=arguments, timeout=30, tolerance=1e-3
        )


def test_shuffled_batch_is_refused_where_batches_are_compared() -> None:
    with pytest.raises(AssertionError, match="hold different samples at training step 0"):
        parity(one_ranks_batch_shuffled, WORDS, check_batches_every_n_steps=1)


@pytest.mark.parametrize(
    ("batches", "world_size", "strategy"),
    [(PADDED, 2, {}), (ACROSS, 2, {}), (ACROSS, 2, {"vision_exchange": "gather"}), (WORDS, 2, {}), (MIXED, 4, {})],
    ids=["padded", "across", "gathered", "words", "mixed"],
)
def test_harness_passes_without_mutation(batches: list[Batch], world_size: int, strategy: dict[str, Any]) -> None:
    assert parity(None, batches, world_size, **strategy) < 1e-9
