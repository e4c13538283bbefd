"""Workers that read batches for one rank."""

import os
from functools import partial

from lightning.fabric.utilities.seed import pl_worker_init_function

__all__ = ["seed_workers_by_replica"]


def seed_workers_by_replica(loader: object, replica: int) -> None:
    """Lets the ranks of a group draw the same augmentations, where `seed_everything` was asked to seed workers.

    Lightning seeds workers by rank. A loader with a `worker_init_fn` of its own is left alone.

    Args:
        loader: The data loader.
        replica: The sequence group that this rank belongs to.
    """
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(loader, "worker_init_fn", loader) is None:
        vars(loader)["worker_init_fn"] = partial(pl_worker_init_function, rank=replica)
