"""How features get from the owners of units to the ranks that need them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_vdp.collectives import all_gather
from lightning_vdp.vision.units import UnitPlan

__all__ = ["gather_features"]


def gather_features(levels: Sequence[Tensor], plan: UnitPlan, group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Gives every rank of the group the features of every unit, all levels in one exchange.

    Args:
        levels: Features of this rank's units in ascending order, one tensor ``[rows, width]`` for the tower's output
            and one for each deepstack level.
        plan: Owners and rows of all units.
        group: The sequence group.

    Returns:
        For each level, one tensor ``[rows of the unit, width]`` for each unit, in the batch's order.
    """
    widths = [level.shape[1] for level in levels]
    rows = torch.cat(list(levels), dim=1) if len(levels) > 1 else levels[0]
    gathered = all_gather(rows, plan.rows_per_rank, group)
    order = plan.gathered_order
    result = []
    for level in gathered.split(widths, dim=1):
        units = dict(zip(order, level.split([plan.rows[unit] for unit in order])))
        result.append([units[unit] for unit in range(len(order))])
    return result
