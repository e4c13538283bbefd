"""Spoiling one adjoint on purpose, so that tests see whether a check can fail. Only for processes that end after it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_vdp import collectives

__all__ = ["SABOTAGES", "sabotage"]


def _unreversed(ctx: Any, gradient: Tensor) -> Tensor:
    """An all-to-all that hands its gradient on in the order in which it came."""
    handed = gradient.new_zeros(sum(ctx.input_sizes))
    kept = min(handed.numel(), gradient.numel())
    handed[:kept] = gradient.flatten()[:kept]
    return handed


def _sliced(ctx: Any, gradient: Tensor) -> Tensor:
    """An all-gather that forgets what the other ranks did with its rows."""
    return gradient.split(ctx.sizes)[dist.get_rank(ctx.group)].clone()


def _not_summed(ctx: Any, gradient: Tensor) -> Tensor:
    """An all-reduce that forgets the other ranks' losses."""
    return gradient.clone()


SABOTAGES: Mapping[str, tuple[type, Callable[..., Any]]] = {
    "all_to_all": (collectives._AllToAll, _unreversed),
    "all_gather": (collectives._AllGather, _sliced),
    "all_reduce": (collectives._AllReduce, _not_summed),
}
"""By name: the collective and what its backward does instead of its adjoint."""


def sabotage(name: str) -> None:
    """Spoils an adjoint in this process and all that it forks; there is no way back.

    Args:
        name: One of `SABOTAGES`.
    """
    function, spoiled = SABOTAGES[name]

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # the other arguments of a collective have no gradient
        return spoiled(ctx, gradient), *(None for _ in ctx.needs_input_grad[1:])

    function.backward = staticmethod(backward)  # type: ignore[attr-defined]
