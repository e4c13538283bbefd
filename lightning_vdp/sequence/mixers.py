"""Token mixers beside attention: convolutions by channel, gated delta rules by head, others around gathered states.

Modeling files of transformers mix tokens in functions of known names, each with a kernel behind it where one is
installed. A mixer's forward is run with these functions replaced, for that call alone, by versions that exchange
sequence shards for channels or heads and back.

Shape suffixes: B rows of the batch, C channels, H heads, T positions of a shard, S positions of the whole, D head width.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers import __version__ as transformers_version

from lightning_vdp.call.arguments import Parameters, parameters_of
from lightning_vdp.call.call import CALL, ForwardCall
from lightning_vdp.errors import UnsupportedError
from lightning_vdp.families.conventions import (
    CHANNEL_CONVOLUTIONS,
    GATED_DELTA_RULES,
    MODULE_CONVOLUTIONS,
    STATE_SPACE_SCANS,
)
from lightning_vdp.families.wrappers import class_name
from lightning_vdp.sequence.heads import head_splits, pick_heads, runs, to_heads, to_sequence
from lightning_vdp.shards import gather_sequence, shard_sequence

__all__ = ["divided_mixer", "gathered_mixer", "token_mixers"]


def _by_channel(
    function: Callable[..., Tensor],
    call: ForwardCall,
    x_BCT: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """A depthwise causal convolution over positions: any division of its channels is exact."""
    channels = runs(x_BCT.shape[1], len(call.shard.sizes))
    local = slice(channels[call.shard.rank].start, channels[call.shard.rank].stop)
    (x_BCS1,) = to_heads([x_BCT.unsqueeze(-1)], [channels], call.shard)
    y_BCS = function(x_BCS1.squeeze(-1), weight[local], None if bias is None else bias[local], **kwargs)
    y_BTC1 = to_sequence(y_BCS.transpose(1, 2).unsqueeze(-1), tuple(map(len, channels)), call.shard)
    return y_BTC1.squeeze(-1).transpose(1, 2)


def _by_channel_of_module(
    function: Callable[..., Tensor], call: ForwardCall, conv1d: nn.Conv1d, x_BCT: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """The same convolution, in a function that takes the weights from a module, as those of transformers 5.25 do."""

    def convolve(x_BCS: Tensor, weight: Tensor, bias: Tensor | None, **kwargs: Any) -> Tensor:
        part = SimpleNamespace(weight=weight, bias=bias, kernel_size=conv1d.kernel_size)
        return function(part, x_BCS, *args, **kwargs)

    return _by_channel(convolve, call, x_BCT, conv1d.weight, conv1d.bias, **kwargs)


def _by_head(
    function: Callable[..., tuple[Tensor, Any]],
    call: ForwardCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A gated delta rule: heads do not know of each other. Tensors are ``[B, T, H, D]`` or ``[B, T, H]``."""
    splits = head_splits(value.shape[2], key.shape[2], len(call.shard.sizes))
    tensors = [x.unsqueeze(-1) if x.dim() == 3 else x for x in (query, key, value, g, beta)]
    heads = (splits.key_value, splits.key_value, splits.query, splits.query, splits.query)
    exchanged = [x.transpose(1, 2) for x in to_heads([x.transpose(1, 2) for x in tensors], heads, call.shard)]
    mine = splits.ranks[call.shard.rank]
    if mine.groups is None:
        exchanged[:2] = [pick_heads(x, mine.reads, 2) for x in exchanged[:2]]
    query, key, value, g, beta = (
        x.squeeze(-1) if before.dim() == 3 else x for x, before in zip(exchanged, (query, key, value, g, beta))
    )
    output, _ = function(query, key, value, g=g, beta=beta, **kwargs)
    return to_sequence(output, splits.counts, call.shard), None


_DIVIDED: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(CHANNEL_CONVOLUTIONS, _by_channel),
    **dict.fromkeys(MODULE_CONVOLUTIONS, _by_channel_of_module),
    **dict.fromkeys(GATED_DELTA_RULES, _by_head),
}


def _code(module: nn.Module) -> CodeType | None:
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def _names(module: nn.Module) -> frozenset[str]:
    code = _code(module)
    return frozenset() if code is None else frozenset(code.co_names)


def token_mixers(layer: nn.Module) -> Iterator[nn.Module]:
    """The modules of a decoder layer that mix tokens by one of the known functions."""
    for module in layer.modules():
        if _names(module) & (_DIVIDED.keys() | STATE_SPACE_SCANS):
            yield module


def divided_mixer(module: nn.Module) -> Callable[..., Any]:
    """Makes the function that stands in for the forward of a token mixer.

    Args:
        module: The mixer, as found by `token_mixers`.
    """
    forward = type(module).forward
    names = _names(module)
    if names & STATE_SPACE_SCANS:
        return gathered_mixer(module)
    return functools.partial(_run_divided, parameters_of(forward), tuple(sorted(names & _DIVIDED.keys())))


def _run_divided(parameters: Parameters, names: tuple[str, ...], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call: ForwardCall | None = kwargs.get(CALL)
    original = inspect.unwrap(type(self).forward)
    if call is None or call.whole:
        return type(self).forward(self, *args, **kwargs)
    arguments = parameters.by_name(self, args, kwargs)
    del arguments[CALL]
    for name in ("attention_mask", "conv_mask"):
        mask = arguments.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            arguments[name] = shard_sequence(mask, call.shard)
    used: set[str] = set()

    def divided(name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            used.add(name)
            return _DIVIDED[name](original.__globals__[name], call, *args, **kwargs)

        return function

    replaced = {**original.__globals__, **{name: divided(name) for name in names}}
    forward = FunctionType(original.__code__, replaced, original.__name__, original.__defaults__, original.__closure__)
    forward.__kwdefaults__ = original.__kwdefaults__
    output = forward(self, **arguments)
    if used != set(names):
        raise UnsupportedError(
            f"{class_name(self)} of transformers {transformers_version} did not call {', '.join(set(names) - used)}, "
            "where lightning_vdp divides it; set `sequence_parallel_size=1` for this model."
        )
    call.mixed[self] += 1
    return output


def gathered_mixer(module: nn.Module) -> Callable[..., Any]:
    """Makes the function that stands in for the forward of a module which must see the whole sequence.

    Args:
        module: Takes hidden states first and returns them, or a tuple that begins with them.
    """
    return functools.partial(_run_gathered, parameters_of(type(module).forward))


def _run_gathered(parameters: Parameters, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Every rank mixes the whole sequence and keeps its shard: exact, and no lighter than undivided."""
    call: ForwardCall | None = kwargs.get(CALL)
    if call is None or call.whole:
        return type(self).forward(self, *args, **kwargs)
    arguments = {name: call.whole_of(x) for name, x in parameters.by_name(self, args, kwargs).items()}
    del arguments[CALL]
    first = next(iter(arguments))
    arguments[first] = gather_sequence(arguments[first], call.shard)
    output = type(self).forward(self, **arguments)
    call.mixed[self] += 1
    if isinstance(output, tuple):
        return (shard_sequence(output[0], call.shard), *output[1:])
    return shard_sequence(output, call.shard)
