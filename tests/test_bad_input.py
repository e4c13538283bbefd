"""Bad input: the same clear error on every rank, in seconds, with nothing left hanging."""

import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, Qwen2_5_VLModel
from transformers import Qwen2_5_VLForConditionalGeneration as Qwen2_5_VL

from lightning_vdp import UlyssesVisionDPStrategy
from lightning_vdp.testing import Batches, ParityModule, RankFailed, quiet_trainer, run_ranks, tiny_batch, tiny_model

FAMILY = "qwen2_5_vl"
Batch = dict[str, Any]


def _qwen(**model: Any) -> nn.Module:
    return tiny_model(FAMILY, **model)


def _bert() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertModel(BertConfig(vocab_size=128, **sizes))


def _headless() -> nn.Module:
    model = tiny_model(FAMILY)
    model.model.language_model = nn.Identity()
    return model


def _own_loss() -> nn.Module:
    model = tiny_model(FAMILY)
    model.loss_function = lambda logits, labels, **_: logits.mean()
    return model


def _reentrant() -> nn.Module:
    model = tiny_model(FAMILY).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


SETUPS: dict[str, tuple[Callable[[], nn.Module], Batch, str]] = {
    "size that does not divide the world": (
        _qwen,
        {"sequence_parallel_size": 3},
        r"`sequence_parallel_size` is 3, which does not divide the 2 processes; choose one of \[1, 2\]",
    ),
    "size below 1": (_qwen, {"sequence_parallel_size": 0}, "`sequence_parallel_size` is 0, but must be 1 or more"),
    "size that is no number": (
        _qwen,
        {"sequence_parallel_size": "two"},
        "`sequence_parallel_size` is 'two', but must be a positive whole number or 'auto'",
    ),
    "replicas that do not divide the world": (
        _qwen,
        {"data_parallel_size": 3},
        "`data_parallel_size` is 3, which does not divide the 2 processes",
    ),
    "sizes that do not multiply to the world": (
        _qwen,
        {"sequence_parallel_size": 2, "data_parallel_size": 2},
        "`data_parallel_size` 2 times `sequence_parallel_size` 2 is 4, but there are 2 processes",
    ),
    "no Hugging Face model": (
        lambda: nn.Linear(2, 2),
        {"sequence_parallel_size": 2},
        "No supported model in ParityModule: .* found no Hugging Face model at all",
    ),
    "no model that can be divided": (
        _bert,
        {"sequence_parallel_size": 2},
        r"No supported model .* found .*BertModel \(model_type 'bert'\)",
    ),
    "no decoder": (_headless, {"sequence_parallel_size": 2}, "Qwen2_5_VLModel at 'model.model' has no decoder"),
    "a loss function of its own": (_own_loss, {"sequence_parallel_size": 2}, "has a loss function of its own"),
    "hybrid sharding over one rank": (
        _qwen,
        {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 1), "fsdp_version": 1},
        "Hybrid sharding over a shard size of 1",
    ),
    "a policy that wraps the model as a whole": (
        _qwen,
        {"sequence_parallel_size": 2, "auto_wrap_policy": {Qwen2_5_VL}},
        "`auto_wrap_policy` wraps Qwen2_5_VLForConditionalGeneration as a whole",
    ),
    "global weights without groups": (
        _qwen,
        {"sequence_parallel_size": 1, "loss_tokens": "global"},
        "`loss_tokens='global'` acts in sequence groups of two ranks or more",
    ),
    "reentrant checkpointing": (
        _reentrant,
        {"sequence_parallel_size": 2},
        "checkpoints activations with `use_reentrant=True`",
    ),
    "an FSDP mesh of another size": (
        _qwen,
        {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)},
        r"`device_mesh` is \(2, 2\), but must be",
    ),
}


def _set_up(make_model: Callable[[], nn.Module], arguments: Batch) -> None:
    quiet_trainer(devices=2, strategy=UlyssesVisionDPStrategy(**arguments)).fit(ParityModule(make_model()), Batches([]))


def same_failure(function: Callable[..., Any], world_size: int, *args: Any) -> str:
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(function, world_size, *args, timeout=20)
    assert time.monotonic() - started < 10
    failures = caught.value.failures
    assert sorted(failures) == list(range(world_size))
    assert len(set(failures.values())) == 1, failures
    return failures[0]


