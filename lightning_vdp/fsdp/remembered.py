"""The FSDP root that an earlier run left on a module, and the parts that FSDP gathers on their own."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightning_vdp.errors import UserError
from lightning_vdp.families.wrappers import unwrap
from lightning_vdp.fsdp.fsdp2 import sharded_parts
from lightning_vdp.fsdp.policy import gathered_apart

__all__ = ["WrappedRoot", "fsdp_parts", "known_root", "remember", "wraps_more_than_default"]


_ROOT = "_vdp_fsdp_root"


_PART = "_vdp_fsdp_part"


# what acts only while wrapping, so that a later run may leave it out or give it anew
_FOR_WRAPPING_ONLY = {"auto_wrap_policy", "param_init_fn"}


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

    Args:
        module: The LightningModule.
        arguments: What this run would wrap it with.

    Raises:
        UserError: If the earlier run wrapped it with other arguments, which FSDP cannot change afterwards, or stopped
            in the middle of a forward, or if parts of it belong to another LightningModule.
    """
    name = type(module).__name__
    known: WrappedRoot | None = vars(module).get(_ROOT)
    if known is None:
        if any(_PART in vars(child) for child in module.modules()):
            raise UserError(
                f"A part of {name} was wrapped by FSDP in an earlier run as part of another LightningModule, which cannot be "
                "undone; keep using that one, or build the model anew and load its weights from a checkpoint."
            )
        return None
    changed = [
        argument
        for argument in sorted((known.arguments.keys() | arguments.keys()) - _FOR_WRAPPING_ONLY)
        if known.arguments.get(argument) != arguments.get(argument)
    ]
    if changed:
        raise UserError(
            f"{name} was wrapped by FSDP in an earlier run with other values of "
            f"{', '.join(f'`{argument}`' for argument in changed)}, which cannot be changed afterwards; build the module anew."
        )
    if not all(_is_idle(part) for part in fsdp_parts(known.root)):
        raise UserError(
            f"An earlier run of {name} stopped in the middle of a step, which leaves its weights gathered in part; build the "
            "module anew and continue from a checkpoint."
        )
    return known.root


def remember(module: nn.Module, parts: list[nn.Module], root: nn.Module, remembered: dict[str, Any]) -> None:
    vars(module)[_ROOT] = WrappedRoot(root, remembered)
    for part in parts:
        vars(part)[_PART] = True


def fsdp_parts(root: nn.Module) -> list[nn.Module]:
    """Modules of a tree whose weights FSDP of either version gathers on their own, the root among them."""
    return sharded_parts(root) or list(FullyShardedDataParallel.fsdp_modules(root))


def _is_idle(part: nn.Module) -> bool:
    state: Any = part._get_fsdp_state()._training_state if isinstance(part, FSDPModule) else part.training_state
    return bool(state.name == "IDLE")


def wraps_more_than_default(root: nn.Module) -> bool:
    """Whether FSDP gathers weights of other modules than blocks and heads on their own, such as an embedding's."""
    is_apart = gathered_apart(root)
    return any(not is_apart(part) for part in fsdp_parts(root) if unwrap(part) is not unwrap(root))
