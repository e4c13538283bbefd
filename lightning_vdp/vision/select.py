"""Picking units out of the arguments of a features method, and describing one to ranks that have none."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_vdp.batch.contents import to_numbers
from lightning_vdp.batch.host_copies import host_copy
from lightning_vdp.call.units import UnitPlan
from lightning_vdp.families.facts import Facts
from lightning_vdp.families.family import Modality

__all__ = ["build_unit", "describe_unit", "select_units"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
# integers that say something (sizes, counts) are few; the many are masks
_FEW = 32
# lists that say something of each unit, among others that name layers
_PER_UNIT = re.compile("(sizes|grids?|patches|images|sample)$|^num_")


def select_units(
    arguments: Mapping[str, Any], units: Sequence[int], plan: UnitPlan, modality: Modality, facts: Facts
) -> dict[str, Any]:
    """The arguments for some units alone; views joined on the device, since an index list would be copied there.

    Args:
        arguments: Arguments of the features method for all units.
        units: Indices, ascending.
        plan: The units.
        modality: What they are.
        facts: Facts about the model type.
    """
    selected, count = dict(arguments), len(plan.sizes)
    pixels = _flat(arguments[modality.pixels], facts).movedim(facts.pixels_dim, 0)
    # pixels of a patch, where they lie along the same dimension
    length = pixels.shape[0] // sum(plan.sizes)
    chosen = _pick(pixels, units, [size * length for size in plan.sizes]).movedim(0, facts.pixels_dim)
    selected[modality.pixels] = _unflat(chosen, facts)
    if modality.grid is not None:
        selected[modality.grid] = _pick(_frames(arguments[modality.grid], plan), units)
        if plan.frames:
            return selected
    for name, value in arguments.items():
        if isinstance(value, (list, tuple)) and len(value) == count and _PER_UNIT.search(name):
            selected[name] = [value[unit] for unit in units]
        if not isinstance(value, Tensor) or name in (modality.pixels, modality.grid):
            continue
        if name in facts.ragged:
            selected[name] = _pick(value, units, to_numbers(arguments[facts.ragged[name]]))
        elif modality.counts not in (None, name) and value.shape[:1].numel() == sum(plan.sizes):
            selected[name] = _pick(value, units, plan.sizes)
        elif value.shape[: facts.unit_dims].numel() == count and value.dim() >= facts.unit_dims:
            selected[name] = _unflat(_pick(_flat(value, facts), units), facts)
    return selected


def _flat(x: Tensor, facts: Facts) -> Tensor:
    return x.flatten(0, facts.unit_dims - 1) if facts.unit_dims > 1 else x


def _unflat(x: Tensor, facts: Facts) -> Tensor:
    return x.view(*[1] * (facts.unit_dims - 1), *x.shape)


def _pick(x: Tensor, units: Sequence[int], sizes: Sequence[int] | None = None) -> Tensor:
    ends = range(len(x) + 1) if sizes is None else list(itertools.accumulate(sizes, initial=0))
    # neighbors lie in one piece
    firsts = [place for place, unit in enumerate(units) if place == 0 or unit != units[place - 1] + 1]
    parts = [
        x[ends[units[first]] : ends[units[after - 1] + 1]] for first, after in itertools.pairwise([*firsts, len(units)])
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _frames(grid: Tensor, plan: UnitPlan) -> Tensor:
    """Grids of units that are frames of the given grids, ``[videos, 3]`` to ``[units, 3]``."""
    if not plan.frames:
        return grid
    frames = torch.cat([grid[video : video + 1].expand(count, -1) for video, count in enumerate(plan.frames)])
    return torch.cat([torch.ones_like(frames[:, :1]), frames[:, 1:]], dim=1)


def describe_unit(arguments: Mapping[str, Any], modality: Modality) -> list[int]:
    """Describes the tensors of one unit in whole numbers: sizes of all, and values of integers that are few.

    Args:
        arguments: Arguments of the features method for one unit.
        modality: What it is.

    Returns:
        For each tensor: its place among the arguments, its dtype, its dimensions, sizes and values.
    """
    flat: list[int] = []
    for place, name in enumerate(modality.arguments):
        value = arguments.get(name)
        if not isinstance(value, Tensor) or value.dtype not in _DTYPES:
            continue
        flat += [place, _DTYPES.index(value.dtype), value.dim(), *value.shape]
        if not value.is_floating_point() and value.numel() <= _FEW:
            flat += [int(number) for number in host_copy(value).flatten().tolist()]
    return flat


def build_unit(flat: Sequence[int], modality: Modality, device: torch.device) -> dict[str, Tensor]:
    """Undoes `describe_unit`: pixels and masks are ones.

    Args:
        flat: The description.
        modality: What it is.
        device: The device on which the tensors are made.
    """
    unit, numbers = {}, iter(flat)
    for place in numbers:
        dtype, dimensions = _DTYPES[next(numbers)], next(numbers)
        shape = [next(numbers) for _ in range(dimensions)]
        count = torch.Size(shape).numel()
        if not dtype.is_floating_point and count <= _FEW:
            value = torch.tensor([next(numbers) for _ in range(count)], dtype=dtype).view(shape).to(device)
        else:
            # no zeros: some models drop images of nothing as padding
            value = torch.ones(shape, dtype=dtype, device=device)
        unit[modality.arguments[place]] = value
    return unit
