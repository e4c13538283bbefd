"""Starting a call: what a forward holds is checked, described to the other ranks, and planned."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_vdp.batch.contents import read_contents
from lightning_vdp.batch.host_copies import host_copy, known_host_copy
from lightning_vdp.batch.labels import IGNORED, count_tokens
from lightning_vdp.batch.same import digest_batch, find_other_batches
from lightning_vdp.batch.validate import find_input_problem, unreadable_problem
from lightning_vdp.call.arguments import Parameters
from lightning_vdp.call.call import CALL, CallContext, ForwardCall, Purpose
from lightning_vdp.call.header import exchange_headers
from lightning_vdp.call.units import UnitPlan
from lightning_vdp.families.facts import Facts
from lightning_vdp.families.family import Family, Modality
from lightning_vdp.families.find import tower_of
from lightning_vdp.families.wrappers import class_name
from lightning_vdp.forward.first_batch import FirstBatch, verify_first_batch
from lightning_vdp.vision.cost import TowerCost
from lightning_vdp.vision.plan import (
    UnitDraft,
    assign_units,
    cheapest,
    find_nothing_to_encode,
    list_units,
    working_units,
)
from lightning_vdp.vision.select import describe_unit, select_units

__all__ = ["Entry", "begin_call", "start_call", "start_generation"]


@dataclass(frozen=True)
class Entry:
    """What starting the calls of one model takes.

    Args:
        context: What all calls of the model share.
        text: The decoder's config, asked for once: configs take long to answer.
        first: Whether the model's first batch is still to come.
        carries_state: Whether layers hand a state from position to position, which knows no masks.
        batch_norms: What normalizes over all images of a batch.
        cost: What a unit costs the tower; None where its config does not say.
    """

    context: CallContext
    text: Any
    first: FirstBatch
    carries_state: bool
    batch_norms: tuple[nn.Module, ...]
    cost: TowerCost | None


def begin_call(
    entry: Entry, parameters: Parameters, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Forward pre-hook of a model: starts a divided call, unless this forward is part of one or must stay whole."""
    context = entry.context
    if CALL in kwargs or not context.mesh.is_open:
        return None
    problem = _find_training_problem(entry, module)
    arguments: dict[str, Any] = {}
    try:
        arguments = parameters.by_name(module, args, kwargs)
    except TypeError as error:
        problem = f"the forward cannot be called like this ({error}); pass what the processor returned, by name"
    if any(arguments.get(name) is not None for name in ("cache", "past_key_values")):
        return args, {**kwargs, CALL: None}
    call = start_call(entry, module.config, arguments, Purpose.STEP, problem)
    if entry.first.expected:
        entry.first.expected = False
        call.headers.wait()
        start = functools.partial(start_call, entry, module.config)
        verify_first_batch(module, arguments, context.mesh, context.family, start)
    return args, {**kwargs, CALL: call}


def _find_training_problem(entry: Entry, module: PreTrainedModel) -> str | None:
    """Looks for modules in a state in which ranks would train different models."""
    if any(norm.training for norm in entry.batch_norms):
        return (
            f"{class_name(module)} normalizes over all images of a batch, which ranks that encode some of them cannot; put "
            "its batch normalization into evaluation mode, or set `vision_data_parallel=False`"
        )
    if entry.context.lockstep or not torch.is_grad_enabled():
        return None
    # weights that FSDP leaves out, whose gradients nobody would reduce
    if any(parameter.requires_grad for parameter in tower_of(module, entry.context.family).parameters()):
        return (
            "the vision tower was unfrozen after `shard_frozen_tower=False` had kept it out of FSDP, so that ranks would train "
            "different towers; leave that argument out"
        )
    return None


def start_call(
    entry: Entry,
    config: Any,
    arguments: dict[str, Any],
    purpose: Purpose = Purpose.STEP,
    problem: str | None = None,
) -> ForwardCall:
    """Starts a call: checks the input, tells the other ranks what it holds, and plans who encodes what.

    Args:
        entry: The model's.
        config: The config of the module that was called.
        arguments: The forward's arguments by name.
        purpose: What the forward is for.
        problem: What was found to be wrong already.
    """
    context = entry.context
    mesh, settings, family = context.mesh, context.settings, context.family
    ranks = mesh.sequence_parallel_size
    error = problem or find_input_problem(arguments, family, config, entry.text, ranks, entry.carries_state)
    header: dict[str, list[int]] = {}
    drafts: dict[str, UnitDraft] = {}
    stage, step = mesh.watch.locate()
    every = settings.check_batches_every_n_steps
    if error is None:
        try:
            header, drafts = _describe_batch(context, config, arguments)
            error = _find_idle_tower(context, arguments, drafts)
            if purpose is Purpose.STEP and every and step % every == 0:
                header |= {"digest": digest_batch(arguments, family), "loader": [mesh.suspicion]}
        except Exception as failure:
            # no rank may raise alone
            error = unreadable_problem(failure)
    agree = functools.partial(find_other_batches, ranks=ranks, family=family, place=f"{stage} step {step}")
    headers = exchange_headers(mesh, header, error, agree if purpose is Purpose.STEP else None)
    # a rank that met bad input must not be waited for in a collective that it never enters
    if error is not None or mesh.headers_first:
        headers.wait()
    # planning goes on while the header is under way
    plans = assign_units(drafts, family, settings, ranks, entry.cost)
    mesh.watch.plans = plans
    sequence = _sequence(arguments)
    return ForwardCall(context, purpose, sequence.shape[1], plans, headers, sequence.device)


