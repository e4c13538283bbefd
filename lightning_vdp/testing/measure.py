"""Counting what collectives move, at the collective itself, and what a forward keeps for backward."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vdp.fsdp.gradients import local

__all__ = ["ByteCounter", "SavedBytes"]


class ByteCounter(TorchDispatchMode):
    """Within it, counts the bytes that this process receives from other ranks in all-to-all exchanges and all-gathers.

    Args:
        group: The group whose exchanges are counted; None counts those of all groups.

    Attributes:
        received: The bytes that each exchange brought, in order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._group = group
        self.received: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.__name__.startswith(("alltoall_base_", "_allgather_base_")):
            group = dist.ProcessGroup.unbox(args[2])
            if self._group in (None, group):
                gathers = func.__name__.startswith("_allgather_base_")
                self.received.append(_gathered(*args[:2]) if gathers else _exchanged(args[0], args[3], group))
        return func(*args, **(kwargs or {}))


def _gathered(output: Tensor, sent: Tensor) -> int:
    return (output.numel() - sent.numel()) * output.element_size()


def _exchanged(output: Tensor, sizes: list[int] | None, group: dist.ProcessGroup) -> int:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = sizes or [output.shape[0] // ranks] * ranks
    row = output.element_size() * (output.numel() // output.shape[0] if output.shape[0] else 0)
    return row * (sum(sizes) - sizes[rank])


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within it, counts the bytes that forwards keep for backward: each storage once and whole, parameters left out.

    Args:
        module: The module whose parameters are left out; FSDP may have divided it.
        given: Tensors that are left out because somebody else holds them too, such as those of the batch.
    """

    def __init__(self, module: nn.Module, given: Iterable[Tensor] = ()) -> None:
        self._module = module
        self._given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self._kept: dict[int, int] = {}
        super().__init__(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._given | self._parameters():
            self._kept[storage._cdata] = storage.nbytes()
        return tensor

    def _parameters(self) -> set[int]:
        """Where parameters are now: FSDP gathers them into tensors of its own."""
        found = {local(parameter).untyped_storage().data_ptr() for parameter in self._module.parameters()}
        for wrapper in FullyShardedDataParallel.fsdp_modules(self._module):
            gathered = getattr(getattr(wrapper, "_flat_param", None), "_full_param_padded", None)
            if gathered is not None:
                found.add(gathered.untyped_storage().data_ptr())
        return found

    @property
    def total(self) -> int:
        """Bytes so far."""
        return sum(self._kept.values())
