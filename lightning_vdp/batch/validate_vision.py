"""What is wrong with the images and videos of one forward. Functions return a sentence or None and do not raise."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_vdp.batch.contents import VisionContents, count_placeholders, read_modality, to_numbers
from lightning_vdp.batch.host_copies import host_copy, known_host_copy
from lightning_vdp.families.facts import Facts
from lightning_vdp.families.family import Family, Modality

__all__ = ["find_vision_problem"]


def find_vision_problem(arguments: Mapping[str, Any], modality: Modality, config: Any, family: Family) -> str | None:
    """Looks for what is wrong with the images or the videos of a forward.

    Args:
        arguments: The forward's arguments by name.
        modality: Images or videos.
        config: The model's config.
        family: What is known about the model's type.

    Returns:
        What is wrong and what to do, or None.
    """
    if arguments.get(modality.pixels) is None:
        return _find_absent_pixels(arguments, modality, family)
    problem = _find_tensor_problem(arguments, modality, config, family)
    if problem is not None:
        return problem
    contents = read_modality(arguments, modality)
    return _find_contents_problem(contents, modality, config, family.facts, arguments.get("input_ids"))


def _find_tensor_problem(arguments: Mapping[str, Any], modality: Modality, config: Any, family: Family) -> str | None:
    """Looks at the tensors themselves: their types, dtypes and channels, and whether what describes them is there."""
    pixels = arguments[modality.pixels]
    if not isinstance(pixels, Tensor):
        return (
            f"`{modality.pixels}` is a {type(pixels).__name__}, but must be a tensor; pass what the processor returned"
        )
    if pixels.dtype in (torch.uint8, torch.int32, torch.int64):
        return f"`{modality.pixels}` holds whole numbers, which nobody has normalized; pass what the processor returned"
    counts = None if modality.counts is None else arguments.get(modality.counts)
    if counts is not None and (min(to_numbers(counts), default=0) < 1 or sum(to_numbers(counts)) != pixels.shape[0]):
        return (
            f"`{modality.counts}` is {to_numbers(counts)}, but must count the {pixels.shape[0]} rows of "
            f"`{modality.pixels}`, one or more for each entry; leave samples without pixels out of it"
        )
    vision = getattr(config, "vision_config", None)
    channels = getattr(vision, "num_channels", None) if family.facts.unit_dims == 1 else None
    if modality.grid is None:
        if channels and pixels.dim() == 4 and pixels.shape[1] != channels:
            return f"`{modality.pixels}` has {pixels.shape[1]} channels, but the model takes {channels}; convert the images"
        return None
    if arguments.get(modality.grid) is None:
        return f"`{modality.pixels}` came without `{modality.grid}`; pass what the processor returned"
    known = {modality.grid, *modality.arguments, *family.arguments}
    foreign = [name for name in arguments if name.startswith(f"{modality.name}_") and name not in known]
    if foreign:
        return f"`{foreign[0]}` describes all {modality.name}s at once and cannot be divided; leave it out"
    grid = arguments[modality.grid]
    sides = ("time", "height", "width") if modality.grid.endswith("thw") else ("height", "width")
    if grid.is_floating_point() or grid.dim() != 2 or grid.shape[1] != len(sides):
        return (
            f"`{modality.grid}` has shape {list(grid.shape)} and dtype {grid.dtype}, but must hold whole numbers "
            f"({', '.join(sides)}) for each {modality.name}; pass what the processor returned"
        )
    return None


def _find_contents_problem(
    contents: VisionContents, modality: Modality, config: Any, facts: Facts, ids: Any
) -> str | None:
    """Looks at what the batch says in whole numbers: sizes against each other and against the placeholders."""
    name = modality.name
    nothing = f"`{modality.pixels}` is there but holds no {name}; leave it out of batches without {name}s"
    if contents.grids is None:
        return None if math.prod(contents.shape[: facts.unit_dims]) else nothing
    if not contents.grids:
        return nothing
    vision = getattr(config, "vision_config", None)
    merge = int(getattr(vision, "spatial_merge_size", 1)) if facts.merged_rows else 1
    for unit, (time, height, width) in enumerate(contents.grids):
        if min(time, height, width) < 1 or height % merge or width % merge:
            return (
                f"{name} {unit} has a grid of {time} x {height} x {width} patches, but its height and width must "
                f"be positive multiples of {merge}; resize it with the model's processor"
            )
    patches = sum(contents.patches)
    if facts.pixels_dim == 0 and contents.shape[0] != patches:
        return (
            f"`{modality.pixels}` has {contents.shape[0]} patches, but `{modality.grid}` describes {patches}; pass both "
            "from one call of the processor"
        )
    if not facts.merged_rows or not isinstance(ids, Tensor):
        return None
    tokens = count_placeholders(ids, modality)
    if tokens != patches // merge**2:
        return (
            f"the batch has {tokens} {name} tokens, but its {len(contents.grids)} {name}s yield "
            f"{patches // merge**2} features; check that truncation did not cut {name} tokens off"
        )
    return _find_cut_images(ids, modality, [size // merge**2 for size in contents.patches])


def _find_absent_pixels(arguments: Mapping[str, Any], modality: Modality, family: Family) -> str | None:
    """Placeholders whose pixels are missing, which the model would take for words."""
    ids = arguments.get("input_ids")
    host = known_host_copy(ids) if isinstance(ids, Tensor) else None
    if host is None or arguments.get("mm_encoder_outputs") is not None:
        return None
    present = [other for other in family.modalities if arguments.get(other.pixels) is not None]
    if any(other.token == modality.token for other in present):
        # some models mark images and videos alike
        return None
    tokens = count_placeholders(host, modality)
    if not tokens:
        return None
    return (
        f"the batch has {tokens} {modality.name} tokens, but no `{modality.pixels}`; pass what the processor returned"
    )


def _find_cut_images(ids: Any, modality: Modality, features: list[int]) -> str | None:
    """Looks for a row of the batch that holds a part of an image."""
    token = modality.token
    if token is None or not isinstance(ids, Tensor) or ids.shape[0] == 1:
        return None
    counts = host_copy(ids).eq(token).sum(1).tolist()
    ends = {0, *itertools.accumulate(features)}
    for row, end in enumerate(itertools.accumulate(counts)):
        if end not in ends:
            return (
                f"row {row} of the batch has {counts[row]} {modality.name} tokens, which no run of the batch's "
                f"{modality.name}s yields ({', '.join(map(str, features[:8]))} features each): another row has those that are "
                f"missing; check that truncation did not cut {modality.name} tokens off"
            )
    return None
