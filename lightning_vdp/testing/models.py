"""Tiny models of supported families and batches for them, built offline from configs."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["IMAGE_TOKEN", "TINY_FAMILIES", "VIDEO_TOKEN", "add_noise", "tiny_batch", "tiny_model"]

IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END, VOCABULARY = 120, 121, 122, 123, 128

_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_HIDDEN = 64
_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": _HIDDEN,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_DEEPSTACK = {**_TOWER, "depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}

_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "projection_dim": 32,
}
_INTERNVL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": [16, 16],
    "patch_size": [4, 4],
}
# tokens of an image of a family whose images all have one size
_FIXED_TOKENS = {"llava": 16, "internvl": 4}

_DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
}

TINY_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": _HIDDEN,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        {},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {**_TOWER, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
        {},
    ),
    "qwen3_vl": ("Qwen3VL", _DEEPSTACK, {}),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        _DEEPSTACK,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "experts_implementation": "eager",
        },
    ),
    "qwen3_5": ("Qwen3_5", {**_TOWER, "num_position_embeddings": 64}, _DELTA_RULE),
    "llava": ("Llava", _CLIP, {"model_type": "llama"}),
    "internvl": ("InternVL", _INTERNVL, {"model_type": "qwen2"}),
}
"""By model type: the stem of its classes in transformers, the tower's config, and what its text config adds."""


def tiny_model(
    model_type: str, attention: str = "sdpa", heads: int = 4, key_value_heads: int = 2, seed: int = 0, **text: Any
) -> PreTrainedModel:
    """Builds a random model with about 0.1 M parameters.

    Parameters get noise after their initialization, since zeros and ones hide errors.

    Args:
        model_type: One of `TINY_FAMILIES`.
        attention: The attention implementation, such as "sdpa" or "eager".
        heads: The number of query heads of the decoder, 4 or 8.
        key_value_heads: The number of key-value heads of the decoder.
        seed: The seed of the parameters.
        **text: Further fields of the text config.
    """
    stem, vision, extra = TINY_FAMILIES[model_type]
    width = _HIDDEN // heads
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": {16: [2, 3, 3], 8: [1, 1, 2]}[width],
    }
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        **extra,
    }
    if model_type.startswith("qwen3"):
        rope["mrope_interleaved"] = True
        fields["head_dim"] = width
    if model_type in _FIXED_TOKENS:
        del rope["mrope_section"]
    experts = fields.pop("experts_implementation", None)
    config = getattr(transformers, f"{stem}Config")(
        text_config={**fields, **text}, vision_config=dict(vision), tie_word_embeddings=False, **_IDS
    )
    config._attn_implementation = attention
    if experts is not None:
        config._experts_implementation = experts
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{stem}ForConditionalGeneration")(config)
    add_noise(model, seed + 1)
    return model


def add_noise(model: nn.Module, seed: int, spread: float = 0.05) -> None:
    """Moves all parameters a little, in place: those that begin at zero or one hide errors.

    Args:
        model: The model.
        seed: The seed of the noise.
        spread: The standard deviation of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * spread)


Grid = tuple[int, int, int]


def _image_tokens(model_type: str, grid: Grid) -> int:
    return _FIXED_TOKENS.get(model_type, grid[1] * grid[2] // 4)


def _row(
    model_type: str, images: Sequence[Grid], videos: Sequence[Grid], text: int, draw: torch.Generator
) -> list[int]:
    def words(count: int) -> list[int]:
        return torch.randint(3, 100, (count,), generator=draw).tolist()

    ids = words(text)
    for grid in images:
        ids += [VISION_START, *[IMAGE_TOKEN] * _image_tokens(model_type, grid), VISION_END, *words(text)]
    for time, height, width in videos:
        # from Qwen3-VL on, each frame stands between markers of its own
        frames = time if model_type.startswith("qwen3") else 1
        for _ in range(frames):
            ids += [VISION_START, *[VIDEO_TOKEN] * (time // frames * height * width // 4), VISION_END, *words(2)]
    return ids


def tiny_batch(
    model_type: str,
    rows: Sequence[Sequence[Grid]] = (((1, 4, 4), (1, 6, 8), (1, 8, 4)),),
    videos: Sequence[Sequence[Grid]] = (),
    text: int = 5,
    seed: int = 0,
    padding: str = "right",
    length: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Makes a batch with labels, like a processor's output.

    Args:
        model_type: One of `TINY_FAMILIES`.
        rows: The grids ``(time, height, width)`` of the images of each row; families whose images have one size take
            their number alone.
        videos: The grids of the videos of each row.
        text: The number of words around each image.
        seed: The seed of words and pixels.
        padding: The side on which shorter rows are padded, "left" or "right".
        length: The number of positions to which all rows are padded at least.
        dtype: The type of the pixels.
    """
    draw = torch.Generator().manual_seed(seed)
    videos = list(videos) or [()] * len(rows)
    sequences = [_row(model_type, images, clips, text, draw) for images, clips in zip(rows, videos)]
    widest = max(*map(len, sequences), length or 0)
    ids = torch.zeros(len(rows), widest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, sequence in enumerate(sequences):
        start = widest - len(sequence) if padding == "left" else 0
        ids[index, start : start + len(sequence)] = torch.tensor(sequence)
        mask[index, start : start + len(sequence)] = 1
    labels = ids.masked_fill((ids >= IMAGE_TOKEN) | (mask == 0), -100)
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int(),
    }
    if model_type in _FIXED_TOKENS:
        del batch["mm_token_type_ids"]
        images = sum(map(len, rows))
        if images:
            batch["pixel_values"] = torch.randn(images, 3, 16, 16, generator=draw, dtype=torch.float64).to(dtype)
        return batch
    for grids, pixels, name in ((rows, "pixel_values", "image"), (videos, "pixel_values_videos", "video")):
        units = [grid for row in grids for grid in row]
        if units:
            batch[f"{name}_grid_thw"] = torch.tensor(units)
            patches = sum(time * height * width for time, height, width in units)
            batch[pixels] = torch.randn(patches, 3 * 2 * 4 * 4, generator=draw, dtype=torch.float64).to(dtype)
    return batch