@pytest.mark.parametrize("case", SETUPS)
def test_setup_is_refused_alike_on_every_rank(case: str) -> None:
    make_model, arguments, message = SETUPS[case]
    failure = same_failure(_set_up, 2, make_model, arguments)
    assert failure.startswith("UserError: ")
    assert re.search(message, failure), failure


def _fit_four(heads: int) -> None:
    module = ParityModule(tiny_model(FAMILY, heads=4, key_value_heads=2))
    module.model.config.text_config.num_attention_heads = heads
    quiet_trainer(devices=4, strategy="ulysses_vdp_sp4").fit(module, Batches([]))


def test_size_above_the_head_count_is_refused_with_the_sizes_that_work() -> None:
    failure = same_failure(_fit_four, 4, 2)
    assert "has 2 attention heads, of which each rank needs one; sizes that work are 1 to 2" in failure


def _without(name: str) -> Callable[[Batch], None]:
    return lambda batch: batch.__delitem__(name)


def _set(name: str, change: Callable[[Tensor], Any]) -> Callable[[Batch], None]:
    return lambda batch: batch.__setitem__(name, change(batch[name]))


def _add(name: str, value: Any) -> Callable[[Batch], None]:
    return lambda batch: batch.__setitem__(name, value)


def _one_more_image_token(batch: Batch) -> None:
    batch["input_ids"][0, 0] = 120


def _part_of_an_image(batch: Batch) -> None:
    batch.update(tiny_batch(FAMILY, rows=[[(1, 4, 4)], [(1, 6, 8)]], text=9, dtype=torch.float32))
    ids = batch["input_ids"]
    ids[0, (ids[0] == 120).nonzero()[0]] = 5
    ids[1, 0] = 120


