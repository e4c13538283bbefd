"""Frozen vision towers that every rank holds whole."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_vdp.errors import UserError
from lightning_vdp.families.find import DividedModel
from lightning_vdp.families.wrappers import class_name

__all__ = ["keep_towers_whole"]


def keep_towers_whole(
    models: Iterable[DividedModel], arguments: dict[str, Any], device: torch.device
) -> list[nn.Module]:
    """Moves frozen towers to their device, for FSDP to ignore them.

    Args:
        models: The models.
        arguments: Arguments of FSDP.
        device: Where this rank computes.

    Returns:
        The towers.

    Raises:
        UserError: If a tower is trained, or its weights were to come from rank 0.
    """
    towers = []
    for model in models:
        if model.tower is None:
            continue
        trainable = next((name for name, value in model.tower.named_parameters() if value.requires_grad), None)
        if trainable is not None:
            raise UserError(
                f"`shard_frozen_tower=False` needs a frozen vision tower, but `{trainable}` of {class_name(model.tower)} at "
                f"'{model.name}' is trainable; freeze it or leave the argument out."
            )
        if arguments.get("sync_module_states"):
            raise UserError(
                "`sync_module_states` does not reach a tower that `shard_frozen_tower=False` keeps whole; load its weights on "
                "every rank, or leave one of the two out."
            )
        towers.append(model.tower.to(device))
    return towers
