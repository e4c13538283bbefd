"""Continuing in the middle of an epoch: each sample once, also when the number of replicas changed."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import lightning.pytorch as pl
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_vdp.errors import UserError

__all__ = ["REPLICAS_KEY", "continue_samplers", "rescale_progress", "restore_loaders"]

REPLICAS_KEY = "data_parallel_size"
"""Where a checkpoint says in batches of how many replicas it counts."""

_COUNTERS = ("ready", "started", "processed", "completed")


def rescale_progress(checkpoint: dict[str, Any], replicas: int) -> None:
    """Counts the batches of a checkpoint's running epoch in batches of this run's replicas, in place.

    Args:
        checkpoint: What the checkpoint of a fit holds besides weights and optimizer states.
        replicas: Number of replicas that continue.

    Raises:
        UserError: If the samples seen are no whole number of batches of so many replicas.
    """
    old_replicas = checkpoint.get(REPLICAS_KEY, replicas)
    if old_replicas == replicas:
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counters in (progress["current"], progress["total"]):
        batches = counters["ready"] * old_replicas
        if batches % replicas and counters is progress["current"] and not progress["is_last_batch"]:
            raise UserError(
                f"The checkpoint was made after {counters['ready']} batches of each of {old_replicas} replicas, which "
                f"{replicas} replicas cannot have seen evenly; continue with a number of replicas that divides {batches}, "
                "or from a checkpoint made at the end of an epoch."
            )
        ready = -(-batches // replicas)
        counters.update({name: ready - (counters["ready"] - counters[name]) for name in _COUNTERS})


class _Rest:
    """Yields what a sampler has left after some samples, and takes itself out again."""

    def __init__(self, owner: BatchSampler, sampler: DistributedSampler[Any], seen: int, epoch: int) -> None:
        self._owner, self._sampler, self._seen, self._epoch = owner, sampler, seen, epoch

    def __iter__(self) -> Iterator[Any]:
        self._owner.sampler = self._sampler
        # the Trainer sets the epoch only after workers have begun to read
        self._sampler.set_epoch(self._epoch)
        return islice(iter(self._sampler), self._seen, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch


def continue_samplers(trainer: "pl.Trainer") -> list[DataLoader[Any]]:
    """Lets data loaders whose sampler the Trainer made go on where the checkpoint of a fit was made.

    Other data loaders are left to Lightning, which continues those that have `state_dict` and `load_state_dict`, and warns
    of others.

    Args:
        trainer: At the start of training.

    Returns:
        The loaders, which look resumable to Lightning until `restore_loaders`.
    """
    loop = trainer.fit_loop
    seen = _batches_seen(loop.epoch_loop)
    if not loop.restarting or not 0 < seen < trainer.num_training_batches:
        return []
    continued: list[DataLoader[Any]] = []
    epoch = cast(Any, loop.epoch_progress.current).processed
    assert loop._combined_loader is not None
    for loader in loop._combined_loader.flattened:
        batches: Any = getattr(loader, "batch_sampler", None)
        known = isinstance(getattr(loader, "loader", loader), DataLoader) and type(batches) is BatchSampler
        if not known or hasattr(loader, "load_state_dict") or not isinstance(batches.sampler, DistributedSampler):
            continue
        rest = _Rest(batches, batches.sampler, seen * batches.batch_size, epoch)
        batches.sampler = rest
        # Lightning would warn that it is not
        vars(loader).update(state_dict=dict, load_state_dict=lambda state: None)
        continued.append(loader)
    # the Trainer's own iterator may have begun to read already
    assert loop._data_fetcher is not None
    iter(loop._data_fetcher)
    return continued


def restore_loaders(loaders: list[DataLoader[Any]]) -> None:
    """Takes back what `continue_samplers` put on loaders, which a later checkpoint must not see."""
    while loaders:
        loader = vars(loaders.pop())
        del loader["state_dict"], loader["load_state_dict"]


def _batches_seen(loop: Any) -> int:
    progress = loop.batch_progress
    # made in a hook at the end of a batch, which the counter of completed batches has not reached yet
    return int(progress.current.completed + loop.restarted_on_train_batch_end)
