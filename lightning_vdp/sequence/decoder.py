"""Hooks that divide a decoder's sequence: between the merged embeddings and the head, every tensor is a shard."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vdp.call.call import CALL, ForwardCall
from lightning_vdp.collectives import attach
from lightning_vdp.errors import UnsupportedError
from lightning_vdp.families.conventions import PER_POSITION
from lightning_vdp.families.wrappers import class_name
from lightning_vdp.sequence.audit import Audit
from lightning_vdp.shards import gather_sequence, shard_sequence
from lightning_vdp.vision.tower import run_absent_towers

__all__ = ["check_decoder_outputs", "leave_decoder", "shard_decoder_inputs", "shard_layer_inputs"]


def shard_decoder_inputs(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the decoder: prepares what does not pass through a layer's arguments.

    The embeddings stay whole here: the decoder derives masks and positions from their length.
    """
    call: ForwardCall | None = kwargs.get(CALL)
    if call is None:
        return None
    kwargs = {**kwargs, "use_cache": False}
    if decoder is call.base:
        # it merges features itself: what this rank's batch lacks comes first, and is attached in front of the layers
        run_absent_towers(call, before=next(iter(call.present), None))
    else:
        run_absent_towers(call)
        if call.dummy_outputs:
            kwargs["inputs_embeds"] = attach(kwargs["inputs_embeds"], call.dummy_outputs)
            call.dummy_outputs = []
    if call.whole:
        return args, kwargs
    call.mixed = Counter()
    levels = kwargs.get("deepstack_visual_embeds")
    if levels is not None:
        mask = kwargs["visual_pos_masks"]
        kwargs["visual_pos_masks"] = local = shard_sequence(mask, call.shard)
        if not call.routed:
            rows = (shard_sequence(mask.flatten().cumsum(0).view_as(mask), call.shard) - 1)[local]
            kwargs["deepstack_visual_embeds"] = [level[rows] for level in levels]
    return args, kwargs


def shard_layer_inputs(
    cut_dim: int | None,
    names: Sequence[str | None],
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Forward pre-hook of a decoder layer: cuts rotary tables and what else has positions.

    Masks stay whole: attention sees the whole sequence. Hidden states are cut in dimension `cut_dim`, in front of the
    first layer. `names` are those of the layer's arguments that belong to positions, in their places.
    """
    call: ForwardCall | None = kwargs.get(CALL)
    if call is None:
        return None
    if call.dummy_outputs:
        args, call.dummy_outputs = (attach(args[0], call.dummy_outputs), *args[1:]), []
    if call.whole:
        return args, kwargs
    if cut_dim is not None:
        args = (shard_sequence(args[0], call.shard, cut_dim), *args[1:])
        # from here to the decoder's end ranks hold different positions
        call.randomness.__enter__()
    if len(args) > 1:
        args = tuple(
            value if name is None else call.cut_once(value, PER_POSITION[name]) for name, value in zip(names, args)
        )
    kwargs = dict(kwargs)
    tables = kwargs.get("position_embeddings")
    if tables is not None:
        kwargs["position_embeddings"] = call.cut_once(tables, -2)
    for name, dim in PER_POSITION.items():
        if name in kwargs:
            kwargs[name] = call.cut_once(kwargs[name], dim)
    return args, kwargs


def check_decoder_outputs(
    audit: Audit, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
) -> Any:
    """Forward hook of the decoder: audits attention, and makes router logits whole for the auxiliary loss.

    Raises:
        UnsupportedError: If some layer's attention did not pass through Ulysses exactly once.
    """
    call: ForwardCall | None = kwargs.get(CALL)
    if call is None or call.whole:
        return None
    problems = audit.unmixed(call)
    if problems:
        raise UnsupportedError(
            f"{class_name(decoder)} cannot be divided over the sequence: each layer's attention must pass once through "
            f"the attention registry of transformers; it did not in {', '.join(problems)}. Set "
            "`sequence_parallel_size=1` for this model."
        )
    routers = getattr(outputs, "router_logits", None)
    if routers is not None:
        outputs["router_logits"] = tuple(_gather_tokens(router, call) for router in routers)
    return outputs


def leave_decoder(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
    """Forward hook of the decoder, called after an error too: random numbers are common again."""
    call: ForwardCall | None = kwargs.get(CALL)
    if call is not None:
        call.randomness.__exit__()


def _gather_tokens(x: Tensor, call: ForwardCall) -> Tensor:
    """Per-token rows ``[B * T, E]`` of a shard to those of the whole, ``[B * S, E]``."""
    whole = gather_sequence(x.view(-1, call.shard.size, x.shape[-1]), call.shard)
    return torch.flatten(whole, 0, 1)
