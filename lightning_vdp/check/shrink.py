"""Making a model's config small while keeping what makes the model different. Pure: mappings in and out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["TEXT_HIDDEN", "VOCABULARY", "shrink"]

VOCABULARY = 160
TEXT_HIDDEN, VISION_HIDDEN = 64, 32
_TEXT_HEADS, _VISION_HEADS = 4, 2

# width-like fields: equal values stay equal, wherever they stand, since modules are joined by them
_WIDTHS = frozenset(
    [
        "hidden_size",
        "embed_dim",
        "d_model",
        "n_embd",
        "out_hidden_size",
        "projector_hidden_size",
        "text_hidden_size",
        "encoder_hidden_size",
        "projection_dim",
        "vision_hidden_size",
        "projection_hidden_size",
        "adapter_in_dim",
        "adapter_out_dim",
        "projector_input_dim",
        "projector_output_dim",
        "vision_output_dim",
        "word_embed_proj_dim",
        "image_text_hidden_size",
        "patch_embed_hidden_size",
        "output_dim",
        "codebook_dim",
        "adapter_input_size",
    ]
)
_INNER = frozenset(
    [
        "intermediate_size",
        "ffn_dim",
        "mlp_dim",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "intermediate_size_mlp",
        "dense_intermediate_size",
        "shared_intermediate_size",
        "alignment_intermediate_size",
        "projection_intermediate_size",
        "projection_hidden_dim",
        "share_expert_dim",
        "moe_shared_expert_intermediate_size",
        "shared_experts_intermediate_size",
        "moe_hidden_size",
        "d_ff",
        "decoder_intermediate_size",
        "ple_embed_dim",
    ]
)
# widths that features must have to be merged into embeddings
_JOINED = frozenset(["out_hidden_size", "text_hidden_size", "image_text_hidden_size", "adapter_out_dim"])
# fields with one good small value, whatever they were
_FIXED: Mapping[str, Any] = {
    "max_position_embeddings": 512,
    # scaling by position acts beyond it
    "original_max_position_embeddings": 8,
    "head_dim": 16,
    "global_head_dim": 16,
    "d_kv": 16,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "rel_extent": 12,
    "latent_query_num": 4,
    "resampler_n_latents": 4,
    "resampler_n_heads": 4,
    "resampler_head_dim": 16,
    "max_img_size": 64,
    "downsample_hidden_size": 8,
    "output_channels": 16,
    "hc_lowrank": 8,
    "mel_vocab_size": 16,
    "num_filters": 4,
    "chunk_size": 8,
    "attention_chunk_size": 8,
    "floor_scale": 8,
    "log_scaling_n_floor": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "index_kpool": 4,
    "num_query_tokens": 4,
    "num_mel_bins": 8,
    "query_pre_attn_scalar": 16,
    "projection_dim": 32,
    "num_nextn_predict_layers": 0,
}
_EXPERTS = frozenset(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"])
# lists with a value for each layer
_PER_LAYER = frozenset(
    [
        "layer_types",
        "mlp_layer_types",
        "no_rope_layers",
        "indexer_types",
        "layer_rope_theta",
        "activation_sparsity_pattern",
        "layers_block_type",
        "mtp_layers_block_type",
    ]
)
# lists of those layers that have something
_LAYER_INDEXES = frozenset(["mlp_only_layers", "moe_layers", "full_attn_idxs", "rope_scaling_layers"])
# chance would differ between runs
_RANDOM = ("dropout", "dropout_prob", "layerdrop", "drop_path_rate", "jitter_noise", "dropout_rate", "_drop")
_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "n_layers", "layers", "encoder_layers", "decoder_layers")


def _text(config: Mapping[str, Any]) -> bool:
    return "vocab_size" in config and not {"num_hidden_layers", "layers", "layers_block_type"}.isdisjoint(config)


def _chosen_layers(config: Mapping[str, Any], depth: int) -> list[int]:
    """Layers that show each kind there is, at least two and at most four."""
    lists = [config[name] for name in sorted(_PER_LAYER & config.keys()) if isinstance(config[name], Sequence)]
    shared = config.get("num_kv_shared_layers") or 0
    sources = config.get("kv_source_layers") or range(depth)
    kinds: dict[tuple[Any, ...], int] = {}
    for layer in range(depth):
        kind: tuple[Any, ...] = tuple(values[layer] for values in lists if len(values) == depth)
        # the last layers may take keys and values from earlier ones of their kind, so that both must be there
        kind += (layer >= depth - shared, sources[layer] == layer)
        kinds.setdefault(kind, layer)
    chosen = sorted(kinds.values())[:4]
    for layer in range(depth):
        if len(chosen) >= min(2, depth):
            break
        if layer not in chosen:
            chosen.append(layer)
    return sorted(chosen)


class _Widths:
    """Small widths for large ones: equal values stay equal."""

    def __init__(self, text: int | None, vision: int | None) -> None:
        self.known = {}
        if vision is not None:
            self.known[vision] = VISION_HIDDEN
        if text is not None:
            self.known[text] = TEXT_HIDDEN

    def __call__(self, width: int) -> int:
        if width in self.known:
            return self.known[width]
        for known, small in list(self.known.items()):
            if width % known == 0 and width // known in (2, 4, 9, 16):
                return small * (width // known)
            if known % width == 0 and known // width in (2, 4):
                return small // (known // width)
        return self.known.setdefault(width, 48)


def shrink(config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns a small version of a config.

    Layers, widths, vocabulary, experts and images become few and small; what acts only beyond some length (windows,
    temperature floors, sparse attention) shrinks along, so that it acts on short sequences.

    Args:
        config: As `to_dict` of a config returns it, sub-configs within.
        overrides: Fields that get these values instead, by their path ("vision_config.depth").
    """
    text = config.get("text_config") or config
    vision = config.get("vision_config") or {}
    hidden = text.get("hidden_size") or text.get("d_model")
    vision_hidden = vision.get("hidden_size") or vision.get("embed_dim")
    if vision_hidden == hidden:
        vision_hidden = None
    widths = _Widths(hidden, vision_hidden if isinstance(vision_hidden, int) else None)
    tokens: dict[Any, int] = {}
    result = _shrink(config, widths, tokens, _text(config))
    for path, value in (overrides or {}).items():
        *parents, name = path.split(".")
        target = result
        for parent in parents:
            target = target.setdefault(parent, {})
        target[name] = value
    return result


