"""Entering models: the hooks and instance patches that divide a model, and taking them out again."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from lightning_vdp.call.arguments import Parameters, parameters_of
from lightning_vdp.call.call import CALL, ForwardCall, with_call
from lightning_vdp.errors import UnsupportedError, UserError
from lightning_vdp.families.conventions import PER_POSITION
from lightning_vdp.families.find import DividedModel
from lightning_vdp.forward.begin import Entry, begin_call, start_generation
from lightning_vdp.forward.first_batch import FirstBatch
from lightning_vdp.forward.generation import encoded_in_lockstep, undivided_inputs
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
from lightning_vdp.sequence.ulysses import attention_dispatcher
from lightning_vdp.settings import Settings
from lightning_vdp.shards import gather_sequence
from lightning_vdp.vision.cost import tower_cost
from lightning_vdp.vision.tower import divided_features, restricted_placeholders

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
            UnsupportedError: If the class has no such method, does not look there, or somebody patched this instance already.
        """
        attribute = attribute or name
        if not hasattr(type(instance), name):
            raise UnsupportedError(
                f"{type(instance).__name__} of transformers {transformers_version} has no `{name}`, where lightning_vdp "
                "enters; install a version of transformers that this version of lightning_vdp names."
            )
        if attribute in vars(instance):
            raise UnsupportedError(
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
            raise UnsupportedError(
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
        UserError: If a model cannot be divided over so many ranks.
        UnsupportedError: If transformers has moved what must be patched.
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
        raise UserError(
            f"`sequence_parallel_size` is {ranks}, but {type(model.base).__name__} at '{model.name}' has {heads} attention "
            f"heads, of which each rank needs one; sizes that work are 1 to {heads}."
        )
    takes = "pixel_values" in inspect.signature(type(model.base).forward).parameters
    if takes and not any(modality.pixels == "pixel_values" for modality in model.family.modalities):
        raise UnsupportedError(
            f"{type(model.base).__name__} of transformers {transformers_version} has no `get_image_features`, where "
            "lightning_vdp enters; install a version of transformers that this version of lightning_vdp names."
        )
    if any(_is_reentrant(module) for module in model.base.modules()):
        raise UserError(
            f"{type(model.base).__name__} at '{model.name}' checkpoints activations with `use_reentrant=True`, which FSDP "
            "cannot follow when ranks encode other images; enable it with "
            'gradient_checkpointing_kwargs={"use_reentrant": False}.'
        )
    other = next((part for part in model.loss_models if not model_uses_causal_loss(part)), None)
    if other is not None:
        raise UserError(
            f"{type(other).__name__} has a loss function of its own, which shards of logits would bend; remove it and "
            "compute the loss in `training_step`, or set `sequence_parallel_size=1`."
        )


def _is_reentrant(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    if function is None or not getattr(module, "gradient_checkpointing", False):
        return False
    return bool(getattr(function, "keywords", {}).get("use_reentrant", True))


def _divide_model(
    division: Division, model: DividedModel, mesh: SequenceMesh, settings: Settings, lockstep: bool
) -> None:
    first = FirstBatch(expected=settings.verify_first_batch)
    # without Vision DP, replicas that lack images still run dummies through them
    norms = tuple(model.batch_norms) if settings.vision_data_parallel or mesh.data_parallel_size > 1 else ()
    all_mixers = [mixer for layer in model.layers for mixer in token_mixers(layer)]
    text = model.base.config.get_text_config()
    vision = getattr(model.base.config, "vision_config", None)
    cost = tower_cost(vision, model.family.facts.tower_mlp_matrices)
    start = Entry(mesh, settings, model.family, text, lockstep, first, bool(all_mixers), norms, cost)
    for entry in model.entries:
        begin = functools.partial(begin_call, start, parameters_of(type(entry).forward))
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
        cut_dim = None if index else model.decoder_facts.sequence_dim
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
        begin_generation = functools.partial(start_generation, start)
        division.method(
            model.head, "prepare_inputs_for_generation", functools.partial(undivided_inputs, begin_generation)
        )
        if model.family.modalities:
            encode = functools.partial(encoded_in_lockstep, begin_generation)
            division.method(model.head, "_maybe_prepare_encoder_kwargs_for_generation", encode)


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
