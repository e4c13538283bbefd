"""Handing a LightningModule to FSDP: the one seam behind which versions of FSDP differ."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from lightning_vdp.fsdp.fsdp2 import shard
from lightning_vdp.fsdp.policy import gathered_apart
from lightning_vdp.fsdp.remembered import remember

__all__ = ["shard_in_place", "wrap"]


def wrap(module: nn.Module, arguments: dict[str, Any], remembered: dict[str, Any]) -> nn.Module:
    """Wraps a module with FSDP1, by default blocks and heads on their own, and then the root.

    Args:
        module: The LightningModule; submodules may be wrapped already.
        arguments: For :class:`torch.distributed.fsdp.FullyShardedDataParallel`.
        remembered: What `known_root` compares in later runs.

    Returns:
        The root.
    """
    policy = arguments.get("auto_wrap_policy") or CustomPolicy(gathered_apart(module))
    if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
        # the user wrapped submodules in `configure_model`; the root takes the rest
        policy = None
    parts = list(module.children())
    root = FullyShardedDataParallel(module, **{**arguments, "auto_wrap_policy": policy})
    remember(module, parts, root, remembered)
    return root


def shard_in_place(
    module: nn.Module,
    arguments: dict[str, Any],
    remembered: dict[str, Any],
    mesh: DeviceMesh,
    checkpointing: dict[str, Any],
    fill: Callable[[nn.Module, set[int]], None] | None = None,
) -> None:
    """Does with FSDP2 what `wrap` does with FSDP1; the module itself becomes the root.

    Args:
        module: See `wrap`.
        arguments: See `wrap`.
        remembered: See `wrap`.
        mesh: What to shard over.
        checkpointing: Arguments of Lightning's activation checkpointing.
        fill: See `shard`.
    """
    shard(module, arguments, mesh, checkpointing, fill)
    remember(module, list(module.children()), module, remembered)


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
