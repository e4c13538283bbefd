"""What is peculiar to a model type when its config is made small: data, by model type."""

from collections.abc import Mapping
from typing import Any

__all__ = ["OVERRIDES"]

_MROPE = {"text_config.rope_parameters.mrope_section": [2, 3, 3]}
_LAST_TOKEN = 159
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
_GEMMA4_VISION = {
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
_MINICPM = {"vision_config.insert_layer_id": 0, "insert_layer_id": 0}
_HYBRID = {"text_config.layer_types": ["linear_attention", "full_attention"], "text_config.num_hidden_layers": 2}


def _under(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{path}.{name}": value for name, value in fields.items()}


def _letters(number: int) -> str:
    return "".join(chr(ord("A") + int(digit)) for digit in str(number))


OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "apertus1p5": {
        **_under("vision_config", _VQ),
        "image_token_offset": 100,
        "audio_token_offset": 116,
        "audio_config.codebook_size": 4,
    },
    "aria": {"projector_patch_to_query_dict": {16: 4, 8: 2}, "max_value_projector_patch_to_query_dict": 4},
    "chameleon": {
        **_under("vq_config", _VQ),
        "image_token_id": 158,
        "vocabulary_map": {"<image>": 158, **{f"IMGIMG{_letters(code)}Z": 100 + code for code in range(16)}},
    },
    "cohere_compass": {
        "text_config.layer_types": ["sliding_attention", "full_attention"],
        "text_config.rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "full_attention": None,
        },
    },
    "deepseek_ocr2": {
        **_under("vision_config.sam_config", _SAM),
        "vision_config.sam_config.downsample_channels": [24, 64],
        "text_config.num_experts_per_tok": 2,
        "text_config.mlp_layer_types": ["dense", "sparse"],
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 32,
    },
    "dots3_note": {
        # some layers have half as many
        "text_config.num_attention_heads": 8,
        "text_config.num_key_value_heads": 8,
        "text_config.per_layer_config.02.num_attention_heads": 4,
        "text_config.per_layer_config.02.num_key_value_heads": 4,
        "text_config.head_dim": 64,
        "text_config.qk_nope_head_dim": 32,
        "text_config.per_layer_config.02.qk_nope_head_dim": 48,
    },
    "emu3": {
        **_under("vq_config", _VQ),
        "vq_config.hidden_size": 64,
        "vq_config.num_attention_heads": 1,
        "image_token_id": 158,
        "vocabulary_map": {
            "<image>": 158,
            "<|extra_200|>": 157,
            **{f"<|visual token {code:06}|>": 100 + code for code in range(16)},
        },
    },
    "ernie4_5_vl_moe": {"text_config.rope_parameters.mrope_section": [3, 3, 2]},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {"vision_config": _GEMMA4_VISION},
    "gemma4_unified": {
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": 8,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 48,
            "mm_posemb_size": 64,
            "output_proj_dims": 48,
        }
    },
    "glm46v": _MROPE,
    "glm4v": _MROPE,
    "glm4v_moe": {"text_config.rope_parameters.mrope_section": [1, 1, 2]},
    "glm_ocr": _MROPE,
    "glmga": _MROPE,
    "granite4_vision": {
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [0, 1, 1, 1],
        "vision_config.hidden_size": 128,
        "qformer_config.encoder_hidden_size": 128,
        "qformer_config.hidden_size": 128,
        "text_config.num_hidden_layers": 2,
    },
    "hunyuan_vl": {
        "text_config.rope_parameters.mrope_section": [2, 2, 2, 2],
        "text_config.head_dim": 16,
        "vision_config.max_image_size": 64,
        "vision_config.img_max_token_num": 64,
        "vision_config.min_image_size": 16,
    },
    "hy_v4_vl": {"text_config.head_dim": 16, "vision_config.max_image_size": 64},
    "janus": {"vision_config.projection_dim": 64, **_under("vq_config", _VQ), "vq_config.projection_dim": 64},
    "kosmos-2.5": {"vision_config.patch_embed_hidden_size": 192},
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM,
    "lfm2_vl": {"text_config.layer_types": ["conv", "full_attention"], "text_config.full_attn_idxs": [1]},
    "llama4": {
        "vision_config.vision_output_dim": 64,
        "vision_config.projector_input_dim": 64,
        "vision_config.projector_output_dim": 64,
        "vision_config.intermediate_size": 128,
        "text_config.moe_layers": [1],
    },
    "lighton_ocr": {"vision_config.hidden_size": 32},
    "mistral4": {"head_dim": 32},
    "minimax_m3_vl": {"text_config.layer_types": ["full_attention", "minimax_m3_sparse"]},
    "molmo2": {
        "vision_config.num_position_embeddings": 16,
        "text_config.rope_scaling_layers": [0],
        "text_config.rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
    "muse_glimmer": _MUSE,
    "muse_spark": {
        **_MUSE,
        "audio_config.patch_sizes": [4, 2],
        "audio_config.hidden_sizes": [16, 32],
        "audio_config.depths": [1, 1],
    },
    "nemotron_h_omni": {
        "vision_config.patch_dim": 192,
        "vision_config.video_patch_dim": 384,
        "vision_hidden_size": 32,
        "text_config.mamba_num_heads": 4,
        "text_config.mamba_head_dim": 8,
        "text_config.n_groups": 2,
        "text_config.ssm_state_size": 8,
    },
    "ovis2": {
        "hidden_size": 64,
        "vocab_size": 160,
        "visual_indicator_token_ids": [150, 151, 152, 153, 154],
    },
    "paddleocr_vl": _MROPE,
    "paligemma": {"vision_config.projection_dim": 64, "projection_dim": 64},
    "qwen2_5_omni_thinker": {**_MROPE, "vision_start_token_id": 120},
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": {"vision_config.hidden_size": 64, "vision_config.embed_dim": 32, **_MROPE},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 120},
    "qwen4_exp": {
        "text_config.indexer_n_heads": 2,
        "text_config.indexer_kv_heads": 1,
        "text_config.indexer_head_dim": 16,
        "text_config.indexer_budget": 8,
        "text_config.indexer_compress_ratio": 2,
    },
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "step3p7": {
        "text_config.sliding_window": 8,
        "text_config.layer_types": ["sliding_attention", "full_attention"],
        "text_config.rope_parameters.sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "t5gemma2": {"encoder.mm_tokens_per_image": 4},
    "unlimited_ocr": {**_under("vision_config.sam_config", _SAM), "vision_config.encoder_config.hidden_size": 32},
}
"""By model type: fields of the small config, by their path, which no rule finds."""
