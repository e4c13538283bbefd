"""Reading features out of what models return for images, and putting them back in the same form."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_vdp.families.facts import Facts

__all__ = ["count_rows", "count_rows_of_last", "count_rows_of_units", "feature_levels", "with_features"]


def _field(outputs: Any) -> str:
    """Where a model leaves its features."""
    return "last_hidden_state" if getattr(outputs, "pooler_output", None) is None else "pooler_output"


def _like(features: Any, units: list[Tensor]) -> Any:
    """Features of all units in the form in which a model returns those of some: a list, or one tensor for all."""
    if not isinstance(features, Tensor):
        return units
    if features.dim() == 2:
        return torch.cat(units)
    return torch.stack(units) if len({len(unit) for unit in units}) == 1 else torch.cat(units)[None]


def feature_levels(outputs: Any) -> list[Tensor]:
    """The tower's output and its deepstack levels, each as rows ``[rows, width]``."""
    levels = [getattr(outputs, _field(outputs)), *(getattr(outputs, "deepstack_features", None) or [])]
    return [
        level.flatten(0, -2) if isinstance(level, Tensor) else torch.cat([unit.flatten(0, -2) for unit in level])
        for level in levels
    ]


def count_rows(outputs: Any) -> int:
    features = getattr(outputs, _field(outputs))
    return sum(part.shape[:-1].numel() for part in ([features] if isinstance(features, Tensor) else features))


def count_rows_of_units(outputs: Any, sizes: list[int], facts: Facts) -> list[int]:
    """Rows of features of each unit that was encoded; where the output does not tell, all with the first one."""
    features, total, patches = getattr(outputs, _field(outputs)), count_rows(outputs), sum(sizes)
    if facts.listed and isinstance(features, Tensor):
        if features.dim() > 2 and len(features) == len(sizes):
            return [features.shape[1:-1].numel()] * len(sizes)
        if all(total * size % patches == 0 for size in sizes):
            return [total * size // patches for size in sizes]
    elif facts.listed:
        rows = [unit.shape[:-1].numel() for unit in features]
        if len(rows) == len(sizes):
            return rows
        if len(rows) == patches:
            # a unit is a sample with several images
            ends = list(itertools.accumulate(sizes, initial=0))
            return [sum(rows[start:end]) for start, end in itertools.pairwise(ends)]
    return [total, *[0] * (len(sizes) - 1)]


def count_rows_of_last(outputs: Any, facts: Facts) -> int:
    if facts.listed:
        return int(getattr(outputs, _field(outputs))[-1].shape[:-1].numel())
    # images that are alike, as many as the tower has encoded
    return int(count_rows(outputs) // outputs.last_hidden_state.shape[0])


def with_features(outputs: Any, levels: Sequence[list[Tensor]]) -> Any:
    """Makes outputs of the same kind with the features of other units.

    What else the outputs hold is left out: it describes this rank's units alone, and would keep their activations.

    Args:
        outputs: What the model returned for this rank's units.
        levels: The tower's features and those of its deepstack levels, each one tensor ``[rows, width]`` for each unit.
    """
    units, *deepstack = levels
    field = _field(outputs)
    features = _like(getattr(outputs, field), units)
    return type(outputs)(**{field: features}, **({"deepstack_features": deepstack} if deepstack else {}))
