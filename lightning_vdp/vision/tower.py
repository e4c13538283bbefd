"""Running the tower on this rank's units, and on a dummy where the lockstep of all ranks asks for it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vdp.call import CALL, ForwardCall, call_of
from lightning_vdp.models import Modality, smallest_unit
from lightning_vdp.vision.assignment import loads
from lightning_vdp.vision.exchange import gather_features, received_rows, route_features
from lightning_vdp.vision.load import Stopwatch, VisionLoad
from lightning_vdp.vision.units import UnitPlan

__all__ = ["divided_features", "restricted_placeholders", "run_absent_towers"]


def divided_features(modality: Modality) -> Callable[..., Any]:
    """Makes the function that stands in for a base model's `get_image_features` or `get_video_features`."""
    return functools.partial(_features, modality)


def _own(base: nn.Module, modality: Modality) -> Callable[..., Any]:
    """The model's own method, under the stand-in on the instance."""
    return functools.partial(getattr(type(base), modality.features), base)


def _features(modality: Modality, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop(CALL, None)
    own = _own(self, modality)
    bound = inspect.signature(own).bind_partial(*args, **kwargs).arguments
    arguments = {**bound, **bound.get("kwargs", {})}
    arguments.pop("kwargs", None)
    # on the pixels, since some models do not hand keyword arguments on
    call = call_of(arguments.get(modality.pixels))
    if call is None:
        return own(*args, **kwargs)
    run_absent_towers(call, before=modality)
    call.pending.remove(modality)
    return _divide(own, arguments, call, modality)


def _divide(own: Callable[..., Any], arguments: dict[str, Any], call: ForwardCall, modality: Modality) -> Any:
    plan = call.plans[modality.name]
    watch = Stopwatch(call.device)
    if not call.settings.vision_data_parallel:
        # without the call: a model may encode videos by way of its method for images
        pixels = arguments[modality.pixels]
        outputs = own(**{**arguments, modality.pixels: pixels.view_as(pixels)})
        watch.stop()
        _report(call, modality, plan, list(range(len(plan.sizes))), 0, watch)
        return outputs
    owned = plan.owned(call.shard.rank)
    if owned:
        outputs = own(**_select(arguments, owned, plan, modality))
        levels = _levels(outputs)
    else:
        outputs, levels = _dummy(own, call, modality, arguments)
    watch.stop()
    _check_rows(levels, plan.rows_per_rank[call.shard.rank], modality)
    routes = call.routes.get(modality.name)
    if routes is None:
        exchanged = gather_features(levels, plan, call.shard.group)
    else:
        exchanged = route_features(levels, routes, call.shard.group)
    row_bytes = sum(level.shape[1] * level.element_size() for level in levels)
    _report(call, modality, plan, owned, received_rows(plan, routes, call.shard.rank) * row_bytes, watch)
    units, *deepstack = exchanged
    # one tensor for all units, ``[units, rows, width]``, or a list
    pooled = torch.stack(units) if isinstance(outputs.pooler_output, Tensor) else units
    # without the other fields, which describe this rank's units alone and would keep their activations
    return type(outputs)(pooler_output=pooled, **({"deepstack_features": deepstack} if deepstack else {}))


def _report(
    call: ForwardCall, modality: Modality, plan: UnitPlan, encoded: list[int], received: int, watch: Stopwatch
) -> None:
    if not call.observers:
        return
    own = sum(plan.costs[unit] for unit in encoded)
    divided = call.settings.vision_data_parallel
    load = VisionLoad(
        modality=modality.name,
        units=len(encoded),
        patches=sum(plan.sizes[unit] for unit in encoded),
        loads=tuple(loads(plan.costs, plan.owners, plan.ranks)) if divided else (own,) * plan.ranks,
        bytes_received=received,
        tower=watch,
    )
    for observe in call.observers:
        observe(load)


def _select(arguments: dict[str, Any], owned: list[int], plan: UnitPlan, modality: Modality) -> dict[str, Any]:
    """The arguments for the owned units alone; views joined on the device, since an index list would be copied there."""
    pixels = arguments[modality.pixels]
    if owned == list(range(owned[0], owned[-1] + 1)):
        start = sum(plan.sizes[: owned[0]])
        chosen = pixels[start : start + sum(plan.sizes[unit] for unit in owned)]
    else:
        parts = pixels.split(list(plan.sizes))
        chosen = torch.cat([parts[unit] for unit in owned])
    selected = {**arguments, modality.pixels: chosen}
    if modality.grid is not None:
        selected[modality.grid] = _pick(_frames(arguments[modality.grid], plan), owned)
        return selected
    for name, value in arguments.items():
        if name != modality.pixels and isinstance(value, Tensor) and value.dim() and value.shape[0] == len(plan.sizes):
            selected[name] = _pick(value, owned)
    return selected


def _pick(x: Tensor, units: list[int]) -> Tensor:
    return torch.cat([x[unit : unit + 1] for unit in units])


def _frames(grid: Tensor, plan: UnitPlan) -> Tensor:
    """Grids of units that are frames of the given grids, ``[videos, 3]`` to ``[units, 3]``."""
    if not plan.frames:
        return grid
    frames = torch.cat([grid[video : video + 1].expand(count, -1) for video, count in enumerate(plan.frames)])
    return torch.cat([torch.ones_like(frames[:, :1]), frames[:, 1:]], dim=1)


def _levels(outputs: Any) -> list[Tensor]:
    """The tower's output and its deepstack levels, each as rows ``[rows, width]``."""
    levels = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or [])]
    return [level.flatten(0, 1) if isinstance(level, Tensor) else torch.cat(list(level)) for level in levels]


