"""Checks of one forward's input, before its first collective of ours. They return a sentence or None and do not raise."""

import itertools
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_vdp.batch.host_copies import host_copy, known_host_copy
from lightning_vdp.batch.labels import IGNORED
from lightning_vdp.families.conventions import SOUND_ARGUMENTS
from lightning_vdp.families.family import Family, Modality

__all__ = ["count_placeholders", "describe_bad_input", "describe_unreadable", "grids_of"]

_WHOLE_ONLY = ("output_hidden_states", "output_attentions", "use_cache")
_PER_POSITION = ("labels", "shift_labels", "attention_mask", "mm_token_type_ids")


def grids_of(arguments: Mapping[str, Any], modality: Modality) -> list[list[int]]:
    """The ``(time, height, width)`` of each image or video that the forward encodes, where there are grids."""
    grid = None if modality.grid is None else arguments.get(modality.grid)
    if arguments.get(modality.pixels) is None or grid is None:
        return []
    return [[1, *row][-3:] for row in host_copy(grid).long().tolist()]


def counts_of(counts: Any) -> list[int]:
    """Whole numbers of an argument that counts something for each unit, a tensor or a list."""
    return host_copy(counts).flatten().tolist() if isinstance(counts, Tensor) else [int(count) for count in counts]


def count_placeholders(ids: Tensor, modality: Modality) -> int:
    """Number of a modality's placeholder tokens in input ids ``[B, S]``."""
    return 0 if modality.token is None else int(np.count_nonzero(host_copy(ids).numpy() == modality.token))


def describe_bad_input(
    arguments: Mapping[str, Any],
    family: Family,
    config: Any,
    text: Any,
    ranks: int,
    carries_state: bool = False,
) -> str | None:
    """Looks for input that some rank would stumble over later.

    Args:
        arguments: The forward's arguments by name.
        family: Facts about the model.
        config: The model's config.
        text: The config of its decoder.
        ranks: Size of the sequence group.
        carries_state: Whether layers carry a state from one position to the next, past the end of a packed sample.

    Returns:
        What is wrong and what to do, or None.
    """
    try:
        problem = _describe(arguments, family, config, text, ranks)
        return problem or (_describe_packing(arguments) if carries_state else None)
    except Exception as error:
        # no rank may raise alone: what a check cannot read is bad input too
        return describe_unreadable(error)


def describe_unreadable(error: Exception) -> str:
    """What to say of input on which a check itself failed."""
    return f"the input cannot be read ({type(error).__name__}: {error}); pass what the processor returned"


def _describe(arguments: Mapping[str, Any], family: Family, config: Any, text: Any, ranks: int) -> str | None:
    sequence = arguments.get("input_ids")
    if sequence is None:
        sequence = arguments.get("inputs_embeds")
    if not isinstance(sequence, Tensor):
        return "the forward got neither `input_ids` nor `inputs_embeds`; pass one of them"
    batch, length = sequence.shape[:2]
    if not batch:
        return "the batch has no rows; drop empty batches in the data loader"
    if length < ranks:
        return (
            f"the sequence has {length} positions, fewer than the {ranks} ranks of its group; pad the batch or lower "
            "`sequence_parallel_size`"
        )
    sound = next(
        (name for name, value in arguments.items() if value is not None and name.startswith(SOUND_ARGUMENTS)), None
    )
    if sound is not None:
        return f"`{sound}` is there, but sound is not divided; leave it out, or set `sequence_parallel_size=1`"
    return (
        _describe_requests(arguments, text)
        or _describe_types(arguments, text)
        or _describe_shapes(arguments, batch, length)
        or _describe_vocabulary(arguments, text)
        or next(
            (
                problem
                for modality in family.modalities
                if (problem := _describe_modality(arguments, modality, config, family)) is not None
            ),
            None,
        )
        or _describe_positions(arguments, family)
    )


def _describe_requests(arguments: Mapping[str, Any], text: Any) -> str | None:
    for name in _WHOLE_ONLY:
        asked = arguments.get(name)
        by_config = name != "use_cache" and getattr(text, name, False)
        if asked or (asked is None and by_config):
            return f"`{name}` is not available while the sequence is divided; switch it off"
    if arguments.get("return_dict") is False:
        return "`return_dict=False` leaves no place to say which positions the outputs belong to; leave it out"
    keep = arguments.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        return (
            "`logits_to_keep` would pick positions of each rank's shard; leave it out, and pick from "
            "`gather_sequence(outputs.logits, outputs.sequence_shard)`"
        )
    return None


