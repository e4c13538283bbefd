"""What one forward needs to know about itself: it travels with the call's arguments and is stored nowhere else."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vdp.batch.host_copies import keep_host_copies, known_host_copy
from lightning_vdp.call.header import PendingHeaders
from lightning_vdp.call.randomness import OwnRandomness
from lightning_vdp.call.units import UnitPlan
from lightning_vdp.families.family import Family, Modality
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.run.observers import Observers
from lightning_vdp.settings import Settings
from lightning_vdp.shards import SequenceShard, shard_sequence

__all__ = ["CALL", "ForwardCall", "call_of", "with_call"]

CALL = "vdp_call"
"""Keyword argument that carries a `ForwardCall`; None in forwards that are not divided."""

_CALL = "_vdp_call"


class ForwardCall:
    """One divided forward of one model.

    Not a dataclass, so that wrappers which rebuild dataclasses among a module's arguments pass it on as it is.

    Args:
        mesh: The ranks.
        settings: How to divide.
        family: Facts about the model.
        length: Positions of the whole sequence.
        plans: The plan of each modality in this rank's batch, by name.
        headers: Those of the world, under way.
        device: Where the batch is.
        lockstep: Whether towers hold collectives, so that ranks must run them alike.
        observers: Are told what the tower did.
        whole: Whether each rank encodes all units and runs the decoder on the whole sequence.
    """

    __slots__ = (
        "_cut",
        "_pending",
        "_wholes",
        "attended",
        "base",
        "counted",
        "device",
        "family",
        "headers",
        "ids",
        "lockstep",
        "loose_ends",
        "mesh",
        "observers",
        "plans",
        "randomness",
        "routed",
        "settings",
        "shard",
        "whole",
    )

    def __init__(
        self,
        mesh: SequenceMesh,
        settings: Settings,
        family: Family,
        length: int,
        plans: Mapping[str, UnitPlan],
        headers: PendingHeaders,
        device: torch.device,
        lockstep: bool = True,
        observers: Observers | tuple[()] = (),
        whole: bool = False,
    ) -> None:
        self.mesh = mesh
        self.settings = settings
        self.family = family
        self.shard = SequenceShard(length, mesh.sequence_group, mesh.watch)
        self.plans = dict(plans)
        self.headers = headers
        self.device = device
        self.lockstep = lockstep
        self.observers = observers
        self.whole = whole
        self.randomness = OwnRandomness("decoder", mesh.rank, device)
        self.ids: Tensor | None = None
        # whether placeholders must be as many as features
        self.counted = False
        # whether features go to the ranks that hold their placeholders, rather than to all
        self.routed = False
        self.base: nn.Module | None = None
        self.attended: Counter[nn.Module] = Counter()
        self.loose_ends: list[Tensor] = []
        self._pending: list[Modality] | None = None
        self._wholes: dict[int, tuple[Tensor, Tensor]] = {}
        self._cut: dict[int, tuple[Any, Any]] = {}

    @property
    def pending(self) -> list[Modality]:
        """Modalities whose tower some rank of the world runs and this rank has not run yet, in order."""
        if self._pending is None:
            running = {index for header in self.headers.wait() for index in header["modalities"]}
            self._pending = [modality for index, modality in enumerate(self.family.modalities) if index in running]
        return self._pending

    @property
    def present(self) -> list[Modality]:
        """Modalities of this rank's batch."""
        return [modality for modality in self.family.modalities if modality.name in self.plans]

    @property
    def encodes_all(self) -> bool:
        """Whether every rank runs the tower on every unit."""
        return self.whole or not self.settings.vision_data_parallel

    def cut_once(self, whole: Any, dim: int) -> Any:
        """Cuts what all layers share (rotary tables, in tuples too) the first time a layer asks.

        What has no dimension as long as the sequence stays as it is.
        """
        known = self._cut.get(id(whole))
        if known is None:
            if isinstance(whole, tuple):
                cut: Any = tuple([self.cut_once(part, dim) for part in whole])
            elif isinstance(whole, Tensor) and whole.shape[dim] == self.shard.length:
                cut = shard_sequence(whole, self.shard, dim)
                self._wholes[id(cut)] = (cut, whole)
            else:
                cut = whole
            # with the whole, whose place in memory must not be taken by another
            known = self._cut[id(whole)] = (whole, cut)
        return known[1]

    def whole_of(self, cut: Any) -> Any:
        """Returns what `cut_once` cut, or the argument itself if it was not cut; looks into tuples."""
        if isinstance(cut, tuple):
            return tuple(self.whole_of(part) for part in cut)
        known = self._wholes.get(id(cut))
        return cut if known is None or known[0] is not cut else known[1]


def with_call(tensor: Tensor, call: ForwardCall) -> Tensor:
    """Returns an alias of an argument that carries a call to methods which get the argument and not the call."""
    alias = tensor.view_as(tensor)
    setattr(alias, _CALL, call)
    keep_host_copies(known_host_copy(tensor), alias)
    return alias


def call_of(tensor: Any) -> ForwardCall | None:
    """Returns the call that `with_call` put on an argument, if any."""
    call: ForwardCall | None = getattr(tensor, _CALL, None)
    return call
