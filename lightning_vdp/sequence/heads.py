"""Which heads a rank owns, and exchanging sequence shards for head shards and back.

Shape suffixes: B rows of the batch, H heads, T positions of a shard, S positions of the whole, D head width.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_vdp.collectives import all_to_all
from lightning_vdp.errors import UserError
from lightning_vdp.run.regions import ATTENTION_EXCHANGE, region
from lightning_vdp.shards import SequenceShard, even_sizes

__all__ = ["HeadSplit", "HeadSplits", "head_splits", "pick_heads", "runs", "to_heads", "to_sequence"]


@functools.lru_cache
def runs(count: int, ranks: int) -> tuple[range, ...]:
    """Divides `count` heads or channels into a run for each rank; sizes differ by at most one."""
    sizes = even_sizes(count, ranks)
    return tuple(range(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(ranks))


class HeadSplit(NamedTuple):
    """The heads of one rank.

    Args:
        query: Its run of query heads.
        key_value: The run of kv heads that these read.
        reads: Which of these each query head reads.
        groups: Query heads that read each kv head, or None if that differs.
    """

    query: range
    key_value: range
    reads: tuple[int, ...]
    groups: int | None


class HeadSplits(NamedTuple):
    """How attention's heads are divided.

    Args:
        ranks: The heads of each rank.
        query: Runs of query heads, by rank.
        key_value: Runs of kv heads, by rank.
        counts: Numbers of query heads, by rank.
    """

    ranks: tuple[HeadSplit, ...]
    query: tuple[range, ...]
    key_value: tuple[range, ...]
    counts: tuple[int, ...]


@functools.lru_cache
def head_splits(query_heads: int, key_value_heads: int, ranks: int) -> HeadSplits:
    """Divides heads over ranks: query heads as evenly as they go, and to each rank the kv heads that these read.

    Raises:
        UserError: If there are more ranks than query heads.
    """
    if query_heads < ranks:
        raise UserError(f"{query_heads} query heads cannot be divided over {ranks} ranks.")
    group = query_heads // key_value_heads
    splits = []
    for query in runs(query_heads, ranks):
        key_value = range(query[0] // group, query[-1] // group + 1)
        reads = tuple(head // group - key_value[0] for head in query)
        each = len(query) // len(key_value)
        regular = tuple(head for head in range(len(key_value)) for _ in range(each))
        splits.append(HeadSplit(query, key_value, reads, each if reads == regular else None))
    return HeadSplits(
        tuple(splits),
        tuple(split.query for split in splits),
        tuple(split.key_value for split in splits),
        tuple(len(split.query) for split in splits),
    )


def pick_heads(x: Tensor, heads: Sequence[int], dim: int) -> Tensor:
    """Heads in the given order, as often as they are named; joined on the device, since an index list would be copied there."""
    return torch.cat([x.narrow(dim, head, 1) for head in heads], dim)


class _Runs(NamedTuple):
    """Neighboring ranks that own equally many positions."""

    ranks: int
    size: int
    start: int


@functools.lru_cache
def _position_runs(sizes: tuple[int, ...]) -> tuple[_Runs, ...]:
    """The ranks of a sequence in at most two runs, since the sizes of shards differ by at most one."""
    found, start = [], 0
    for size, ranks in itertools.groupby(sizes):
        count = len(list(ranks))
        found.append(_Runs(count, size, start))
        start += count * size
    return tuple(found)


def _are_even(heads: Sequence[range]) -> bool:
    """Whether ranks own equally many heads, in order and each one once."""
    count = len(heads[0])
    return all(run == range(rank * count, (rank + 1) * count) for rank, run in enumerate(heads))


class _ToHeads:
    """Tensors ``[B, H, T, D]`` of one width to ``[B, H_r, S, D]``, rank by rank.

    What is sent to a rank lies as ``[H_r, B, T, D]``.

    Args:
        heads: For each tensor, the run of heads that goes to each rank.
        sizes: Positions of each rank's shard.
        rank: This rank.
        batch: B.
        width: D.
    """

    def __init__(
        self, heads: tuple[tuple[range, ...], ...], sizes: tuple[int, ...], rank: int, batch: int, width: int
    ) -> None:
        self._heads, self._batch, self._width = heads, batch, width
        self._ranks, self._positions, self._length = len(sizes), sizes[rank], sum(sizes)
        self._runs = _position_runs(sizes)
        # this rank's heads of each tensor
        self._counts = [len(runs[rank]) for runs in heads]
        self._all = sum(self._counts)
        self._even = all(map(_are_even, heads))
        row = batch * width
        self.input_sizes = [sum(map(len, rank_heads)) * self._positions * row for rank_heads in zip(*heads)]
        self.output_sizes = [self._all * size * row for size in sizes]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        if self._even:
            ranks, (batch, _, positions, width) = self._ranks, tensors[0].shape
            parts = [
                x.view(batch, ranks, count, positions, width).permute(1, 2, 0, 3, 4)
                for x, count in zip(tensors, self._counts)
            ]
            return torch.cat(parts, 1).view(-1)
        return torch.cat([x.narrow(1, run.start, len(run)).transpose(0, 1) for x, run in self._pieces(tensors)]).view(
            -1
        )

    def _pieces(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, range]]:
        for rank_heads in zip(*self._heads):
            yield from zip(tensors, rank_heads)

    def unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        batch, width, heads = self._batch, self._width, self._all
        if len(self._runs) == 1:
            blocks = flat.view(self._ranks, heads, batch, self._positions, width)
            whole = blocks.permute(2, 1, 0, 3, 4).reshape(batch, heads, self._length, width)
        else:
            whole = flat.new_empty(batch, heads, self._length, width)
            for run, part in zip(self._runs, flat.split(self._run_sizes)):
                target = whole.narrow(2, run.start, run.ranks * run.size)
                target = target.view(batch, heads, run.ranks, run.size, width)
                target.copy_(part.view(run.ranks, heads, batch, run.size, width).permute(2, 1, 0, 3, 4))
        return whole.split(self._counts, 1)

    @functools.cached_property
    def _run_sizes(self) -> list[int]:
        """Elements of all ranks of each run."""
        return [run.ranks * run.size * self._all * self._batch * self._width for run in self._runs]

    def unpack_adjoint(self, gradients: Sequence[Tensor]) -> Tensor:
        if len(self._runs) == 1:
            return self._by_position(gradients, self._runs[0]).view(-1)
        flat = gradients[0].new_empty(sum(self.output_sizes))
        for run, part in zip(self._runs, flat.split(self._run_sizes)):
            of_run = [gradient.narrow(2, run.start, run.ranks * run.size) for gradient in gradients]
            self._by_position(of_run, run, part.view(run.ranks, self._all, self._batch, run.size, self._width))
        return flat

    def _by_position(self, gradients: Sequence[Tensor], run: _Runs, into: Tensor | None = None) -> Tensor:
        # dividing a dimension is a view, whatever the strides
        parts = [
            gradient.view(self._batch, count, run.ranks, run.size, self._width).permute(2, 1, 0, 3, 4)
            for gradient, count in zip(gradients, self._counts)
        ]
        return torch.cat(parts, 1, out=into)

    def pack_adjoint(self, flat: Tensor) -> tuple[Tensor, ...]:
        batch, positions, width = self._batch, self._positions, self._width
        if self._even:
            whole = flat.view(self._ranks, self._all, batch, positions, width).permute(2, 0, 1, 3, 4)
            parts = whole.split(self._counts, 2)
            return tuple([part.reshape(batch, -1, positions, width) for part in parts])
        # a head that several ranks have read has the sum of their gradients
        gradients = [flat.new_zeros(batch, max(run.stop for run in runs), positions, width) for runs in self._heads]
        pieces = list(self._pieces(gradients))
        sizes = [len(run) * batch * positions * width for _, run in pieces]
        for (gradient, run), part in zip(pieces, flat.split(sizes)):
            target = gradient.narrow(1, run.start, len(run))
            target += part.view(len(run), batch, positions, width).transpose(0, 1)
        return tuple(gradients)


class _ToSequence:
    """A tensor ``[B, S, H_r, D]``, rank by rank, to ``[B, T, H, D]``; what is sent to a rank lies as ``[T, B, H_r, D]``.

    Args:
        heads: Heads of each rank.
        sizes: Positions of each rank's shard.
        rank: This rank.
        batch: B.
        width: D.
    """

    def __init__(self, heads: tuple[int, ...], sizes: tuple[int, ...], rank: int, batch: int, width: int) -> None:
        self._heads, self._batch, self._width = heads, batch, width
        self._local_heads, self._positions, self._length = heads[rank], sizes[rank], sum(sizes)
        self._even = len(set(heads)) == 1
        self.input_sizes = [batch * size * self._local_heads * width for size in sizes]
        self.output_sizes = [batch * self._positions * count * width for count in heads]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].transpose(0, 1).reshape(-1)

    def unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        batch, positions, width = self._batch, self._positions, self._width
        if self._even:
            blocks = flat.view(len(self._heads), positions, batch, self._local_heads, width)
            return (blocks.permute(2, 1, 0, 3, 4).reshape(batch, positions, -1, width),)
        chunks = [
            part.view(positions, batch, count, width).transpose(0, 1)
            for part, count in zip(flat.split(self.output_sizes), self._heads)
        ]
        return (torch.cat(chunks, 2),)

    def unpack_adjoint(self, gradients: Sequence[Tensor]) -> Tensor:
        gradient = gradients[0]
        if self._even:
            shape = (self._batch, self._positions, len(self._heads), self._local_heads, self._width)
            return gradient.view(shape).permute(2, 1, 0, 3, 4).reshape(-1)
        return torch.cat([part.transpose(0, 1).reshape(-1) for part in gradient.split(self._heads, 2)])

    def pack_adjoint(self, flat: Tensor) -> tuple[Tensor, ...]:
        return (flat.view(self._length, self._batch, self._local_heads, self._width).transpose(0, 1),)


# pure plans, the same for all layers of a forward
_to_heads_layout = functools.lru_cache(_ToHeads)
_to_sequence_layout = functools.lru_cache(_ToSequence)


@region(ATTENTION_EXCHANGE)
def to_heads(
    tensors: Sequence[Tensor], heads: Sequence[tuple[range, ...]], shard: SequenceShard, phase: str = "layer"
) -> tuple[Tensor, ...]:
    """Sequence shards to head shards; tensors of one width and dtype go in one exchange.

    Args:
        tensors: Each of shape ``[B, H, T, D]``.
        heads: For each tensor, the run of its heads that goes to each rank.
        shard: The shards.
        phase: What the exchange belongs to, for who watches.

    Returns:
        Each of shape ``[B, H_r, S, D]``.
    """
    batch, track = tensors[0].size(0), shard.track(phase)
    kinds = [(tensor.size(3), tensor.dtype) for tensor in tensors]
    if kinds.count(kinds[0]) == len(kinds):
        layout = _to_heads_layout(tuple(heads), shard.sizes, shard.rank, batch, kinds[0][0])
        return _by_position(all_to_all(tensors, layout, shard.group, track), shard)
    result = list(tensors)
    for kind in dict.fromkeys(kinds):
        indices = [index for index, other in enumerate(kinds) if other == kind]
        layout = _to_heads_layout(tuple([heads[index] for index in indices]), shard.sizes, shard.rank, batch, kind[0])
        exchanged = all_to_all([tensors[index] for index in indices], layout, shard.group, track)
        for index, tensor in zip(indices, exchanged):
            result[index] = tensor
    return _by_position(result, shard)


def _by_position(tensors: Sequence[Tensor], shard: SequenceShard) -> tuple[Tensor, ...]:
    """Positions of all ranks, in the order of the sequence."""
    return tuple([shard.layout.by_position(tensor, 2) for tensor in tensors])


@region(ATTENTION_EXCHANGE)
def to_sequence(x_BSHD: Tensor, heads: tuple[int, ...], shard: SequenceShard, phase: str = "layer") -> Tensor:
    """Head shards back to sequence shards: ``[B, S, H_r, D]`` to ``[B, T, H, D]``, with H_r of each rank in `heads`."""
    layout = _to_sequence_layout(heads, shard.sizes, shard.rank, x_BSHD.size(0), x_BSHD.size(3))
    return all_to_all([shard.layout.by_rank(x_BSHD, 1)], layout, shard.group, shard.track(phase))[0]
