"""Checkpoints: saved and resumed at other sizes, whole and sharded, under both versions of FSDP, interrupted or not."""

import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import slow
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForImageTextToText

from lightning_vdp import StepError, UlyssesVisionDPPrecision, UlyssesVisionDPStrategy
from lightning_vdp.checkpoint import save as save_module
from lightning_vdp.checkpoint.load import newest
from lightning_vdp.cli import main
from lightning_vdp.testing import (
    Batches,
    ParityModule,
    PromoteFloat32,
    RankFailed,
    quiet_trainer,
    run_ranks,
    tiny_batch,
    tiny_model,
    whole_parameters,
)

FAMILY = "qwen2_5_vl"
SAMPLES, PER_STEP, EPOCHS = 12, 4, 2
KINDS = ("full", "sharded")


class _Samples(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**tiny_batch(FAMILY, seed=index, rows=[[(1, 4, 4)]], text=3), "index": index}


class _Recording(ParityModule):
    def __init__(self) -> None:
        super().__init__(tiny_model(FAMILY))
        self.seen: list[tuple[int, int, float]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        index = batch.pop("index")
        loss = super().training_step(batch, batch_idx)
        # optimizer step, sample, loss
        self.seen.append((self.trainer.global_step, index, float(loss.detach())))
        return loss

    def train_dataloader(self) -> DataLoader[dict[str, Any]]:
        return DataLoader(_Samples(), batch_size=1, shuffle=True, collate_fn=lambda samples: samples[0])


class _SaveAfter(Callback):
    """Saves in both ways after some steps: one run to be resumed from either."""

    def __init__(self, folder: str, steps: tuple[int, ...]) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if stepped and trainer.global_step in self.steps:
            for kind in KINDS:
                trainer.strategy._state_dict_type = kind
                trainer.save_checkpoint(Path(self.folder) / kind / f"{trainer.global_step}.ckpt")


def _fit(
    folder: str, size: int, version: int, kind: str, resume: int | None, save: bool
) -> tuple[list[tuple[int, int, float]], dict[str, Tensor], list[str]]:
    world = int(os.environ["WORLD_SIZE"])
    module = _Recording()
    strategy = UlyssesVisionDPStrategy(size, fsdp_version=version, state_dict_type=kind)
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        plugins=[UlyssesVisionDPPrecision("64-true")],
        accumulate_grad_batches=PER_STEP * size // world,
        max_epochs=EPOCHS,
        use_distributed_sampler=True,
        callbacks=[_SaveAfter(folder, (2, 3, 5))] if save else [],
    )
    with PromoteFloat32(), warnings.catch_warnings(record=True) as caught:
        trainer.fit(module, ckpt_path=None if resume is None else str(Path(folder) / f"{resume}.ckpt"))
    return module.seen, whole_parameters(trainer.strategy.model), [str(warning.message) for warning in caught]


def _curve(results: list[Any], size: int) -> dict[int, dict[int, float]]:
    """The loss of each sample by optimizer step, over all replicas; each sample is seen once in a step."""
    curve: dict[int, dict[int, float]] = {}
    for seen, *_ in results[::size]:
        for step, index, loss in seen:
            assert index not in curve.setdefault(step, {})
            curve[step][index] = loss
    return curve


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[int, str], tuple[str, list[Any]]]]:
    runs: dict[tuple[int, str], tuple[str, list[Any]]] = {}

    class Runs(dict):  # type: ignore[type-arg]
        def __missing__(self, key: tuple[int, str]) -> tuple[str, list[Any]]:
            version, _ = key
            folder = str(tmp_path_factory.mktemp("uninterrupted"))
            results = run_ranks(_fit, 4, folder, 2, version, "full", None, True, timeout=120)
            self.update({(version, kind): (f"{folder}/{kind}", results) for kind in KINDS})
            return self[key]

    yield Runs(runs)


