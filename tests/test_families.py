"""Families by convention: exact, with tower and decoder divided, and rows of features measured."""

import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from lightning_vdp import UlyssesVisionDPPrecision, UlyssesVisionDPStrategy
from lightning_vdp.check.build import build_model, tiny_config
from lightning_vdp.check.inputs import make_batch
from lightning_vdp.families.facts import FAMILIES, Facts, facts_of
from lightning_vdp.families.family import Modality
from lightning_vdp.families.find import family_of, find_models
from lightning_vdp.forward.first_batch import shorten
from lightning_vdp.testing import (
    Batches,
    ParityModule,
    PromoteFloat32,
    RankFailed,
    assert_parity,
    quiet_trainer,
    run_ranks,
)
from lightning_vdp.vision.monitor import VisionLoad
from lightning_vdp.vision.select import build_unit, describe_unit

Batch = dict[str, Any]


def make_module(family: str, checkpointing: bool = False) -> ParityModule:
    model = build_model(tiny_config(CONFIG_MAPPING[family]()))
    if checkpointing:
        model.gradient_checkpointing_enable()
    return ParityModule(model.train())


def images(family: str, count: int = 2, rows: int = 1) -> list[Batch]:
    model = make_module(family).model.eval()
    with PromoteFloat32():
        return [make_batch(model, seed=seed, rows=rows) for seed in range(count)]


def words(batch: Batch) -> Batch:
    """The same ids as words alone."""
    kept = {name: batch[name] for name in ("attention_mask", "input_ids")}
    special = kept["input_ids"] >= 100
    kept["input_ids"] = kept["input_ids"].masked_fill(special, 7)
    kept["labels"] = kept["input_ids"].masked_fill(kept["attention_mask"] == 0, -100)
    if "token_type_ids" in batch:
        kept["token_type_ids"] = torch.zeros_like(kept["input_ids"])
    return kept


ROWS: dict[str, tuple[str, int, bool, int]] = {
    "bidirectional spans of images, checkpointed": ("gemma3", 2, True, 2),
    "bidirectional spans of images, three ranks": ("gemma3", 3, False, 1),
    "bidirectional spans of images, four ranks": ("gemma3", 4, False, 1),
    "a bidirectional prefix": ("paligemma", 2, False, 2),
    "images of many sizes, checkpointed": ("mistral3", 2, True, 1),
    "images of many sizes, three ranks": ("mistral3", 3, False, 1),
    "images of many sizes, four ranks": ("mistral3", 4, True, 1),
    "tiles in rows": ("llava_next", 2, False, 2),
    "linear attention, three ranks, checkpointed": ("qwen3_5", 3, True, 1),
    "images of one row": ("idefics3", 2, False, 1),
    "tiles by counts": ("step3p7", 2, False, 1),
    "an indexer and hyper connections, checkpointed": ("glm5_next", 2, True, 1),
    "hidden states by position and by layer": ("gemma4", 2, False, 1),
    "temperature and an indexer": ("mistral_large4", 2, True, 1),
    "state spaces and experts": ("nemotron_h_omni", 2, False, 1),
    "a decoder that merges features itself": ("chameleon", 2, False, 1),
}


@pytest.mark.parametrize("row", ROWS)
def test_family(row: str) -> None:
    family, size, checkpointing, rows = ROWS[row]
    module = partial(make_module, family, checkpointing)
    assert_parity(module, images(family, rows=rows), world_size=size, sequence_parallel_size=size)


@pytest.mark.parametrize("family", ["gemma3", "mistral3", "idefics3", "chameleon"])
def test_words_on_one_replica_beside_images_on_the_other(family: str) -> None:
    # the replica without images runs one like the smallest of the other's
    alternating = [words(batch) if index % 2 else batch for index, batch in enumerate(images(family, 4))]
    assert_parity(partial(make_module, family), alternating, world_size=4, sequence_parallel_size=2)


