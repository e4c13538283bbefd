"""The vision side of a model alone: its tower, the exchange and the merge of features, without decoder layers."""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.measure import check_parity, gradients, largest_difference, worst
from benchmarks.models import qwen
from lightning_vdp.families.find import find_models
from lightning_vdp.forward.divide import divide_models
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.settings import Settings
from lightning_vdp.shards import SequenceShard, shard_sequence

__all__ = ["VisionSides"]


class VisionSides:
    """Vision DP beside towers that encode every image on every rank, with the same weights, on one sequence group.

    A side's loss weighs each row of features by another factor; each rank's loss has the rows of its shard, and sums over
    ranks equal the loss and gradients of the whole.

    Args:
        batch: Is moved to this rank's device.
        device: This rank's device.
        tower_hidden: Width of the tower.
        tower_layers: Blocks of the tower.
        **settings: Fields of `Settings` for Vision DP.
    """

    def __init__(
        self, batch: dict[str, Tensor], device: torch.device, tower_hidden: int, tower_layers: int = 4, **settings: Any
    ) -> None:
        model = qwen(layers=0, hidden=64, tower_layers=tower_layers, tower_hidden=tower_hidden)
        model.to(device.type)  # type: ignore[arg-type]
        model.get_input_embeddings().requires_grad_(False)
        self.batch = {name: value.to(device) for name, value in batch.items()}
        self.mesh = SequenceMesh(device.type, 1, dist.get_world_size())
        self.plain, self.redundant, self.divided = model, deepcopy(model), deepcopy(model)
        length = batch["input_ids"].shape[1]
        self.shard = SequenceShard(length, self.mesh.sequence_group)
        self._weights = torch.linspace(-1, 1, length, device=device)[None, :, None]
        for side, arguments in ((self.divided, settings), (self.redundant, {"vision_data_parallel": False})):
            divide_models(find_models(side), self.mesh, Settings(verify_first_batch=False, **arguments))

    def _whole(self, model: Any) -> None:
        hidden = model.model(**self.batch, use_cache=False).last_hidden_state
        model.zero_grad()
        (hidden * self._weights).sum().backward()

    def run_divided(self, around_forward: AbstractContextManager[Any] | None = None) -> None:
        """Forward and backward of this rank's share of the images."""
        with around_forward or nullcontext():
            hidden = self.divided.model(**self.batch, use_cache=False).last_hidden_state
        self.divided.zero_grad()
        own = shard_sequence(hidden, self.shard) * shard_sequence(self._weights, self.shard)
        own.sum().backward()

    def run_redundant(self) -> None:
        """Forward and backward of all images."""
        self._whole(self.redundant)

    def run_plain(self) -> None:
        """Forward and backward of all images in the model as it was; needs no other rank."""
        self._whole(self.plain)

    def parity(self, expected: PreTrainedModel) -> float:
        """Largest relative difference of the tower's gradients, summed over ranks, to those of another side.

        Args:
            expected: `redundant`, or `plain`, which rank 0 alone must have run. Both sides have run once.
        """
        found = gradients(self.divided.model.visual, self.mesh.sequence_group)
        difference = largest_difference(found, gradients(expected.model.visual)) if dist.get_rank() == 0 else 0.0
        return check_parity(worst(difference))
