"""Names that transformers gives to the same thing in all models. What breaks with them is a record in `facts`."""

import re
from collections.abc import Mapping

__all__ = [
    "CHANNEL_CONVOLUTIONS",
    "COUNTS",
    "FEATURE_METHODS",
    "GATED_DELTA_RULES",
    "GRID",
    "INDEXER",
    "MODULE_CONVOLUTIONS",
    "OUTPUT_PROJECTION",
    "PER_POSITION",
    "SOUND_ARGUMENTS",
    "STATE_SPACE_SCANS",
    "TOWERS",
    "placeholder_fields",
]

FEATURE_METHODS: Mapping[str, str] = {"image": "get_image_features", "video": "get_video_features"}
"""Methods of a base model that run the tower and the projector, by modality, in the order in which forwards run them."""

TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder", "image_tower")
"""Children of a base model that encode patches."""

GRID = re.compile("grid_t?hw$|^target_sizes")
"""Arguments of a features method with the patches of each image or video along its sides."""

COUNTS = re.compile("^num_.*_per_(image|video)$|^batch_num_images$|^images_per_sample$")
"""Arguments of a features method with the rows of the pixels that each image or video takes."""

SOUND_ARGUMENTS = ("input_features", "input_values", "feature_attention_mask", "audio_")
"""What the names of forward arguments with sound begin with."""

PER_POSITION: Mapping[str, int] = {"per_layer_input": 1, "moe_mm_token_type_ids": 1, "position_ids": -1}
"""Arguments of decoder layers that belong to positions, and their sequence dimension."""

OUTPUT_PROJECTION = "o_proj"
"""Child that attention modules have and other parts of a decoder layer do not."""

INDEXER = "indexer"
"""Part of the name of a child that picks the keys which an attention module sees, and looks at all of them to do so."""

CHANNEL_CONVOLUTIONS = frozenset({"causal_conv1d_fn"})
"""Functions of modeling files that mix tokens within each channel."""

MODULE_CONVOLUTIONS = frozenset({"causal_conv1d_forward"})
"""The same, of transformers 5.25 and later: they take the weights from the convolution's module."""

GATED_DELTA_RULES = frozenset({"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"})
"""Functions of modeling files that mix tokens within each head."""

STATE_SPACE_SCANS = frozenset(
    {"mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined", "mamba_inner_fn", "mamba_selective_scan"}
)
"""Functions of modeling files that take projections, convolution and scan in one."""


def placeholder_fields(kind: str) -> tuple[str, ...]:
    """Fields of a config that may hold the id of the placeholder token for "image" or "video"."""
    return f"{kind}_token_id", f"{kind}_token_index", f"{kind}_patch_id"
