"""Ulysses attention: all-to-all from sequence shards to head shards, the model's own attention, and back.

The attention registry of transformers gets one dispatcher, which acts on calls that carry a `ForwardCall` and on no
others. Jacobs et al. 2023, DeepSpeed-Ulysses (arXiv 2309.14509).

Shape suffixes: B rows of the batch, H heads, T positions of a shard, S positions of the whole, D head width.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_vdp.call import CALL, ForwardCall
from lightning_vdp.collectives import all_to_all
from lightning_vdp.sequence.shards import SequenceShard, shard_sizes

__all__ = ["attention_dispatcher", "head_split", "ulysses_attention"]

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


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
    sizes, group = shard_sizes(query_heads, ranks), query_heads // key_value_heads
    splits = []
    for rank in range(ranks):
        query = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        key_value = range(query[0] // group, query[-1] // group + 1)
        splits.append(HeadSplit(query, key_value, tuple(head // group - key_value[0] for head in query)))
    return tuple(splits)


class _ModuleView:
    """An attention module as its attention function sees it, with some attributes replaced."""

    def __init__(self, module: nn.Module, **attributes: Any) -> None:
        self.__dict__.update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _run(heads: range, x_BHTD: Tensor) -> Tensor:
    return x_BHTD.narrow(1, heads.start, len(heads)).transpose(0, 1)


def _to_heads(tensors: list[Tensor], heads: list[list[range]], shard: SequenceShard) -> list[Tensor]:
    """Sequence shards to head shards, in one exchange.

    Args:
        tensors: Each of shape ``[B, H, T, D]``, equal but for H.
        heads: For each destination, the run of heads of each tensor that goes there.
        shard: The shards.

    Returns:
        Each of shape ``[B, H_r, S, D]``.
    """
    batch, _, positions, width = tensors[0].shape
    pieces = [_run(run, tensor) for runs in heads for run, tensor in zip(runs, tensors)]
    sent = [sum(map(len, runs)) * batch * positions * width for runs in heads]
    counts = [len(run) for run in heads[shard.rank]]
    received = [sum(counts) * batch * size * width for size in shard.sizes]
    flat = all_to_all(torch.cat(pieces).view(-1), sent, received, shard.group)
    chunks = [chunk.view(sum(counts), batch, size, width) for chunk, size in zip(flat.split(received), shard.sizes)]
    return [x_HBSD.transpose(0, 1) for x_HBSD in torch.cat(chunks, dim=2).split(counts)]


def _to_sequence(x_BSHD: Tensor, heads: list[int], shard: SequenceShard) -> Tensor:
    """Head shards back to sequence shards: ``[B, S, H_r, D]`` to ``[B, T, H, D]``, with H_r of each rank in `heads`."""
    batch, _, own, width = x_BSHD.shape
    sent = [batch * size * own * width for size in shard.sizes]
    received = [batch * shard.size * count * width for count in heads]
    flat = all_to_all(x_BSHD.transpose(0, 1).contiguous().view(-1), sent, received, shard.group)
    chunks = [chunk.view(shard.size, batch, count, width) for chunk, count in zip(flat.split(received), heads)]
    return torch.cat(chunks, dim=2).transpose(0, 1)


def ulysses_attention(
    function: AttentionFunction,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    call: ForwardCall,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Runs an attention function on the whole sequence and this rank's heads.

    Args:
        function: The model's own attention function.
        module: The attention module.
        query: Shape ``[B, H, T, D]``, with rotary positions applied.
        key: Shape ``[B, H_kv, T, D]``.
        value: Shape ``[B, H_kv, T, D_v]``.
        attention_mask: As the model made it for the whole sequence.
        call: The forward that this belongs to.
        **kwargs: Passed on.

    Returns:
        The output of shape ``[B, T, H, D_v]``, and None for the weights.

    Raises:
        RuntimeError: If the tensors are not those of self-attention over this rank's shard.
    """
    shard = call.shard
    lengths = {x.shape[2] for x in (query, key, value)}
    if lengths != {shard.size}:
        raise RuntimeError(
            f"{type(module).__name__} attends over {sorted(lengths)} positions, but this rank's shard has {shard.size}: "
            "this attention cannot be divided over the sequence."
        )
    call.attended[id(module)] = call.attended.get(id(module), 0) + 1
    splits = head_split(query.shape[1], key.shape[1], len(shard.sizes))
    if query.shape[-1] == value.shape[-1]:
        heads = [[split.query, split.key_value, split.key_value] for split in splits]
        query, key, value = _to_heads([query, key, value], heads, shard)
    else:
        query, key = _to_heads([query, key], [[split.query, split.key_value] for split in splits], shard)
        (value,) = _to_heads([value], [[split.key_value] for split in splits], shard)
    mine = splits[shard.rank]
    groups = mine.groups
    if groups is None:
        reads = list(mine.reads)
        key, value, groups = key[:, reads], value[:, reads], 1
    own_heads = slice(mine.query.start, mine.query.stop)
    # what an attention function reads off the module, as it is for this rank's heads
    changed: dict[str, Any] = {}
    if getattr(module, "num_key_value_groups", groups) != groups:
        changed["num_key_value_groups"] = groups
    sinks = getattr(module, "sinks", None)
    if isinstance(sinks, Tensor):
        changed["sinks"] = sinks[own_heads]
    seen: Any = _ModuleView(module, **changed) if changed else module
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1] > 1:
        attention_mask = attention_mask[:, own_heads]
    if isinstance(kwargs.get("s_aux"), Tensor):
        kwargs["s_aux"] = kwargs["s_aux"][own_heads]
    output, _ = function(seen, query, key, value, attention_mask, **kwargs)
    return _to_sequence(output, [len(split.query) for split in splits], shard), None


