"""Shards: the runs of sequence positions that ranks own, and moving tensors between shards and the whole."""

from functools import partial

import torch.distributed as dist
from torch import Tensor

from lightning_vdp.collectives import all_gather, all_reduce
from lightning_vdp.errors import UserError
from lightning_vdp.run.watch import Mark, Watch, unmarked

__all__ = ["SequenceShard", "gather_sequence", "sequence_mean", "shard_sequence", "shard_sizes"]


def shard_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """Positions that each rank owns: sizes differ by at most one, so nothing is padded."""
    return tuple(length // ranks + (rank < length % ranks) for rank in range(ranks))


class SequenceShard:
    """This rank's run of a sequence and those of the other ranks of its group.

    Not a dataclass, so that wrappers which rebuild dataclasses among a module's arguments pass it on as it is.

    Args:
        length: Positions of the whole sequence.
        group: The sequence group.
        watch: Is told of collectives.
    """

    __slots__ = ("group", "rank", "sizes", "watch")

    def __init__(self, length: int, group: dist.ProcessGroup, watch: Watch | None = None) -> None:
        self.group = group
        self.watch = watch
        self.rank = dist.get_rank(group)
        self.sizes: tuple[int, ...] = shard_sizes(length, dist.get_world_size(group))

    def mark(self, phase: str) -> Mark:
        """The mark of a collective in a phase."""
        return unmarked if self.watch is None else partial(self.watch.collective, phase)

    @property
    def length(self) -> int:
        """Positions of the whole sequence."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """Positions of this rank's shard."""
        return self.sizes[self.rank]

    @property
    def start(self) -> int:
        """First position of this rank's shard."""
        return sum(self.sizes[: self.rank])

    @property
    def positions(self) -> range:
        """Positions of this rank's shard in the whole sequence."""
        return range(self.start, self.start + self.size)

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
        shard: As found in `outputs.sequence_shard`.
        dim: Sequence dimension.

    Raises:
        UserError: If `x` is not `shard.length` long in `dim`.
    """
    _check(x, dim, shard.length, "the whole sequence")
    return x.narrow(dim, shard.start, shard.size).clone()


def gather_sequence(x: Tensor, shard: SequenceShard, dim: int = 1) -> Tensor:
    """Joins the shards of all ranks of the sequence group to the whole-sequence tensor; differentiable.

    Every rank of the group must call it. What follows may be the same on every rank or not: the gradient is right.

    Args:
        x: This rank's shard, `shard.size` long in `dim`.
        shard: As found in `outputs.sequence_shard`.
        dim: Sequence dimension.

    Raises:
        UserError: If `x` is not `shard.size` long in `dim`.
    """
    _check(x, dim, shard.size, "this rank's shard")
    return all_gather(x.movedim(dim, 0), shard.sizes, shard.group, shard.mark("gather")).movedim(0, dim)


def sequence_mean(x: Tensor, shard: SequenceShard, dim: int = 1) -> Tensor:
    """Mean over all positions of the whole sequence, from shards; the same on every rank; differentiable.

    Args:
        x: This rank's shard, `shard.size` long in `dim`.
        shard: As found in `outputs.sequence_shard`.
        dim: Sequence dimension, which the result lacks.

    Raises:
        UserError: If `x` is not `shard.size` long in `dim`.
    """
    _check(x, dim, shard.size, "this rank's shard")
    return all_reduce(x.sum(dim), shard.group, shard.mark("mean")) / shard.length