def _samples_of_several_images(seed: int) -> Batch:
    """Two samples in a row, one with two images: their number decides how an image is cut into tiles."""
    model = make_module("llava_onevision").model.eval()
    with PromoteFloat32(), torch.no_grad():
        batch = make_batch(model, seed=seed)
        batch["batch_num_images"] = torch.tensor([2, 1])
        names = ("pixel_values", "image_sizes", "batch_num_images")
        features = model.model.get_image_features(**{name: batch[name] for name in names}).pooler_output
    token = model.config.image_token_id
    ids = [7, 8, 9]
    for part in features:
        ids += [token] * len(part) + [7, 9]
    batch["input_ids"] = torch.tensor([ids])
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == token, -100)
    return batch


@pytest.mark.parametrize("size", [2, 4])
def test_samples_of_several_images_stay_together(size: int) -> None:
    batches = [_samples_of_several_images(seed) for seed in range(2)]
    module = partial(make_module, "llava_onevision")
    assert_parity(module, batches, world_size=size, sequence_parallel_size=size)


def test_a_sample_without_images_is_refused_alike() -> None:
    batch = _samples_of_several_images(0)
    batch["batch_num_images"] = torch.tensor([3, 0])
    with pytest.raises(RankFailed) as caught:
        run_ranks(_fit_and_watch, 2, "llava_onevision", batch, 2)
    assert len(set(caught.value.failures.values())) == 1
    assert "`batch_num_images` is [3, 0], but must count" in caught.value.failures[0]


@pytest.mark.parametrize(("family", "rows"), [("idefics3", 2), ("step3p7", 1), ("smolvlm", 2)])
def test_ranks_with_padding_or_images_without_tiles_encode_one_beside(family: str, rows: int) -> None:
    # step3p7: of three images on four ranks the second has no tiles; the others: the second row has an empty image
    assert_parity(partial(make_module, family), images(family, 1, rows), world_size=4, sequence_parallel_size=4)


def test_a_batch_without_tiles_is_refused_alike() -> None:
    batch = images("step3p7", 1)[0]
    batch["num_local_patches"] = [0, 0, 0]
    batch["pixel_values_local"] = batch["pixel_values_local"][:0]
    with pytest.raises(RankFailed) as caught:
        run_ranks(_fit_and_watch, 2, "step3p7", batch, 2)
    assert len(set(caught.value.failures.values())) == 1
    assert "no image of the batch has tiles or is more than padding" in caught.value.failures[0]


def test_sound_is_refused_alike() -> None:
    batch = {**images("gemma3", 1)[0], "input_features": torch.zeros(1, 4)}
    with pytest.raises(RankFailed) as caught:
        run_ranks(_fit_and_watch, 2, "gemma3", batch, 2)
    assert len(set(caught.value.failures.values())) == 1
    assert "sound is not divided" in caught.value.failures[0]


@pytest.mark.parametrize("family", ["gemma3", "llava_next"])
def test_a_long_first_batch_is_cut_to_words(family: str) -> None:
    batch = images(family, 1, rows=2)[0]
    base = make_module(family).model.model
    short = shorten(batch, family_of(base), base.config, 2, limit=20)
    assert short is not None
    assert short["input_ids"].shape == (1, 20)
    assert "pixel_values" not in short
    assert not (short["input_ids"] == base.config.image_token_id).any()


def _fit_and_watch(family: str, batch: Batch, size: int) -> list[tuple[int, tuple[int, ...], int]]:
    seen: list[tuple[int, tuple[int, ...], int]] = []

    class Watching(ParityModule):
        def on_fit_start(self) -> None:
            def observe(load: VisionLoad) -> None:
                seen.append((load.units, load.loads, load.bytes_received))

            self.trainer.strategy.mesh.vision_observers.append(observe)

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            outputs = self.model(**batch)
            assert outputs.logits.shape[1] == outputs.sequence_shard.size
            return outputs.loss

    with PromoteFloat32():
        quiet_trainer(
            devices=size,
            strategy=UlyssesVisionDPStrategy(sequence_parallel_size=size, verify_first_batch=False),
            plugins=[UlyssesVisionDPPrecision("64-true")],
        ).fit(Watching(make_module(family).model), Batches([batch]))
    return seen


