"""Checks of one forward's input, before its first collective of ours. They return a sentence or None and do not raise."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_vdp.batch.host_copies import known_host_copy
from lightning_vdp.batch.labels import IGNORED
from lightning_vdp.batch.validate_vision import find_vision_problem
from lightning_vdp.families.conventions import SOUND_ARGUMENTS
from lightning_vdp.families.family import Family

__all__ = ["find_input_problem", "unreadable_problem"]

_WHOLE_ONLY = ("output_hidden_states", "output_attentions", "use_cache")
_SEQUENCE_LONG = ("labels", "shift_labels", "attention_mask", "mm_token_type_ids")


def find_input_problem(
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
        problem = _find_problem(arguments, family, config, text, ranks)
        return problem or (_find_packing_problem(arguments) if carries_state else None)
    except Exception as error:
        # no rank may raise alone: what a check cannot read is bad input too
        return unreadable_problem(error)


def unreadable_problem(error: Exception) -> str:
    """What to say of input on which a check itself failed."""
    return f"the input cannot be read ({type(error).__name__}: {error}); pass what the processor returned"


def _find_problem(arguments: Mapping[str, Any], family: Family, config: Any, text: Any, ranks: int) -> str | None:
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
        _find_request_problem(arguments, text)
        or _find_type_problem(arguments, text)
        or _find_shape_problem(arguments, batch, length)
        or _find_vocabulary_problem(arguments, text)
        or next(
            (
                problem
                for modality in family.modalities
                if (problem := find_vision_problem(arguments, modality, config, family)) is not None
            ),
            None,
        )
        or _find_position_problem(arguments, family)
    )


def _find_request_problem(arguments: Mapping[str, Any], text: Any) -> str | None:
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


def _find_type_problem(arguments: Mapping[str, Any], text: Any) -> str | None:
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


def _find_shape_problem(arguments: Mapping[str, Any], batch: int, length: int) -> str | None:
    for name in _SEQUENCE_LONG:
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


def _find_vocabulary_problem(arguments: Mapping[str, Any], text: Any) -> str | None:
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


def _find_packing_problem(arguments: Mapping[str, Any]) -> str | None:
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


def _find_position_problem(arguments: Mapping[str, Any], family: Family) -> str | None:
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
