"""Dividing models: which hooks and patches each part of a model gets."""

import functools
import inspect
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from lightning_vdp.call.arguments import Parameters, parameters_of
from lightning_vdp.call.call import CALL, CallContext, ForwardCall, with_call
from lightning_vdp.errors import UnsupportedError, UserError
from lightning_vdp.families.conventions import PER_POSITION
from lightning_vdp.families.find import DividedModel
from lightning_vdp.families.wrappers import class_name
from lightning_vdp.forward.begin import Entry, begin_call, start_generation
from lightning_vdp.forward.first_batch import FirstBatch
from lightning_vdp.forward.generation import encoded_in_lockstep, undivided_inputs
from lightning_vdp.forward.patches import Patches
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.sequence.audit import Audit
from lightning_vdp.sequence.decoder import (
    check_decoder_outputs,
    leave_decoder,
    shard_decoder_inputs,
    shard_layer_inputs,
)
from lightning_vdp.sequence.loss import model_uses_causal_loss, sharded_causal_loss
from lightning_vdp.sequence.mixers import divided_mixer, gathered_mixer, token_mixers
from lightning_vdp.settings import Settings
from lightning_vdp.shards import gather_sequence
from lightning_vdp.vision.cost import tower_cost
from lightning_vdp.vision.tower import divided_features, restricted_placeholders

__all__ = ["divide_models"]


def divide_models(
    models: Iterable[DividedModel],
    mesh: SequenceMesh,
    settings: Settings,
    undivided_towers: Collection[nn.Module] = (),
) -> Patches:
    """Makes forwards of the models run on the ranks of a sequence group together.

    Args:
        models: The models, as found by `find_models`.
        mesh: The ranks. Models in groups of one rank are left as they are.
        settings: How to divide.
        undivided_towers: Towers whose weights FSDP does not divide, so that ranks need not run them alike.

    Returns:
        What takes all hooks and patches out again.

    Raises:
        UserError: If a model cannot be divided over so many ranks.
        UnsupportedError: If transformers has moved what must be patched.
    """
    patches = Patches()
    if mesh.sequence_parallel_size == 1:
        return patches
    models = list(models)
    for model in models:
        _check_divisible(model, mesh.sequence_parallel_size)
    try:
        patches.dispatch_attention()
        for model in models:
            lockstep = model.tower is None or model.tower not in undivided_towers
            _divide_model(patches, model, CallContext(mesh, settings, model.family, lockstep))
    except BaseException:
        patches.undo()
        raise
    return patches


def _check_divisible(model: DividedModel, ranks: int) -> None:
    heads = model.query_heads
    if heads < ranks:
        raise UserError(
            f"`sequence_parallel_size` is {ranks}, but {class_name(model.base)} at '{model.name}' has {heads} attention "
            f"heads, of which each rank needs one; sizes that work are 1 to {heads}."
        )
    takes = "pixel_values" in inspect.signature(type(model.base).forward).parameters
    if takes and not any(modality.pixels == "pixel_values" for modality in model.family.modalities):
        raise UnsupportedError(
            f"{class_name(model.base)} of transformers {transformers_version} has no `get_image_features`, where "
            "lightning_vdp enters; install a version of transformers that this version of lightning_vdp names."
        )
    if any(_is_reentrant(module) for module in model.base.modules()):
        raise UserError(
            f"{class_name(model.base)} at '{model.name}' checkpoints activations with `use_reentrant=True`, which FSDP "
            "cannot follow when ranks encode other images; enable it with "
            'gradient_checkpointing_kwargs={"use_reentrant": False}.'
        )
    other = next((part for part in model.loss_models if not model_uses_causal_loss(part)), None)
    if other is not None:
        raise UserError(
            f"{class_name(other)} has a loss function of its own, which shards of logits would bend; remove it and "
            "compute the loss in `training_step`, or set `sequence_parallel_size=1`."
        )