def _check_rows(levels: list[Tensor], expected: int, modality: Modality) -> None:
    if levels[0].shape[0] != expected:
        raise RuntimeError(
            f"The tower yielded {levels[0].shape[0]} rows of features for this rank's {modality.name}s, but their "
            f"placeholder tokens are {expected}; the processor and the model do not belong together."
        )


def _dummy(
    own: Callable[..., Any], call: ForwardCall, modality: Modality, arguments: dict[str, Any]
) -> tuple[Any, list[Tensor]]:
    """Runs the smallest unit there is and keeps none of its rows: no `0 * x`, since `0 * inf` is NaN."""
    base: Any = call.base
    assert base is not None, "the decoder ran outside the forward of its base model"
    config = base.config.vision_config
    shape = smallest_unit(modality, config, base.get_submodule(call.family.tower))
    if modality.pixels in arguments and modality.grid is None:
        shape = (1, *arguments[modality.pixels].shape[1:])
    unit = {modality.pixels: torch.zeros(shape, device=call.device)}
    if modality.grid is not None:
        # filled on the device: a list would be copied there
        grid = torch.full((1, 3), int(config.spatial_merge_size), dtype=torch.int64, device=call.device)
        grid[:, 0].fill_(1)
        unit[modality.grid] = grid
    plain = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}
    outputs = own(**{**plain, **unit, "return_dict": True})
    return outputs, [level[:0] for level in _levels(outputs)]


def run_absent_towers(call: ForwardCall, before: Modality | None = None) -> None:
    """Runs a dummy for each modality that other ranks of the world encode and this rank's batch lacks.

    Towers hold FSDP collectives, so all ranks run them equally often and in one order.

    Args:
        call: The forward.
        before: Stop in front of this modality. Default: run all that are left.
    """
    while call.pending and call.pending[0] != before:
        modality = call.pending.pop(0)
        if call.lockstep:
            assert call.base is not None
            _, levels = _dummy(_own(call.base, modality), call, modality, {})
            call.loose_ends += [level for level in levels if level.requires_grad]


def restricted_placeholders(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `get_placeholder_mask`: where features were routed, it names only those of this rank's shard."""
    own = functools.partial(type(self).get_placeholder_mask, self)
    arguments = inspect.signature(own).bind_partial(*args, **kwargs).arguments
    ids: Tensor | None = arguments.get("input_ids")
    call = call_of(ids)
    if ids is None or call is None or not call.routes:
        return own(**arguments)
    inside = torch.full_like(ids, -1)
    shard = slice(call.shard.start, call.shard.start + call.shard.size)
    inside[:, shard] = ids[:, shard]
    return own(**{**arguments, "input_ids": inside})
