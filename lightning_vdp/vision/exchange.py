"""How features get from the owners of units to the ranks that need them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_vdp.call.units import UnitPlan
from lightning_vdp.collectives import all_gather, all_to_all
from lightning_vdp.run.regions import EXCHANGE, region
from lightning_vdp.run.watch import Track, untracked
from lightning_vdp.vision.routes import Routes, WholeNumbers

__all__ = ["gather_features", "received_rows", "route_features"]


@region(EXCHANGE)
def gather_features(
    levels: Sequence[Tensor], plan: UnitPlan, group: dist.ProcessGroup, track: Track = untracked
) -> list[list[Tensor]]:
    """Gives every rank of the group the features of every unit, all levels in one exchange.

    Args:
        levels: Features of this rank's units in ascending order, one tensor ``[rows, width]`` for the tower's output
            and one for each deepstack level.
        plan: Owners and rows of all units.
        group: The sequence group.
        track: Tells the watch that this rank is in the collective.

    Returns:
        For each level, one tensor ``[rows of the unit, width]`` for each unit, in the batch's order.
    """
    widths = [level.shape[1] for level in levels]
    gathered = all_gather(_side_by_side(levels), plan.rows_per_rank, group, track)
    assert plan.rows is not None, "the rows of units are not known yet"
    order = plan.gathered_order
    result = []
    for level in gathered.split(widths, dim=1):
        units = dict(zip(order, level.split([plan.rows[unit] for unit in order])))
        result.append([units[unit] for unit in range(len(order))])
    return result


@region(EXCHANGE)
def route_features(
    levels: Sequence[Tensor], routes: Routes, group: dist.ProcessGroup, track: Track = untracked
) -> list[list[Tensor]]:
    """Gives each rank the features whose placeholders are in its shard, all levels in one exchange.

    Args:
        levels: Features of this rank's units; see `gather_features`.
        routes: This rank's routes.
        group: The sequence group.
        track: Tells the watch that this rank is in the collective.

    Returns:
        For each level, one tensor ``[rows of the shard, width]`` in the order of the placeholders, in a list of its own.
    """
    rows = _side_by_side(levels)
    (routed,) = all_to_all([rows], _RoutedRows(routes, rows.shape[1], rows.device), group, track)
    return [[level] for level in routed.split([level.shape[1] for level in levels], dim=1)]


def received_rows(plan: UnitPlan, routes: Routes | None, rank: int) -> int:
    """Rows that a rank receives from others in one exchange; gathering pads to the largest share."""
    if routes is None:
        return (plan.ranks - 1) * max(plan.rows_per_rank)
    return sum(routes.receive_counts) - routes.receive_counts[rank]


def _side_by_side(levels: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(levels), dim=1) if len(levels) > 1 else levels[0]


def _to_device(numbers: WholeNumbers, device: torch.device) -> Tensor:
    order = torch.from_numpy(numbers)
    if device.type == "cpu":
        return order
    # pinned, so that the copy does not wait for the device
    return order.pin_memory().to(device, non_blocking=True)


class _RoutedRows:
    """Rows ``[rows, width]`` of a rank's units to rows of its shard; what is sent lies by destination.

    Args:
        routes: This rank's routes.
        width: Numbers in a row.
        device: The device of the rows.
    """

    def __init__(self, routes: Routes, width: int, device: torch.device) -> None:
        self._width = width
        self._send_order, self._receive_order = (
            _to_device(order, device) for order in (routes.send_order, routes.receive_order)
        )
        self.input_sizes = [count * width for count in routes.send_counts]
        self.output_sizes = [count * width for count in routes.receive_counts]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0][self._send_order].view(-1)

    def unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        return (flat.view(-1, self._width)[self._receive_order],)

    def pack_adjoint(self, flat: Tensor) -> tuple[Tensor, ...]:
        return (_put(flat.view(-1, self._width), self._send_order),)

    def unpack_adjoint(self, gradients: Sequence[Tensor]) -> Tensor:
        return _put(gradients[0], self._receive_order).view(-1)


def _put(rows: Tensor, places: Tensor) -> Tensor:
    """Undoes a permutation: row i goes to the i-th of the places."""
    moved = rows.new_empty(rows.shape)
    moved[places] = rows
    return moved
