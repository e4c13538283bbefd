from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightning_vdp.check.build import MODEL_TYPES, build_model, tiny_config
from lightning_vdp.check.inputs import make_batch, vision_base
from lightning_vdp.check.shrink import TEXT_HIDDEN, VOCABULARY, shrink
from lightning_vdp.testing import PromoteFloat32

# what would be without effect on a short input if it kept its size: field, and a value at which it has none
FIELDS: list[tuple[str, str, Any]] = [
    ("qwen2_5_vl", "vision_config.window_size", 64),
    ("gemma3", "text_config.sliding_window", 64),
    ("gemma4", "text_config.sliding_window", 64),
    ("muse_spark", "vision_config.layer_types", ["full_attention"] * 2),
    ("muse_glimmer", "text_config.layer_rope_theta", [10000.0] * 2),
    ("inkling2", "text_config.sliding_window_size", 64),
    ("inkling2", "text_config.log_scaling_n_floor", 512),
    ("mistral_large4", "text_config.index_topk", 64),
    ("mistral_large4", "text_config.rope_parameters.original_max_position_embeddings", 512),
    ("minimax_m3_vl", "text_config.index_topk_blocks", 64),
    ("qwen4_exp", "text_config.indexer_budget", 64),
    ("qwen3_vl", "vision_config.deepstack_visual_indexes", [1, 0]),
    ("qwen2_vl", "text_config.rope_parameters.mrope_section", [8, 0, 0]),
    ("lfm2_vl", "text_config.layer_types", ["full_attention"] * 2),
]
MORE_FIELDS: list[tuple[str, str, Any]] = [
    ("aya_vision", "text_config.sliding_window", 64),
    ("cohere2_vision", "text_config.sliding_window", 64),
    ("cohere_compass", "text_config.sliding_window", 64),
    ("cosmos3_edge", "text_config.rope_parameters.mrope_section", [8, 0, 0]),
    ("deepseek_ocr2", "vision_config.sam_config.window_size", 0),
    ("dots3_note", "text_config.index_topk", 64),
    ("dots3_note", "text_config.sliding_window", 64),
    ("exaone4_5", "text_config.sliding_window", 64),
    ("exaone4_5", "vision_config.window_size", 64),
    ("gemma4_unified", "text_config.sliding_window", 64),
    ("glm4v", "text_config.rope_parameters.mrope_section", [8, 0, 0]),
    ("glm5_next", "text_config.index_topk", 64),
    ("granite4_vision", "spatial_target_layers", [0, 0, 0, 0]),
    ("hunyuan_vl", "text_config.rope_parameters.mrope_section", [8, 0, 0, 0]),
    ("hy_v4_vl", "text_config.index_topk", 64),
    ("hyperclovax_vision_v2", "vision_config.window_size", 64),
    ("inkling2_loop", "text_config.log_scaling_n_floor", 512),
    ("inkling_mm_model", "text_config.sliding_window_size", 64),
    ("mistral4", "rope_parameters.original_max_position_embeddings", 512),
    ("molmo2", "text_config.rope_scaling_layers", [0, 1]),
    ("muse_glimmer", "text_config.sliding_window", 64),
    ("muse_glimmer", "vision_config.layer_types", ["full_attention"] * 2),
    ("muse_spark", "text_config.sliding_window", 64),
    ("paddleocr_vl", "text_config.rope_parameters.mrope_section", [8, 0, 0]),
    ("qwen2_5_vl", "vision_config.fullatt_block_indexes", []),
    ("qwen3_5", "text_config.rope_parameters.mrope_section", [2, 0, 0]),
    ("step3p7", "text_config.sliding_window", 64),
    ("unlimited_ocr", "vision_config.sam_config.window_size", 0),
]


def small(model_type: str) -> Any:
    return tiny_config(CONFIG_MAPPING[model_type]())


def loss(config: Any) -> float:
    model = build_model(config)
    torch.set_default_dtype(torch.float64)
    try:
        with PromoteFloat32(), torch.no_grad():
            return float(model(**make_batch(model)).loss)
    finally:
        torch.set_default_dtype(torch.float32)


