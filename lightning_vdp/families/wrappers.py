"""Modules and names inside the wrappers of FSDP and activation checkpointing."""

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_layers import GradientCheckpointingLayer

__all__ = ["class_name", "is_block", "plain_name", "unwrap"]


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the module inside FSDP's and activation checkpointing's wrappers."""
    while True:
        inner = getattr(module, "_fsdp_wrapped_module", None) or getattr(module, "_checkpoint_wrapped_module", None)
        if inner is None:
            return module
        module = inner


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's class as its author wrote it: `fully_shard` makes classes of its own."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def plain_name(name: str) -> str:
    """Returns a module's or parameter's name without FSDP's and activation checkpointing's wrappers."""
    for wrapper in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module"):
        name = name.replace(f".{wrapper}", "").replace(f"{wrapper}.", "")
    return name


def is_block(module: nn.Module) -> bool:
    """Whether gradient checkpointing knows the module: a decoder layer or a block of the vision tower."""
    return isinstance(unwrap(module), GradientCheckpointingLayer)
