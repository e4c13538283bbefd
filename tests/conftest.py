import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only

pytest_plugins = ["lightning_vdp.testing.plugin"]
# forked ranks inherit this process: threads of its own would be missing in them
torch.set_num_threads(1)


def slow(*cases: Any) -> list[Any]:
    """Cases that run with -m slow."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


@pytest.fixture(autouse=True)
def _leave_this_process_as_found() -> Iterator[None]:
    """Takes back what a Trainer in this process leaves behind, which forked ranks would inherit."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    rank_zero_only.rank = fabric_rank_zero_only.rank = 0
    if dist.is_initialized():
        dist.destroy_process_group()
