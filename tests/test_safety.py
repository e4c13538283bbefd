"""Checkpoints that would run code, or that are broken: nothing in them is opened on any rank."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_vdp import UlyssesVisionDPStrategy
from lightning_vdp.checkpoint.export import export
from lightning_vdp.checkpoint.safety import check_holds_data
from lightning_vdp.errors import UserError
from lightning_vdp.testing import Batches, ParityModule, RankFailed, quiet_trainer, run_ranks, tiny_batch, tiny_model

FAMILY = "qwen3_vl"


class _Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (os.environ["EVIL"],)


class _Module(ParityModule):
    def __init__(self, root: Path | None) -> None:
        super().__init__(tiny_model(FAMILY))
        self.save_hyperparameters()


def _fit(version: int, kind: str, root: Path | None = None, save: str | None = None, **resume: Any) -> int:
    trust = resume.pop("trust_checkpoints", False)
    strategy = UlyssesVisionDPStrategy(2, fsdp_version=version, state_dict_type=kind, trust_checkpoints=trust)
    trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=2 if resume else 1)
    trainer.fit(_Module(root), Batches([tiny_batch(FAMILY)]), **resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer.global_step


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what FSDP2 saves, whole and sharded."""
    folder = tmp_path_factory.mktemp("saved")
    for kind in ("full", "sharded"):
        run_ranks(_fit, 2, 2, kind, None, str(folder / kind))
    return folder


def _evil_file(path: Path) -> Path:
    content = torch.load(path, weights_only=True)
    torch.save({**content, "evil": _Evil()}, path)
    return path


def _evil_meta(folder: Path) -> Path:
    _evil_file(folder / "meta.pt")
    return folder


def _evil_index(folder: Path) -> Path:
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data = _Evil()
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


def _evil_entry(folder: Path) -> Path:
    """A value that is no tensor: torch pickles these into the files of tensors."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    name, place = next(
        (entry, place)
        for entry, place in index.storage_data.items()
        if type(index.state_dict_metadata[entry.fqn]).__name__ == "BytesStorageMetadata"
    )
    evil = folder / place.relative_path
    whole = evil.read_bytes()
    torch.save(_Evil(), folder / "entry")
    entry = (folder / "entry").read_bytes()
    evil.write_bytes(whole + entry)
    place.offset, place.length = len(whole), len(entry)
    index.storage_data[name] = place
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


def _outside(folder: Path) -> Path:
    index = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(index.storage_data.values())).relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


def _cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def _empty(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def _cut_shard(folder: Path) -> Path:
    _cut(next(folder.glob("*.distcp")))
    return folder


def _cut_index(folder: Path) -> Path:
    _cut(folder / ".metadata")
    return folder


def _lost_shard(folder: Path) -> Path:
    next(folder.glob("*.distcp")).unlink()
    return folder


SPOILED: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "code in a file": ("full", _evil_file, "holds more than tensors and plain values: posix.mkdir"),
    "code in the metadata": ("sharded", _evil_meta, "holds more than tensors and plain values: posix.mkdir"),
    "code in the index": ("sharded", _evil_index, "holds code: posix.mkdir"),
    "code in an entry": ("sharded", _evil_entry, "holds more than tensors and plain values: posix.mkdir"),
    "a shard elsewhere": ("sharded", _outside, "leads to another folder"),
    "half a file": ("full", _cut, "cannot be read, and may be cut short"),
    "an empty file": ("full", _empty, "cannot be read, and may be cut short"),
    "half a shard": ("sharded", _cut_shard, "is cut short"),
    "half an index": ("sharded", _cut_index, "cannot be read, and may be cut short"),
    "no shard": ("sharded", _lost_shard, "cannot be read"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_spoiled_checkpoint_is_refused(saved: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    kind, spoil, message = SPOILED[case]
    (shutil.copy if kind == "full" else shutil.copytree)(saved / kind, tmp_path / kind)
    check_holds_data(tmp_path / kind)
    spoil(tmp_path / kind)
    for open_it in (check_holds_data, lambda path: export(path, tmp_path / "exported")):
        with pytest.raises(UserError) as caught:
            open_it(tmp_path / kind)
        assert str(caught.value).startswith(f"The checkpoint {tmp_path / kind}")
        assert message in str(caught.value)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", ["code in a file", "code in the metadata", "code in the index", "half a shard"])
def test_no_rank_opens_a_spoiled_checkpoint(
    saved: Path, tmp_path: Path, case: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    kind, spoil, message = SPOILED[case]
    (shutil.copy if kind == "full" else shutil.copytree)(saved / kind, tmp_path / kind)
    path = str(spoil(tmp_path / kind))
    with pytest.raises(RankFailed) as caught:
        run_ranks(lambda: _fit(version, kind, ckpt_path=path), 2)
    assert caught.value.failures.keys() == {0, 1}
    assert len(set(caught.value.failures.values())) == 1
    assert message in caught.value.failures[0]
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(("version", "kind"), [(1, "full"), (1, "sharded"), (2, "full"), (2, "sharded")])
def test_objects_are_loaded_where_the_user_trusts_them(tmp_path: Path, version: int, kind: str) -> None:
    path = str(tmp_path / "with_path")
    run_ranks(_fit, 2, version, kind, Path("/data"), path)
    with pytest.raises(RankFailed) as caught:
        run_ranks(lambda: _fit(version, kind, ckpt_path=path), 2)
    assert "pathlib.PosixPath" in caught.value.failures[0]
    assert "`trust_checkpoints=True`" in caught.value.failures[0]
    steps = run_ranks(lambda: _fit(version, kind, Path("/data"), ckpt_path=path, trust_checkpoints=True), 2)
    assert steps == [2, 2]
    with pytest.raises(UserError, match=r"pathlib\.PosixPath"):
        export(path, tmp_path / "exported")
    export(path, tmp_path / "exported", trust_checkpoint=True)
    assert (tmp_path / "exported" / "model.safetensors").exists()
