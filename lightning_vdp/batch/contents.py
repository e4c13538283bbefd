"""What a batch says of its images and videos, in whole numbers: sizes come from grids, counts and shapes.

Ranks plan with these, whoever holds the pixels; what looks into the tensors of this rank is elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lightning_vdp.batch.host_copies import host_copy
from lightning_vdp.families.family import Family, Modality

__all__ = ["VisionContents", "count_placeholders", "read_contents", "to_numbers"]


@dataclass(frozen=True)
class VisionContents:
    """What a batch says of one modality.

    Args:
        shape: The shape of the whole batch's pixel tensor.
        grids: ``(time, height, width)`` in patches of each image or video; None where the family has no grids.
        counts: Rows of the pixels that each unit takes, where an argument says so.
    """

    shape: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...] | None = None
    counts: tuple[int, ...] | None = None

    @property
    def patches(self) -> tuple[int, ...]:
        """Patches of each image or video, where there are grids."""
        return tuple(time * height * width for time, height, width in self.grids or ())


def read_contents(arguments: Mapping[str, Any], family: Family) -> dict[str, VisionContents]:
    """Reads off a forward's checked arguments what it says of each modality whose pixels it has.

    Args:
        arguments: The forward's arguments by name.
        family: What is known about the model's type.

    Returns:
        By the modality's name, in the order of the family.
    """
    return {
        modality.name: read_modality(arguments, modality)
        for modality in family.modalities
        if arguments.get(modality.pixels) is not None
    }


def read_modality(arguments: Mapping[str, Any], modality: Modality) -> VisionContents:
    """Reads what a forward's arguments say of one modality whose pixels it has."""
    grid = None if modality.grid is None else arguments.get(modality.grid)
    counts = None if modality.counts is None else arguments.get(modality.counts)
    return VisionContents(
        tuple(arguments[modality.pixels].shape),
        None if grid is None else _read_grids(grid),
        None if counts is None else tuple(to_numbers(counts)),
    )


def _read_grids(grid: Tensor) -> tuple[tuple[int, int, int], ...]:
    rows = host_copy(grid).long().tolist()
    # without time, a row is an image
    return tuple((1, *row)[-3:] for row in rows)


def to_numbers(counts: Any) -> list[int]:
    """The whole numbers of an argument that counts something for each unit, a tensor or a list."""
    return host_copy(counts).flatten().tolist() if isinstance(counts, Tensor) else [int(count) for count in counts]


def count_placeholders(ids: Tensor, modality: Modality) -> int:
    """Number of a modality's placeholder tokens in input ids ``[B, S]``."""
    return 0 if modality.token is None else int(np.count_nonzero(host_copy(ids).numpy() == modality.token))
