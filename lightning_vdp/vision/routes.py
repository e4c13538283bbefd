"""Which rows of features each rank sends to which, so that each receives only those of its shard. Pure, no processes.

Tensors here are whole numbers on the host: batches hold tens of thousands of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_vdp.vision.units import UnitPlan

__all__ = ["Routes", "plan_routes"]


@dataclass(frozen=True)
class Routes:
    """The rows that one rank sends and receives.

    Args:
        send_order: Indices into the rank's own rows, ordered by destination, shape ``[own rows]``.
        send_counts: Rows for each destination.
        receive_order: Indices into the received rows, ordered by position in the sequence, shape ``[needed rows]``.
        receive_counts: Rows from each source.
    """

    send_order: Tensor
    send_counts: tuple[int, ...]
    receive_order: Tensor
    receive_counts: tuple[int, ...]


def plan_routes(columns: Tensor, plan: UnitPlan, sizes: Sequence[int], rank: int) -> Routes:
    """Finds the routes of one rank.

    Args:
        columns: Sequence position of each placeholder, in the order in which features fill them, shape ``[rows]``.
        plan: Owners and rows of all units; as many rows as placeholders.
        sizes: Positions of each rank's shard.
        rank: The rank in its sequence group.
    """
    ranks = len(sizes)
    ends = torch.tensor(sizes).cumsum(0)
    destination = torch.bucketize(columns, ends, right=True)
    owner = torch.repeat_interleave(torch.tensor(plan.owners), torch.tensor(plan.rows))
    sent = destination[owner == rank]
    sources = owner[destination == rank]
    by_source = sources.argsort(stable=True)
    receive_order = torch.empty_like(by_source)
    receive_order[by_source] = torch.arange(len(by_source))
    return Routes(
        send_order=sent.argsort(stable=True),
        send_counts=tuple(sent.bincount(minlength=ranks).tolist()),
        receive_order=receive_order,
        receive_counts=tuple(sources.bincount(minlength=ranks).tolist()),
    )
