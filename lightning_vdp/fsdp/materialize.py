"""Weights that rank 0 alone has loaded, given to the other ranks part by part: none of them ever holds the whole model."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_vdp.agreement import gather_numbers
from lightning_vdp.errors import UserError
from lightning_vdp.families.wrappers import class_name, plain_name
from lightning_vdp.fsdp.backend import FSDPBackend, Wrapping
from lightning_vdp.mesh import SequenceMesh

__all__ = ["fill_from_rank_zero", "some_weights_are_absent"]


def some_weights_are_absent(module: nn.Module, backend: FSDPBackend, wrapping: Wrapping, mesh: SequenceMesh) -> bool:
    """Whether some ranks have weights on the meta device, which are to get rank 0's values; every rank calls it.

    Args:
        module: The LightningModule before it is wrapped.
        backend: The version of FSDP.
        wrapping: How the module will be wrapped; a `param_init_fn` fills weights by itself.
        mesh: The ranks.

    Raises:
        UserError: If the weights cannot be filled: rank 0 lacks them too, or ranks have built different models.
    """
    absent = any(value.is_meta for value in module.parameters())
    if wrapping.arguments.get("param_init_fn") is not None:
        return False
    absent_by_rank = gather_numbers(mesh, int(absent))
    if not any(absent_by_rank):
        return False
    signature = [(plain_name(name), value.shape, value.dtype) for name, value in module.named_parameters()]
    if absent_by_rank[0]:
        problem: str | None = "rank 0 has weights on the meta device; load them there with `from_pretrained`"
    elif len(set(gather_numbers(mesh, _hash_of(signature)))) > 1:
        problem = (
            "ranks have other names, shapes or dtypes of weights than rank 0; give `from_pretrained` and `from_config` the "
            "same config and `dtype`"
        )
    else:
        problem = backend.find_absent_weights_problem()
    if problem is not None:
        raise UserError(f"{class_name(module)} cannot be set up: {problem}.")
    return True


def _hash_of(values: Any) -> int:
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
        values_of_child = (*child._parameters.values(), *child._buffers.values())
        if any(value is not None and value.is_meta for value in values_of_child):
            child.to_empty(device=device, recurse=False)
    for values, name in first.values():
        sent = values[name].detach().to(device).contiguous()
        dist.broadcast(sent, src=0)
        if rank > 0:
            values[name].detach().copy_(sent)
    for values, name, (owner, owner_name) in shared:
        values[name] = owner[owner_name]
