"""Handing a LightningModule to FSDP: the one seam behind which versions of FSDP differ."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy

from lightning_vdp.models import is_block

__all__ = ["WrappedRoot", "known_root", "wrap"]

_ROOT = "_vdp_fsdp_root"


class WrappedRoot:
    """The FSDP root of a LightningModule, kept on it: wrapping a module a second time would break it.

    Not a module, so that the LightningModule does not count its own root among its children.

    Args:
        root: The root.
        arguments: What it was wrapped with.
    """

    def __init__(self, root: nn.Module, arguments: dict[str, Any]) -> None:
        self.root = root
        self.arguments = arguments


def known_root(module: nn.Module, arguments: dict[str, Any]) -> nn.Module | None:
    """Returns the root that an earlier run left on a module, or None.

    Raises:
        ValueError: If the earlier run wrapped it with other arguments, which FSDP cannot change afterwards.
    """
    known: WrappedRoot | None = vars(module).get(_ROOT)
    if known is None:
        return None
    changed = [
        name
        for name in sorted(known.arguments.keys() | arguments.keys())
        if name != "auto_wrap_policy" and known.arguments.get(name) != arguments.get(name)
    ]
    if changed:
        raise ValueError(
            f"{type(module).__name__} was wrapped by FSDP in an earlier run with other values of "
            f"{', '.join(f'`{name}`' for name in changed)}, which cannot be changed afterwards; build the module anew."
        )
    return known.root


def wrap(module: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    """Wraps a module with FSDP1, by default each block that gradient checkpointing knows and then the root.

    Args:
        module: The LightningModule; submodules may be wrapped already.
        arguments: For :class:`torch.distributed.fsdp.FullyShardedDataParallel`.

    Returns:
        The root, which is also remembered for later runs.
    """
    policy = arguments.get("auto_wrap_policy") or CustomPolicy(is_block)
    if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
        # the user wrapped submodules in `configure_model`; the root takes the rest
        policy = None
    root = FullyShardedDataParallel(module, **{**arguments, "auto_wrap_policy": policy})
    vars(module)[_ROOT] = WrappedRoot(root, arguments)
    return root