def _describe_types(arguments: Mapping[str, Any], text: Any) -> str | None:
    ids, embeddings = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if ids is not None and embeddings is not None:
        return "the forward got both `input_ids` and `inputs_embeds`; pass one of them"
    width = getattr(text, "hidden_size", None)
    if isinstance(embeddings, Tensor) and width and (embeddings.dim() != 3 or embeddings.shape[-1] != width):
        return f"`inputs_embeds` has shape {list(embeddings.shape)}, but must be [rows, positions, {width}]"
    for name in ("input_ids", "labels", "shift_labels"):
        value = arguments.get(name)
        if value is not None and not isinstance(value, Tensor):
            return f"`{name}` is a {type(value).__name__}, but must be a tensor"
        if (
            isinstance(value, Tensor)
            and value.dtype != torch.int64
            and (name != "input_ids" or value.dtype != torch.int32)
        ):
            return f"`{name}` has dtype {value.dtype}, but must be torch.int64; convert it in the collate function"
        if isinstance(value, Tensor) and value.dim() != 2:
            return f"`{name}` has shape {list(value.shape)}, but must be [rows, positions]"
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() not in (2, 4):
        return f"`attention_mask` has shape {list(mask.shape)}, but must be [rows, positions] or of four dimensions"
    return None


def _describe_shapes(arguments: Mapping[str, Any], batch: int, length: int) -> str | None:
    for name in _PER_POSITION:
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape != (batch, length):
            return (
                f"`{name}` has {value.shape[0]} rows of {value.shape[1]} positions, but the sequence has {batch} of {length}; "
                "make them equal"
            )
    positions = arguments.get("position_ids")
    if isinstance(positions, Tensor) and positions.is_floating_point():
        return f"`position_ids` has dtype {positions.dtype}, but must hold whole numbers"
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 4 and (mask.shape[-1] != length or mask.shape[0] not in (1, batch)):
        return (
            f"`attention_mask` has shape {list(mask.shape)}, but the sequence has {batch} rows of {length} positions; make it "
            "[rows, heads or 1, positions, positions]"
        )
    if isinstance(positions, Tensor) and (
        positions.dim() not in (2, 3)
        or (positions.dim() == 3 and positions.shape[0] not in (3, 4))
        or positions.shape[-1] != length
        or positions.shape[-2] not in (1, batch)
    ):
        return (
            f"`position_ids` has shape {list(positions.shape)}, but the sequence has {batch} rows of {length} positions; make "
            "its last two sizes equal to these"
        )
    return None


def _describe_vocabulary(arguments: Mapping[str, Any], text: Any) -> str | None:
    size = int(text.vocab_size)
    for name in ("input_ids", "labels", "shift_labels"):
        value = arguments.get(name)
        # not worth a device sync
        host = known_host_copy(value) if isinstance(value, Tensor) else None
        if host is None or not host.numel():
            continue
        ids = host.numpy()
        least, most = int(ids.min()), int(ids.max())
        if most >= size:
            return f"`{name}` holds the id {most}, but the vocabulary has {size}; use the model's own tokenizer"
        if least >= 0:
            continue
        if name == "input_ids":
            return f"`input_ids` holds the id {least}, but ids start at 0; -100 belongs into labels alone"
        ignored = int(arguments.get("ignore_index") or IGNORED)
        wrong = ids[(ids < 0) & (ids != ignored)]
        if wrong.size:
            return (
                f"`{name}` holds the label {wrong[0]}, but must hold ids, or {ignored} where a position does not count"
            )
    return None


def _describe_packing(arguments: Mapping[str, Any]) -> str | None:
    kernels = all(find_spec(package) is not None for package in ("fla", "causal_conv1d"))
    if arguments.get("cu_seq_lens_q") is not None:
        told = kernels and arguments.get("seq_idx") is not None
    else:
        positions = arguments.get("position_ids")
        host = known_host_copy(positions) if isinstance(positions, Tensor) else None
        if host is None or arguments.get("attention_mask") is not None or (host.dim() == 3 and host.shape[0] != 4):
            return None
        text = host if host.dim() == 2 else host[0]
        told = bool((text.diff() == 1).all())
    if told:
        return None
    return (
        "the batch packs several samples in a row, and this model's linear attention would carry its state from one to the "
        "next; pass `cu_seq_lens_q` and `seq_idx` with the packages fla and causal-conv1d installed, or do not pack"
    )