STEPS: dict[str, tuple[Callable[[Batch], None], str]] = {
    "more image tokens than features": (
        _one_more_image_token,
        "the batch has 25 image tokens, but its 3 images yield 24 features; check that truncation",
    ),
    "no grid": (_without("image_grid_thw"), "`pixel_values` came without `image_grid_thw`"),
    "fewer pixels than the grid says": (
        _set("pixel_values", lambda pixels: pixels[:-4]),
        "`pixel_values` has 92 patches, but `image_grid_thw` describes 96",
    ),
    "a grid not divisible by the merge size": (
        _set("image_grid_thw", lambda grid: torch.tensor([[1, 4, 4], [1, 3, 16], [1, 8, 4]])),
        "image 1 has a grid of 1 x 3 x 16 patches, but its height and width must be positive multiples of 2",
    ),
    "an empty image": (
        _set("image_grid_thw", lambda grid: torch.cat([grid, torch.zeros(1, 3, dtype=grid.dtype)])),
        "image 3 has a grid of 0 x 0 x 0",
    ),
    "labels of another length": (
        _set("labels", lambda labels: labels[:, :-1]),
        "`labels` has 1 rows of 49 positions, but the sequence has 1 of 50; make them equal",
    ),
    "an attention mask of another length": (
        _set("attention_mask", lambda mask: torch.nn.functional.pad(mask, (0, 1))),
        "`attention_mask` has 1 rows of 51 positions, but the sequence has 1 of 50",
    ),
    "no token types": (_without("mm_token_type_ids"), "`mm_token_type_ids` is missing"),
    "no input": (_without("input_ids"), "the forward got neither `input_ids` nor `inputs_embeds`"),
    "labels of another batch": (
        _set("labels", lambda labels: labels.repeat(2, 1)),
        "`labels` has 2 rows of 50 positions, but the sequence has 1 of 50",
    ),
    "a label beyond the vocabulary": (
        _set("labels", lambda labels: labels.clamp(min=5000)),
        "`labels` holds the id 5000, but the vocabulary has 128; use the model's own tokenizer",
    ),
    "an id beyond the vocabulary": (
        _set("input_ids", lambda ids: ids.where(ids != ids[0, 0], 128)),
        "`input_ids` holds the id 128",
    ),
    "position ids of another length": (
        _add("position_ids", torch.zeros(3, 1, 4, dtype=torch.int64)),
        "`position_ids` has shape [3, 1, 4], but the sequence has 1 rows of 50 positions",
    ),
    "position ids of a wrong rank": (
        _add("position_ids", torch.zeros(50, dtype=torch.int64)),
        "`position_ids` has shape [50]",
    ),
    "a grid of two columns": (
        _set("image_grid_thw", lambda grid: grid[:, :2]),
        "`image_grid_thw` has shape [3, 2] and dtype torch.int64, but must hold whole numbers (time, height, width)",
    ),
    "ids without a batch": (_set("input_ids", lambda ids: ids[0]), "the input cannot be read"),
    "pixels in a list": (
        _set("pixel_values", lambda pixels: pixels.tolist()),
        "`pixel_values` is a list, but must be a tensor; pass what the processor returned",
    ),
    "pixels of no image": (
        lambda batch: batch.update(
            pixel_values=torch.zeros(0, 96), image_grid_thw=torch.zeros(0, 3, dtype=torch.int64)
        ),
        "`pixel_values` is there but holds no image; leave it out of batches without images",
    ),
    "a cache": (_add("use_cache", True), "`use_cache` is not available"),
    "a tuple": (_add("return_dict", False), "`return_dict=False` leaves no place"),
    "hidden states": (_add("output_hidden_states", True), "`output_hidden_states` is not available"),
    "attentions": (_add("output_attentions", True), "`output_attentions` is not available"),
    "logits to keep": (_add("logits_to_keep", 1), "`logits_to_keep` would pick positions of each rank's shard"),
    "an image token without images": (
        lambda batch: (batch.pop("pixel_values"), batch.pop("image_grid_thw")),
        "the batch has 24 image tokens, but no `pixel_values`; pass what the processor returned",
    ),
    "a video token without videos": (
        _set("input_ids", lambda ids: ids.where(ids != ids[0, 0], 121)),
        " video tokens, but no `pixel_values_videos`",
    ),
    "a row with a part of an image": (
        _part_of_an_image,
        "row 0 of the batch has 3 image tokens, which no run of the batch's images yields (4, 12 features each)",
    ),
    "token types of text": (
        _set("mm_token_type_ids", torch.zeros_like),
        "`mm_token_type_ids` takes image tokens for text, which makes positions wrong",
    ),
    "token types of another length": (
        _set("mm_token_type_ids", lambda types: types[:, 1:]),
        "`mm_token_type_ids` has 1 rows of 49 positions",
    ),
    "shifted labels of another length": (
        lambda batch: batch.update(shift_labels=batch["labels"][:, 1:]),
        "`shift_labels` has 1 rows of 49 positions",
    ),
    "a negative id": (
        _set("input_ids", lambda ids: ids.where(ids != ids[0, 0], -100)),
        "`input_ids` holds the id -100, but ids start at 0; -100 belongs into labels alone",
    ),
    "a negative label": (
        _set("labels", lambda labels: labels.where(labels != -100, -1)),
        "`labels` holds the label -1, but must hold ids, or -100 where a position does not count",
    ),
    "labels of float": (_set("labels", Tensor.float), "`labels` has dtype torch.float32, but must be torch.int64"),
    "labels of 32 bits": (_set("labels", Tensor.int), "`labels` has dtype torch.int32, but must be torch.int64"),
    "ids of float": (_set("input_ids", Tensor.float), "`input_ids` has dtype torch.float32, but must be torch.int64"),
    "labels in a list": (_set("labels", Tensor.tolist), "`labels` is a list, but must be a tensor"),
    "labels without a batch": (_set("labels", lambda labels: labels[0]), "`labels` has shape [50], but must be [rows"),
    "ids and embeddings": (
        _add("inputs_embeds", torch.zeros(1, 50, 64)),
        "the forward got both `input_ids` and `inputs_embeds`; pass one of them",
    ),
    "embeddings of another width": (
        lambda batch: (batch.pop("input_ids"), batch.update(inputs_embeds=torch.zeros(1, 50, 32))),
        "`inputs_embeds` has shape [1, 50, 32], but must be [rows, positions, 64]",
    ),
    "pixels that nobody normalized": (
        _set("pixel_values", lambda pixels: pixels.to(torch.uint8)),
        "`pixel_values` holds whole numbers, which nobody has normalized",
    ),
    "pixels with a batch": (
        _set("pixel_values", lambda pixels: pixels[None]),
        "`pixel_values` has 1 patches, but `image_grid_thw` describes 96",
    ),
    "more pixels than the grid says": (
        _set("pixel_values", lambda pixels: torch.cat([pixels, pixels[:4]])),
        "`pixel_values` has 100 patches, but `image_grid_thw` describes 96",
    ),
    "a grid of float": (
        _set("image_grid_thw", Tensor.float),
        "`image_grid_thw` has shape [3, 3] and dtype torch.float32",
    ),
    "a negative grid": (_set("image_grid_thw", Tensor.neg), "image 0 has a grid of -1 x -4 x -4 patches"),
    "an attention mask of three dimensions": (
        _set("attention_mask", lambda mask: mask[None]),
        "`attention_mask` has shape [1, 1, 50], but must be [rows, positions] or of four dimensions",
    ),
    "a four-dimensional mask of another length": (
        _add("attention_mask", torch.zeros(1, 1, 49, 49)),
        "`attention_mask` has shape [1, 1, 49, 49], but the sequence has 1 rows of 50 positions",
    ),
    "two rows of position ids": (
        _add("position_ids", torch.zeros(2, 1, 50, dtype=torch.int64)),
        "`position_ids` has shape [2, 1, 50]",
    ),
    "position ids of float": (
        _add("position_ids", torch.zeros(3, 1, 50)),
        "`position_ids` has dtype torch.float32, but must hold whole numbers",
    ),
    "no rows": (_set("input_ids", lambda ids: ids[:0]), "the batch has no rows; drop empty batches in the data loader"),
    "what describes all images": (_add("image_cu_seqlens", torch.zeros(2)), "`image_cu_seqlens` describes all images"),
}


