"""Running the strategy from a notebook cell, where no script can be started again: processes are forked."""

import os
import tempfile
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher, _WorkerOutput
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

__all__ = ["NotebookLauncher"]


class NotebookLauncher(_MultiProcessingLauncher):
    """Forks one process for each device of this node, and brings the weights back that they trained.

    Lightning's own rules for notebooks hold: CUDA must not be initialized in the cells before, the devices are those of
    one node, and each Trainer fits once.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, start_method="fork")

    @override
    def _collect_rank_zero_results(self, trainer: "pl.Trainer", results: Any) -> _WorkerOutput | None:
        weights = None
        if trainer.state.fn == TrainerFn.FITTING:
            # Lightning would take each rank's own parts for the weights
            weights = self._strategy.lightning_module_state_dict()
        if self._strategy.global_rank != 0:
            return None
        path = None
        if weights is not None:
            path = os.path.join(tempfile.mkdtemp(), "weights.ckpt")
            self._strategy.checkpoint_io.save_checkpoint(weights, path)
        callback = trainer.checkpoint_callback
        best = getattr(callback, "best_model_path", None)
        return _WorkerOutput(best, path, trainer.state, results, self.get_extra_results(trainer))
