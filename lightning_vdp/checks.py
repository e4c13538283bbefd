"""Checks of one forward's input, before its first collective of ours. Each returns a sentence or None; none raises."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_vdp.call import host_copy
from lightning_vdp.models import Family, Modality

__all__ = ["describe_bad_input", "grids_of"]

_WHOLE_ONLY = ("output_hidden_states", "output_attentions")


def grids_of(arguments: Mapping[str, Any], modality: Modality) -> list[list[int]]:
    """The ``(time, height, width)`` of each unit that the forward encodes; empty without pixels."""
    grid = arguments.get(modality.grid)
    if arguments.get(modality.pixels) is None or grid is None:
        return []
    return [list(map(int, row)) for row in host_copy(grid).tolist()]


def describe_bad_input(arguments: Mapping[str, Any], family: Family, config: Any, ranks: int) -> str | None:
    """Looks for input that some rank would stumble over later.

    Args:
        arguments: The forward's arguments by name.
        family: Facts about the model.
        config: The model's config.
        ranks: Size of the sequence group.

    Returns:
        What is wrong and what to do, or None.
    """
    sequence = arguments.get("input_ids")
    if sequence is None:
        sequence = arguments.get("inputs_embeds")
    if not isinstance(sequence, Tensor):
        return "the forward got neither `input_ids` nor `inputs_embeds`; pass one of them"
    length = sequence.shape[1]
    if length < ranks:
        return (
            f"the sequence has {length} positions, fewer than the {ranks} ranks of its group; pad the batch or lower "
            "`sequence_parallel_size`"
        )
    return (
        _describe_requests(arguments, config)
        or _describe_lengths(arguments, length)
        or next(
            (
                problem
                for modality in family.modalities
                if (problem := _describe_modality(arguments, modality, config)) is not None
            ),
            None,
        )
        or _describe_positions(arguments, family)
    )


def _describe_requests(arguments: Mapping[str, Any], config: Any) -> str | None:
    for name in _WHOLE_ONLY:
        asked = arguments.get(name)
        if asked or (asked is None and getattr(config.get_text_config(), name, False)):
            return f"`{name}` is not available while the sequence is divided; switch it off"
    keep = arguments.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        return (
            "`logits_to_keep` would pick positions of each rank's shard; leave it out, and pick from "
            "`gather_sequence(outputs.logits, outputs.sequence_shard)`"
        )
    return None


def _describe_lengths(arguments: Mapping[str, Any], length: int) -> str | None:
    for name in ("labels", "attention_mask", "mm_token_type_ids"):
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] != length:
            return f"`{name}` has {value.shape[1]} positions, but the sequence has {length}; make them equal"
    return None


def _describe_modality(arguments: Mapping[str, Any], modality: Modality, config: Any) -> str | None:
    pixels, grid = arguments.get(modality.pixels), arguments.get(modality.grid)
    if pixels is None:
        return None
    if grid is None:
        return f"`{modality.pixels}` came without `{modality.grid}`; pass what the processor returned"
    foreign = [name for name in arguments if name.startswith(f"{modality.name}_") and name != modality.grid]
    if foreign:
        return f"`{foreign[0]}` describes all {modality.name}s at once and cannot be divided; leave it out"
    merge = int(config.vision_config.spatial_merge_size)
    grids = grids_of(arguments, modality)
    for unit, (time, height, width) in enumerate(grids):
        if min(time, height, width) < 1 or height % merge or width % merge:
            return (
                f"{modality.name} {unit} has a grid of {time} x {height} x {width} patches, but its height and width must "
                f"be positive multiples of {merge}; resize it with the model's processor"
            )
    patches = sum(time * height * width for time, height, width in grids)
    if pixels.shape[0] != patches:
        return (
            f"`{modality.pixels}` has {pixels.shape[0]} patches, but `{modality.grid}` describes {patches}; pass both from "
            "one call of the processor"
        )
    ids = arguments.get("input_ids")
    if isinstance(ids, Tensor):
        tokens = int((host_copy(ids) == getattr(config, modality.token_id)).sum())
        if tokens != patches // merge**2:
            return (
                f"the batch has {tokens} {modality.name} tokens, but its {len(grids)} {modality.name}s yield "
                f"{patches // merge**2} features; check that truncation did not cut {modality.name} tokens off"
            )
    return None


def _describe_positions(arguments: Mapping[str, Any], family: Family) -> str | None:
    vision = any(arguments.get(modality.grid) is not None for modality in family.modalities)
    known = arguments.get("mm_token_type_ids") is not None or arguments.get("position_ids") is not None
    if family.needs_token_types and vision and not known and arguments.get("input_ids") is not None:
        return (
            "`mm_token_type_ids` is missing, without which image positions are wrong; pass what the processor returned"
        )
    return None
