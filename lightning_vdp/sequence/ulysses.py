"""Ulysses attention: all-to-all from sequence shards to head shards, the model's own attention, and back.

The attention registry of transformers gets one dispatcher, which acts on calls that carry a `ForwardCall` and on no
others. Jacobs et al. 2023, DeepSpeed-Ulysses (arXiv 2309.14509).

Shape suffixes: B rows of the batch, H heads, T positions of a shard, S positions of the whole, D head width.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_vdp.call.call import CALL, ForwardCall
from lightning_vdp.errors import UnsupportedError
from lightning_vdp.families.wrappers import class_name
from lightning_vdp.sequence.heads import head_splits, pick_heads, to_heads, to_sequence

__all__ = ["attention_dispatcher", "ulysses_attention"]

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


class _ModuleView:
    """An attention module as its attention function sees it, with some attributes replaced."""

    def __init__(self, module: nn.Module, **attributes: Any) -> None:
        self.__dict__.update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


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
        attention_mask: The mask that the model made for the whole sequence.
        call: The forward that this belongs to.
        **kwargs: Passed on.

    Returns:
        The output of shape ``[B, T, H, D_v]``, and None for the weights.

    Raises:
        UnsupportedError: If the tensors are not those of self-attention over this rank's shard.
    """
    shard = call.shard
    lengths = (query.size(2), key.size(2), value.size(2))
    if lengths != (shard.size,) * 3:
        raise UnsupportedError(
            f"{class_name(module)} attends over {sorted(set(lengths))} positions, but this rank's shard has {shard.size}: "
            "this attention cannot be divided over the sequence."
        )
    call.mixed[module] += 1
    splits = head_splits(query.size(1), key.size(1), len(shard.sizes))
    heads = (splits.query, splits.key_value, splits.key_value)
    known = vars(module)
    phase = f"layer {known.get('layer_idx', '')}"
    query, key, value = to_heads([query, key, value], heads, shard, phase)
    mine = splits.ranks[shard.rank]
    groups = mine.groups
    if groups is None:
        key, value, groups = pick_heads(key, mine.reads, 1), pick_heads(value, mine.reads, 1), 1
    local_heads = slice(mine.query.start, mine.query.stop)
    # what an attention function reads off the module, as it is for this rank's heads
    changed: dict[str, Any] = {}
    if known.get("num_key_value_groups", groups) != groups:
        changed["num_key_value_groups"] = groups
    # a weight, or what FSDP puts in its place
    sinks = known.get("sinks", module._parameters.get("sinks"))
    if sinks is not None:
        changed["sinks"] = sinks[local_heads]
    seen: Any = _ModuleView(module, **changed) if changed else module
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1] > 1:
        attention_mask = attention_mask[:, local_heads]
    if "position_ids" in kwargs:
        kwargs["position_ids"] = call.whole_of(kwargs["position_ids"])
    if kwargs.get("s_aux") is not None:
        kwargs["s_aux"] = kwargs["s_aux"][local_heads]
    output, _ = function(seen, query, key, value, attention_mask, **kwargs)
    return to_sequence(output, splits.counts, shard, phase), None


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
        self._installed: Any = None

    def acquire(self) -> None:
        """Installs the dispatcher for one more user.

        Raises:
            UnsupportedError: If the registry has no lookup to wrap.
        """
        self.users += 1
        if self.users > 1:
            return
        lookup = getattr(ALL_ATTENTION_FUNCTIONS, "get_interface", None)
        if lookup is None:
            from transformers import __version__

            self.users = 0
            raise UnsupportedError(
                f"transformers {__version__} has no `ALL_ATTENTION_FUNCTIONS.get_interface`, where lightning_vdp enters "
                "attention; install a version of transformers that this version of lightning_vdp names."
            )

        @functools.wraps(lookup)
        def get_interface(*args: Any, **kwargs: Any) -> AttentionFunction:
            return _dispatching(lookup(*args, **kwargs))

        self._before = vars(ALL_ATTENTION_FUNCTIONS).get("get_interface")
        self._installed = vars(ALL_ATTENTION_FUNCTIONS)["get_interface"] = get_interface

    def release(self) -> None:
        """Takes the dispatcher out with its last user."""
        self.users -= 1
        if self.users or vars(ALL_ATTENTION_FUNCTIONS).get("get_interface") is not self._installed:
            # still in use, or somebody wrapped it since, for whom it stays and does nothing
            return
        del vars(ALL_ATTENTION_FUNCTIONS)["get_interface"]
        if self._before is not None:
            vars(ALL_ATTENTION_FUNCTIONS)["get_interface"] = self._before


attention_dispatcher = _AttentionDispatcher()
