"""Entering models: the hooks and instance patches that divide a model, and taking them out again."""

import functools
import inspect
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from lightning_vdp.call import CALL, ForwardCall, Settings, host_copy, known_host_copy
from lightning_vdp.checks import describe_bad_input, grids_of
from lightning_vdp.header import exchange_headers
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.models import Family, VisionLanguageModel
from lightning_vdp.sequence.attention import attention_dispatcher
from lightning_vdp.sequence.decoder import check_decoder_outputs, shard_decoder_inputs, shard_layer_inputs
from lightning_vdp.sequence.loss import count_tokens, model_uses_causal_loss, sharded_causal_loss
from lightning_vdp.sequence.shards import gather_sequence
from lightning_vdp.vision.cost import tower_cost
from lightning_vdp.vision.tower import divided_features
from lightning_vdp.vision.units import UnitPlan, plan_units

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
            RuntimeError: If the class has no such method or somebody patched this instance already.
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

    def dispatch_attention(self) -> None:
        """Makes attention calls that carry a `ForwardCall` pass through Ulysses."""
        attention_dispatcher.acquire()
        self._undo.append(attention_dispatcher.release)


def divide_models(models: Iterable[VisionLanguageModel], mesh: SequenceMesh, settings: Settings) -> Division:
    """Makes forwards of the models run on the ranks of a sequence group together.

    Args:
        models: As found by `find_models`.
        mesh: The ranks. At a sequence group of one rank, nothing is touched.
        settings: How to divide.

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
            _divide_model(division, model, mesh, settings)
    except BaseException:
        division.undo()
        raise
    return division


def _check_divisible(model: VisionLanguageModel, ranks: int) -> None:
    heads = model.query_heads
    if heads % ranks:
        possible = [size for size in range(1, heads + 1) if heads % size == 0]
        raise ValueError(
            f"`sequence_parallel_size` is {ranks}, but {type(model.base).__name__} at '{model.name}' has {heads} attention "
            f"heads, which {ranks} ranks cannot divide evenly; sizes that work are {possible}."
        )
    if model.head is not None and not model_uses_causal_loss(model.head):
        raise ValueError(
            f"{type(model.head).__name__} has a loss function of its own, which shards of logits would bend; remove it and "
            "compute the loss in `training_step`, or set `sequence_parallel_size=1`."
        )


def _divide_model(division: Division, model: VisionLanguageModel, mesh: SequenceMesh, settings: Settings) -> None:
    for entry in model.entries:
        signature = inspect.signature(type(entry).forward)
        begin = functools.partial(_begin_call, mesh, settings, model.family, signature)
        division.hook(entry.register_forward_pre_hook, begin)
    division.hook(model.base.register_forward_pre_hook, _enter_base)
    for modality in model.family.modalities:
        division.method(model.base, modality.features, divided_features(modality))
    division.hook(model.decoder.register_forward_pre_hook, shard_decoder_inputs)
    division.hook(model.decoder.register_forward_hook, check_decoder_outputs)
    for index, layer in enumerate(model.layers):
        division.hook(layer.register_forward_pre_hook, functools.partial(shard_layer_inputs, index == 0))
    for entry in model.entries:
        division.hook(entry.register_forward_hook, _describe_outputs)
    if model.head is not None:
        division.method(model.head, "loss_function", sharded_causal_loss, attribute="_loss_function")
        division.method(model.head, "prepare_inputs_for_generation", _prepare_undivided_inputs)


def _begin_call(
    mesh: SequenceMesh,
    settings: Settings,
    family: Family,
    signature: inspect.Signature,
    module: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Forward pre-hook of a model: starts a divided call, unless this forward is part of one or must stay whole."""
    if CALL in kwargs or not mesh.is_open:
        return None
    bound = signature.bind_partial(module, *args, **kwargs).arguments
    arguments = {**bound, **bound.get("kwargs", {})}
    if any(arguments.get(name) is not None for name in ("cache", "past_key_values")) or arguments.get("use_cache"):
        return args, {**kwargs, CALL: None}
    return args, {**kwargs, CALL: _start_call(mesh, settings, family, module.config, arguments)}


def _start_call(
    mesh: SequenceMesh, settings: Settings, family: Family, config: Any, arguments: dict[str, Any]
) -> ForwardCall:
    ranks = mesh.sequence_parallel_size
    error = describe_bad_input(arguments, family, config, ranks)
    header: dict[str, list[int]] = {}
    plans: dict[str, UnitPlan] = {}
    if error is None:
        sequence = arguments["input_ids"] if arguments.get("input_ids") is not None else arguments["inputs_embeds"]
        header = {"length": [sequence.shape[1]], "modalities": []}
        merge = int(config.vision_config.spatial_merge_size)
        cost = tower_cost(config.vision_config) if settings.vision_balance == "time" else None
        for index, modality in enumerate(family.modalities):
            grids = grids_of(arguments, modality)
            if arguments.get(modality.pixels) is not None:
                header["modalities"].append(index)
                plan = plan_units(grids, ranks, merge, settings.vision_assignment, cost)
                plans[modality.name] = plan
                header[f"{modality.name}_units"] = list(plan.patches)
        labels = arguments.get("labels")
        if isinstance(labels, Tensor):
            # counting on a device costs a sync, which only the global weights are worth
            host = host_copy(labels) if settings.loss_tokens == "global" else known_host_copy(labels)
            header["tokens"] = [] if host is None else [count_tokens(host)]
    headers = exchange_headers(mesh, header, error)
    if error is not None:
        headers.wait()
    return ForwardCall(mesh, settings, family, sequence.shape[1], plans, headers, sequence.device)


def _enter_base(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the base model: absent towers are run through it."""
    call: ForwardCall | None = kwargs.get(CALL)
    if call is not None:
        call.base = base


def _describe_outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
    """Forward hook of a model: says which positions the outputs belong to, and makes logits whole where asked."""
    call: ForwardCall | None = kwargs.get(CALL)
    if call is None or isinstance(outputs, tuple):
        return outputs
    if call.settings.logits == "whole" and getattr(outputs, "logits", None) is not None:
        outputs.logits = gather_sequence(outputs.logits, call.shard)
    outputs.sequence_shard = call.shard
    return outputs


def _prepare_undivided_inputs(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Stands in for `prepare_inputs_for_generation`: generation runs whole on every rank."""
    inputs = type(self).prepare_inputs_for_generation(self, *args, **kwargs)
    return {**inputs, CALL: None}
