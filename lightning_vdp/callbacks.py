"""Callbacks that show what the strategy does."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_vdp.errors import UserError
from lightning_vdp.strategy import UlyssesVisionDPStrategy
from lightning_vdp.vision.monitor import Stopwatch, VisionLoad

__all__ = ["VisionLoadMonitor"]


class VisionLoadMonitor(Callback):
    """Logs what each rank's vision tower did in training since the last time, whenever the Trainer logs a step.

    Logged are, for each rank R, ``vision/units_R``, ``vision/patches_R``, ``vision/bytes_received_R`` and
    ``vision/tower_seconds_R``, and once ``vision/load``: the largest predicted load over the mean, at worst over all
    groups; 1 is even. In groups of one rank nothing is divided, and nothing logged.

    Args:
        per_rank: False logs the largest value and the mean over ranks (``_max``, ``_mean``) instead of each rank's.

    Attributes:
        total_units: Units that this rank encoded in training since the callback was made.
    """

    NAMES = ("units", "patches", "bytes_received", "tower_seconds")

    def __init__(self, per_rank: bool = True) -> None:
        self.per_rank = per_rank
        self.total_units = 0
        self._trainer: pl.Trainer | None = None
        self._sums = [0, 0, 0]
        self._load = 1.0
        self._watches: list[Stopwatch] = []

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, UlyssesVisionDPStrategy):
            raise UserError(
                f"VisionLoadMonitor watches UlyssesVisionDPStrategy, but the Trainer has {type(strategy).__name__}; remove the "
                "callback or set strategy='ulysses_vdp'."
            )
        if strategy.sequence_parallel_size == 1:
            rank_zero_warn("VisionLoadMonitor logs nothing: in sequence groups of one rank no images are divided.")
        self._trainer = trainer
        if self._observe not in strategy.mesh.vision_observers:
            strategy.mesh.vision_observers.append(self._observe)

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self._trainer = None
        observers = getattr(getattr(trainer.strategy, "_mesh", None), "vision_observers", [])
        if self._observe in observers:
            observers.remove(self._observe)

    def _observe(self, load: VisionLoad) -> None:
        # validation between training steps is not what is logged with them
        if self._trainer is None or not self._trainer.training:
            return
        self.total_units += load.units
        for index, value in enumerate((load.units, load.patches, load.bytes_received)):
            self._sums[index] += value
        if sum(load.loads):
            self._load = max(self._load, max(load.loads) * len(load.loads) / sum(load.loads))
        if self._trainer.log_every_n_steps:  # type: ignore[attr-defined]
            self._watches.append(load.tower)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, UlyssesVisionDPStrategy)
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        # the same on every rank: what follows is a collective
        if strategy.sequence_parallel_size == 1 or not (stepped and trainer._logger_connector.should_update_logs):
            return
        rows = self._gather(strategy)
        values = {"vision/load": float(rows[:, -1].max())}
        for column, name in enumerate(self.NAMES):
            if self.per_rank:
                values.update({f"vision/{name}_{rank}": float(row[column]) for rank, row in enumerate(rows)})
            else:
                values[f"vision/{name}_max"] = float(rows[:, column].max())
                values[f"vision/{name}_mean"] = float(rows[:, column].mean())
        pl_module.log_dict(values, rank_zero_only=True, batch_size=1)

    def _gather(self, strategy: UlyssesVisionDPStrategy) -> torch.Tensor:
        """One row ``[units, patches, bytes, seconds, load]`` for each rank of the world."""
        mine = [*map(float, self._sums), sum(watch.seconds for watch in self._watches), self._load]
        self._sums, self._watches, self._load = [0, 0, 0], [], 1.0
        mesh = strategy.mesh
        row = torch.tensor(mine, dtype=torch.float64, device=mesh.header_device)
        rows = row.new_empty(mesh.world_size * len(mine))
        dist.all_gather_single(rows, row, group=mesh.header_group)
        return rows.view(mesh.world_size, -1).cpu()
