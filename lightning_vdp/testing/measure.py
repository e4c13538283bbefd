"""Counting what collectives move, at the collective itself, and what a forward keeps for backward."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ByteCounter", "SavedBytes"]


class ByteCounter(TorchDispatchMode):
    """Within it, counts the bytes that this process receives from other ranks in all-to-all exchanges and all-gathers.

    Attributes:
        received: Bytes of each exchange in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.__name__.startswith("alltoall_base_"):
            output, _, group, output_sizes, *_ = args
            assert isinstance(output, Tensor)
            ranks = dist.get_world_size(dist.ProcessGroup.unbox(group))
            rank = dist.get_rank(dist.ProcessGroup.unbox(group))
            sizes = output_sizes or [output.shape[0] // ranks] * ranks
            row = output.element_size() * (output.numel() // output.shape[0] if output.shape[0] else 0)
            self.received.append(row * (sum(sizes) - sizes[rank]))
        elif func.namespace == "c10d" and func.__name__.startswith("_allgather_base_"):
            output, own, *_ = args
            self.received.append((output.numel() - own.numel()) * output.element_size())
        return func(*args, **(kwargs or {}))


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within it, counts the bytes that forwards keep for backward: each storage once and whole, parameters left out.

    Args:
        module: Whose parameters are left out; FSDP may have divided it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: dict[int, int] = {}
        super().__init__(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters():
            self._kept[storage._cdata] = storage.nbytes()
        return tensor

    def _parameters(self) -> set[int]:
        """Where parameters are now: FSDP gathers them into tensors of its own."""
        found = {parameter.untyped_storage().data_ptr() for parameter in self._module.parameters()}
        for wrapper in FullyShardedDataParallel.fsdp_modules(self._module):
            gathered = getattr(getattr(wrapper, "_flat_param", None), "_full_param_padded", None)
            if gathered is not None:
                found.add(gathered.untyped_storage().data_ptr())
        return found

    @property
    def total(self) -> int:
        """Bytes so far."""
        return sum(self._kept.values())
