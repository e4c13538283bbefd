"""State dicts of FSDP1 on the CPU, where torch's offload of full state dicts to the CPU crashes the process."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

__all__ = ["full_state_on_cpu"]


@contextmanager
def full_state_on_cpu(root: nn.Module, rank0_only: bool = True) -> Generator[None, None, None]:
    """Within it, state dicts of a root on the CPU are whole.

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
