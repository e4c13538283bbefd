"""Where a Trainer is in its run."""

import lightning.pytorch as pl

__all__ = ["locate"]


def locate(trainer: "pl.Trainer") -> tuple[str, int]:
    """The stage, and which of its batches is at hand: in training since the start, elsewhere in this loop's run."""
    stage = trainer.state.stage
    if trainer.training:
        return "training", max(trainer.fit_loop.epoch_loop.total_batch_idx, 0)
    progress = getattr(trainer._active_loop, "batch_progress", None)
    return ("forward" if stage is None else stage.value), max(progress.current.ready - 1, 0) if progress else 0