def _step(
    change: Callable[[Batch], None],
    bad_ranks: tuple[int, ...],
    size: int,
    policy: Any = None,
    family: str = FAMILY,
    **arguments: Any,
) -> None:
    class Module(ParityModule):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            if batch_idx == 1 and self.global_rank in bad_ranks:
                change(batch)
            return super().training_step(batch, batch_idx)

    loader = Batches([tiny_batch(family, seed=seed, dtype=torch.float32) for seed in range(3)])
    if policy is not None:
        arguments["auto_wrap_policy"] = policy
    strategy = UlyssesVisionDPStrategy(sequence_parallel_size=size, **arguments)
    quiet_trainer(devices=int(os.environ["WORLD_SIZE"]), strategy=strategy).fit(Module(tiny_model(family)), loader)


@pytest.mark.parametrize("case", STEPS)
def test_bad_step_on_one_rank_is_refused_alike_on_every_rank(case: str) -> None:
    change, message = STEPS[case]
    failure = same_failure(_step, 2, change, (1,), 2)
    assert failure.startswith("StepError: Refused before the step: rank 1: "), failure
    assert message in failure, failure


FIXED_SIZE: dict[str, tuple[Callable[[Batch], None], str]] = {
    "an image token too many": (
        _one_more_image_token,
        "the batch has 49 placeholder tokens, but its images or videos yield 48 features",
    ),
    "another number of channels": (
        _set("pixel_values", lambda pixels: pixels[:, :1]),
        "`pixel_values` has 1 channels, but the model takes 3; convert the images",
    ),
    "no image": (_set("pixel_values", lambda pixels: pixels[:0]), "`pixel_values` is there but holds no image"),
}


@pytest.mark.parametrize("case", FIXED_SIZE)
def test_bad_step_of_images_of_one_size(case: str) -> None:
    change, message = FIXED_SIZE[case]
    failure = same_failure(_step, 2, change, (1,), 2, None, "llava")
    assert failure.startswith("StepError: Refused before the step: rank 1: "), failure
    assert message in failure, failure


def test_the_tables_hold_forty_cases() -> None:
    assert len(STEPS) + len(FIXED_SIZE) >= 40


