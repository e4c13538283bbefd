"""Starting a call: what a forward holds is checked, described to the other ranks, and planned."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_vdp.batch.host_copies import host_copy, known_host_copy
from lightning_vdp.batch.labels import IGNORED, count_tokens
from lightning_vdp.batch.same import describe_other_batches, digest_batch
from lightning_vdp.batch.validate import describe_bad_input, describe_unreadable
from lightning_vdp.call.arguments import Parameters
from lightning_vdp.call.call import CALL, ForwardCall
from lightning_vdp.call.header import exchange_headers
from lightning_vdp.call.units import UnitPlan
from lightning_vdp.families.facts import Facts
from lightning_vdp.families.family import Family, Modality
from lightning_vdp.families.find import tower_of
from lightning_vdp.forward.first_batch import FirstBatch, verify_first_batch
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.settings import Settings
from lightning_vdp.vision.cost import TowerCost
from lightning_vdp.vision.plan import (
    UnitDraft,
    assign_units,
    cheapest,
    describe_nothing_to_encode,
    list_units,
    working_units,
)
from lightning_vdp.vision.select import describe_unit, select_units

__all__ = ["Entry", "begin_call", "start_call", "start_generation"]


@dataclass(frozen=True)
class Entry:
    """What starting a call of one model takes."""

    mesh: SequenceMesh
    settings: Settings
    family: Family
    # the decoder's config, asked for once: configs take long to answer
    text: Any
    lockstep: bool
    first: FirstBatch
    # whether layers hand a state from position to position, which knows no masks
    carries_state: bool
    batch_norms: tuple[nn.Module, ...] = ()
    # what a unit costs the tower
    cost: TowerCost | None = None


def begin_call(
    entry: Entry, parameters: Parameters, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Forward pre-hook of a model: starts a divided call, unless this forward is part of one or must stay whole."""
    if CALL in kwargs or not entry.mesh.is_open:
        return None
    problem = None if entry.lockstep else _describe_trained_tower(module, entry.family)
    arguments: dict[str, Any] = {}
    try:
        arguments = parameters.by_name(module, args, kwargs)
    except TypeError as error:
        problem = f"the forward cannot be called like this ({error}); pass what the processor returned, by name"
    if any(arguments.get(name) is not None for name in ("cache", "past_key_values")):
        return args, {**kwargs, CALL: None}
    if any(norm.training for norm in entry.batch_norms):
        problem = (
            f"{type(module).__name__} normalizes over all images of a batch, which ranks that encode some of them cannot; put "
            "its batch normalization into evaluation mode, or set `vision_data_parallel=False`"
        )
    call = start_call(entry, module.config, arguments, problem=problem)
    if entry.first.expected:
        entry.first.expected = False
        call.headers.wait()
        start = functools.partial(start_call, entry, module.config)
        verify_first_batch(module, arguments, entry.mesh, entry.family, start)
    return args, {**kwargs, CALL: call}


def _describe_trained_tower(module: PreTrainedModel, family: Family) -> str | None:
    """Looks for trainable weights in a tower that FSDP leaves out, whose gradients nobody would reduce."""
    tower = tower_of(module, family)
    if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in tower.parameters()):
        return None
    return (
        "the vision tower was unfrozen after `shard_frozen_tower=False` had kept it out of FSDP, so that ranks would train "
        "different towers; leave that argument out"
    )


def start_call(
    entry: Entry, config: Any, arguments: dict[str, Any], whole: bool | None = None, problem: str | None = None
) -> ForwardCall:
    """Starts a call; `whole` is given for the two runs that verify the first batch, `problem` what was found already."""
    mesh, settings, family = entry.mesh, entry.settings, entry.family
    ranks = mesh.sequence_parallel_size
    error = problem or describe_bad_input(arguments, family, config, entry.text, ranks, entry.carries_state)
    header: dict[str, list[int]] = {}
    drafts: dict[str, UnitDraft] = {}
    stage, step = mesh.watch.locate()
    if error is None:
        try:
            header, drafts = _describe_batch(entry, config, arguments)
            error = _describe_nothing_to_encode(entry, arguments, drafts)
            every = settings.check_batches_every_n_steps
            if whole is None and every and step % every == 0:
                header |= {"digest": digest_batch(arguments, family), "loader": [mesh.suspicion]}
        except Exception as failure:
            # no rank may raise alone
            error = describe_unreadable(failure)
    agree = functools.partial(
        describe_other_batches, ranks=mesh.sequence_parallel_size, family=family, place=f"{stage} step {step}"
    )
    headers = exchange_headers(mesh, header, error, agree if whole is None else None)
    # a rank that met bad input must not be waited for in a collective that it never enters
    if error is not None or mesh.headers_first:
        headers.wait()
    # planning goes on while the header is under way
    plans = assign_units(drafts, family, settings, ranks, entry.cost)
    mesh.watch.plans = plans
    sequence = _sequence(arguments)
    return ForwardCall(
        mesh,
        settings,
        family,
        sequence.shape[1],
        plans,
        headers,
        sequence.device,
        entry.lockstep,
        mesh.vision_observers if whole is None else (),
        bool(whole),
    )


