"""What one forward needs to know about itself: it travels with the call's arguments and is stored nowhere else."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_vdp.header import PendingHeaders
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.models import Family, Modality
from lightning_vdp.randomness import OwnRandomness
from lightning_vdp.sequence.shards import SequenceShard, shard_sequence
from lightning_vdp.vision.load import LoadObservers
from lightning_vdp.vision.routes import Routes
from lightning_vdp.vision.units import UnitPlan

__all__ = [
    "CALL",
    "ForwardCall",
    "Parameters",
    "Settings",
    "call_of",
    "host_copy",
    "host_tensors",
    "keep_host_copies",
    "keep_samples",
    "known_host_copy",
    "known_sample",
    "parameters_of",
    "sample",
    "with_call",
]

CALL = "vdp_call"
"""Keyword argument that carries a `ForwardCall`; None in forwards that are not divided."""

_HOST_COPY = "_vdp_host_copy"
_HOST_SAMPLE = "_vdp_host_sample"
_SAMPLED_VALUES = 256
_CALL = "_vdp_call"


@dataclass(frozen=True)
class Settings:
    """How the strategy divides, as its arguments say; see `UlyssesVisionDPStrategy`."""

    vision_data_parallel: bool = True
    vision_assignment: Literal["balanced", "contiguous"] = "balanced"
    vision_balance: Literal["time", "memory"] = "time"
    vision_exchange: Literal["routed", "gather"] = "routed"
    logits: Literal["shard", "whole"] = "shard"
    loss_tokens: Literal["replica", "global"] = "replica"
    verify_first_batch: bool = True
    check_batches_every_n_steps: int = 50


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
        "routes",
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
        observers: LoadObservers | tuple[()] = (),
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
        self.routes: dict[str, Routes] = {}
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


class Parameters:
    """The parameters of a method, to name arguments by: `inspect.Signature` does so too, but slowly for every step.

    Args:
        method: A function whose first parameter is the module.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self.signature = inspect.signature(method)
        kinds = {name: parameter.kind for name, parameter in list(self.signature.parameters.items())[1:]}
        self.positional = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self._named = frozenset(name for name, kind in kinds.items() if kind not in _VARIABLE)
        self._takes_others = inspect.Parameter.VAR_KEYWORD in kinds.values()

    def by_name(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, those among its `**kwargs` too; without the module itself.

        Raises:
            TypeError: If the method does not take them.
        """
        given = dict(zip(self.positional, args))
        if len(args) > len(self.positional) or not given.keys().isdisjoint(kwargs):
            raise self._refusal(module, args, kwargs)
        if not self._takes_others and not self._named.issuperset(kwargs):
            raise self._refusal(module, args, kwargs)
        given.update(kwargs)
        return given

    def _refusal(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError:
        try:
            self.signature.bind_partial(module, *args, **kwargs)
        except TypeError as error:
            return error
        return TypeError("positional arguments beyond the named ones")


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# taken once for each method, since features are asked for in every step
parameters_of = functools.cache(Parameters)


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


def sample(tensor: Tensor) -> Tensor:
    """A few values of a tensor on the host, evenly spread; a copy."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED_VALUES)].clone()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def host_tensors(batch: Any, names: frozenset[str], take: Callable[[Tensor], Tensor] = _as_it_is) -> Any:
    """Collects the host tensors of a batch before it moves to a device, in the batch's own structure.

    Args:
        batch: Mappings, lists and tuples of tensors; processors' outputs, which move in place, among them.
        names: Keys of the mappings whose tensors are collected.
        take: What is collected of a tensor.
    """
    if isinstance(batch, Mapping):
        return {
            name: take(value)
            if name in names and isinstance(value, Tensor) and value.device.type == "cpu"
            else host_tensors(value, names, take)
            for name, value in batch.items()
        }
    if isinstance(batch, (list, tuple)):
        return [host_tensors(value, names, take) for value in batch]
    return None


def keep_host_copies(collected: Any, moved: Any, attribute: str = _HOST_COPY) -> None:
    """Remembers, on tensors that were moved to a device, the host tensor each came from.

    Planning reads sizes from there without a device sync. A tensor that lost its host copy on the way, or was written
    to since, costs one sync.

    Args:
        collected: What `host_tensors` returned before the move.
        moved: The batch after the move, of the same structure as far as it matters.
        attribute: Where it is remembered.
    """
    if isinstance(collected, Tensor):
        if isinstance(moved, Tensor) and moved is not collected and not moved.is_inference():
            setattr(moved, attribute, (collected, moved._version))
    elif isinstance(collected, Mapping) and isinstance(moved, Mapping):
        for name, value in collected.items():
            keep_host_copies(value, moved.get(name), attribute)
    elif isinstance(collected, list) and isinstance(moved, (list, tuple)):
        for value, target in zip(collected, moved):
            keep_host_copies(value, target, attribute)


def known_host_copy(tensor: Tensor) -> Tensor | None:
    """Returns the tensor on the host if it is there already, without a device sync."""
    if tensor.device.type == "cpu":
        return tensor
    return _remembered(tensor, _HOST_COPY)


def keep_samples(samples: Any, moved: Any) -> None:
    """Remembers what `host_tensors` took with `sample`, as `keep_host_copies` does with whole tensors."""
    keep_host_copies(samples, moved, _HOST_SAMPLE)


def known_sample(tensor: Tensor) -> Tensor | None:
    """Returns a `sample` of the tensor if that takes no device sync."""
    if tensor.device.type == "cpu":
        return sample(tensor)
    return _remembered(tensor, _HOST_SAMPLE)


def _remembered(tensor: Tensor, attribute: str) -> Tensor | None:
    host, version = getattr(tensor, attribute, (None, None))
    return host if host is not None and version == tensor._version else None


def host_copy(tensor: Tensor) -> Tensor:
    """Returns the tensor on the host: the remembered copy, or a new one at the price of a device sync."""
    known = known_host_copy(tensor)
    if known is None:
        known = tensor.to(torch.device("cpu"))
        keep_host_copies(known, tensor)
    return known
