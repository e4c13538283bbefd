"""Shards: the positions of a sequence that ranks own, and moving tensors between shards and the whole."""

import functools
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_vdp.collectives import all_gather, all_reduce
from lightning_vdp.errors import UserError
from lightning_vdp.run.watch import Track, Watch, untracked

__all__ = ["SequenceShard", "ShardLayout", "even_sizes", "gather_sequence", "sequence_mean", "shard_sequence"]


def even_sizes(count: int, ranks: int) -> tuple[int, ...]:
    """How many of `count` things each rank gets: sizes differ by at most one, so nothing is padded."""
    return tuple(count // ranks + (rank < count % ranks) for rank in range(ranks))


class ShardLayout:
    """Which positions of a sequence each rank owns. Pure: needs no processes.

    Whatever cuts a sequence, joins it or asks who owns a position goes through here, so that another layout (such as one
    that balances causal attention) can stand in the place of the contiguous one.

    Args:
        runs: For each rank, the runs of positions that it owns, ascending; together they are the whole sequence.
    """

    __slots__ = ("_in_order", "_pieces", "length", "runs", "sizes")

    # how often each layer's token mixing runs divided in one forward; the audit of layers expects this
    mixing_runs = 1

    def __init__(self, runs: Sequence[Sequence[range]]) -> None:
        self.runs = tuple(map(tuple, runs))
        self.sizes = tuple(sum(map(len, of_rank)) for of_rank in self.runs)
        self.length = sum(self.sizes)
        # runs in the order of the ranks, each with its place there
        self._pieces = [run for of_rank in self.runs for run in of_rank]
        self._in_order = all(one.stop == other.start for one, other in pairwise(self._pieces))

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> "ShardLayout":
        """One run for each rank, in the order of the ranks."""
        return _contiguous(length, ranks)

    def positions(self, rank: int) -> Sequence[int]:
        """Positions in the whole sequence that a rank owns, ascending."""
        runs = self.runs[rank]
        return runs[0] if len(runs) == 1 else [position for run in runs for position in run]

    def owners(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rank that owns each of some positions."""
        ordered = sorted((run.stop, rank) for rank, of_rank in enumerate(self.runs) for run in of_rank)
        stops, ranks = np.array(ordered, dtype=np.int64).T
        return cast(NDArray[np.int64], ranks[stops.searchsorted(positions, side="right")])

    def outside(self, rank: int) -> list[slice]:
        """The positions that a rank does not own, as slices of the whole sequence."""
        edges = [0, *(edge for run in self.runs[rank] for edge in (run.start, run.stop)), self.length]
        return [slice(start, stop) for start, stop in zip(edges[::2], edges[1::2]) if start < stop]

    def cut(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's positions of a whole-sequence tensor, as a copy."""
        parts = [x.narrow(dim, run.start, len(run)) for run in self.runs[rank]]
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts, dim)

    def by_position(self, x: Tensor, dim: int) -> Tensor:
        """The shards of all ranks, joined in the order of the ranks, as the whole sequence."""
        if self._in_order:
            return x
        parts = x.split(list(map(len, self._pieces)), dim)
        order = sorted(range(len(parts)), key=lambda place: self._pieces[place].start)
        return torch.cat([parts[place] for place in order], dim)

    def by_rank(self, x: Tensor, dim: int) -> Tensor:
        """Undoes `by_position`."""
        if self._in_order:
            return x
        return torch.cat([x.narrow(dim, run.start, len(run)) for run in self._pieces], dim)


@functools.lru_cache
def _contiguous(length: int, ranks: int) -> ShardLayout:
    ends = [0, *accumulate(even_sizes(length, ranks))]
    return ShardLayout([[range(start, stop)] for start, stop in pairwise(ends)])


class SequenceShard:
    """This rank's positions of a sequence and those of the other ranks of its group.

    Not a dataclass, so that wrappers which rebuild dataclasses among a module's arguments pass it on as it is.

    Args:
        length: Positions of the whole sequence.
        group: The sequence group.
        watch: What is told when this rank enters a collective; None where nobody watches.
        layout: Which positions each rank owns. Default: one run for each rank.
    """

    __slots__ = ("group", "layout", "rank", "watch")

    def __init__(
        self, length: int, group: dist.ProcessGroup, watch: Watch | None = None, layout: ShardLayout | None = None
    ) -> None:
        self.group = group
        self.watch = watch
        self.rank = dist.get_rank(group)
        self.layout = layout or ShardLayout.contiguous(length, dist.get_world_size(group))

    def track(self, phase: str) -> Track:
        """What tells the watch that this rank is in a collective of some phase."""
        return untracked if self.watch is None else partial(self.watch.collective, phase)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions that each rank owns."""
        return self.layout.sizes

    @property
    def length(self) -> int:
        """Positions of the whole sequence."""
        return self.layout.length

    @property
    def size(self) -> int:
        """Number of positions that this rank owns."""
        return self.layout.sizes[self.rank]

    @property
    def start(self) -> int:
        """First position that this rank owns."""
        return self.layout.runs[self.rank][0].start

    @property
    def positions(self) -> Sequence[int]:
        """Positions that this rank owns, in the whole sequence."""
        return self.layout.positions(self.rank)

    def __repr__(self) -> str:
        return f"SequenceShard(rank={self.rank}, sizes={self.sizes})"


def _check(x: Tensor, dim: int, expected: int, what: str) -> None:
    if x.shape[dim] != expected:
        raise UserError(
            f"Dimension {dim} has {x.shape[dim]} positions, but {what} has {expected}; pass the tensor that belongs to "
            "this shard, or name the sequence dimension with `dim`."
        )


def shard_sequence(x: Tensor, shard: SequenceShard, dim: int = 1) -> Tensor:
    """Cuts this rank's shard out of a whole-sequence tensor.

    The shard is a copy, so that the whole can be freed. Backward puts zeros outside the shard: where every rank cuts
    the same replicated tensor, the ranks' gradients add up to that of the whole.

    Args:
        x: Whole-sequence tensor, `shard.length` long in `dim`.
        shard: The shard, as found in `outputs.sequence_shard`.
        dim: Sequence dimension.

    Raises:
        UserError: If `x` is not `shard.length` long in `dim`.
    """
    _check(x, dim, shard.length, "the whole sequence")
    return shard.layout.cut(x, shard.rank, dim)


def gather_sequence(x: Tensor, shard: SequenceShard, dim: int = 1) -> Tensor:
    """Joins the shards of all ranks of the sequence group to the whole-sequence tensor; differentiable.

    Every rank of the group must call it. What follows may be the same on every rank or not: the gradient is right.

    Args:
        x: This rank's shard, `shard.size` long in `dim`.
        shard: The shard, as found in `outputs.sequence_shard`.
        dim: Sequence dimension.

    Raises:
        UserError: If `x` is not `shard.size` long in `dim`.
    """
    _check(x, dim, shard.size, "this rank's shard")
    joined = all_gather(x.movedim(dim, 0), shard.sizes, shard.group, shard.track("gather"))
    return shard.layout.by_position(joined, 0).movedim(0, dim)


def sequence_mean(x: Tensor, shard: SequenceShard, dim: int = 1) -> Tensor:
    """Mean over all positions of the whole sequence, from shards; the same on every rank; differentiable.

    Args:
        x: This rank's shard, `shard.size` long in `dim`.
        shard: The shard, as found in `outputs.sequence_shard`.
        dim: Sequence dimension, which the result lacks.

    Raises:
        UserError: If `x` is not `shard.size` long in `dim`.
    """
    _check(x, dim, shard.size, "this rank's shard")
    return all_reduce(x.sum(dim), shard.group, shard.track("mean")) / shard.length
