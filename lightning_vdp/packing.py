"""Packing samples of different lengths into one row without padding."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_vdp.errors import UserError

__all__ = ["pack_samples"]

_JOINED = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
_JOINED_BY_POSITION = ("input_ids", "mm_token_type_ids")


def pack_samples(samples: Sequence[Mapping[str, Any]], model: Any = None) -> dict[str, Tensor]:
    """Joins samples to one row, in which attention keeps them apart by their positions.

    The model must be called with what is returned and without a cache; there is no attention mask.

    Args:
        samples: Each as a processor returns it for one text, without padding: tensors of one row, with `labels` if it is
            for training.
        model: The vision-language model whose positions have several dimensions (M-RoPE), or its base model. Without
            one, positions count from 0 in each sample.

    Returns:
        A batch of one row with `position_ids` of shape ``[1, S]``, or ``[4, 1, S]`` for M-RoPE: positions in the text
        and then in time, height and width. The first label of each sample does not count, since nothing precedes it.

    Raises:
        UserError: If a sample is not one row without padding.
    """
    for index, sample in enumerate(samples):
        mask = sample.get("attention_mask")
        if sample["input_ids"].shape[0] != 1 or (mask is not None and not bool(mask.all())):
            raise UserError(
                f"Sample {index} has {sample['input_ids'].shape[0]} rows or padding; process texts alone, with padding=False."
            )
    packed = {
        name: torch.cat([sample[name] for sample in samples], 1) for name in _JOINED_BY_POSITION if name in samples[0]
    }
    for name in _JOINED:
        parts = [sample[name] for sample in samples if sample.get(name) is not None]
        if parts:
            packed[name] = torch.cat(parts)
    if "labels" in samples[0]:
        packed["labels"] = torch.cat(
            [functional.pad(sample["labels"][:, 1:], (1, 0), value=-100) for sample in samples], 1
        )
    packed["position_ids"] = torch.cat([_positions(sample, model) for sample in samples], -1)
    return packed


def _positions(sample: Mapping[str, Any], model: Any) -> Tensor:
    ids = sample["input_ids"]
    text = torch.arange(ids.shape[1], device=ids.device)[None]
    if model is None:
        return text
    base = model if hasattr(model, "get_rope_index") else model.model
    names = ("image_grid_thw", "video_grid_thw", "mm_token_type_ids", "second_per_grid_ts")
    known = {name: sample[name] for name in names if sample.get(name) is not None}
    if "image_grid_thw" not in known and "video_grid_thw" not in known:
        return text.expand(4, 1, -1)
    vision, _ = base.get_rope_index(ids, **known)
    return torch.cat([text[None], vision])