def _token(value: int, tokens: dict[Any, int]) -> int:
    if value < 3:
        return value
    return VOCABULARY - 1 - tokens.setdefault(value, len(tokens))


def _shrink(
    config: Mapping[str, Any], widths: Callable[[int], int], tokens: dict[Any, int], text: bool
) -> dict[str, Any]:
    result: dict[str, Any] = dict(config)
    late: list[str] = []
    heads = next((config[n] for n in ("num_attention_heads", "num_heads", "attention_heads") if n in config), None)
    depth_name = next((name for name in _DEPTHS if isinstance(config.get(name), int)), None)
    chosen = _chosen_layers(config, config[depth_name]) if depth_name else []
    for full_name, value in config.items():
        # windowed layers have the same fields under other names
        name = full_name if isinstance(value, Mapping) else full_name.removeprefix("swa_")
        if isinstance(value, Mapping):
            if "model_type" in value:
                result[name] = _shrink(value, widths, tokens, "vision" not in name and _text(value))
            elif name == "rope_parameters":
                result[name] = _shrink_rope(value)
            elif name == "per_layer_config":
                late.append(name)
        elif value is None and name in ("image_token_id", "video_token_id", "image_token_index", "video_token_index"):
            # left to the tokenizer
            result[full_name] = VOCABULARY - 1 - tokens.setdefault(name, len(tokens))
        elif name == "output_router_logits":
            # the loss that balances experts is not linear in tokens
            result[full_name] = value or bool(config.get("router_aux_loss_coef"))
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, (int, float)) and name.endswith(_RANDOM):
            result[full_name] = type(value)(0)
        elif name in _PER_LAYER and isinstance(value, Sequence) and len(value) == config.get(depth_name or ""):
            result[full_name] = [value[layer] for layer in chosen]
        elif isinstance(value, int) and (name.endswith(("_token_id", "_token_index")) or name == "image_patch_id"):
            result[full_name] = _token(value, tokens)
        elif name in ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input", "output_vocab_size"):
            result[full_name] = VOCABULARY
        elif name in _FIXED and value and not isinstance(value, Sequence):
            result[full_name] = _FIXED[name]
        elif name == "qk_head_dim":
            # the sum of two others
            del result[full_name]
        elif name in _EXPERTS:
            result[full_name] = 4
        elif name in ("num_attention_heads", "num_heads", "attention_heads", "encoder_attention_heads") and isinstance(
            value, int
        ):
            result[full_name] = _TEXT_HEADS if text else _VISION_HEADS
        elif name == "num_key_value_heads" and isinstance(heads, int) and isinstance(value, int):
            # windowed layers may have their own ratio
            heads = config.get(f"{full_name.removesuffix(name)}num_attention_heads", heads)
            full = _TEXT_HEADS if text else _VISION_HEADS
            result[full_name] = full if value == heads else 1 if value == 1 else full // 2
        elif name in _DEPTHS:
            result[full_name] = len(chosen) if name == depth_name else 2
        elif name in _INNER:
            each = isinstance(value, Sequence) and len(value) == config.get(depth_name or "")
            result[full_name] = 48 if isinstance(value, int) else [48 for _ in (chosen if each else value)]
        elif name in _JOINED and isinstance(value, int):
            result[full_name] = TEXT_HIDDEN
        elif name in _WIDTHS and isinstance(value, int):
            result[full_name] = widths(value)
        elif name == "image_size":
            result[full_name] = [32, 32] if isinstance(value, Sequence) else 32
        elif name == "patch_size":
            result[full_name] = 8 if isinstance(value, int) else [8, 8] if len(value) == 2 else value
        elif name == "first_k_dense_replace":
            result[full_name] = min(value, 1)
        elif name in ("deepstack_visual_indexes", "fullatt_block_indexes", "global_attn_indexes"):
            result[full_name] = [0, 1][: len(value)] if name.startswith("deepstack") else [1]
        elif name == "window_size":
            result[full_name] = 4 * 8
        elif name == "num_position_embeddings":
            result[full_name] = 64
        elif name == "vision_feature_layer":
            result[full_name] = value if isinstance(value, int) else [-1, -2][: len(value)]
        elif name == "image_grid_pinpoints":
            unit = min(min(sides) for sides in value)
            small = [[side * 32 // unit for side in sides] for sides in value]
            result[full_name] = [sides for sides in small if max(sides) <= 64]
        elif name in _LAYER_INDEXES:
            result[full_name] = [chosen.index(layer) for layer in value if layer in chosen]
        elif name == "kv_source_layers":
            result[full_name] = [
                chosen.index(value[layer]) if value[layer] in chosen else place for place, layer in enumerate(chosen)
            ]
        elif name == "num_kv_shared_layers" and depth_name:
            result[full_name] = sum(layer >= config[depth_name] - value for layer in chosen)
    for name in late:
        result[name] = _layer_configs(config, result, config[name], chosen)
    return result


def _layer_configs(
    config: Mapping[str, Any], small: Mapping[str, Any], layers: Mapping[str, Mapping[str, Any]], chosen: list[int]
) -> dict[str, dict[str, Any]]:
    """What single layers have otherwise, in the ratio that it had to the other layers' value."""
    result = {}
    for place, layer in enumerate(chosen):
        fields = next((value for key, value in layers.items() if int(key) == layer), None)
        if fields is not None:
            result[f"{place:02d}"] = {
                name: max(2, value * small[name] // config[name])
                if isinstance(value, int) and config.get(name)
                else value
                for name, value in fields.items()
            }
    return result


def _shrink_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(rope)
    for name, value in rope.items():
        if isinstance(value, Mapping):
            result[name] = _shrink_rope(value)
        elif name == "mrope_section":
            # half the head width in all
            result[name] = {3: [2, 3, 3], 4: [2, 2, 2, 2]}.get(len(value), value)
        elif name in ("original_max_position_embeddings", "max_position_embeddings"):
            result[name] = _FIXED[name]
    return result
