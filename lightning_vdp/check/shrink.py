"""Making a model's config small while keeping what makes the model different. Pure: mappings in and out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

__all__ = ["TEXT_HIDDEN", "VOCABULARY", "shrink"]

VOCABULARY = 160
TEXT_HIDDEN, VISION_HIDDEN = 64, 32
_TEXT_HEADS, _VISION_HEADS = 4, 2

# width-like fields: equal values stay equal, wherever they stand, since modules are joined by them
_WIDTHS = (
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
)
_INNER = (
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
)
# widths that features must have to be merged into embeddings
_JOINED = ("out_hidden_size", "text_hidden_size", "image_text_hidden_size", "adapter_out_dim")
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
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_VOCABULARIES = ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input", "output_vocab_size")
# lists of those layers that have something
_LAYER_INDEXES = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "rope_scaling_layers")
# lists with a value for each layer
_PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "no_rope_layers",
    "indexer_types",
    "layer_rope_theta",
    "activation_sparsity_pattern",
    "layers_block_type",
    "mtp_layers_block_type",
)
# chance would differ between runs
_RANDOM = ("dropout", "dropout_prob", "layerdrop", "drop_path_rate", "jitter_noise", "dropout_rate", "_drop")
_TOKENS = ("_token_id", "_token_index", "image_patch_id")
# tokens that a config may leave to the tokenizer
_LEFT_TO_TOKENIZER = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "n_layers", "layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "num_heads", "attention_heads", "encoder_attention_heads")


def _chosen_layers(config: Mapping[str, Any], depth: int) -> list[int]:
    """Layers that show each kind there is, at least two and at most four."""
    lists = [config[name] for name in sorted({*_PER_LAYER} & config.keys()) if isinstance(config[name], Sequence)]
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


@dataclass(frozen=True)
class _Part:
    """A config, or one inside another, as rules see it.

    Args:
        fields: The config's fields, as they were.
        text: Whether it is the config of the language model.
        widths: Gives small widths for large ones, for all parts together.
        tokens: Numbers of the tokens seen so far, in all parts together.
    """

    fields: Mapping[str, Any]
    text: bool
    widths: _Widths
    tokens: dict[Any, int]

    @cached_property
    def depth_name(self) -> str | None:
        """The field with the number of layers."""
        return next((name for name in _DEPTHS if isinstance(self.fields.get(name), int)), None)

    @property
    def depth(self) -> int | None:
        """The number of layers."""
        return None if self.depth_name is None else self.fields[self.depth_name]

    @cached_property
    def chosen(self) -> list[int]:
        """The layers that stay."""
        return [] if self.depth is None else _chosen_layers(self.fields, self.depth)

    @property
    def heads(self) -> int:
        """The small number of attention heads."""
        return _TEXT_HEADS if self.text else _VISION_HEADS

    def token(self, key: Any) -> int:
        """The small id of a token, another one for each."""
        return VOCABULARY - 1 - self.tokens.setdefault(key, len(self.tokens))


def _is_text(config: Mapping[str, Any]) -> bool:
    return "vocab_size" in config and not {"num_hidden_layers", "layers", "layers_block_type"}.isdisjoint(config)


# what a field becomes, from the part, the field's name and its value
_Rule = Callable[[_Part, str, Any], Any]


def _always(small: Any) -> _Rule:
    return lambda part, name, value: small


def _unless_off(small: Any) -> _Rule:
    return lambda part, name, value: small if value and not isinstance(value, Sequence) else value


def _where_whole(rule: Callable[[_Part, int], int]) -> _Rule:
    return lambda part, name, value: rule(part, value) if isinstance(value, int) else value


def _values_of_chosen(part: _Part, name: str, value: Any) -> Any:
    matches = isinstance(value, Sequence) and len(value) == part.depth
    return [value[layer] for layer in part.chosen] if matches else value


def _places_of_chosen(part: _Part, name: str, value: Any) -> Any:
    return [part.chosen.index(layer) for layer in value if layer in part.chosen]


def _sources_of_chosen(part: _Part, name: str, value: Any) -> Any:
    chosen = part.chosen
    return [chosen.index(value[layer]) if value[layer] in chosen else place for place, layer in enumerate(chosen)]


def _sharing_of_chosen(part: _Part, name: str, value: Any) -> Any:
    return value if part.depth is None else sum(layer >= part.depth - value for layer in part.chosen)


def _depth(part: _Part, name: str, value: Any) -> Any:
    return len(part.chosen) if name == part.depth_name else 2


def _key_value_heads(part: _Part, name: str, value: Any) -> Any:
    """The ratio to query heads stays, as far as it is none, some, or one for all."""
    heads = next((part.fields[field] for field in _HEADS[:3] if field in part.fields), None)
    if not isinstance(heads, int) or not isinstance(value, int):
        return value
    # windowed layers may have their own ratio
    heads = part.fields.get(f"{name.removesuffix('num_key_value_heads')}num_attention_heads", heads)
    return part.heads if value == heads else 1 if value == 1 else part.heads // 2


def _inner(part: _Part, name: str, value: Any) -> Any:
    if isinstance(value, int):
        return 48
    return [48 for _ in (part.chosen if len(value) == part.depth else value)]


def _balanced(part: _Part, value: Any) -> Any:
    # the loss that balances experts is not linear in tokens
    return value or bool(part.fields.get("router_aux_loss_coef"))


def _patch(part: _Part, name: str, value: Any) -> Any:
    return 8 if isinstance(value, int) else [8, 8] if len(value) == 2 else value


def _pinpoints(part: _Part, name: str, value: Any) -> Any:
    unit = min(min(sides) for sides in value)
    small = [[side * 32 // unit for side in sides] for sides in value]
    return [sides for sides in small if max(sides) <= 64]


# by the name of a field; what stands in several lists follows the last
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_WIDTHS, _where_whole(lambda part, value: part.widths(value))),
    **dict.fromkeys(_JOINED, _where_whole(lambda part, value: TEXT_HIDDEN)),
    **dict.fromkeys(_INNER, _inner),
    **dict.fromkeys(_DEPTHS, _depth),
    **dict.fromkeys(_HEADS, _where_whole(lambda part, value: part.heads)),
    **dict.fromkeys(_EXPERTS, _always(4)),
    **{name: _unless_off(small) for name, small in _FIXED.items()},
    **dict.fromkeys(_VOCABULARIES, _always(VOCABULARY)),
    **dict.fromkeys(_PER_LAYER, _values_of_chosen),
    **dict.fromkeys(_LAYER_INDEXES, _places_of_chosen),
    "num_key_value_heads": _key_value_heads,
    "kv_source_layers": _sources_of_chosen,
    "num_kv_shared_layers": _sharing_of_chosen,
    "first_k_dense_replace": lambda part, name, value: min(value, 1),
    "deepstack_visual_indexes": lambda part, name, value: [0, 1][: len(value)],
    "fullatt_block_indexes": lambda part, name, value: [1],
    "global_attn_indexes": lambda part, name, value: [1],
    "vision_feature_layer": lambda part, name, value: value if isinstance(value, int) else [-1, -2][: len(value)],
    "image_size": lambda part, name, value: [32, 32] if isinstance(value, Sequence) else 32,
    "patch_size": _patch,
    "window_size": _always(4 * 8),
    "num_position_embeddings": _always(64),
    "image_grid_pinpoints": _pinpoints,
}


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
    result = _shrink(_Part(config, _is_text(config), widths, {}))
    for path, value in (overrides or {}).items():
        *parents, name = path.split(".")
        target = result
        for parent in parents:
            target = target.setdefault(parent, {})
        target[name] = value
    return result


def _shrink(part: _Part) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in part.fields.items():
        if name.removeprefix("swa_") == "qk_head_dim" and value is not None:
            # the sum of two others
            continue
        result[name] = (
            _shrink_mapping(part, name, value) if isinstance(value, Mapping) else _shrink_value(part, name, value)
        )
    if isinstance(layers := part.fields.get("per_layer_config"), Mapping):
        result["per_layer_config"] = _layer_configs(part, result, layers)
    return result


def _shrink_mapping(part: _Part, name: str, value: Mapping[str, Any]) -> Any:
    if "model_type" in value:
        return _shrink(replace(part, fields=value, text="vision" not in name and _is_text(value)))
    return _shrink_rope(value) if name == "rope_parameters" else value


def _shrink_value(part: _Part, name: str, value: Any) -> Any:
    # windowed layers have the same fields under other names
    plain = name.removeprefix("swa_")
    if value is None and plain in _LEFT_TO_TOKENIZER:
        return part.token(plain)
    if plain == "output_router_logits":
        return _balanced(part, value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and plain.endswith(_RANDOM):
        return type(value)(0)
    if isinstance(value, int) and plain.endswith(_TOKENS):
        return value if value < 3 else part.token(value)
    rule = _RULES.get(plain)
    return value if rule is None else rule(part, name, value)


def _layer_configs(
    part: _Part, small: Mapping[str, Any], layers: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What single layers have otherwise, in the ratio that it had to the other layers' value."""
    result = {}
    for place, layer in enumerate(part.chosen):
        fields = next((value for key, value in layers.items() if int(key) == layer), None)
        if fields is not None:
            result[f"{place:02d}"] = {
                name: max(2, value * small[name] // part.fields[name])
                if isinstance(value, int) and part.fields.get(name)
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
