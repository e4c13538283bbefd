"""Entering models: the hooks and instance patches that divide a model, and taking them out again."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from lightning_vdp.batches import describe_other_batches, digest_batch
from lightning_vdp.call import (
    CALL,
    ForwardCall,
    Parameters,
    Settings,
    host_copy,
    known_host_copy,
    parameters_of,
    with_call,
)
from lightning_vdp.checks import describe_bad_input, describe_unreadable
from lightning_vdp.generation import encoded_in_lockstep, undivided_inputs
from lightning_vdp.header import exchange_headers
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.models import PER_POSITION, SEQUENCE_DIM, DividedModel, Facts, Family, Modality, tower_of
from lightning_vdp.sequence.attention import Audit, attention_dispatcher
from lightning_vdp.sequence.decoder import (
    check_decoder_outputs,
    leave_decoder,
    shard_decoder_inputs,
    shard_layer_inputs,
)
from lightning_vdp.sequence.linear_attention import divided_mixer, gathered_mixer, token_mixers
from lightning_vdp.sequence.loss import count_tokens, model_uses_causal_loss, sharded_causal_loss
from lightning_vdp.sequence.shards import gather_sequence, shard_sequence
from lightning_vdp.sequence.tokens import IGNORED
from lightning_vdp.verify import FirstBatch, describe_difference, evaluating, shorten
from lightning_vdp.vision.planning import (
    UnitDraft,
    assign_units,
    cheapest,
    describe_nothing_to_encode,
    list_units,
    working_units,
)
from lightning_vdp.vision.selection import describe_unit, select_units
from lightning_vdp.vision.tower import divided_features, restricted_placeholders
from lightning_vdp.vision.units import UnitPlan

__all__ = ["Division", "divide_models"]


class Division:
    """The hooks and patches of one strategy; `undo` takes all of them out."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def undo(self) -> None:
        """Takes out every hook and patch, the last one first."""
        while self._undo:
            self._undo.pop()()

    def hook(self, register: Callable[..., Any], hook: Callable[..., Any], **kwargs: Any) -> None:
        """Registers a forward hook or pre-hook that sees keyword arguments."""
        self._undo.append(register(hook, with_kwargs=True, **kwargs).remove)

    def method(
        self, instance: nn.Module, name: str, function: Callable[..., Any], attribute: str | None = None
    ) -> None:
        """Puts a bound method over one that the instance's class defines.

        Args:
            instance: What to patch; other instances of the class stay as they are.
            name: What callers call it.
            function: Takes the instance first.
            attribute: Where the class looks for an override. Default: the name.

        Raises:
            RuntimeError: If the class has no such method, does not look there, or somebody patched this instance already.
        """
        attribute = attribute or name
        if not hasattr(type(instance), name):
            raise RuntimeError(
                f"{type(instance).__name__} of transformers {transformers_version} has no `{name}`, where lightning_vdp "
                "enters; install a version of transformers that this version of lightning_vdp names."
            )
        if attribute in vars(instance):
            raise RuntimeError(
                f"`{name}` of this {type(instance).__name__} was replaced by somebody else, so that it cannot be divided; "
                "undo that, or set `sequence_parallel_size=1`."
            )

        own = getattr(type(instance), name)

        # callers read the signature, as generation does
        @functools.wraps(function if isinstance(own, property) else own)
        def standing_in(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        vars(instance)[attribute] = MethodType(standing_in, instance)
        self._undo.append(functools.partial(vars(instance).pop, attribute))
        if getattr(getattr(instance, name), "__func__", None) is not standing_in:
            raise RuntimeError(
                f"`{name}` of {type(instance).__name__} in transformers {transformers_version} no longer looks at "
                f"`{attribute}`, where lightning_vdp enters; install a version of transformers that this version of "
                "lightning_vdp names."
            )

    def dispatch_attention(self) -> None:
        """Makes attention calls that carry a `ForwardCall` pass through Ulysses."""
        attention_dispatcher.acquire()
        self._undo.append(attention_dispatcher.release)


def divide_models(
    models: Iterable[DividedModel],
    mesh: SequenceMesh,
    settings: Settings,
    undivided_towers: Collection[nn.Module] = (),
) -> Division:
    """Makes forwards of the models run on the ranks of a sequence group together.

    Args:
        models: As found by `find_models`.
        mesh: The ranks. At a sequence group of one rank, nothing is touched.
        settings: How to divide.
        undivided_towers: Towers whose weights FSDP does not divide, so that ranks need not run them alike.

    Raises:
        ValueError: If a model cannot be divided over so many ranks.
        RuntimeError: If transformers has moved what must be patched.
    """
    division = Division()
    if mesh.sequence_parallel_size == 1:
        return division
    models = list(models)
    for model in models:
        _check_divisible(model, mesh.sequence_parallel_size)
    try:
        division.dispatch_attention()
        for model in models:
            _divide_model(
                division, model, mesh, settings, lockstep=model.tower is None or model.tower not in undivided_towers
            )
    except BaseException:
        division.undo()
        raise
    return division


def _check_divisible(model: DividedModel, ranks: int) -> None:
    heads = model.query_heads
    if heads < ranks:
        raise ValueError(
            f"`sequence_parallel_size` is {ranks}, but {type(model.base).__name__} at '{model.name}' has {heads} attention "
            f"heads, of which each rank needs one; sizes that work are 1 to {heads}."
        )
    takes = "pixel_values" in inspect.signature(type(model.base).forward).parameters
    if takes and not any(modality.pixels == "pixel_values" for modality in model.family.modalities):
        raise RuntimeError(
            f"{type(model.base).__name__} of transformers {transformers_version} has no `get_image_features`, where "
            "lightning_vdp enters; install a version of transformers that this version of lightning_vdp names."
        )
    if any(_is_reentrant(module) for module in model.base.modules()):
        raise ValueError(
            f"{type(model.base).__name__} at '{model.name}' checkpoints activations with `use_reentrant=True`, which FSDP "
            "cannot follow when ranks encode other images; enable it with "
            'gradient_checkpointing_kwargs={"use_reentrant": False}.'
        )
    other = next((part for part in model.loss_models if not model_uses_causal_loss(part)), None)
    if other is not None:
        raise ValueError(
            f"{type(other).__name__} has a loss function of its own, which shards of logits would bend; remove it and "
            "compute the loss in `training_step`, or set `sequence_parallel_size=1`."
        )


def _is_reentrant(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    if function is None or not getattr(module, "gradient_checkpointing", False):
        return False
    return bool(getattr(function, "keywords", {}).get("use_reentrant", True))


@dataclass(frozen=True)
class _Entry:
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


def _divide_model(
    division: Division, model: DividedModel, mesh: SequenceMesh, settings: Settings, lockstep: bool
) -> None:
    first = FirstBatch(expected=settings.verify_first_batch)
    # without Vision DP, replicas that lack images still run dummies through them
    norms = tuple(model.batch_norms) if settings.vision_data_parallel or mesh.data_parallel_size > 1 else ()
    all_mixers = [mixer for layer in model.layers for mixer in token_mixers(layer)]
    text = model.base.config.get_text_config()
    start = _Entry(mesh, settings, model.family, text, lockstep, first, bool(all_mixers), norms)
    for entry in model.entries:
        begin = functools.partial(_begin_call, start, parameters_of(type(entry).forward))
        division.hook(entry.register_forward_pre_hook, begin)
    enter = functools.partial(_enter_base, parameters_of(type(model.base).forward))
    division.hook(model.base.register_forward_pre_hook, enter)
    for modality in model.family.modalities:
        division.method(model.base, modality.features, divided_features(modality))
    if model.family.modalities and model.family.facts.routed:
        division.method(model.base, "get_placeholder_mask", restricted_placeholders)
    division.hook(model.decoder.register_forward_pre_hook, shard_decoder_inputs)
    division.hook(model.decoder.register_forward_hook, leave_decoder, always_call=True)
    for index, layer in enumerate(model.layers):
        cut_dim = None if index else SEQUENCE_DIM.get(model.decoder.config.model_type, 1)
        parameters = list(inspect.signature(type(layer).forward).parameters)[1:]
        names = tuple(name if name in PER_POSITION else None for name in parameters)
        shard_inputs = functools.partial(shard_layer_inputs, cut_dim, names)
        division.hook(layer.register_forward_pre_hook, shard_inputs)
    gathered = model.gathered_attention
    within = {part for module in gathered for part in module.modules()}
    mixers = [mixer for mixer in all_mixers if mixer not in within]
    for mixer in mixers:
        division.method(mixer, "forward", divided_mixer(mixer))
    for module in gathered:
        division.method(module, "forward", gathered_mixer(module))
    check = functools.partial(check_decoder_outputs, Audit(model.layers, frozenset({*mixers, *gathered})))
    division.hook(model.decoder.register_forward_hook, check)
    for entry in model.entries:
        division.hook(entry.register_forward_hook, _describe_outputs)
    for part in model.loss_models:
        division.method(part, "loss_function", sharded_causal_loss, attribute="_loss_function")
    if model.head is not None:
        begin_generation = functools.partial(_start_generation, start)
        division.method(
            model.head, "prepare_inputs_for_generation", functools.partial(undivided_inputs, begin_generation)
        )
        if model.family.modalities:
            encode = functools.partial(encoded_in_lockstep, begin_generation)
            division.method(model.head, "_maybe_prepare_encoder_kwargs_for_generation", encode)


def _begin_call(
    entry: _Entry, parameters: Parameters, module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
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
    call = _start_call(entry, module.config, arguments, problem=problem)
    if entry.first.expected:
        entry.first.expected = False
        call.headers.wait()
        _verify_first_batch(entry, module, arguments)
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


def _start_call(
    entry: _Entry, config: Any, arguments: dict[str, Any], whole: bool | None = None, problem: str | None = None
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
    plans = assign_units(drafts, family, settings, ranks)
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


def _start_generation(entry: _Entry, config: Any, inputs: dict[str, Any]) -> ForwardCall | None:
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
    entry: _Entry, config: Any, arguments: dict[str, Any]
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


def _describe_nothing_to_encode(
    entry: _Entry, arguments: dict[str, Any], drafts: Mapping[str, UnitDraft]
) -> str | None:
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


def _verify_first_batch(entry: _Entry, module: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Runs the first batch whole and divided and compares.

    Raises:
        StepError: If they differ by more than rounding on any rank; the same on every rank.
    """
    mesh = entry.mesh
    short, problem = None, None
    try:
        short = shorten(arguments, entry.family, module.config, mesh.sequence_parallel_size)
    except Exception as failure:
        # no rank may raise alone
        problem = describe_unreadable(failure)
    # every rank of the world runs the same forwards, whatever batch it holds
    uncut = {"length": [1] if short is None else []}
    if any(header["length"] for header in exchange_headers(mesh, uncut, problem).wait()):
        return
    assert short is not None
    results: list[Tensor] = []
    with evaluating(module):
        for whole in (True, False):
            call = _start_call(entry, module.config, short, whole)
            outputs = module(**short, **{CALL: call})
            results.append(outputs.logits if "logits" in outputs else outputs.last_hidden_state)
    whole_result, divided = results
    if divided.shape[1] != whole_result.shape[1]:
        whole_result = shard_sequence(whole_result, call.shard)
    exchange_headers(mesh, {}, describe_difference(divided, whole_result, module.config)).wait()


def _enter_base(parameters: Parameters, base: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the base model: its ids and pixels carry the call to its methods, absent towers run through it."""
    call: ForwardCall | None = kwargs.get(CALL)
    if call is None:
        return None
    call.base = base
    arguments = parameters.by_name(base, args, kwargs)
    ids = arguments.get("input_ids")
    carriers = {
        name: with_call(arguments[name], call)
        for modality in call.present
        for name in modality.carriers(call.family.facts)
    }
    given = arguments.get("mm_encoder_outputs") is not None
    tokens = [modality.token for modality in call.present]
    # where one token stands for images and videos, the model tells them apart by what surrounds it
    apart = len(set(tokens)) == len(tokens)
    call.counted = ids is not None and not given and apart and call.family.facts.routed
    call.routed = call.counted and not call.encodes_all and call.settings.vision_exchange == "routed"
    call.ids = ids
    if ids is not None and call.routed:
        carriers["input_ids"] = with_call(ids, call)
    # in the places where they came: some decorators of forwards add keyword arguments of their own
    positional = tuple(carriers.pop(name, value) for name, value in zip(parameters.positional, args))
    return positional, {**kwargs, **carriers}


def _describe_outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
    """Forward hook of a model: says which positions the outputs belong to, and makes logits whole where asked."""
    call: ForwardCall | None = kwargs.get(CALL)
    if call is None or call.whole or isinstance(outputs, tuple):
        return outputs
    if call.settings.logits == "whole" and getattr(outputs, "logits", None) is not None:
        outputs.logits = gather_sequence(outputs.logits, call.shard)
    outputs.sequence_shard = call.shard
    return outputs
