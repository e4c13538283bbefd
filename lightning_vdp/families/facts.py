"""The one table of model types: what the names and signatures of `conventions` do not say of them.

A model type without a record is one for which the conventions hold. A decoder that language models and several
vision-language models use has a record under its own model type.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["FAMILIES", "Facts", "facts_of"]


@dataclass(frozen=True)
class Facts:
    """What no convention, no signature and no config of a model type says.

    Args:
        refused: Why models of the type cannot be divided; None where they can.
        pixels_dim: Dimension of the pixels along which packed patches lie.
        unit_dims: Number of leading dimensions of the pixels that count units.
        ragged: Arguments of the features method whose rows belong to units by the counts in another argument.
        splits_frames: Whether the tower treats the frames of a video apart, so that each is a unit of its own.
        tiny_unit: Whether the tower takes one square of `spatial_merge_size` patches as an image; else a rank without
            units runs one like the smallest of others.
        tower_mlp_matrices: Number of weight matrices of a block's feed-forward layer in the tower: 3 where it is gated.
        merged_rows: Whether a unit yields a row of features for each square of `spatial_merge_size` patches, so that
            rows are known before the tower runs; else they are measured.
        listed: Whether the output of the features method tells the rows of each unit; else units stay in order.
        routed: Whether placeholders may be restricted to those of a shard; else all features are gathered.
        video_placeholder: Kind of placeholder, "image" or "video", that marks the places of videos' features.
        sequence_dim: Sequence dimension of the hidden states of a decoder of this type.
        gathered_attention: Whether attention of a decoder of this type needs the whole sequence before it comes to the
            attention function: for temperatures by place in the sequence, or to select keys. Where a layer's attention
            has an indexer, that tells.
        small: Fields of the small config that `lightning-vdp check` builds, by their path ("vision_config.depth"), for
            which the rules of `check.shrink` find no value that works.
    """

    refused: str | None = None
    pixels_dim: int = 0
    unit_dims: int = 1
    ragged: Mapping[str, str] = field(default_factory=dict)
    splits_frames: bool = False
    tiny_unit: bool = False
    tower_mlp_matrices: int = 2
    merged_rows: bool = False
    listed: bool = True
    routed: bool = True
    video_placeholder: str = "video"
    sequence_dim: int = 1
    gathered_attention: bool = False
    small: Mapping[str, Any] = field(default_factory=dict)


def _under(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{path}.{name}": value for name, value in fields.items()}


def _letters(number: int) -> str:
    return "".join(chr(ord("A") + int(digit)) for digit in str(number))


# small configs that several types share
_MROPE = {"text_config.rope_parameters.mrope_section": [2, 3, 3]}
# a tokenizer of pictures, whose tokens the language model embeds
_VQ = {
    "base_channels": 32,
    "channel_multiplier": [1, 1, 2],
    "num_res_blocks": 1,
    "embed_dim": 8,
    "latent_channels": 8,
    "num_embeddings": 16,
    "codebook_size": 16,
    "resolution": 16,
}
_SAM = {
    "output_channels": 16,
    "downsample_channels": [24, 32],
    "image_size": 128,
    "window_size": 2,
    "global_attn_indexes": [1],
    "mlp_dim": 48,
}
_MUSE = {
    # also the side of a window, in patches
    "vision_config.pos_emb_height": 4,
    "vision_config.pos_emb_width": 4,
    "vision_config.max_position_embeddings": 16,
    "out_hidden_size": 32 * 4,
}

# records that several types share, or begin with
_PACKED = Facts(merged_rows=True, splits_frames=True, tiny_unit=True)
_GLM = Facts(video_placeholder="image")
_GLM_MROPE = replace(_GLM, small=_MROPE)
_STRIP = Facts(pixels_dim=-1, small={"vision_config.insert_layer_id": 0, "insert_layer_id": 0})
_TILES = Facts(ragged={"pixel_values_local": "num_local_patches"})
_NESTED = Facts(unit_dims=2, listed=False)
_CROSS_ATTENTION = Facts(refused="its decoder attends to images by cross attention, which is not divided")
_ENCODER_DECODER = Facts(refused="it is an encoder-decoder, whose decoder attends to another sequence")
_EARLIER_BLOCKS = Facts(refused="it keeps the states of earlier blocks outside its layers, where they are not divided")


FAMILIES: Mapping[str, Facts] = {
    "apertus1p5": Facts(
        small={
            **_under("vision_config", _VQ),
            "image_token_offset": 100,
            "audio_token_offset": 116,
            "audio_config.codebook_size": 4,
        }
    ),
    "aria": Facts(
        small={"projector_patch_to_query_dict": {16: 4, 8: 2}, "max_value_projector_patch_to_query_dict": 4},
    ),
    "blip": _CROSS_ATTENTION,
    "chameleon": Facts(
        small={
            **_under("vq_config", _VQ),
            "image_token_id": 158,
            "vocabulary_map": {"<image>": 158, **{f"IMGIMG{_letters(code)}Z": 100 + code for code in range(16)}},
        }
    ),
    "cohere_compass": Facts(
        small={
            "text_config.layer_types": ["sliding_attention", "full_attention"],
            "text_config.rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
                "full_attention": None,
            },
        }
    ),
    "deepseek_ocr2": replace(
        _TILES,
        small={
            **_under("vision_config.sam_config", _SAM),
            "vision_config.sam_config.downsample_channels": [24, 64],
            "text_config.num_experts_per_tok": 2,
            "text_config.mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "diffusion_gemma": Facts(
        refused="it predicts blocks by diffusion and has no causal language model loss",
        small={
            "text_config.num_experts": 4,
            "text_config.top_k_experts": 2,
            "text_config.moe_intermediate_size": 32,
        },
    ),
    "dots3_note": Facts(
        small={
            # some layers have half as many
            "text_config.num_attention_heads": 8,
            "text_config.num_key_value_heads": 8,
            "text_config.per_layer_config.02.num_attention_heads": 4,
            "text_config.per_layer_config.02.num_key_value_heads": 4,
            "text_config.head_dim": 64,
            "text_config.qk_nope_head_dim": 32,
            "text_config.per_layer_config.02.qk_nope_head_dim": 48,
        }
    ),
    "emu3": Facts(
        small={
            **_under("vq_config", _VQ),
            "vq_config.hidden_size": 64,
            "vq_config.num_attention_heads": 1,
            "image_token_id": 158,
            "vocabulary_map": {
                "<image>": 158,
                "<|extra_200|>": 157,
                **{f"<|visual token {code:06}|>": 100 + code for code in range(16)},
            },
        }
    ),
    "ernie4_5_vl_moe": Facts(small={"text_config.rope_parameters.mrope_section": [3, 3, 2]}),
    "evolla": _CROSS_ATTENTION,
    "florence2": _ENCODER_DECODER,
    "gemma3": Facts(small={"mm_tokens_per_image": 4}),
    "gemma3n_text": Facts(sequence_dim=2),
    "gemma4": Facts(
        small={
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 8,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            }
        }
    ),
    "gemma4_unified": Facts(
        small={
            "vision_config": {
                "model_type": "gemma4_unified_vision",
                "patch_size": 8,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 48,
                "mm_posemb_size": 64,
                "output_proj_dims": 48,
            }
        }
    ),
    "git": Facts(refused="its images stand in front of the text as rows of their own, without placeholder tokens"),
    "glm46v": _GLM_MROPE,
    "glm4v": _GLM_MROPE,
    "glm4v_moe": replace(_GLM, small={"text_config.rope_parameters.mrope_section": [1, 1, 2]}),
    "glm5_next": _GLM,
    "glm_ocr": _GLM_MROPE,
    "glmga": _GLM_MROPE,
    "granite4_vision": Facts(
        refused="it hands features of its images to layers of the decoder in a form of its own",
        small={
            "downsample_rate": "2/4",
            "deepstack_layer_map": [[-2, 0]],
            "spatial_target_layers": [0, 1, 1, 1],
            "vision_config.hidden_size": 128,
            "qformer_config.encoder_hidden_size": 128,
            "qformer_config.hidden_size": 128,
            "text_config.num_hidden_layers": 2,
        },
    ),
    "granite_docling": _NESTED,
    "hunyuan_vl": Facts(
        small={
            "text_config.rope_parameters.mrope_section": [2, 2, 2, 2],
            "text_config.head_dim": 16,
            "vision_config.max_image_size": 64,
            "vision_config.img_max_token_num": 64,
            "vision_config.min_image_size": 16,
        }
    ),
    "hy_v4_vl": Facts(small={"text_config.head_dim": 16, "vision_config.max_image_size": 64}),
    "idefics": _CROSS_ATTENTION,
    "idefics2": _NESTED,
    "idefics3": _NESTED,
    "inkling2": _EARLIER_BLOCKS,
    "inkling2_loop": _EARLIER_BLOCKS,
    "inkling_mm_model": Facts(
        refused="its convolutions do not get the keyword arguments that tell how a sequence is divided"
    ),
    "janus": Facts(
        small={"vision_config.projection_dim": 64, **_under("vq_config", _VQ), "vq_config.projection_dim": 64}
    ),
    "kosmos-2.5": Facts(small={"vision_config.patch_embed_hidden_size": 192}),
    "lfm2_vl": Facts(small={"text_config.layer_types": ["conv", "full_attention"], "text_config.full_attn_idxs": [1]}),
    "lighton_ocr": Facts(small={"vision_config.hidden_size": 32}),
    "llama4": Facts(
        small={
            "vision_config.vision_output_dim": 64,
            "vision_config.projector_input_dim": 64,
            "vision_config.projector_output_dim": 64,
            "vision_config.intermediate_size": 128,
            "text_config.moe_layers": [1],
        }
    ),
    "llama4_text": Facts(gathered_attention=True),
    "minicpm_ocr": _STRIP,
    "minicpmv4_6": _STRIP,
    "minicpmv4_7": _STRIP,
    "minimax_m3_vl": Facts(small={"text_config.layer_types": ["full_attention", "minimax_m3_sparse"]}),
    "mistral4": Facts(small={"head_dim": 32}),
    "mllama": _CROSS_ATTENTION,
    "molmo2": Facts(
        refused="features of all its images are pooled together by indices over the whole batch",
        small={
            "vision_config.num_position_embeddings": 16,
            "text_config.rope_scaling_layers": [0],
            "text_config.rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "muse_glimmer": Facts(small=_MUSE),
    "muse_spark": Facts(
        small={
            **_MUSE,
            "audio_config.patch_sizes": [4, 2],
            "audio_config.hidden_sizes": [16, 32],
            "audio_config.depths": [1, 1],
        }
    ),
    "nemotron_h_omni": replace(
        _GLM,
        small={
            "vision_config.patch_dim": 192,
            "vision_config.video_patch_dim": 384,
            "vision_hidden_size": 32,
            "text_config.mamba_num_heads": 4,
            "text_config.mamba_head_dim": 8,
            "text_config.n_groups": 2,
            "text_config.ssm_state_size": 8,
        },
    ),
    "ovis2": Facts(
        small={"hidden_size": 64, "vocab_size": 160, "visual_indicator_token_ids": [150, 151, 152, 153, 154]}
    ),
    "paddleocr_vl": Facts(small=_MROPE),
    "paligemma": Facts(small={"vision_config.projection_dim": 64, "projection_dim": 64}),
    "pi0": Facts(refused="it predicts actions by flow matching and has no language model loss"),
    "pix2struct": _ENCODER_DECODER,
    "pp_formulanet": _ENCODER_DECODER,
    "qwen2_5_omni_thinker": Facts(small={**_MROPE, "vision_start_token_id": 120}),
    "qwen2_5_vl": replace(_PACKED, tower_mlp_matrices=3, small=_MROPE),
    "qwen2_vl": replace(_PACKED, small={"vision_config.hidden_size": 64, "vision_config.embed_dim": 32, **_MROPE}),
    "qwen3_5": _PACKED,
    "qwen3_5_moe": _PACKED,
    "qwen3_omni_moe_thinker": Facts(small={"vision_start_token_id": 120}),
    "qwen3_vl": _PACKED,
    "qwen3_vl_moe": _PACKED,
    "qwen4_exp": Facts(
        small={
            "text_config.indexer_n_heads": 2,
            "text_config.indexer_kv_heads": 1,
            "text_config.indexer_head_dim": 16,
            "text_config.indexer_budget": 8,
            "text_config.indexer_compress_ratio": 2,
        }
    ),
    "qwen4_exp_text": Facts(gathered_attention=True),
    "shieldgemma2": Facts(small={"mm_tokens_per_image": 4}),
    "smolvlm": _NESTED,
    "step3p7": replace(
        _TILES,
        small={
            "text_config.sliding_window": 8,
            "text_config.layer_types": ["sliding_attention", "full_attention"],
            "text_config.rope_parameters.sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "t5gemma2": replace(_ENCODER_DECODER, small={"encoder.mm_tokens_per_image": 4}),
    "udop": _ENCODER_DECODER,
    "unlimited_ocr": replace(
        _TILES,
        small={**_under("vision_config.sam_config", _SAM), "vision_config.encoder_config.hidden_size": 32},
    ),
    "vision-encoder-decoder": _ENCODER_DECODER,
}
"""The records, by the `model_type` of a config. `docs/adding_a_model.rst` says when a model type needs one."""


def facts_of(config: Any) -> Facts:
    """The record of a config's model type; where there is none, that of a type for which the conventions hold."""
    return FAMILIES.get(config.model_type, Facts())
