"""What one fit of the check is made of, and what it notes down besides losses and gradients."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vdp.strategy import UlyssesVisionDPStrategy
from lightning_vdp.testing.measure import SavedBytes
from lightning_vdp.testing.parity import ParityModule
from lightning_vdp.vision.monitor import VisionLoad

__all__ = ["Notes", "ProbeModule"]


@dataclass
class Notes:
    """What one rank did.

    Args:
        lengths: For each step, positions of the rank's shard, or None where the decoder ran whole.
        units: For each step and kind of pixels, units that the rank encoded.
        saved_bytes: Bytes that the first step's forward kept for backward, without parameters.
    """

    lengths: list[int | None] = field(default_factory=list)
    units: list[dict[str, int]] = field(default_factory=list)
    saved_bytes: int = 0


class ProbeModule(ParityModule):
    """A `ParityModule` that notes how the strategy divided its steps.

    Args:
        model: Model to train, as in `ParityModule`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.notes = Notes()

    def on_train_start(self) -> None:
        """Listens to the tower."""
        strategy = self.trainer.strategy
        if isinstance(strategy, UlyssesVisionDPStrategy):
            strategy.mesh.vision_observers.append(self._observe)

    def _observe(self, load: VisionLoad) -> None:
        units = self.notes.units[-1]
        units[load.modality] = units.get(load.modality, 0) + load.units

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        self.notes.units.append({})
        if batch_idx:
            outputs = self.model(**batch)
        else:
            root = self.trainer.strategy.model
            assert root is not None
            saved = SavedBytes(root)
            with saved:
                outputs = self.model(**batch)
            self.notes.saved_bytes = saved.total
        shard = getattr(outputs, "sequence_shard", None)
        self.notes.lengths.append(None if shard is None else shard.size)
        loss: Tensor = outputs.loss
        return loss

    def configure_optimizers(self) -> Optimizer:
        """SGD without momentum, which would move what a step does not use where FSDP gives it zeros for no gradient."""
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)
