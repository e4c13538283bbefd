"""State dicts of both versions of FSDP where Lightning's way does not serve, and saves that replace a file in one step."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import (
    _METADATA_FILENAME,
    _distributed_checkpoint_save,
)
from torch import nn

from lightning_vdp.checkpoint.load import ASIDE
from lightning_vdp.families.wrappers import plain_name

__all__ = ["frozen_names", "replaced_in_one_step", "write_file", "write_shards"]

_PART = ".part"


def frozen_names(module: nn.Module) -> set[str]:
    """Plain names of the parameters that are not trained."""
    return {plain_name(name) for name, value in module.named_parameters() if not value.requires_grad}


@contextmanager
def replaced_in_one_step(path: Path, is_global_zero: bool, barrier: Any) -> Iterator[Path]:
    """Within it, ranks write to the path that it yields, which takes the place of `path` only if all went well.

    Args:
        path: A file or a folder; what is there stays until the new one is whole.
        is_global_zero: Whether this rank moves files.
        barrier: Called on every rank where all must have come.
    """
    part, aside = path.with_name(path.name + _PART), path.with_name(path.name + ASIDE)
    if is_global_zero:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(part)
    barrier()
    yield part
    barrier()
    if is_global_zero:
        if part.is_dir() or path.is_dir():
            # folders cannot be exchanged in one step: for a moment the old one has another name
            if path.exists():
                _remove(aside)
                path.rename(aside)
            part.rename(path)
            _remove(aside)
        else:
            os.replace(part, path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Writes a file that survives a crash of the machine right after."""
    with open(path, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())


def write_shards(checkpoint: dict[str, Any], path: Path, is_global_zero: bool) -> None:
    """Writes a folder to which each rank adds its parts, laid out as Lightning's FSDPStrategy does for either version.

    Args:
        checkpoint: As the Trainer makes it; weights and optimizer states are taken out.
        path: The folder.
        is_global_zero: Whether this rank writes what is not sharded.
    """
    path.mkdir(parents=True, exist_ok=True)
    optimizers = enumerate(checkpoint.pop("optimizer_states", []))
    states = {"model": checkpoint.pop("state_dict"), **{f"optimizer_{index}": state for index, state in optimizers}}
    _distributed_checkpoint_save(states, path)
    if is_global_zero:
        write_file(checkpoint, path / _METADATA_FILENAME)
