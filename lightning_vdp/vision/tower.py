"""Running the tower on this rank's units, and on a dummy where the lockstep of all ranks asks for it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vdp.call import CALL, ForwardCall
from lightning_vdp.models import Modality, patch_width
from lightning_vdp.vision.exchange import gather_features
from lightning_vdp.vision.units import UnitPlan

__all__ = ["divided_features", "run_absent_towers"]


def divided_features(modality: Modality) -> Callable[..., Any]:
    """Makes the function that stands in for a base model's `get_image_features` or `get_video_features`."""
    return functools.partial(_features, modality)


def _own(base: nn.Module, modality: Modality) -> Callable[..., Any]:
    """The model's own method, under the stand-in on the instance."""
    return functools.partial(getattr(type(base), modality.features), base)


def _features(modality: Modality, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call: ForwardCall | None = kwargs.pop(CALL, None)
    own = _own(self, modality)
    if call is None:
        return own(*args, **kwargs)
    run_absent_towers(call, before=modality)
    call.pending.remove(modality)
    if not call.settings.vision_data_parallel:
        return own(*args, **kwargs)
    arguments = inspect.signature(own).bind_partial(*args, **kwargs).arguments
    pixels, grid = arguments[modality.pixels], arguments[modality.grid]
    others = {
        name: value
        for name, value in {**arguments, **arguments.get("kwargs", {})}.items()
        if name not in (modality.pixels, modality.grid, "kwargs")
    }
    return _divide(own, pixels, grid, others, call.plans[modality.name], call)


def _divide(
    own: Callable[..., Any],
    pixels: Tensor,
    grid: Tensor,
    others: dict[str, Any],
    plan: UnitPlan,
    call: ForwardCall,
) -> Any:
    owned = plan.owned(call.shard.rank)
    if owned:
        parts = pixels.split(list(plan.patches))
        # views joined on the device: indexing with a list would copy the list there
        outputs = own(
            torch.cat([parts[unit] for unit in owned]), torch.cat([grid[unit : unit + 1] for unit in owned]), **others
        )
        levels = [torch.cat(list(level)) for level in _levels(outputs)]
    else:
        outputs, levels = _dummy(own, call, pixels, grid, others)
    units, *deepstack = gather_features(levels, plan, call.shard.group)
    outputs.pooler_output = units
    # the only field left that describes this rank's units alone
    outputs.last_hidden_state = None
    if deepstack:
        outputs.deepstack_features = deepstack
    return outputs


def _levels(outputs: Any) -> list[Any]:
    return [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or [])]


def _dummy(
    own: Callable[..., Any], call: ForwardCall, pixels: Tensor, grid: Tensor, others: dict[str, Any]
) -> tuple[Any, list[Tensor]]:
    """Runs the smallest unit there is and keeps none of its rows: no `0 * x`, since `0 * inf` is NaN."""
    merge = int(call_base(call).config.vision_config.spatial_merge_size)
    outputs = own(pixels.new_zeros(merge * merge, pixels.shape[1]), grid.new_tensor([[1, merge, merge]]), **others)
    return outputs, [torch.cat(list(level))[:0] for level in _levels(outputs)]


def call_base(call: ForwardCall) -> Any:
    """The base model of a call that has entered it."""
    assert call.base is not None, "the decoder ran outside the forward of its base model"
    return call.base


def run_absent_towers(call: ForwardCall, before: Modality | None = None) -> None:
    """Runs a dummy for each modality that other ranks of the world encode and this rank's batch lacks.

    Towers hold FSDP collectives, so all ranks run them equally often and in one order.

    Args:
        call: The forward.
        before: Stop in front of this modality. Default: run all that are left.
    """
    while call.pending and call.pending[0] != before:
        modality = call.pending.pop(0)
        base = call_base(call)
        width = patch_width(base.get_submodule(call.family.tower))
        pixels = torch.zeros(0, width, device=call.device)
        grid = torch.zeros(0, 3, dtype=torch.int64, device=call.device)
        _, levels = _dummy(_own(base, modality), call, pixels, grid, {"return_dict": True})
        call.loose_ends += [level for level in levels if level.requires_grad]
