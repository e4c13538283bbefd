"""What is peculiar to a model type when its config is made small: data, by model type."""

from collections.abc import Mapping
from typing import Any

__all__ = ["OVERRIDES"]

_MROPE = {"text_config.rope_parameters.mrope_section": [2, 3, 3]}
# a tokenizer of pictures, whose tokens the language model embeds
_VQ = {
    "base_channels": 32,
    "channel_multiplier": [1, 1, 2],
    "num_res_blocks": 1,
    "embed_dim": 8,
    "latent_channels": 8,
    "num_embeddings": 16,
    "resolution": 16,
}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4, 8: 2}, "max_value_projector_patch_to_query_dict": 4},
    "qwen2_vl": {"vision_config.hidden_size": 64, "vision_config.embed_dim": 32, **_MROPE},
    "qwen2_5_vl": _MROPE,
    "qwen2_5_omni_thinker": _MROPE,
    "paddleocr_vl": _MROPE,
    "glm_ocr": _MROPE,
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "janus": {"vision_config.projection_dim": 64},
    "paligemma": {"vision_config.projection_dim": 64, "projection_dim": 64},
}
"""By model type: fields of the small config, by their path, which no rule finds."""
