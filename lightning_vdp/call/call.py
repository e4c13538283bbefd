"""What one forward needs to know about itself: it travels with the call's arguments and is stored nowhere else."""

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vdp.batch.host_copies import keep_host_copies, known_host_copy
from lightning_vdp.call.header import PendingHeaders
from lightning_vdp.call.randomness import RankRandomness
from lightning_vdp.call.units import UnitPlan
from lightning_vdp.families.family import Family, Modality
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.run.observers import Observers
from lightning_vdp.settings import Settings
from lightning_vdp.shards import SequenceShard, shard_sequence

__all__ = ["CALL", "CallContext", "ForwardCall", "Purpose", "call_of", "with_call"]

CALL = "vdp_call"
"""Keyword argument that carries a `ForwardCall`; None in forwards that are not divided."""

_CALL = "_vdp_call"


class Purpose(enum.Enum):
    """What a forward is for."""

    STEP = enum.auto()
    """A forward of the user's, which is divided."""
    COMPARE_DIVIDED = enum.auto()
    """The first batch, divided, to compare it with the same batch whole."""
    COMPARE_WHOLE = enum.auto()
    """The first batch on every rank alone."""
    GENERATE = enum.auto()
    """A forward that stays whole, while other replicas may run other towers."""

    @property
    def is_whole(self) -> bool:
        """Whether each rank encodes all units and runs the decoder on the whole sequence."""
        return self in (Purpose.COMPARE_WHOLE, Purpose.GENERATE)


@dataclass(frozen=True)
class CallContext:
    """What all calls of one model share.

    Args:
        mesh: The ranks and their groups.
        settings: How the strategy divides.
        family: What is known about the model's type.
        lockstep: Whether the tower's forward holds collectives, so that all ranks must run it equally often.
    """

    mesh: SequenceMesh
    settings: Settings
    family: Family
    lockstep: bool = True


class ForwardCall:
    """One divided forward of one model.

    Not a dataclass, so that wrappers which rebuild dataclasses among a module's arguments pass it on as it is.

    Args:
        context: What all calls of the model share.
        purpose: What the forward is for.
        length: Positions of the whole sequence.
        plans: The plan of each modality in this rank's batch, by its name.
        headers: The step headers of the world, under way.
        device: The device of the batch.
    """

    __slots__ = (
        "_cut",
        "_pending",
        "_wholes",
        "base",
        "context",
        "counts_placeholders",
        "device",
        "dummy_outputs",
        "headers",
        "ids",
        "mixed",
        "plans",
        "purpose",
        "randomness",
        "routed",
        "shard",
    )

    def __init__(
        self,
        context: CallContext,
        purpose: Purpose,
        length: int,
        plans: Mapping[str, UnitPlan],
        headers: PendingHeaders,
        device: torch.device,
    ) -> None:
        self.context = context
        self.purpose = purpose
        self.shard = SequenceShard(length, context.mesh.sequence_group, context.mesh.watch)
        self.plans = dict(plans)
        self.headers = headers
        self.device = device
        self.randomness = RankRandomness("decoder", context.mesh.rank, device)
        self.ids: Tensor | None = None
        # whether placeholders must be as many as features
        self.counts_placeholders = False
        # whether features go to the ranks that hold their placeholders, rather than to all
        self.routed = False
        self.base: nn.Module | None = None
        # how often each module has mixed tokens divided
        self.mixed: Counter[nn.Module] = Counter()
        # of towers that ran for the lockstep alone: their backward must run too
        self.dummy_outputs: list[Tensor] = []
        self._pending: list[Modality] | None = None
        self._wholes: dict[int, tuple[Tensor, Tensor]] = {}
        self._cut: dict[int, tuple[Any, Any]] = {}

    @property
    def mesh(self) -> SequenceMesh:
        """The ranks and their groups."""
        return self.context.mesh

    @property
    def settings(self) -> Settings:
        """How the strategy divides."""
        return self.context.settings

    @property
    def family(self) -> Family:
        """What is known about the model's type."""
        return self.context.family

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must run the tower equally often."""
        return self.context.lockstep

    @property
    def whole(self) -> bool:
        """Whether each rank encodes all units and runs the decoder on the whole sequence."""
        return self.purpose.is_whole

    @property
    def observers(self) -> Observers | tuple[()]:
        """Are told what the tower did."""
        return self.mesh.vision_observers if self.purpose is Purpose.STEP else ()

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
