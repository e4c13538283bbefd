"""The FSDP root that an earlier run left on a module."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_vdp.errors import UserError
from lightning_vdp.families.wrappers import class_name, unwrap
from lightning_vdp.fsdp.backend import FSDPBackend, Wrapping
from lightning_vdp.fsdp.policy import fsdp_parts

__all__ = ["known_root", "remember"]

_ROOT = "_vdp_fsdp_root"
_PART = "_vdp_fsdp_part"
# what acts only while wrapping, so that a later run may leave it out or give it anew
_FOR_WRAPPING_ONLY = {"auto_wrap_policy", "param_init_fn"}


@dataclass(frozen=True)
class _WrappedRoot:
    """The FSDP root of a LightningModule, kept on it: wrapping a module a second time would break it.

    Not a module, so that the LightningModule does not count its own root among its children.

    Args:
        root: The root.
        choices: What it was wrapped with.
    """

    root: nn.Module
    choices: dict[str, Any]


def known_root(module: nn.Module, backend: FSDPBackend, wrapping: Wrapping) -> nn.Module | None:
    """Returns the root that an earlier run left on a module, or None.

    Args:
        module: The LightningModule.
        backend: The version of FSDP that this run would wrap it with.
        wrapping: How this run would wrap it.

    Raises:
        UserError: If the earlier run wrapped it in another way, which FSDP cannot change afterwards, or stopped
            in the middle of a forward, or if parts of it belong to another LightningModule.
    """
    name = class_name(module)
    known: _WrappedRoot | None = vars(module).get(_ROOT)
    if known is None:
        if any(_PART in vars(child) for child in module.modules()):
            raise UserError(
                f"A part of {name} was wrapped by FSDP in an earlier run as part of another LightningModule, which cannot be "
                "undone; keep using that one, or build the model anew and load its weights from a checkpoint."
            )
        return None
    choices = _choices(backend, wrapping)
    changed = [
        argument
        for argument in sorted((known.choices.keys() | choices.keys()) - _FOR_WRAPPING_ONLY)
        if known.choices.get(argument) != choices.get(argument)
    ]
    if changed:
        raise UserError(
            f"{name} was wrapped by FSDP in an earlier run with other values of "
            f"{', '.join(f'`{argument}`' for argument in changed)}, which cannot be changed afterwards; build the module anew."
        )
    # of the same version from here on
    if not all(backend.is_idle(part) for part in fsdp_parts(known.root)):
        raise UserError(
            f"An earlier run of {name} stopped in the middle of a step, which leaves its weights gathered in part; build the "
            "module anew and continue from a checkpoint."
        )
    return known.root


def remember(module: nn.Module, root: nn.Module, backend: FSDPBackend, wrapping: Wrapping) -> None:
    """Keeps a module's root for `known_root`.

    Args:
        module: The LightningModule.
        root: Its root.
        backend: The version of FSDP that it was wrapped with.
        wrapping: How it was wrapped.
    """
    vars(module)[_ROOT] = _WrappedRoot(root, _choices(backend, wrapping))
    for part in module.children():
        vars(unwrap(part))[_PART] = True


def _choices(backend: FSDPBackend, wrapping: Wrapping) -> dict[str, Any]:
    """What later runs of the same module must not change, by the strategy's arguments."""
    return {
        **wrapping.arguments,
        "activation_checkpointing_policy": bool(wrapping.activation_checkpointing),
        "fsdp_version": backend.version,
    }
