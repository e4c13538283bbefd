"""State dicts of both versions of FSDP where Lightning's way does not serve, and saves that replace a file in one step."""

import os
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import (
    _METADATA_FILENAME,
    _distributed_checkpoint_save,
    _is_full_checkpoint,
    _is_sharded_checkpoint,
)
from lightning.fabric.strategies.model_parallel import _rekey_optimizer_state_if_needed
from torch import nn
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
)
from torch.optim import Optimizer

from lightning_vdp.models import plain_name

__all__ = [
    "frozen_names",
    "full_state_on_cpu",
    "load_sharded_module",
    "loosened",
    "newest",
    "optimizer_state_2",
    "replaced_in_one_step",
    "state_dict_2",
    "write_file",
    "write_shards",
]

_PART, _OLD = ".part", ".old"


@contextmanager
def full_state_on_cpu(root: nn.Module, rank0_only: bool = True) -> Generator[None, None, None]:
    """Within it, state dicts of a root of FSDP1 on the CPU are whole; torch's offload to the CPU would crash the process.

    Args:
        root: The FSDP root.
        rank0_only: Whether rank 0 alone gets them.
    """
    with FullyShardedDataParallel.state_dict_type(
        root,
        StateDictType.FULL_STATE_DICT,
        # no offload: CPU to CPU it writes to freed memory (Lightning issue 21804)
        FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
    ):
        yield


def state_dict_2(root: nn.Module, full: bool) -> dict[str, Any]:
    """The weights of a root of FSDP2 on the CPU: whole on rank 0 alone, or this rank's parts."""
    return get_model_state_dict(root, options=StateDictOptions(full_state_dict=full, cpu_offload=True))


def optimizer_state_2(root: nn.Module, optimizer: Optimizer, full: bool, is_global_zero: bool) -> dict[str, Any]:
    """The state of an optimizer of parameters under FSDP2; a whole one as a plain optimizer would save it."""
    options = StateDictOptions(full_state_dict=full, cpu_offload=True)
    state: dict[str, Any] = get_optimizer_state_dict(root, optimizer, options=options)
    if full and is_global_zero:
        state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, root)
    return state


def load_sharded_module(
    path: Path, root: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Loads a checkpoint, whole or sharded by either version of FSDP, into a root of FSDP2, a sharded one into either.

    Args:
        path: The checkpoint.
        root: The root.
        optimizers: Those whose state is loaded; empty for the weights alone.
        strict: Whether names must agree.
        weights_only: See `torch.load`.

    Returns:
        What else the checkpoint holds.

    Raises:
        ValueError: If there is no checkpoint at the path.
    """
    if _is_sharded_checkpoint(path):
        module_state = {"model": get_model_state_dict(root)}
        load(module_state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=not strict))
        set_model_state_dict(root, module_state["model"], options=StateDictOptions(strict=strict))
        for index, optimizer in enumerate(optimizers):
            state = {f"optimizer_{index}": get_optimizer_state_dict(root, optimizer)}
            load(state, checkpoint_id=path)
            set_optimizer_state_dict(root, optimizer, optim_state_dict=state[f"optimizer_{index}"])
        metadata: dict[str, Any] = torch.load(path / _METADATA_FILENAME, weights_only=weights_only)
        return metadata
    if not _is_full_checkpoint(path):
        raise ValueError(
            f"There is no checkpoint at {path}: expected a file, or a folder with the shards of a checkpoint."
        )
    # mapped into memory: rank 0 reads the tensors one by one, the others none
    checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    set_model_state_dict(root, checkpoint.pop("state_dict"), options=options)
    states = checkpoint.get("optimizer_states", [])
    if optimizers and len(states) != len(optimizers):
        raise ValueError(
            f"The checkpoint holds the states of {len(states)} optimizers, but `configure_optimizers` made {len(optimizers)}; "
            "make as many, or load the weights alone."
        )
    for optimizer, whole in zip(optimizers, states):
        if whole["state"]:
            named = _rekey_optimizer_state_if_needed(whole, root)
            set_optimizer_state_dict(root, optimizer, optim_state_dict=named, options=options)
    return checkpoint


def frozen_names(module: nn.Module) -> set[str]:
    """Plain names of the parameters that are not trained."""
    return {plain_name(name) for name, value in module.named_parameters() if not value.requires_grad}


@contextmanager
def loosened(module: Any, enabled: bool) -> Iterator[None]:
    """Within it, a LightningModule takes checkpoints that lack weights.

    Args:
        module: The LightningModule.
        enabled: False changes nothing.
    """
    strict = module.strict_loading
    module.strict_loading = strict and not enabled
    try:
        yield
    finally:
        module.strict_loading = strict


def newest(path: Path) -> Path:
    """The path, or what an interrupted `replaced_in_one_step` has put aside of it."""
    aside = path.with_name(path.name + _OLD)
    return aside if aside.exists() and not path.exists() else path


@contextmanager
def replaced_in_one_step(path: Path, is_global_zero: bool, barrier: Any) -> Iterator[Path]:
    """Within it, ranks write to the path that it yields, which takes the place of `path` only if all went well.

    Args:
        path: A file or a folder; what is there stays until the new one is whole.
        is_global_zero: Whether this rank moves files.
        barrier: Called on every rank where all must have come.
    """
    part, aside = path.with_name(path.name + _PART), path.with_name(path.name + _OLD)
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
