"""The plan of one modality in one forward: units, their owners and their rows. Pure, no processes."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_vdp.vision.assignment import assign
from lightning_vdp.vision.cost import TowerCost, patches

__all__ = ["UnitPlan", "plan_units"]


@dataclass(frozen=True)
class UnitPlan:
    """Which rank of a sequence group encodes which unit.

    Args:
        patches: Patches of each unit.
        rows: Rows of features that each unit yields.
        owners: Rank in the group of each unit's owner.
        ranks: Size of the group.
    """

    patches: tuple[int, ...]
    rows: tuple[int, ...]
    owners: tuple[int, ...]
    ranks: int

    def owned(self, rank: int) -> list[int]:
        """Indices of the units that a rank owns, ascending."""
        return [unit for unit, owner in enumerate(self.owners) if owner == rank]

    @property
    def rows_per_rank(self) -> list[int]:
        """Rows of features that each rank yields."""
        sums = [0] * self.ranks
        for rows, owner in zip(self.rows, self.owners):
            sums[owner] += rows
        return sums

    @property
    def gathered_order(self) -> list[int]:
        """Units in the order in which gathering rank by rank lays them out."""
        return sorted(range(len(self.owners)), key=lambda unit: (self.owners[unit], unit))


def plan_units(
    grids: Sequence[Sequence[int]],
    ranks: int,
    merge_size: int,
    method: str = "balanced",
    cost: TowerCost | None = None,
) -> UnitPlan:
    """Gives the units of one modality owners.

    Args:
        grids: ``(time, height, width)`` of each unit in patches; height and width are multiples of `merge_size`.
        ranks: Size of the sequence group.
        merge_size: Patches along one side that the projector merges into one row.
        method: "balanced" or "contiguous".
        cost: What balances loads. Default: the number of patches.
    """
    counts = patches(grids)
    owners = assign(counts if cost is None else cost(grids), ranks, method)
    return UnitPlan(tuple(counts), tuple(count // merge_size**2 for count in counts), tuple(owners), ranks)
