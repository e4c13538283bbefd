"""Which heads a rank owns, and exchanging sequence shards for head shards and back.

Shape suffixes: B rows of the batch, H heads, T positions of a shard, S positions of the whole, D head width.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_vdp.collectives import all_to_all
from lightning_vdp.regions import ATTENTION_EXCHANGE, region
from lightning_vdp.sequence.shards import SequenceShard, shard_sizes

__all__ = ["HeadSplit", "head_split", "pick_heads", "runs", "to_heads", "to_sequence"]


def runs(count: int, ranks: int) -> list[range]:
    """Divides `count` heads or channels into a run for each rank; sizes differ by at most one."""
    sizes = shard_sizes(count, ranks)
    return [range(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(ranks)]


class HeadSplit(NamedTuple):
    """The heads of one rank: a run of query heads, the run of kv heads they read, and which of these each reads."""

    query: range
    key_value: range
    reads: tuple[int, ...]

    @property
    def groups(self) -> int | None:
        """Query heads that read each kv head, or None if that differs."""
        groups = len(self.query) // len(self.key_value)
        regular = tuple(head for head in range(len(self.key_value)) for _ in range(groups))
        return groups if self.reads == regular else None


@functools.lru_cache
def head_split(query_heads: int, key_value_heads: int, ranks: int) -> tuple[HeadSplit, ...]:
    """Divides heads over ranks: query heads as evenly as they go, and to each rank the kv heads that these read.

    Raises:
        ValueError: If there are more ranks than query heads.
    """
    if query_heads < ranks:
        raise ValueError(f"{query_heads} query heads cannot be divided over {ranks} ranks.")
    group = query_heads // key_value_heads
    splits = []
    for query in runs(query_heads, ranks):
        key_value = range(query[0] // group, query[-1] // group + 1)
        splits.append(HeadSplit(query, key_value, tuple(head // group - key_value[0] for head in query)))
    return tuple(splits)


def pick_heads(x: Tensor, heads: Sequence[int], dim: int) -> Tensor:
    """Heads in the given order, as often as they are named; joined on the device, since an index list would be copied there."""
    return torch.cat([x.narrow(dim, head, 1) for head in heads], dim)


def _run(heads: range, x_BHTD: Tensor) -> Tensor:
    return x_BHTD.narrow(1, heads.start, len(heads)).transpose(0, 1)


@region(ATTENTION_EXCHANGE)
def to_heads(
    tensors: Sequence[Tensor], heads: Sequence[Sequence[range]], shard: SequenceShard, phase: str = "layer"
) -> list[Tensor]:
    """Sequence shards to head shards; tensors of one width and dtype go in one exchange.

    Args:
        tensors: Each of shape ``[B, H, T, D]``.
        heads: For each rank, the run of heads of each tensor that goes there.
        shard: The shards.
        phase: What the exchange belongs to, for who watches.

    Returns:
        Each of shape ``[B, H_r, S, D]``.
    """
    alike: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault((tensor.shape[3], tensor.dtype), []).append(index)
    result = list(tensors)
    for indices in alike.values():
        chosen = [[rank_heads[index] for index in indices] for rank_heads in heads]
        for index, tensor in zip(indices, _to_heads([tensors[index] for index in indices], chosen, shard, phase)):
            result[index] = tensor
    return result


def _to_heads(tensors: list[Tensor], heads: list[list[range]], shard: SequenceShard, phase: str) -> list[Tensor]:
    batch, _, positions, width = tensors[0].shape
    pieces = [_run(run, tensor) for rank_heads in heads for run, tensor in zip(rank_heads, tensors)]
    sent = [sum(map(len, rank_heads)) * batch * positions * width for rank_heads in heads]
    counts = [len(run) for run in heads[shard.rank]]
    received = [sum(counts) * batch * size * width for size in shard.sizes]
    flat = all_to_all(torch.cat(pieces).view(-1), sent, received, shard.group, shard.mark(phase))
    chunks = [chunk.view(sum(counts), batch, size, width) for chunk, size in zip(flat.split(received), shard.sizes)]
    return [x_HBSD.transpose(0, 1) for x_HBSD in torch.cat(chunks, dim=2).split(counts)]


@region(ATTENTION_EXCHANGE)
def to_sequence(x_BSHD: Tensor, heads: Sequence[int], shard: SequenceShard, phase: str = "layer") -> Tensor:
    """Head shards back to sequence shards: ``[B, S, H_r, D]`` to ``[B, T, H, D]``, with H_r of each rank in `heads`."""
    batch, _, own, width = x_BSHD.shape
    sent = [batch * size * own * width for size in shard.sizes]
    received = [batch * shard.size * count * width for count in heads]
    flat = all_to_all(x_BSHD.transpose(0, 1).contiguous().view(-1), sent, received, shard.group, shard.mark(phase))
    chunks = [chunk.view(shard.size, batch, count, width) for chunk, count in zip(flat.split(received), heads)]
    return torch.cat(chunks, dim=2).transpose(0, 1)
