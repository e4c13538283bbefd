"""The plan of one modality in one forward: units, their owners and their rows. Pure, no processes."""

from dataclasses import dataclass

__all__ = ["UnitPlan"]


@dataclass(frozen=True)
class UnitPlan:
    """Which rank of a sequence group encodes which unit.

    Args:
        sizes: Rows of the pixel tensor that each unit takes: its patches, or 1 where each row is an image.
        rows: Rows of features that each unit yields; None until they are measured.
        costs: Predicted cost of each unit.
        owners: Rank in the group of each unit's owner.
        ranks: Size of the group.
        frames: Units that each row of the grid was split into; empty if rows are units.
    """

    sizes: tuple[int, ...]
    rows: tuple[int, ...] | None
    costs: tuple[int, ...]
    owners: tuple[int, ...]
    ranks: int
    frames: tuple[int, ...] = ()

    def owned(self, rank: int) -> list[int]:
        """Indices of the units that a rank owns, ascending."""
        return [unit for unit, owner in enumerate(self.owners) if owner == rank]

    @property
    def rows_per_rank(self) -> list[int]:
        """Rows of features that each rank yields."""
        assert self.rows is not None, "the rows of units are not known yet"
        sums = [0] * self.ranks
        for rows, owner in zip(self.rows, self.owners):
            sums[owner] += rows
        return sums

    @property
    def gathered_order(self) -> list[int]:
        """Units in the order in which gathering rank by rank lays them out."""
        return sorted(range(len(self.owners)), key=lambda unit: (self.owners[unit], unit))
