"""Which rows of features each rank sends to which, so that each receives only those of its shard. Pure, no processes.

Arrays here hold whole numbers on the host: batches have tens of thousands of rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_vdp.call.units import UnitPlan

__all__ = ["Routes", "plan_routes"]

WholeNumbers = NDArray[np.int64]


@dataclass(frozen=True)
class Routes:
    """The rows that one rank sends and receives.

    Args:
        send_order: Indices into the rank's own rows, ordered by destination, shape ``[own rows]``.
        send_counts: Rows for each destination.
        receive_order: Indices into the received rows, in the order of their placeholders, shape ``[needed rows]``.
        receive_counts: Rows from each source.
    """

    send_order: WholeNumbers
    send_counts: tuple[int, ...]
    receive_order: WholeNumbers
    receive_counts: tuple[int, ...]


def plan_routes(destinations: WholeNumbers, plan: UnitPlan, rank: int) -> Routes:
    """Finds the routes of one rank.

    Args:
        destinations: The rank that owns each placeholder's position, in the order in which features fill them, shape
            ``[rows]``.
        plan: Owners and rows of all units; as many rows as placeholders.
        rank: The rank in its sequence group.
    """
    ranks = plan.ranks
    assert plan.rows is not None, "the rows of units are not known yet"
    owners = np.repeat(np.array(plan.owners), plan.rows)
    sent = destinations[owners == rank]
    sources = owners[destinations == rank]
    by_source = sources.argsort(kind="stable")
    receive_order = np.empty_like(by_source)
    receive_order[by_source] = np.arange(len(by_source))
    return Routes(
        send_order=sent.argsort(kind="stable"),
        send_counts=tuple(np.bincount(sent, minlength=ranks).tolist()),
        receive_order=receive_order,
        receive_counts=tuple(np.bincount(sources, minlength=ranks).tolist()),
    )