@pytest.mark.parametrize(
    ("version", "kind", "step"),
    [
        *((1, "full", 2), (1, "sharded", 5), (2, "full", 5), (2, "sharded", 2)),
        *slow((1, "full", 5), (1, "sharded", 2), (2, "full", 2), (2, "sharded", 5)),
        *slow((1, "full", 3), (1, "sharded", 3), (2, "full", 3), (2, "sharded", 3)),
    ],
)
def test_resumed_equals_uninterrupted_bit_for_bit(uninterrupted: Any, version: int, kind: str, step: int) -> None:
    folder, truth = uninterrupted[version, kind]
    resumed = run_ranks(_fit, 4, folder, 2, version, kind, step, False, timeout=120)
    whole, rest = _curve(truth, 2), _curve(resumed, 2)
    assert rest == {later: whole[later] for later in whole if later >= step}
    assert sorted(index for part in list(whole.values())[:3] for index in part) == list(range(SAMPLES))
    for name, value in truth[0][1].items():
        assert torch.equal(resumed[0][1][name], value), name
    assert not [message for message in resumed[0][2] if "resumable" in message]


@pytest.mark.parametrize(
    ("version", "kind", "world", "size", "then", "step"),
    [
        (1, "sharded", 4, 1, 2, 2),
        (2, "full", 4, 1, 1, 5),
        (2, "sharded", 2, 2, 2, 2),
        *slow((1, "full", 2, 2, 2, 2), (1, "sharded", 2, 1, 1, 5), (2, "sharded", 3, 3, 1, 3)),
    ],
)
def test_resumed_at_other_sizes(
    uninterrupted: Any, version: int, kind: str, world: int, size: int, then: int, step: int
) -> None:
    folder, truth = uninterrupted[version, kind]
    resumed = run_ranks(_fit, world, folder, size, then, kind, step, False, timeout=120)
    whole, rest = _curve(truth, 2), _curve(resumed, size)
    assert rest.keys() == {later for later in whole if later >= step}
    for later, losses in rest.items():
        # the same samples in each step, also of the epoch that goes on
        assert losses.keys() == whole[later].keys()
        assert losses == pytest.approx(whole[later], rel=1e-9)
    for name, value in truth[0][1].items():
        torch.testing.assert_close(resumed[0][1][name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_epoch_that_other_replicas_cannot_continue_is_refused(uninterrupted: Any) -> None:
    folder, _ = uninterrupted[2, "full"]
    with pytest.raises(RankFailed, match="after 4 batches of each of 2 replicas, which 3 replicas cannot"):
        run_ranks(_fit_three, 3, folder)


def _fit_three(folder: str) -> None:
    trainer = quiet_trainer(devices=3, strategy=UlyssesVisionDPStrategy(1, fsdp_version=2), max_epochs=2)
    trainer.fit(_Recording(), ckpt_path=str(Path(folder) / "2.ckpt"))


@pytest.mark.parametrize("version", [1, 2])
def test_names_are_those_of_the_plain_model(uninterrupted: Any, version: int) -> None:
    folder, _ = uninterrupted[version, "full"]
    checkpoint = torch.load(Path(folder) / "5.ckpt", weights_only=True)
    model = tiny_model(FAMILY, seed=3).double()
    own = {f"model.{name}" for name in model.state_dict()}
    assert checkpoint["state_dict"].keys() == own
    model.load_state_dict({name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()})
    assert all(value.dtype == torch.float64 for value in model.parameters())
    # a plain optimizer's layout
    assert set(checkpoint["optimizer_states"][0]["state"]) == set(range(len(list(model.parameters()))))


# ---- interrupted


class _Killing(Callback):
    """Saves the same file after each step, and dies in step 3."""

    def __init__(self, folder: str, rank: int, where: str) -> None:
        self.folder, self.rank, self.where = folder, rank, where

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            if self.where == "fit":
                os.kill(os.getpid(), signal.SIGKILL)
            self._die_in_save()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(Path(self.folder) / "last.ckpt")

    def _die_in_save(self) -> None:
        def die(checkpoint: Any, path: Path, *_: Any) -> None:
            if path.suffix == ".part" and not path.is_dir() and "full" in self.where:
                path.write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)

        save_module.write_file = save_module.write_shards = die


def _fit_and_die(folder: str, kind: str, version: int, rank: int, where: str) -> None:
    loader = Batches([tiny_batch(FAMILY, seed=seed, dtype=torch.float32) for seed in range(4)])
    trainer = quiet_trainer(
        devices=2,
        strategy=UlyssesVisionDPStrategy(2, fsdp_version=version, state_dict_type=kind),
        callbacks=[_Killing(folder, rank, where)],
    )
    trainer.fit(ParityModule(tiny_model(FAMILY)), loader)


def _steps_of(folder: str, kind: str, version: int) -> int:
    trainer = quiet_trainer(
        devices=2, strategy=UlyssesVisionDPStrategy(2, fsdp_version=version, state_dict_type=kind), max_steps=2
    )
    trainer.fit(ParityModule(tiny_model(FAMILY)), Batches([]), ckpt_path=str(Path(folder) / "last.ckpt"))
    return trainer.global_step


@pytest.mark.parametrize(
    ("kind", "version", "rank", "where"),
    [
        ("full", 1, 1, "fit"),
        ("full", 2, 0, "full save"),
        ("sharded", 1, 1, "sharded save"),
        ("sharded", 2, 0, "fit"),
    ],
)
def test_a_killed_rank_ends_the_others_and_leaves_the_last_checkpoint(
    tmp_path: Path, kind: str, version: int, rank: int, where: str
) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_ranks(_fit_and_die, 2, str(tmp_path), kind, version, rank, where, timeout=60)
    # by itself and with an error: ranks that still run after 3 s are not in the list
    assert list(failed.value.failures) == [1 - rank]
    assert time.monotonic() - started < 30
    assert run_ranks(_steps_of, 2, str(tmp_path), kind, version) == [2, 2]


def test_a_save_interrupted_between_two_folders_is_found(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt.old").mkdir()
    assert newest(tmp_path / "last.ckpt") == tmp_path / "last.ckpt.old"
    (tmp_path / "last.ckpt").mkdir()
    assert newest(tmp_path / "last.ckpt") == tmp_path / "last.ckpt"


# ---- export


@pytest.mark.parametrize(("version", "kind"), [(1, "full"), (2, "sharded")])
def test_export_is_read_by_from_pretrained(
    uninterrupted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], version: int, kind: str
) -> None:
    folder, truth = uninterrupted[version, kind]
    assert main(["export", str(Path(folder) / "5.ckpt"), str(tmp_path / "hf")]) == 0
    assert "without a processor" in capsys.readouterr().out
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    assert type(model) is type(tiny_model(FAMILY))
    saved = torch.load(Path(folder) / "5.ckpt", weights_only=True)["state_dict"] if kind == "full" else None
    for name, value in model.state_dict().items():
        assert saved is None or torch.equal(value, saved[f"model.{name}"]), name
    # one step later than the checkpoint: near, but not the same
    assert (model.lm_head.weight - truth[0][1]["model.lm_head.weight"]).abs().max() < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/none.ckpt", "x"], "There is no checkpoint at"),
        (["{folder}/5.ckpt", "x", "--name", "policy"], "holds the models 'model', and `--name` is 'policy'"),
        (["{folder}/5.ckpt"], "the following arguments are required: folder"),
    ],
)
def test_export_says_what_is_wrong(
    uninterrupted: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    folder, _ = uninterrupted[1, "full"]
    assert main(["export", *(argument.format(folder=folder) for argument in arguments)]) != 0
    assert message in capsys.readouterr().err


class _FullDisk(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        def full(*_: Any) -> None:
            raise OSError("No space left on device")

        save_module.write_file = full
        trainer.save_checkpoint(self.path)

    def __init__(self, path: str) -> None:
        self.path = path


def _save_to_a_full_disk(path: str) -> None:
    trainer = quiet_trainer(devices=2, strategy=UlyssesVisionDPStrategy(2), callbacks=[_FullDisk(path)])
    with pytest.raises(StepError, match="could not be written, and what was there is left: rank 0: OSError: No space"):
        trainer.fit(ParityModule(tiny_model(FAMILY)), Batches([tiny_batch(FAMILY, dtype=torch.float32)]))


def test_every_rank_says_that_a_save_failed(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_text("the last one")
    run_ranks(_save_to_a_full_disk, 2, str(tmp_path / "last.ckpt"))
    assert (tmp_path / "last.ckpt").read_text() == "the last one"