def start_generation(context: CallContext, config: Any, inputs: dict[str, Any]) -> ForwardCall | None:
    """Tells other replicas what a whole forward encodes; None where ranks need not agree."""
    mesh, family = context.mesh, context.family
    if not (context.lockstep and mesh.is_open and mesh.data_parallel_size > 1 and family.modalities):
        return None
    header: dict[str, list[int]] = {}
    error = None
    try:
        header = _describe_units(family, config, inputs)[0]
    except Exception as problem:
        error = unreadable_problem(problem)
    headers = exchange_headers(mesh, header, error)
    headers.wait()
    device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
    return ForwardCall(context, Purpose.GENERATE, 0, {}, headers, device)


def _sequence(arguments: dict[str, Any]) -> Tensor:
    ids: Tensor | None = arguments.get("input_ids")
    return arguments["inputs_embeds"] if ids is None else ids


def _describe_batch(
    context: CallContext, config: Any, arguments: dict[str, Any]
) -> tuple[dict[str, list[int]], dict[str, UnitDraft]]:
    """What other ranks need to know of checked arguments, and the units in them."""
    header, drafts = _describe_units(context.family, config, arguments)
    header["length"] = [_sequence(arguments).shape[1]]
    shifted = arguments.get("shift_labels")
    labels = arguments.get("labels") if shifted is None else shifted
    if isinstance(labels, Tensor) and arguments.get("labels") is not None:
        # counting on a device costs a sync, which only the global weights are worth
        host = host_copy(labels) if context.settings.loss_tokens == "global" else known_host_copy(labels)
        ignored = arguments.get("ignore_index", IGNORED)
        header["tokens"] = [] if host is None else [count_tokens(host, shifted is not None, ignored)]
    return header, drafts


def _describe_units(
    family: Family, config: Any, arguments: dict[str, Any]
) -> tuple[dict[str, list[int]], dict[str, UnitDraft]]:
    facts = family.facts
    contents = read_contents(arguments, family)
    drafts: dict[str, UnitDraft] = {}
    header: dict[str, list[int]] = {"modalities": []}
    for index, modality in enumerate(family.modalities):
        if modality.name in contents:
            draft = drafts[modality.name] = list_units(modality, contents[modality.name], config, facts)
            header["modalities"].append(index)
            header[f"{modality.name}_units"] = list(draft.sizes)
            if not facts.tiny_unit:
                header[f"{modality.name}_smallest"] = _describe_smallest(modality, arguments, draft, facts)
    return header, drafts


def _describe_smallest(modality: Modality, arguments: dict[str, Any], draft: UnitDraft, facts: Facts) -> list[int]:
    """The tensors of the cheapest unit, for ranks that have none and run one like it."""
    plan = UnitPlan(draft.sizes, draft.rows, draft.sizes, (0,) * len(draft.sizes), 1, draft.frames)
    taken = {name: _on_host(value) for name, value in arguments.items() if name in modality.arguments}
    working = working_units(modality, arguments, arguments.get("input_ids"), len(draft.sizes), facts)
    smallest = cheapest(draft.sizes, working)
    return describe_unit(select_units(taken, [smallest], plan, modality, facts), modality)


def _find_idle_tower(context: CallContext, arguments: dict[str, Any], drafts: Mapping[str, UnitDraft]) -> str | None:
    """Looks for batches of which no unit makes the tower do what those of other replicas do."""
    facts, replicas = context.family.facts, context.mesh.data_parallel_size
    for modality in context.family.modalities if context.settings.vision_data_parallel else ():
        if modality.name in drafts:
            problem = find_nothing_to_encode(modality, arguments, drafts[modality.name], facts, replicas)
            if problem is not None:
                return problem
    return None


def _on_host(value: Any) -> Any:
    """Whole numbers from their host copy, so that describing them does not wait for the device."""
    if not isinstance(value, Tensor) or value.is_floating_point():
        return value
    known = known_host_copy(value)
    return value if known is None else known
