"""Adjoints spoiled on purpose, so that tests see whether a check can fail."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_vdp import collectives


def _unreversed(ctx: Any, flat: Tensor) -> Tensor:
    """An all-to-all that hands its gradient on in the order in which it came."""
    handed = flat.new_zeros(sum(ctx.layout.input_sizes))
    kept = min(handed.numel(), flat.numel())
    handed[:kept] = flat[:kept]
    return handed


def _sliced(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """An all-gather that forgets what the other ranks did with its rows."""
    return gradient.split(ctx.sizes)[dist.get_rank(ctx.group)].clone(), None, None, None


def _not_summed(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """An all-reduce that forgets the other ranks' losses."""
    return gradient.clone(), None, None


SPOILED_ADJOINTS: Mapping[str, tuple[type, str, Callable[..., Any]]] = {
    "all_to_all": (collectives._AllToAll, "way_back", _unreversed),
    "all_gather": (collectives._AllGather, "backward", _sliced),
    "all_reduce": (collectives._AllReduce, "backward", _not_summed),
}
"""By name: the collective, what of it is replaced, and by what."""


def spoil(name: str) -> None:
    """Spoils an adjoint in this process and all that it forks; there is no way back.

    Args:
        name: One of `SPOILED_ADJOINTS`.
    """
    function, method, spoiled = SPOILED_ADJOINTS[name]
    setattr(function, method, staticmethod(spoiled))
