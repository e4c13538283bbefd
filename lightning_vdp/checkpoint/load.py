"""Reading checkpoints."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import _METADATA_FILENAME, _is_full_checkpoint, _is_sharded_checkpoint
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
from torch.optim import Optimizer

from lightning_vdp.errors import UserError

__all__ = ["ASIDE", "LoadRequest", "allow_missing_weights", "load_into_root", "newest"]

ASIDE = ".old"
"""Ending of the name that a checkpoint has while another takes its place."""


@dataclass(frozen=True)
class LoadRequest:
    """What to load, and how.

    Args:
        path: The checkpoint: a file, or a folder with shards.
        optimizers: The optimizers whose states are loaded; empty for the weights alone.
        strict: Whether the names of weights must agree.
        may_lack_weights: Whether the checkpoint may be one that was saved without frozen weights.
        weights_only: See `torch.load`; False lets the file run code.
    """

    path: Path
    optimizers: Sequence[Optimizer]
    strict: bool
    may_lack_weights: bool
    weights_only: bool


def load_into_root(root: nn.Module, request: LoadRequest) -> dict[str, Any]:
    """Loads a checkpoint, whole or sharded by either version of FSDP, into a root of FSDP2, a sharded one into either.

    Args:
        root: The root.
        request: What to load.

    Returns:
        What else the checkpoint holds.

    Raises:
        UserError: If there is no checkpoint at the path, or it has the states of another number of optimizers.
    """
    if _is_sharded_checkpoint(request.path):
        return _load_shards(root, request)
    if _is_full_checkpoint(request.path):
        return _load_file(root, request)
    raise UserError(
        f"There is no checkpoint at {request.path}: expected a file, or a folder with the shards of a checkpoint."
    )


def _load_shards(root: nn.Module, request: LoadRequest) -> dict[str, Any]:
    module_state = {"model": get_model_state_dict(root)}
    planner = DefaultLoadPlanner(allow_partial_load=not request.strict)
    load(module_state, checkpoint_id=request.path, planner=planner)
    set_model_state_dict(root, module_state["model"], options=StateDictOptions(strict=request.strict))
    for index, optimizer in enumerate(request.optimizers):
        key = f"optimizer_{index}"
        state = {key: get_optimizer_state_dict(root, optimizer)}
        load(state, checkpoint_id=request.path)
        set_optimizer_state_dict(root, optimizer, optim_state_dict=state[key])
    weights_only = request.weights_only
    rest: dict[str, Any] = torch.load(request.path / _METADATA_FILENAME, weights_only=weights_only)
    return rest


def _load_file(root: nn.Module, request: LoadRequest) -> dict[str, Any]:
    weights_only = request.weights_only
    # mapped into memory: rank 0 reads the tensors one by one, the others none
    checkpoint: dict[str, Any] = torch.load(request.path, mmap=True, map_location="cpu", weights_only=weights_only)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=request.strict)
    set_model_state_dict(root, checkpoint.pop("state_dict"), options=options)
    states = checkpoint.get("optimizer_states", [])
    if request.optimizers and len(states) != len(request.optimizers):
        raise UserError(
            f"The checkpoint holds the states of {len(states)} optimizers, but `configure_optimizers` made "
            f"{len(request.optimizers)}; make as many, or load the weights alone."
        )
    for optimizer, whole in zip(request.optimizers, states):
        if whole["state"]:
            named = _rekey_optimizer_state_if_needed(whole, root)
            set_optimizer_state_dict(root, optimizer, optim_state_dict=named, options=options)
    return checkpoint


@contextmanager
def allow_missing_weights(module: Any, enabled: bool) -> Iterator[None]:
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
    aside = path.with_name(path.name + ASIDE)
    return aside if aside.exists() and not path.exists() else path