def _is_reentrant(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    if function is None or not getattr(module, "gradient_checkpointing", False):
        return False
    return bool(getattr(function, "keywords", {}).get("use_reentrant", True))


def _divide_model(patches: Patches, model: DividedModel, context: CallContext) -> None:
    mixers = [mixer for layer in model.layers for mixer in token_mixers(layer)]
    _start_calls(patches, model, context, carries_state=bool(mixers))
    _divide_tower(patches, model)
    _divide_decoder(patches, model, mixers)
    for entry in model.entries:
        patches.hook(entry.register_forward_hook, _mark_outputs)
    for part in model.loss_models:
        patches.method(part, "loss_function", sharded_causal_loss, attribute="_loss_function")
    _leave_generation_whole(patches, model, context)


def _start_calls(patches: Patches, model: DividedModel, context: CallContext, carries_state: bool) -> None:
    """Every way into the model starts a call, which the base model hands on to its methods."""
    config, settings = model.base.config, context.settings
    # without Vision DP, replicas that lack images still run dummies through them
    encodes_others = settings.vision_data_parallel or context.mesh.data_parallel_size > 1
    entry = Entry(
        context=context,
        text=config.get_text_config(),
        first=FirstBatch(expected=settings.verify_first_batch),
        carries_state=carries_state,
        batch_norms=tuple(model.batch_norms) if encodes_others else (),
        cost=tower_cost(getattr(config, "vision_config", None), model.family.facts.tower_mlp_matrices),
    )
    for module in model.entries:
        begin = functools.partial(begin_call, entry, parameters_of(type(module).forward))
        patches.hook(module.register_forward_pre_hook, begin)
    enter = functools.partial(_enter_base, parameters_of(type(model.base).forward))
    patches.hook(model.base.register_forward_pre_hook, enter)


def _divide_tower(patches: Patches, model: DividedModel) -> None:
    """Features are made by the units' owners, and merged where they are needed."""
    for modality in model.family.modalities:
        patches.method(model.base, modality.features, divided_features(modality))
    if model.family.modalities and model.family.facts.routed:
        patches.method(model.base, "get_placeholder_mask", restricted_placeholders)


def _divide_decoder(patches: Patches, model: DividedModel, mixers: Sequence[nn.Module]) -> None:
    """From the first layer to the last, ranks hold their shard; an audit counts what mixed tokens on the way."""
    patches.hook(model.decoder.register_forward_pre_hook, shard_decoder_inputs)
    patches.hook(model.decoder.register_forward_hook, leave_decoder, always_call=True)
    for index, layer in enumerate(model.layers):
        cut_dim = None if index else model.decoder_facts.sequence_dim
        parameters = list(inspect.signature(type(layer).forward).parameters)[1:]
        names = tuple(name if name in PER_POSITION else None for name in parameters)
        shard_inputs = functools.partial(shard_layer_inputs, cut_dim, names)
        patches.hook(layer.register_forward_pre_hook, shard_inputs)
    gathered = model.gathered_attention
    inside_gathered = {part for module in gathered for part in module.modules()}
    divided = [mixer for mixer in mixers if mixer not in inside_gathered]
    for mixer in divided:
        patches.method(mixer, "forward", divided_mixer(mixer))
    for module in gathered:
        patches.method(module, "forward", gathered_mixer(module))
    audit = Audit(model.layers, frozenset({*divided, *gathered}))
    patches.hook(model.decoder.register_forward_hook, functools.partial(check_decoder_outputs, audit))


def _leave_generation_whole(patches: Patches, model: DividedModel, context: CallContext) -> None:
    if model.head is None:
        return
    start = functools.partial(start_generation, context)
    patches.method(model.head, "prepare_inputs_for_generation", functools.partial(undivided_inputs, start))
    if model.family.modalities:
        encode = functools.partial(encoded_in_lockstep, start)
        patches.method(model.head, "_maybe_prepare_encoder_kwargs_for_generation", encode)


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
    call.counts_placeholders = ids is not None and not given and apart and call.family.facts.routed
    call.routed = call.counts_placeholders and not call.encodes_all and call.settings.vision_exchange == "routed"
    call.ids = ids
    if ids is not None and call.routed:
        carriers["input_ids"] = with_call(ids, call)
    # in the places where they came: some decorators of forwards add keyword arguments of their own
    positional = tuple(carriers.pop(name, value) for name, value in zip(parameters.positional, args))
    return positional, {**kwargs, **carriers}


def _mark_outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
    """Forward hook of a model: says which positions the outputs belong to, and makes logits whole where asked."""
    call: ForwardCall | None = kwargs.get(CALL)
    if call is None or call.whole or isinstance(outputs, tuple):
        return outputs
    if call.settings.logits == "whole" and getattr(outputs, "logits", None) is not None:
        outputs.logits = gather_sequence(outputs.logits, call.shard)
    outputs.sequence_shard = call.shard
    return outputs