def start_generation(entry: Entry, config: Any, inputs: dict[str, Any]) -> ForwardCall | None:
    """Tells other replicas what a whole forward encodes; None where ranks need not agree."""
    mesh, family = entry.mesh, entry.family
    if not (entry.lockstep and mesh.is_open and mesh.data_parallel_size > 1 and family.modalities):
        return None
    header: dict[str, list[int]] = {}
    error = None
    try:
        header = _describe_units(family, config, inputs)[0]
    except Exception as problem:
        error = describe_unreadable(problem)
    headers = exchange_headers(mesh, header, error)
    headers.wait()
    device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
    # towers run undivided here
    settings = dataclasses.replace(entry.settings, vision_data_parallel=False)
    return ForwardCall(mesh, settings, family, 0, {}, headers, device, whole=True)


def _describe_smallest(modality: Modality, arguments: dict[str, Any], draft: UnitDraft, facts: Facts) -> list[int]:
    plan = UnitPlan(draft.sizes, draft.rows, draft.sizes, (0,) * len(draft.sizes), 1, draft.frames)
    own = {name: _on_host(value) for name, value in arguments.items() if name in modality.arguments}
    working = working_units(modality, arguments, arguments.get("input_ids"), len(draft.sizes), facts)
    smallest = cheapest(draft.sizes, working)
    return describe_unit(select_units(own, [smallest], plan, modality, facts), modality)


def _sequence(arguments: dict[str, Any]) -> Tensor:
    ids: Tensor | None = arguments.get("input_ids")
    return arguments["inputs_embeds"] if ids is None else ids


def _describe_batch(
    entry: Entry, config: Any, arguments: dict[str, Any]
) -> tuple[dict[str, list[int]], dict[str, UnitDraft]]:
    """What other ranks need to know of checked arguments, and the units in them."""
    header, drafts = _describe_units(entry.family, config, arguments)
    header["length"] = [_sequence(arguments).shape[1]]
    shifted = arguments.get("shift_labels")
    labels = arguments.get("labels") if shifted is None else shifted
    if isinstance(labels, Tensor) and arguments.get("labels") is not None:
        # counting on a device costs a sync, which only the global weights are worth
        host = host_copy(labels) if entry.settings.loss_tokens == "global" else known_host_copy(labels)
        ignored = arguments.get("ignore_index", IGNORED)
        header["tokens"] = [] if host is None else [count_tokens(host, shifted is not None, ignored)]
    return header, drafts


def _describe_units(
    family: Family, config: Any, arguments: dict[str, Any]
) -> tuple[dict[str, list[int]], dict[str, UnitDraft]]:
    facts = family.facts
    drafts: dict[str, UnitDraft] = {}
    header: dict[str, list[int]] = {"modalities": []}
    for index, modality in enumerate(family.modalities):
        if arguments.get(modality.pixels) is not None:
            draft = drafts[modality.name] = list_units(modality, arguments, config, facts)
            header["modalities"].append(index)
            header[f"{modality.name}_units"] = list(draft.sizes)
            if not facts.tiny_unit:
                header[f"{modality.name}_smallest"] = _describe_smallest(modality, arguments, draft, facts)
    return header, drafts


def _describe_nothing_to_encode(entry: Entry, arguments: dict[str, Any], drafts: Mapping[str, UnitDraft]) -> str | None:
    facts, replicas = entry.family.facts, entry.mesh.data_parallel_size
    for modality in entry.family.modalities if entry.settings.vision_data_parallel else ():
        if modality.name in drafts:
            problem = describe_nothing_to_encode(modality, arguments, drafts[modality.name], facts, replicas)
            if problem is not None:
                return problem
    return None


def _on_host(value: Any) -> Any:
    """Whole numbers from their host copy, so that describing them does not wait for the device."""
    if not isinstance(value, Tensor) or value.is_floating_point():
        return value
    known = known_host_copy(value)
    return value if known is None else known
