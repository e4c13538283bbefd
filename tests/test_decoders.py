"""Decoders of many kinds: language models alone, with sinks, soft caps, windows and experts."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from lightning_vdp.families.find import find_models
from lightning_vdp.forward.divide import divide_models
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.settings import Settings
from lightning_vdp.shards import gather_sequence
from lightning_vdp.testing import ParityModule, assert_parity, run_ranks
from lightning_vdp.testing.models import add_noise

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DELTA_RULE: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "shared_expert_intermediate_size": 32,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "mlp_layer_types": ["dense", "sparse"],
}
STATE_SPACE: dict[str, Any] = {
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "sdpa", {}),
    "qwen2": ("Qwen2", "eager", {}),
    "qwen3": ("Qwen3", "sdpa", {}),
    "mistral, sliding windows": ("Mistral", "sdpa", {"sliding_window": 5}),
    "gemma2, soft caps and windows in every other layer": ("Gemma2", "eager", {"sliding_window": 5}),
    "gemma3, two rotary tables": ("Gemma3Text", "sdpa", {"sliding_window": 5, "query_pre_attn_scalar": 16}),
    "gpt_oss, sinks and experts": ("GptOss", "eager", {**EXPERTS, "sliding_window": 5}),
    "qwen3_moe": ("Qwen3Moe", "sdpa", EXPERTS),
    "mixtral": ("Mixtral", "sdpa", EXPERTS),
    "qwen3_next, delta rule": ("Qwen3Next", "sdpa", {**EXPERTS, **DELTA_RULE}),
    "olmo_hybrid, delta rule": ("OlmoHybrid", "sdpa", {**DELTA_RULE, "linear_num_key_heads": 4}),
    "kimi_linear, delta rule with gates by channel": ("KimiLinear", "sdpa", {**EXPERTS, **DELTA_RULE, **LATENT}),
    "lfm2, short convolutions": ("Lfm2", "sdpa", {"layer_types": ["conv", "full_attention"]}),
    "mamba2": ("Bamba", "sdpa", STATE_SPACE),
}
CAUSAL_CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}


def make_language_model(name: str, checkpointing: bool = False) -> ParityModule:
    stem, attention, extra = MODELS[name]
    config = getattr(transformers, f"{stem}Config")(**{**SIZES, **extra})
    config._attn_implementation = attention
    if extra.get("num_experts"):
        config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, CAUSAL_CLASSES.get(stem, f"{stem}ForCausalLM"))(config)
    add_noise(model, 1)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return ParityModule(model.train())


def text_batch(seed: int, padding: str = "right") -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (2, 23), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    if padding == "left":
        mask = mask.flip(1)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("name", MODELS)
def test_parity_of_language_models(name: str) -> None:
    batches = [text_batch(seed, "left" if seed % 2 else "right") for seed in range(3)]
    assert_parity(partial(make_language_model, name), batches)


def test_parity_of_a_language_model_on_three_ranks_and_two_replicas() -> None:
    assert_parity(
        partial(make_language_model, "llama"),
        [text_batch(seed) for seed in range(3)],
        world_size=3,
        sequence_parallel_size=3,
    )
    assert_parity(
        partial(make_language_model, "qwen3_moe"),
        [text_batch(seed) for seed in range(4)],
        world_size=4,
        sequence_parallel_size=2,
        accumulate_grad_batches=2,
    )


@pytest.mark.parametrize("size", [3, 4])
def test_parity_of_delta_rules_checkpointed(size: int) -> None:
    # two key heads and four value heads: at three ranks, ranks read key heads unevenly
    module = partial(make_language_model, "qwen3_next, delta rule", checkpointing=True)
    assert_parity(module, [text_batch(seed) for seed in range(3)], world_size=size, sequence_parallel_size=size)


def test_parity_of_state_spaces_and_convolutions_checkpointed() -> None:
    for name in ("lfm2, short convolutions", "mamba2"):
        module = partial(make_language_model, name, checkpointing=True)
        assert_parity(module, [text_batch(seed) for seed in range(3)], world_size=3, sequence_parallel_size=3)


def _without_labels_on_the_second_replica() -> list[dict[str, Tensor]]:
    batches = [text_batch(seed) for seed in range(6)]
    for batch in batches[1::2]:
        batch["labels"] = torch.full_like(batch["labels"], -100)
    return batches


class _NothingToLearn(ParityModule):
    """In one process the mean over no labels is NaN; a loss of 0 is what it stands for."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        outputs = self.model(**batch)
        empty = bool((batch["labels"] == -100).all())
        if empty and not hasattr(outputs, "sequence_shard"):
            return outputs.logits.sum() * 0.0
        assert not empty or float(outputs.loss.detach()) == 0.0
        return outputs.loss


def _nothing_to_learn() -> ParityModule:
    return _NothingToLearn(make_language_model("llama").model)


def test_parity_of_a_replica_without_any_label() -> None:
    batches = _without_labels_on_the_second_replica()
    assert_parity(_nothing_to_learn, batches, world_size=4, sequence_parallel_size=2)


def test_parity_of_a_shard_without_any_label() -> None:
    batches = [text_batch(seed) for seed in range(3)]
    for batch in batches:
        batch["labels"][:, 8:] = -100
    assert_parity(partial(make_language_model, "qwen3"), batches, world_size=3, sequence_parallel_size=3)


class _WholeCount(ParityModule):
    """Divides by the labels of the whole optimizer step, as transformers' Trainer does."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        items = torch.tensor(37)
        loss: Tensor = self.model(**batch, num_items_in_batch=items).loss
        return loss


def _whole_count() -> ParityModule:
    return _WholeCount(make_language_model("qwen2").model)


def test_parity_of_a_count_over_accumulated_batches() -> None:
    assert_parity(_whole_count, [text_batch(seed) for seed in range(4)], accumulate_grad_batches=2)


def _router_losses() -> ParityModule:
    module = make_language_model("mixtral")
    module.model.config.output_router_logits = True
    module.model.config.router_aux_loss_coef = 0.5
    return module


@pytest.mark.parametrize("masked", [True, False])
def test_parity_of_the_auxiliary_loss(masked: bool) -> None:
    batches = [text_batch(seed) for seed in range(3)]
    if not masked:
        batches = [{name: value for name, value in batch.items() if name != "attention_mask"} for batch in batches]
    assert_parity(_router_losses, batches)


def _flex_logits(size: int, divided: bool) -> Tensor:
    dist.init_process_group("gloo")
    model = make_language_model("mistral, sliding windows").model.eval()
    model.set_attn_implementation("flex_attention")
    batch = {name: value for name, value in text_batch(0).items() if name != "labels"}
    settings = Settings(verify_first_batch=False)
    division = divide_models(find_models(model), SequenceMesh("cpu", 1, size), settings) if divided else None
    with torch.no_grad():
        outputs = model(**batch)
    if division is None:
        return outputs.logits
    division.undo()
    return gather_sequence(outputs.logits, outputs.sequence_shard)


@pytest.mark.slow
def test_flex_attention_yields_the_same() -> None:
    """Forward alone: on the CPU flex attention has no backward, and is compiled for minutes."""
    (alone,) = run_ranks(_flex_logits, 1, 1, False, timeout=400)
    counted = text_batch(0)["attention_mask"].bool()
    for divided in run_ranks(_flex_logits, 2, 2, True, timeout=400):
        torch.testing.assert_close(divided[counted], alone[counted], rtol=1e-4, atol=1e-5)