def _describe_modality(arguments: Mapping[str, Any], modality: Modality, config: Any, family: Family) -> str | None:
    facts = family.facts
    pixels = arguments.get(modality.pixels)
    if pixels is None:
        return _describe_absent(arguments, modality, family)
    if not isinstance(pixels, Tensor):
        return (
            f"`{modality.pixels}` is a {type(pixels).__name__}, but must be a tensor; pass what the processor returned"
        )
    if pixels.dtype in (torch.uint8, torch.int32, torch.int64):
        return f"`{modality.pixels}` holds whole numbers, which nobody has normalized; pass what the processor returned"
    counts = None if modality.counts is None else arguments.get(modality.counts)
    if counts is not None and (min(counts_of(counts), default=0) < 1 or sum(counts_of(counts)) != pixels.shape[0]):
        return (
            f"`{modality.counts}` is {counts_of(counts)}, but must count the {pixels.shape[0]} rows of `{modality.pixels}`, "
            "one or more for each entry; leave samples without pixels out of it"
        )
    name = modality.name
    nothing = f"`{modality.pixels}` is there but holds no {name}; leave it out of batches without {name}s"
    vision = getattr(config, "vision_config", None)
    channels = getattr(vision, "num_channels", None) if facts.unit_dims == 1 else None
    if modality.grid is None and channels and pixels.dim() == 4 and pixels.shape[1] != channels:
        return f"`{modality.pixels}` has {pixels.shape[1]} channels, but the model takes {channels}; convert the images"
    if modality.grid is None:
        return None if pixels.shape[: facts.unit_dims].numel() else nothing
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
    grids = grids_of(arguments, modality)
    if not grids:
        return nothing
    merge = int(getattr(vision, "spatial_merge_size", 1)) if facts.merged_rows else 1
    for unit, (time, height, width) in enumerate(grids):
        if min(time, height, width) < 1 or height % merge or width % merge:
            return (
                f"{modality.name} {unit} has a grid of {time} x {height} x {width} patches, but its height and width must "
                f"be positive multiples of {merge}; resize it with the model's processor"
            )
    patches = sum(time * height * width for time, height, width in grids)
    if facts.pixels_dim == 0 and pixels.shape[0] != patches:
        return (
            f"`{modality.pixels}` has {pixels.shape[0]} patches, but `{modality.grid}` describes {patches}; pass both from "
            "one call of the processor"
        )
    ids = arguments.get("input_ids")
    if not facts.merged_rows or not isinstance(ids, Tensor):
        return None
    tokens = count_placeholders(ids, modality)
    if tokens != patches // merge**2:
        return (
            f"the batch has {tokens} {modality.name} tokens, but its {len(grids)} {modality.name}s yield "
            f"{patches // merge**2} features; check that truncation did not cut {modality.name} tokens off"
        )
    return _describe_rows(ids, modality, [time * height * width // merge**2 for time, height, width in grids])


def _describe_absent(arguments: Mapping[str, Any], modality: Modality, family: Family) -> str | None:
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


def _describe_rows(ids: Any, modality: Modality, features: list[int]) -> str | None:
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


def _describe_positions(arguments: Mapping[str, Any], family: Family) -> str | None:
    vision = any(arguments.get(modality.pixels) is not None for modality in family.modalities)
    known = arguments.get("mm_token_type_ids") is not None or arguments.get("position_ids") is not None
    if family.needs_token_types and vision and not known and arguments.get("input_ids") is not None:
        return (
            "`mm_token_type_ids` is missing, without which image positions are wrong; pass what the processor returned"
        )
    types, ids = arguments.get("mm_token_type_ids"), arguments.get("input_ids")
    known_ids = known_host_copy(ids) if isinstance(ids, Tensor) else None
    known_types = known_host_copy(types) if isinstance(types, Tensor) else None
    if not family.needs_token_types or known_ids is None or known_types is None:
        return None
    # broadcast as tensors would be
    text = known_types.numpy() == 0
    for modality in family.modalities:
        if modality.token is not None and np.any(text & (known_ids.numpy() == modality.token)):
            return (
                f"`mm_token_type_ids` takes {modality.name} tokens for text, which makes positions wrong; pass what the "
                "processor returned"
            )
    return None
