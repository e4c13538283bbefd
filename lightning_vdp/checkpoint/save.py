"""Saving: a checkpoint takes the place of an older one in one step, and only if every rank has written its part."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies.fsdp import (
    _METADATA_FILENAME,
    _distributed_checkpoint_save,
    _is_sharded_checkpoint,
)
from lightning.pytorch.plugins.io import CheckpointIO
from torch import nn

from lightning_vdp.agreement import raise_together
from lightning_vdp.checkpoint.export import MODELS_KEY, describe_models
from lightning_vdp.checkpoint.load import ASIDE
from lightning_vdp.checkpoint.resume import REPLICAS_KEY
from lightning_vdp.families.wrappers import plain_name
from lightning_vdp.mesh import SequenceMesh

__all__ = ["add_facts", "is_left_to_lightning", "without_frozen", "write_checkpoint"]

FROZEN_KEY = "frozen_weights"
"""Where a checkpoint says whether it holds weights that are not trained."""

_PART = ".part"


def add_facts(checkpoint: dict[str, Any], module: nn.Module, replicas: int, has_frozen_weights: bool) -> None:
    """Adds to a checkpoint what resuming and exporting need to know of the run that made it.

    Args:
        checkpoint: The checkpoint as the Trainer makes it.
        module: The LightningModule.
        replicas: Number of replicas, in whose batches the Trainer counts.
        has_frozen_weights: Whether the checkpoint holds weights that are not trained.
    """
    checkpoint[REPLICAS_KEY] = replicas
    checkpoint[FROZEN_KEY] = has_frozen_weights
    checkpoint[MODELS_KEY] = describe_models(module)


def without_frozen(weights: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Leaves the weights out that are not trained.

    Args:
        weights: The weights by plain names.
        module: The LightningModule.
    """
    frozen = {plain_name(name) for name, value in module.named_parameters() if not value.requires_grad}
    return {name: value for name, value in weights.items() if name not in frozen}


def is_left_to_lightning(filepath: Any, storage_options: Any, checkpoint_io: CheckpointIO, sharded: bool) -> bool:
    """Whether the user chose a way of writing, or a place that is no path of this machine.

    Args:
        filepath: Where to write.
        storage_options: The Trainer's argument.
        checkpoint_io: The Trainer's plugin, which writes whole checkpoints.
        sharded: Whether each rank writes its parts.
    """
    users_io = type(checkpoint_io) is not TorchCheckpointIO
    return storage_options is not None or "://" in str(filepath) or (users_io and not sharded)


def write_checkpoint(
    checkpoint: dict[str, Any], path: Path, sharded: bool, mesh: SequenceMesh, barrier: Callable[[], None]
) -> None:
    """Writes a checkpoint; what is at the path stays if any rank fails to. Every rank calls it.

    Args:
        checkpoint: The checkpoint as the Trainer makes it; weights and optimizer states may be taken out.
        path: A file, or with shards a folder.
        sharded: Whether each rank writes its parts; otherwise rank 0 writes the whole.
        mesh: The ranks.
        barrier: What every rank calls where all must have come.

    Raises:
        IsADirectoryError: If there is a folder at the path that is no checkpoint.
        StepError: If a rank could not write; the same on every rank.
    """
    if path.is_dir() and not _is_sharded_checkpoint(path):
        raise IsADirectoryError(f"There is a folder at {path} that is no checkpoint; give the checkpoint another name.")
    is_global_zero = mesh.rank == 0
    with replaced_in_one_step(path, is_global_zero, barrier) as part:
        problem = None
        try:
            if sharded:
                write_shards(checkpoint, part, is_global_zero)
            elif is_global_zero:
                write_file(checkpoint, part)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        raise_together(mesh, problem, f"The checkpoint {path} could not be written, and what was there is left")


@contextmanager
def replaced_in_one_step(path: Path, is_global_zero: bool, barrier: Callable[[], None]) -> Iterator[Path]:
    """Within it, ranks write to the path that it yields, which takes the place of `path` only if all went well.

    Args:
        path: A file or a folder; what is there stays until the new one is whole.
        is_global_zero: Whether this rank moves files.
        barrier: What every rank calls where all must have come.
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
