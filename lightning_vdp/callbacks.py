"""Callbacks that show what the strategy does."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_vdp.strategy import UlyssesVisionDPStrategy
from lightning_vdp.vision.load import VisionLoad

__all__ = ["VisionLoadMonitor"]


class VisionLoadMonitor(Callback):
    """Logs what each rank's vision tower did since the last time, at the Trainer's `log_every_n_steps`.

    Logged are, for each rank R, ``vision/units_R``, ``vision/patches_R``, ``vision/bytes_received_R`` and
    ``vision/tower_seconds_R``, and once ``vision/load``: the largest predicted load over the mean, at worst over all
    groups; 1 is even.

    Args:
        per_rank: False logs the largest value and the mean over ranks (``_max``, ``_mean``) instead of each rank's.

    Attributes:
        total_units: Units that this rank encoded since the callback was made.
    """

    NAMES = ("units", "patches", "bytes_received", "tower_seconds")

    def __init__(self, per_rank: bool = True) -> None:
        self.per_rank = per_rank
        self.total_units = 0
        self._seen: list[VisionLoad] = []

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if not isinstance(trainer.strategy, UlyssesVisionDPStrategy):
            raise ValueError(
                f"VisionLoadMonitor watches UlyssesVisionDPStrategy, but the Trainer has {type(trainer.strategy).__name__}; "
                "remove the callback or set strategy='ulysses_vdp'."
            )
        observers = trainer.strategy.mesh.vision_observers
        if self._observe not in observers:
            observers.append(self._observe)

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        observers = getattr(getattr(trainer.strategy, "_mesh", None), "vision_observers", [])
        if self._observe in observers:
            observers.remove(self._observe)

    def _observe(self, load: VisionLoad) -> None:
        self.total_units += load.units
        self._seen.append(load)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # every rank counts the same steps: what follows is a collective
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every == 0 or (batch_idx + 1) % every:
            return
        assert isinstance(trainer.strategy, UlyssesVisionDPStrategy)
        rows = self._gather(trainer.strategy)
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
        seen, self._seen = self._seen, []
        mine = [
            float(sum(load.units for load in seen)),
            float(sum(load.patches for load in seen)),
            float(sum(load.bytes_received for load in seen)),
            sum(load.tower.seconds for load in seen),
            max((max(load.loads) * len(load.loads) / sum(load.loads) for load in seen if sum(load.loads)), default=1.0),
        ]
        mesh = strategy.mesh
        row = torch.tensor(mine, dtype=torch.float64, device=mesh.header_device)
        rows = row.new_empty(mesh.world_size * len(mine))
        dist.all_gather_single(rows, row, group=mesh.header_group)
        return rows.view(mesh.world_size, -1).cpu()
