"""How features get from the owners of units to the ranks that need them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_vdp.collectives import all_gather
from lightning_vdp.regions import EXCHANGE, region
from lightning_vdp.vision.routes import Routes
from lightning_vdp.vision.units import UnitPlan
from lightning_vdp.watch import Mark, unmarked

__all__ = ["gather_features", "received_rows", "route_features"]


@region(EXCHANGE)
def gather_features(
    levels: Sequence[Tensor], plan: UnitPlan, group: dist.ProcessGroup, mark: Mark = unmarked
) -> list[list[Tensor]]:
    """Gives every rank of the group the features of every unit, all levels in one exchange.

    Args:
        levels: Features of this rank's units in ascending order, one tensor ``[rows, width]`` for the tower's output
            and one for each deepstack level.
        plan: Owners and rows of all units.
        group: The sequence group.
        mark: Says who watches.

    Returns:
        For each level, one tensor ``[rows of the unit, width]`` for each unit, in the batch's order.
    """
    widths = [level.shape[1] for level in levels]
    gathered = all_gather(_side_by_side(levels), plan.rows_per_rank, group, mark)
    assert plan.rows is not None, "the rows of units are not known yet"
    order = plan.gathered_order
    result = []
    for level in gathered.split(widths, dim=1):
        units = dict(zip(order, level.split([plan.rows[unit] for unit in order])))
        result.append([units[unit] for unit in range(len(order))])
    return result


@region(EXCHANGE)
def route_features(
    levels: Sequence[Tensor], routes: Routes, group: dist.ProcessGroup, mark: Mark = unmarked
) -> list[list[Tensor]]:
    """Gives each rank the features whose placeholders are in its shard, all levels in one exchange.

    Args:
        levels: As for `gather_features`.
        routes: This rank's routes.
        group: The sequence group.
        mark: Says who watches.

    Returns:
        For each level, one tensor ``[rows of the shard, width]`` in the order of the placeholders, in a list of its own.
    """
    rows = _side_by_side(levels)
    send_order, receive_order = (_to_device(order, rows.device) for order in (routes.send_order, routes.receive_order))
    routed = _Route.apply(rows, send_order, receive_order, routes.send_counts, routes.receive_counts, group, mark)
    return [[level] for level in routed.split([level.shape[1] for level in levels], dim=1)]


def received_rows(plan: UnitPlan, routes: Routes | None, rank: int) -> int:
    """Rows that a rank receives from others in one exchange; gathering pads to the largest share."""
    if routes is None:
        return (plan.ranks - 1) * max(plan.rows_per_rank)
    return sum(routes.receive_counts) - routes.receive_counts[rank]


def _side_by_side(levels: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(levels), dim=1) if len(levels) > 1 else levels[0]


def _to_device(order: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return order
    # pinned, so that the copy does not wait for the device
    return order.pin_memory().to(device, non_blocking=True)


class _Route(torch.autograd.Function):
    """Permutes rows by destination, exchanges them and permutes them by position; backward runs the same way back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send_order: Tensor,
        receive_order: Tensor,
        send_counts: tuple[int, ...],
        receive_counts: tuple[int, ...],
        group: dist.ProcessGroup,
        mark: Mark,
    ) -> Tensor:
        ctx.save_for_backward(send_order, receive_order)
        ctx.counts, ctx.group, ctx.mark = (send_counts, receive_counts), group, mark
        with mark("forward"):
            return _exchange_rows(rows[send_order], send_counts, receive_counts, group)[receive_order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        send_order, receive_order = ctx.saved_tensors
        send_counts, receive_counts = ctx.counts
        back = torch.empty_like(gradient)
        back[receive_order] = gradient
        with ctx.mark("backward"):
            received = _exchange_rows(back, receive_counts, send_counts, ctx.group)
        rows = torch.empty_like(received)
        rows[send_order] = received
        return rows, None, None, None, None, None, None


def _exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    output = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(output, rows.contiguous(), list(received), list(sent), group=group)
    return output
