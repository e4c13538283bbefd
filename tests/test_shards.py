"""Layouts of shards: what cuts and joins a sequence works for any of them, not for the contiguous one alone."""

import itertools
import os
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_vdp.shards import ShardLayout, even_sizes
from lightning_vdp.testing import ParityModule, assert_parity, tiny_batch, tiny_model


def zigzag(length: int, ranks: int) -> ShardLayout:
    """Each rank owns a run of the first half and the one that mirrors it in the second."""
    sizes = even_sizes(length, 2 * ranks)
    ends = [sum(sizes[:index]) for index in range(2 * ranks + 1)]
    runs = list(itertools.starmap(range, itertools.pairwise(ends)))
    return ShardLayout([[runs[rank], runs[2 * ranks - 1 - rank]] for rank in range(ranks)])


@pytest.mark.parametrize("make", [ShardLayout.contiguous, zigzag])
@pytest.mark.parametrize(("length", "ranks"), [(12, 2), (13, 3), (9, 4), (8, 1)])
def test_a_layout_cuts_joins_and_knows_owners(make: Any, length: int, ranks: int) -> None:
    layout = make(length, ranks)
    x = torch.arange(2 * length).view(2, length)
    shards = [layout.cut(x, rank, 1) for rank in range(ranks)]
    assert layout.length == length
    assert [shard.shape[1] for shard in shards] == list(layout.sizes)
    for rank, shard in enumerate(shards):
        positions = list(layout.positions(rank))
        assert shard[0].tolist() == positions
        assert layout.owners(np.array(positions)).tolist() == [rank] * len(positions)
        outside = [position for part in layout.outside(rank) for position in range(length)[part]]
        assert sorted([*outside, *positions]) == list(range(length))
    by_rank = torch.cat(shards, 1)
    assert torch.equal(layout.by_position(by_rank, 1), x)
    assert torch.equal(layout.by_rank(x, 1), by_rank)


def test_sizes_of_a_contiguous_layout_differ_by_at_most_one() -> None:
    assert ShardLayout.contiguous(14, 4).sizes == (4, 4, 3, 3)
    assert ShardLayout.contiguous(14, 4).positions(2) == range(8, 11)


def _with_zigzag(family: str) -> ParityModule:
    # the one process that the ranks are compared with stays as it is
    if int(os.environ["WORLD_SIZE"]) > 1:
        ShardLayout.contiguous = staticmethod(zigzag)  # type: ignore[assignment]
    return ParityModule(tiny_model(family).train())


@pytest.mark.parametrize(
    ("family", "size", "strategy"),
    [
        # features across shards and padding, in both exchanges; deepstack; linear attention
        ("qwen3_vl", 2, {"vision_exchange": "routed"}),
        ("qwen3_vl", 3, {"vision_exchange": "gather", "logits": "whole"}),
        ("qwen3_5", 2, {}),
    ],
)
def test_another_layout_in_its_place_is_exact(family: str, size: int, strategy: dict[str, Any]) -> None:
    batches = [tiny_batch(family, rows=[[(1, 4, 4)], [(1, 12, 8), (1, 4, 8)]], padding="left", seed=1)]
    assert_parity(
        partial(_with_zigzag, family),
        batches,
        world_size=size,
        sequence_parallel_size=size,
        strategy_arguments=strategy,
    )
