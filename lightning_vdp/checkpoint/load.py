"""Reading checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
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

__all__ = ["ASIDE", "load_sharded_module", "loosened", "newest"]

ASIDE = ".old"
"""Ending of the name that a checkpoint has while another takes its place."""


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
        UserError: If there is no checkpoint at the path.
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
        raise UserError(
            f"There is no checkpoint at {path}: expected a file, or a folder with the shards of a checkpoint."
        )
    # mapped into memory: rank 0 reads the tensors one by one, the others none
    checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    set_model_state_dict(root, checkpoint.pop("state_dict"), options=options)
    states = checkpoint.get("optimizer_states", [])
    if optimizers and len(states) != len(optimizers):
        raise UserError(
            f"The checkpoint holds the states of {len(states)} optimizers, but `configure_optimizers` made {len(optimizers)}; "
            "make as many, or load the weights alone."
        )
    for optimizer, whole in zip(optimizers, states):
        if whole["state"]:
            named = _rekey_optimizer_state_if_needed(whole, root)
            set_optimizer_state_dict(root, optimizer, optim_state_dict=named, options=options)
    return checkpoint


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
    aside = path.with_name(path.name + ASIDE)
    return aside if aside.exists() and not path.exists() else path