@pytest.mark.parametrize("family", ["gemma3", "mistral3", "idefics3", "step3p7"])
def test_every_rank_encodes_its_share(family: str) -> None:
    results = run_ranks(_fit_and_watch, 2, family, images(family, 1)[0], 2)
    assert [units for ((units, _, _),) in results] in ([2, 1], [1, 2])
    if family == "idefics3":
        # for lack of a mask of placeholders all features are gathered; others may stay on their owner's shard
        assert results[0][0][2] > 0


def test_features_that_do_not_match_placeholders_are_refused_alike() -> None:
    batch = images("gemma3", 1)[0]
    token = make_module("gemma3").model.config.image_token_id
    batch["input_ids"][0, 0] = token
    with pytest.raises(RankFailed) as caught:
        run_ranks(_fit_and_watch, 2, "gemma3", batch, 2)
    assert len(set(caught.value.failures.values())) == 1
    assert "placeholder tokens, but its images or videos yield" in caught.value.failures[0]


def test_batch_normalization_over_images_is_refused_alike() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_fit_and_watch, 2, "emu3", images("emu3", 1)[0], 2)
    assert len(set(caught.value.failures.values())) == 1
    assert "normalizes over all images of a batch" in caught.value.failures[0]


@pytest.mark.parametrize("family", ["mllama", "florence2", "inkling2", "molmo2"])
def test_types_that_need_a_judgement_are_refused_by_name(family: str) -> None:
    model = torch.nn.Module()
    model.inner = build_model(tiny_config(CONFIG_MAPPING[family]()))
    with pytest.raises(ValueError, match=f"model_type '{family}'\\) cannot be divided: ") as caught:
        find_models(model)
    assert FAMILIES[family].refused in str(caught.value)


def test_what_describes_images_is_read_off_the_methods() -> None:
    names = {family: family_of(make_module(family).model.model).describing for family in ("gemma4", "minicpmv4_6")}
    assert {"image_position_ids", "num_frames_per_video"} <= names["gemma4"]
    assert {"target_sizes", "target_sizes_videos"} <= names["minicpmv4_6"]
    assert not any("pixel" in name for found in names.values() for name in found)


def test_a_described_unit_is_rebuilt() -> None:
    modality = Modality("image", "pixels", "grid", "features", ("pixels", "grid", "mode", "mask"))
    unit = {
        "pixels": torch.randn(6, 4, dtype=torch.float16),
        "grid": torch.tensor([[1, 2, 3]]),
        "mode": "full",
        "mask": torch.zeros(1, 40, dtype=torch.bool),
    }
    rebuilt = build_unit(describe_unit(unit, modality), modality, torch.device("cpu"))
    assert set(rebuilt) == {"pixels", "grid", "mask"}
    assert torch.equal(rebuilt["grid"], unit["grid"])
    assert rebuilt["pixels"].dtype == torch.float16
    assert rebuilt["pixels"].shape == (6, 4)
    assert rebuilt["pixels"].all()
    assert rebuilt["mask"].all()


def test_records_are_of_model_types_that_transformers_has() -> None:
    assert set(FAMILIES) - set(CONFIG_MAPPING.keys()) == set()
    assert list(FAMILIES) == sorted(FAMILIES)


def test_a_type_without_a_record_follows_the_conventions() -> None:
    assert "llava" not in FAMILIES
    assert facts_of(CONFIG_MAPPING["llava"]()) == Facts()


def test_every_fact_is_described() -> None:
    page = (Path(__file__).parent.parent / "docs" / "adding_a_model.rst").read_text()
    rows = re.findall(r"^   \* - ``(\w+)``$", page.split("\nThe fields of a record\n")[1], flags=re.MULTILINE)
    assert rows == [entry.name for entry in fields(Facts)]