@functools.lru_cache
def _dispatching(function: AttentionFunction) -> AttentionFunction:
    @functools.wraps(function)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        call = kwargs.pop(CALL, None)
        if call is None or call.whole:
            return function(module, query, key, value, attention_mask, **kwargs)
        return ulysses_attention(function, module, query, key, value, attention_mask, call, **kwargs)

    return attention


class _AttentionDispatcher:
    """The process-wide dispatcher; wraps functions when they are looked up, so that later registrations pass too."""

    def __init__(self) -> None:
        self.users = 0
        self._before: Any = None
        self._own: Any = None

    def acquire(self) -> None:
        """Installs the dispatcher for one more user.

        Raises:
            RuntimeError: If the registry has no lookup to wrap.
        """
        self.users += 1
        if self.users > 1:
            return
        lookup = getattr(ALL_ATTENTION_FUNCTIONS, "get_interface", None)
        if lookup is None:
            from transformers import __version__

            self.users = 0
            raise RuntimeError(
                f"transformers {__version__} has no `ALL_ATTENTION_FUNCTIONS.get_interface`, where lightning_vdp enters "
                "attention; install a version of transformers that this version of lightning_vdp names."
            )

        @functools.wraps(lookup)
        def get_interface(*args: Any, **kwargs: Any) -> AttentionFunction:
            return _dispatching(lookup(*args, **kwargs))

        self._before = vars(ALL_ATTENTION_FUNCTIONS).get("get_interface")
        self._own = vars(ALL_ATTENTION_FUNCTIONS)["get_interface"] = get_interface

    def release(self) -> None:
        """Takes the dispatcher out with its last user."""
        self.users -= 1
        if self.users or vars(ALL_ATTENTION_FUNCTIONS).get("get_interface") is not self._own:
            # still in use, or somebody wrapped it since, for whom it stays and does nothing
            return
        del vars(ALL_ATTENTION_FUNCTIONS)["get_interface"]
        if self._before is not None:
            vars(ALL_ATTENTION_FUNCTIONS)["get_interface"] = self._before


attention_dispatcher = _AttentionDispatcher()


def unattended(call: ForwardCall, layers: Iterable[nn.Module]) -> list[str]:
    """Describes the layers in which attention did not pass through Ulysses exactly once."""
    problems = []
    for index, layer in enumerate(layers):
        times = sum(call.attended.get(id(module), 0) for module in layer.modules())
        if times != 1:
            problems.append(f"layer {index} ({type(layer).__name__}): {times} times")
    return problems
