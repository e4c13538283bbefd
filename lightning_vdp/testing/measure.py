"""Counting what collectives move, at the collective itself."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ByteCounter"]


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
