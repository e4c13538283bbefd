"""Hooks that divide a decoder's sequence: between the merged embeddings and the head, every tensor is a shard."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_vdp.call import CALL, ForwardCall
from lightning_vdp.collectives import attach
from lightning_vdp.models import unwrap
from lightning_vdp.sequence.attention import unmixed
from lightning_vdp.sequence.shards import gather_sequence, shard_sequence
from lightning_vdp.vision.tower import run_absent_towers

__all__ = ["check_decoder_outputs", "shard_decoder_inputs", "shard_layer_inputs"]


def shard_decoder_inputs(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the decoder: prepares what does not pass through a layer's arguments.

    The embeddings stay whole here: the decoder derives masks and positions from their length.
    """
    call: ForwardCall | None = kwargs.get(CALL)
    if call is None:
        return None
    run_absent_towers(call)
    kwargs = {**kwargs, "use_cache": False}
    if call.loose_ends:
        kwargs["inputs_embeds"] = attach(kwargs["inputs_embeds"], call.loose_ends)
        call.loose_ends = []
    if call.whole:
        return args, kwargs
    call.attended = {}
    levels = kwargs.get("deepstack_visual_embeds")
    if levels is not None:
        mask = kwargs["visual_pos_masks"]
        kwargs["visual_pos_masks"] = local = shard_sequence(mask, call.shard)
        if not call.routed:
            rows = (shard_sequence(mask.flatten().cumsum(0).view_as(mask), call.shard) - 1)[local]
            kwargs["deepstack_visual_embeds"] = [level[rows] for level in levels]
    return args, kwargs


def shard_layer_inputs(first: bool, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a decoder layer: cuts hidden states (first layer only) and rotary tables.

    Masks and position ids stay whole: attention sees the whole sequence.
    """
    call: ForwardCall | None = kwargs.get(CALL)
    if call is None or call.whole:
        return None
    if first:
        args = (shard_sequence(args[0], call.shard), *args[1:])
    tables = kwargs.get("position_embeddings")
    if tables is None:
        return args, kwargs
    cut = call.cut_once(tables, -2) if isinstance(tables, Tensor) else tuple(call.cut_once(x, -2) for x in tables)
    return args, {**kwargs, "position_embeddings": cut}


def check_decoder_outputs(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
    """Forward hook of the decoder: audits attention, and makes router logits whole for the auxiliary loss.

    Raises:
        RuntimeError: If some layer's attention did not pass through Ulysses exactly once.
    """
    call: ForwardCall | None = kwargs.get(CALL)
    if call is None or call.whole:
        return None
    problems = unmixed(call, [unwrap(layer) for layer in decoder.get_submodule("layers").children()])
    if problems:
        raise RuntimeError(
            f"{type(decoder).__name__} cannot be divided over the sequence: each layer's attention must pass once through "
            f"the attention registry of transformers; it did not in {', '.join(problems)}. Set "
            "`sequence_parallel_size=1` for this model."
        )
    routers = getattr(outputs, "router_logits", None)
    if routers is not None:
        outputs["router_logits"] = tuple(_gather_tokens(router, call) for router in routers)
    return outputs


def _gather_tokens(x: Tensor, call: ForwardCall) -> Tensor:
    """Per-token rows ``[B * T, E]`` of a shard to those of the whole, ``[B * S, E]``."""
    whole = gather_sequence(x.view(-1, call.shard.size, x.shape[-1]), call.shard)
    return torch.flatten(whole, 0, 1)