@pytest.mark.parametrize("policy", [{nn.Embedding}, {Qwen2_5_VLModel}], ids=str)
@pytest.mark.parametrize("change", [_one_more_image_token, _without("mm_token_type_ids")], ids=["tokens", "types"])
def test_bad_step_is_refused_when_other_modules_than_blocks_gather_weights(policy: Any, change: Any) -> None:
    assert same_failure(_step, 2, change, (1,), 2, policy).startswith("StepError: Refused before the step: rank 1")


def test_bad_step_of_one_replica_is_refused_on_the_other() -> None:
    failure = same_failure(_step, 4, _one_more_image_token, (2, 3), 2)
    assert failure.startswith("StepError: Refused before the step: ranks 2, 3: the batch has 25 image tokens")


def test_two_problems_are_both_named() -> None:
    def change(batch: Batch) -> None:
        (_one_more_image_token if torch.distributed.get_rank() else _without("mm_token_type_ids"))(batch)

    failure = same_failure(_step, 2, change, (0, 1), 2)
    assert "rank 0: `mm_token_type_ids` is missing" in failure
    assert "; rank 1: the batch has 25 image tokens" in failure


def test_sequence_shorter_than_its_group() -> None:
    def change(batch: Batch) -> None:
        ids = batch["input_ids"][:, :1]
        batch.clear()
        batch.update(input_ids=ids, labels=ids)

    assert "the sequence has 1 positions, fewer than the 2 ranks" in same_failure(_step, 2, change, (0, 1), 2)


# ---- ranks of a group that read different samples


def _same_words(batch: Batch) -> None:
    words = tiny_batch(FAMILY, seed=99, dtype=torch.float32)["input_ids"]
    batch["input_ids"] = words


OTHER: dict[str, tuple[Callable[[Batch], None], str, str]] = {
    "words": (_same_words, "input_ids", "likely cause: a sampler that shuffles without a seed"),
    "labels": (_set("labels", lambda labels: labels.where(labels < 50, 7)), "labels", "likely cause: a sampler"),
    "pixels": (
        _set("pixel_values", lambda pixels: pixels * 1.01),
        "pixel_values",
        "likely cause: random augmentation without a seed that ranks share; call `seed_everything(seed, workers=True)`",
    ),
    "an order of images": (
        _set("image_grid_thw", lambda grid: grid.flip(0)),
        "image_grid_thw",
        "likely cause: a sampler",
    ),
    "padding": (_set("attention_mask", lambda mask: mask.clone().fill_diagonal_(0)), "attention_mask", "likely cause"),
}


def _compared(change: Callable[[Batch], None], every: int) -> None:
    _step(change, (1,), 2, check_batches_every_n_steps=every)


@pytest.mark.parametrize("case", OTHER)
def test_other_samples_on_one_rank_of_a_group(case: str) -> None:
    change, name, cause = OTHER[case]
    failure = same_failure(_compared, 2, change, 1)
    assert failure.startswith(
        "StepError: Refused before the step: ranks 0 and 1 of one sequence group hold different samples at training step 1 "
        f"(`{name}` differs), but must read the same batch; "
    )
    assert cause in failure
    assert "`trainer.strategy.data_parallel_rank` of `data_parallel_size`" in failure


def _longer(batch: Batch) -> None:
    batch.update(tiny_batch(FAMILY, text=8, dtype=torch.float32))


def _fewer_labels(batch: Batch) -> None:
    batch["labels"][:, 20:] = -100


@pytest.mark.parametrize("change", [_longer, _fewer_labels], ids=["length", "labels"])
def test_other_sizes_are_found_in_every_step(change: Callable[[Batch], None]) -> None:
    assert "hold different samples at training step 1" in same_failure(_compared, 2, change, 0)


def test_the_group_is_named() -> None:
    failure = same_failure(_step_of_replica, 4)
    assert "ranks 2 and 3 of one sequence group hold different samples at training step 1" in failure


def _step_of_replica() -> None:
    _step(_same_words, (3,), 2, check_batches_every_n_steps=1)


def _seldom() -> int:
    """Other words in step 1 alone, where nobody compares."""
    _step(_same_words, (1,), 2, check_batches_every_n_steps=2)
    return int(os.environ["RANK"])


def test_batches_are_compared_as_often_as_asked() -> None:
    assert run_ranks(_seldom, 2) == [0, 1]
