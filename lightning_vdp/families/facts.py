"""What no signature and no config of a model type says: data, by model type."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = ["FACTS", "GATHERED", "PER_POSITION", "REFUSED", "SEQUENCE_DIM", "Facts"]


@dataclass(frozen=True)
class Facts:
    """What no signature and no config of a model type says.

    Args:
        merged_rows: Whether a unit yields a row of features for each square of `spatial_merge_size` patches, so that
            rows are known before the tower runs; else they are measured.
        splits_frames: Whether the tower treats the frames of a video apart, so that each is a unit of its own.
        tiny_unit: Whether the tower takes one square of `spatial_merge_size` patches as an image; else a rank without
            units runs one like the smallest of others.
        tower_mlp_matrices: Weight matrices of a block's feed-forward layer in the tower: 3 where it is gated.
        ragged: Arguments of the features method whose rows belong to units by the counts in another argument.
        pixels_dim: Dimension of the pixels along which packed patches lie.
        video_placeholder: Whose token id marks the places of videos' features.
        unit_dims: Leading dimensions of the pixels that count units.
        listed: Whether the output tells the rows of each unit; else units stay in order.
        routed: Whether placeholders may be restricted to those of a shard; else all features are gathered.
    """

    merged_rows: bool = False
    splits_frames: bool = False
    tiny_unit: bool = False
    tower_mlp_matrices: int = 2
    ragged: Mapping[str, str] = field(default_factory=dict)
    pixels_dim: int = 0
    video_placeholder: str = "video"
    unit_dims: int = 1
    listed: bool = True
    routed: bool = True


_GLM = Facts(video_placeholder="image")


_STRIP = Facts(pixels_dim=-1)


_TILES = Facts(ragged={"pixel_values_local": "num_local_patches"})


_NESTED = Facts(unit_dims=2, listed=False)


_PACKED = Facts(merged_rows=True, splits_frames=True, tiny_unit=True)


FACTS: Mapping[str, Facts] = {
    "qwen2_vl": _PACKED,
    "qwen2_5_vl": replace(_PACKED, tower_mlp_matrices=3),
    "qwen3_vl": _PACKED,
    "qwen3_vl_moe": _PACKED,
    "qwen3_5": _PACKED,
    "qwen3_5_moe": _PACKED,
    "glm4v": _GLM,
    "glm46v": _GLM,
    "glmga": _GLM,
    "glm4v_moe": _GLM,
    "glm_ocr": _GLM,
    "glm5_next": _GLM,
    "nemotron_h_omni": _GLM,
    "minicpm_ocr": _STRIP,
    "minicpmv4_6": _STRIP,
    "minicpmv4_7": _STRIP,
    "deepseek_ocr2": _TILES,
    "step3p7": _TILES,
    "unlimited_ocr": _TILES,
    "idefics2": _NESTED,
    "idefics3": _NESTED,
    "smolvlm": _NESTED,
    "granite_docling": _NESTED,
}
"""Facts about vision-language models by the `model_type` of their config."""


PER_POSITION: Mapping[str, int] = {"per_layer_input": 1, "moe_mm_token_type_ids": 1, "position_ids": -1}
"""Arguments of decoder layers that belong to positions, and their sequence dimension."""


SEQUENCE_DIM: Mapping[str, int] = {"gemma3n_text": 2}
"""Sequence dimension of a decoder's hidden states by its `model_type`, where it is not 1."""


GATHERED: frozenset[str] = frozenset({"llama4_text", "qwen4_exp_text"})
"""Decoders by `model_type` whose attention needs the whole sequence before it comes to the attention function:
temperatures by place in the sequence, sparse selection of keys. Where attention has an indexer, that tells."""


_CROSS = "its decoder attends to images by cross attention, which is not divided"


_BLOCKS = "it keeps the states of earlier blocks outside its layers, where they are not divided"


_PAIR = "it is an encoder-decoder, whose decoder attends to another sequence"


REFUSED: Mapping[str, str] = {
    "blip": _CROSS,
    "evolla": _CROSS,
    "git": "its images stand in front of the text as rows of their own, without placeholder tokens",
    "idefics": _CROSS,
    "mllama": _CROSS,
    "florence2": _PAIR,
    "granite4_vision": "it hands features of its images to layers of the decoder in a form of its own",
    "inkling_mm_model": "its convolutions do not get the keyword arguments that tell how a sequence is divided",
    "inkling2": _BLOCKS,
    "inkling2_loop": _BLOCKS,
    "molmo2": "features of all its images are pooled together by indices over the whole batch",
    "pi0": "it predicts actions by flow matching and has no language model loss",
    "pix2struct": _PAIR,
    "pp_formulanet": _PAIR,
    "t5gemma2": _PAIR,
    "udop": _PAIR,
    "vision-encoder-decoder": _PAIR,
    "diffusion_gemma": "it predicts blocks by diffusion and has no causal language model loss",
}
"""Model types that cannot be divided, by reason."""
