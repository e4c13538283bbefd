"""Whether each layer of the decoder mixed tokens through what is divided."""

from collections.abc import Collection, Iterable

from torch import nn

from lightning_vdp.call.call import ForwardCall
from lightning_vdp.families.wrappers import class_name

__all__ = ["Audit"]


# kinds of layers that transformers' hybrid models name, in which positions stay apart
_WITHOUT_MIXING = frozenset({"mlp", "moe"})


class Audit:
    """Checks that each layer's attention, or what mixes tokens in its place, ran divided as often as the layout of shards says.

    Args:
        layers: The decoder's layers.
        mixers: Modules that must have run, beside attention, which shows itself.
    """

    def __init__(self, layers: Iterable[nn.Module], mixers: Collection[nn.Module]) -> None:
        self._layers = {
            index: layer
            for index, layer in enumerate(layers)
            if getattr(layer, "block_type", None) not in _WITHOUT_MIXING
        }
        # taken once: what modules a layer has does not change from forward to forward
        self._layer_of = {part: index for index, layer in self._layers.items() for part in layer.modules()}
        self._mixers = [mixer for mixer in mixers if mixer in self._layer_of]

    def unmixed(self, call: ForwardCall) -> list[str]:
        """The layers that did not run as they should in a forward, each in words."""
        times: dict[int, list[int]] = {index: [] for index in self._layers}
        for part, count in call.mixed.items():
            if part in self._layer_of:
                times[self._layer_of[part]].append(count)
        for mixer in self._mixers:
            if mixer not in call.mixed:
                times[self._layer_of[mixer]].append(0)
        expected = call.shard.layout.mixing_runs
        problems = []
        for index, counts in times.items():
            wrong = [count for count in counts or [0] if count != expected]
            if wrong:
                problems.append(f"layer {index} ({class_name(self._layers[index])}): {wrong[0]} times")
        return problems