def change(config: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        config = config[parent] if isinstance(config, dict) else getattr(config, parent)
    if isinstance(config, dict):
        config[name] = value
    else:
        setattr(config, name, value)


def check_that_it_acts(model_type: str, path: str, value: Any) -> None:
    changed = small(model_type)
    change(changed, path, value)
    assert abs(loss(changed) - loss(small(model_type))) > 1e-9


@pytest.mark.parametrize(("model_type", "path", "value"), FIELDS)
def test_what_needs_length_acts_on_a_short_input(model_type: str, path: str, value: Any) -> None:
    check_that_it_acts(model_type, path, value)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "path", "value"), MORE_FIELDS)
def test_what_needs_length_acts_on_a_short_input_in_more_types(model_type: str, path: str, value: Any) -> None:
    check_that_it_acts(model_type, path, value)


def test_layers_of_each_kind_stay() -> None:
    assert small("qwen3_5").text_config.layer_types == ["linear_attention", "full_attention"]
    text = small("mistral_large4").text_config
    assert len(text.layer_types) == text.num_hidden_layers == 3
    # rope-free layers are those with 0
    assert sorted(set(text.no_rope_layers)) == [0, 1]
    assert set(text.mlp_layer_types) == {"dense", "sparse"}


def test_experts_are_balanced_by_a_loss_where_there_is_one() -> None:
    assert small("qwen3_vl_moe").text_config.output_router_logits
    assert not small("kimi_k25").text_config.output_router_logits


def test_ratios_of_heads_stay() -> None:
    for model_type, heads, key_value_heads in (("llava", 4, 4), ("gemma3", 4, 2), ("qwen2_vl", 4, 2)):
        text = small(model_type).text_config
        assert (text.num_attention_heads, text.num_key_value_heads) == (heads, key_value_heads), model_type


def test_equal_widths_stay_equal_and_tokens_stay_apart() -> None:
    config = small("qwen2_5_vl")
    assert config.text_config.hidden_size == config.vision_config.out_hidden_size == TEXT_HIDDEN
    tokens = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    assert len(set(tokens)) == 4
    assert max(tokens) < VOCABULARY


def test_widths_of_single_layers_keep_their_ratio() -> None:
    layers = CONFIG_MAPPING["gemma4"]().to_dict()["text_config"]
    result = shrink(layers)
    assert [fields["head_dim"] for fields in result["per_layer_config"].values()] == [2 * result["head_dim"]]


def test_overrides_are_paths() -> None:
    config = {"hidden_size": 4096, "vision_config": {"model_type": "x", "depth": 30}}
    result = shrink(config, {"vision_config.depth": 3, "other.field": [1]})
    assert result["vision_config"]["depth"] == 3
    assert result["other"] == {"field": [1]}


def test_no_chance_stays() -> None:
    config = CONFIG_MAPPING["emu3"]()
    assert config.text_config.attention_dropout > 0
    assert tiny_config(config).text_config.attention_dropout == 0


def test_batches_show_what_division_must_get_right() -> None:
    model = build_model(small("qwen3_vl"))
    with PromoteFloat32():
        one, two = make_batch(model), make_batch(model, rows=2)
    length = one["input_ids"].shape[1]
    assert length % 2 == 1
    assert len(one["image_grid_thw"].unique(dim=0)) == 3
    assert two["attention_mask"].sum(1).unique().numel() == 2
    assert (one["mm_token_type_ids"] == (one["input_ids"] == model.config.image_token_id)).all()


@pytest.mark.slow
def test_nearly_all_types_run_in_one_process() -> None:
    ran = []
    for model_type in MODEL_TYPES:
        try:
            ran.append(model_type) if loss(small(model_type)) > 0 else None
        except Exception:
            continue
    assert len(ran) >= 80


def test_the_innermost_method_is_found() -> None:
    model = build_model(small("llava"))
    assert vision_base(model) is model.model
    assert vision_base(torch.nn.Linear(1, 1)) is None


@pytest.mark.slow
def test_four_ranks_find_a_head_each() -> None:
    heads = {}
    for model_type in MODEL_TYPES:
        try:
            text = small(model_type).get_text_config(decoder=True)
            heads[model_type] = text.num_attention_heads
        except Exception:
            # heads differ between layers, or the class has another name for them
            continue
    assert len(heads) > 80
    # encoder-decoders, which are refused
    few = {"florence2", "pix2struct", "pp_formulanet", "udop"}
    assert {model_type for model_type, count in heads.items() if count < 4} <= few
