"""Predictions that do not count: of batches that a rank repeats because other ranks have more."""

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len

from lightning_vdp.batch.loader import AgreedLoader

__all__ = ["is_repeated"]


def is_repeated(trainer: "pl.Trainer", *indices: Any) -> bool:
    """Whether the batch that was just predicted is one that this rank repeats.

    Args:
        trainer: The Trainer, while it predicts.
        indices: Arguments of `predict_step` behind the batch, as far as it takes them: the batch's index and the loader's.
    """
    loaders = trainer.predict_loop._combined_loader
    flattened = [] if loaders is None else loaders.flattened
    loader = flattened[indices[1] if len(indices) > 1 else 0] if flattened else None
    if not isinstance(loader, AgreedLoader) or loader.batches_before_end is None:
        return False
    # a step that does not take the index: where lengths are known, nothing is fetched in advance
    return bool(indices[0] >= loader.batches_before_end) if indices else sized_len(loader) is not None
