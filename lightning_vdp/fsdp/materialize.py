"""Weights that rank 0 alone has loaded, given to the other ranks part by part: none of them ever holds the whole model."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["fill_from_rank_zero", "hash_of"]


def hash_of(values: Any) -> int:
    """A digest of plain values that is the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:7], "big")


def fill_from_rank_zero(device: torch.device, rank: int, part: nn.Module, filled: set[int]) -> None:
    """Gives the parameters and buffers of a module rank 0's values; all ranks call it for the same modules in one order.

    Args:
        device: Where the values go.
        rank: This rank.
        part: The module.
        filled: Ids of the modules inside that have their values already; those of this call are added.
    """
    modules = [child for child in part.modules() if id(child) not in filled]
    filled |= set(map(id, modules))
    places: list[tuple[dict[str, Any], str]] = [
        (values, name)
        for child in modules
        for values in (child._parameters, child._buffers)
        for name, value in values.items()
        if value is not None
    ]
    # before anything is replaced: what modules share is one tensor until then
    first: dict[int, tuple[dict[str, Any], str]] = {}
    shared = [(values, name, first.setdefault(id(values[name]), (values, name))) for values, name in places]
    for child in modules:
        own = (*child._parameters.values(), *child._buffers.values())
        if any(value is not None and value.is_meta for value in own):
            child.to_empty(device=device, recurse=False)
    for values, name in first.values():
        sent = values[name].detach().to(device).contiguous()
        dist.broadcast(sent, src=0)
        if rank > 0:
            values[name].detach().copy_(sent)
    for values, name, (owner, owner_name) in shared:
        values[name] = owner[owner_name]
