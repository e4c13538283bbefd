"""Generation runs whole on every rank of a group; replicas stay in lockstep, since FSDP spans them.

transformers lets replicas that are done go on with others until all are (`synced_gpus`), by itself for models under FSDP.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_vdp.call.call import CALL, ForwardCall
from lightning_vdp.families.family import Family
from lightning_vdp.families.wrappers import unwrap
from lightning_vdp.vision.tower import run_absent_towers

__all__ = ["encoded_in_lockstep", "undivided_inputs"]

Start = Callable[[Any, dict[str, Any]], ForwardCall | None]
"""Agrees with the other replicas on what a forward encodes; None where no agreement is needed."""


def encoded_in_lockstep(start: Start, self: Any, inputs: Any, arguments: dict[str, Any], *args: Any) -> dict[str, Any]:
    """Stands in for the method with which `generate` encodes images before its first forward.

    Args:
        start: What agrees with the other replicas on what is encoded; see `Start`.
        self: The model.
        inputs: The prompt, as transformers passes it.
        arguments: The model's arguments, pixels among them.
        *args: As transformers passes them.
    """
    if _encodes_first(self):
        _run_absent(start, self, arguments)
    encoded: dict[str, Any] = type(self)._maybe_prepare_encoder_kwargs_for_generation(self, inputs, arguments, *args)
    return encoded


def undivided_inputs(start: Start, self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Stands in for `prepare_inputs_for_generation`: the forward that follows is not divided.

    Args:
        start: What agrees with the other replicas on what is encoded; see `Start`.
        self: The model.
        *args: As transformers passes them.
        **kwargs: As transformers passes them.
    """
    inputs = type(self).prepare_inputs_for_generation(self, *args, **kwargs)
    # later steps with a cache encode nothing; these arguments are the same on all ranks
    encodes = kwargs.get("is_first_iteration") or not kwargs.get("use_cache", True)
    if encodes and not _encodes_first(self):
        _run_absent(start, self, inputs)
    return {**inputs, CALL: None}


def _encodes_first(model: Any) -> bool:
    return bool(model._supports_mm_encoder_outputs())


def _run_absent(start: Start, model: Any, arguments: dict[str, Any]) -> None:
    """Runs towers that only other replicas need; how many times ranks run a tower counts, not in which order."""
    call = start(model.config, arguments)
    if call is None:
        return
    call.base = _base(model, call.family)
    for modality in [modality for modality in call.pending if arguments.get(modality.pixels) is not None]:
        call.pending.remove(modality)
    run_absent_towers(call, agree=False)


def _base(model: nn.Module, family: Family) -> Any:
    """The base model in a model with a head, which has methods of the same names."""
    name = family.modalities[0].features
    return next(child for child in map(unwrap, (*model.children(), model)) if hasattr(child, name))
