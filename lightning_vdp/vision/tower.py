"""Running the tower on this rank's units, and on a dummy where the lockstep of all ranks asks for it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vdp.batch.contents import count_placeholders
from lightning_vdp.call.arguments import parameters_of
from lightning_vdp.call.call import CALL, ForwardCall, call_of
from lightning_vdp.call.header import exchange_headers
from lightning_vdp.call.randomness import RankRandomness
from lightning_vdp.errors import StepError, UnsupportedError
from lightning_vdp.families.family import Modality
from lightning_vdp.families.find import smallest_unit
from lightning_vdp.run.regions import TOWER, region
from lightning_vdp.vision.assign import loads
from lightning_vdp.vision.exchange import gather_features, received_rows, route_features
from lightning_vdp.vision.monitor import Stopwatch, VisionLoad
from lightning_vdp.vision.outputs import (
    count_rows,
    count_rows_of_last,
    count_rows_of_units,
    feature_levels,
    with_features,
)
from lightning_vdp.vision.plan import cheapest, route_units, working_units
from lightning_vdp.vision.select import build_unit, select_units

__all__ = ["divided_features", "restricted_placeholders", "run_absent_towers"]


def divided_features(modality: Modality) -> Callable[..., Any]:
    """Makes the function that stands in for a base model's `get_image_features` or `get_video_features`."""
    return functools.partial(_features, modality)


def _original(base: nn.Module, modality: Modality) -> functools.partial[Any]:
    """The model's own method, under the stand-in on the instance."""
    return functools.partial(getattr(type(base), modality.features), base)


@region(TOWER)
def _run(encode: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return encode(**arguments)


def _features(modality: Modality, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop(CALL, None)
    encode = _original(self, modality)
    arguments = parameters_of(encode.func).by_name(self, args, kwargs)
    # on the pixels, since some models do not hand keyword arguments on
    carried = [call_of(arguments.get(name)) for name in (modality.pixels, modality.grid) if name is not None]
    call = next((each for each in carried if each is not None), None)
    if call is None:
        return encode(*args, **kwargs)
    run_absent_towers(call, before=modality)
    call.pending.remove(modality)
    return _divide(encode, arguments, call, modality)


def _divide(encode: Callable[..., Any], arguments: dict[str, Any], call: ForwardCall, modality: Modality) -> Any:
    """Encodes this rank's units and exchanges their features."""
    clock = Stopwatch(call.device)
    if call.encodes_all:
        return _encode_all(encode, arguments, call, modality, clock)
    share = _encode_share(encode, arguments, call, modality)
    clock.stop()
    plan = call.plans[modality.name]
    if plan.rows is None:
        rows = _agree_on_rows(call, modality, share.rows)
        plan = call.plans[modality.name] = dataclasses.replace(plan, rows=rows)
    _check_rows(share.levels, plan.rows_per_rank[call.shard.rank], modality)
    group, track = call.shard.group, call.shard.track("exchange")
    routes = None
    if call.routed:
        assert call.ids is not None
        routes = route_units(modality, call.ids, call)
        exchanged = route_features(share.levels, routes, group, track)
    else:
        exchanged = gather_features(share.levels, plan, group, track)
    row_bytes = sum(level.shape[1] * level.element_size() for level in share.levels)
    received = received_rows(plan, routes, call.shard.rank) * row_bytes
    _report(call, modality, plan.owned(call.shard.rank), received, clock)
    return with_features(share.outputs, exchanged)


def _encode_all(
    encode: Callable[..., Any], arguments: dict[str, Any], call: ForwardCall, modality: Modality, clock: Stopwatch
) -> Any:
    # without the call: a model may encode videos by way of its method for images
    plain = {name: arguments[name].view_as(arguments[name]) for name in modality.carriers(call.family.facts)}
    with call.mesh.watch.phase(f"tower ({modality.name}s)"):
        outputs = _run(encode, {**arguments, **plain})
    if not call.family.facts.merged_rows:
        _agree_on_rows(call, modality, [count_rows(outputs)] if call.shard.rank == 0 else [])
    clock.stop()
    _report(call, modality, list(range(len(call.plans[modality.name].sizes))), 0, clock)
    return outputs


@dataclasses.dataclass(frozen=True)
class _Share:
    """What encoding this rank's units gave.

    Args:
        outputs: What the model returned.
        levels: Its features and those of its deepstack levels, each ``[rows, width]``.
        rows: Rows of features of each unit, where they are measured.
    """

    outputs: Any
    levels: list[Tensor]
    rows: list[int]


def _encode_share(
    encode: Callable[..., Any], arguments: dict[str, Any], call: ForwardCall, modality: Modality
) -> _Share:
    plan, facts = call.plans[modality.name], call.family.facts
    owned = plan.owned(call.shard.rank)
    working = working_units(modality, arguments, call.ids, len(plan.sizes), facts)
    # together with units that make the tower do less, one that does not, whose features are dropped
    extra = working[:1] if owned and working and not set(working).intersection(owned) else []
    with _tower(call, modality):
        if not owned:
            outputs, levels = _run_dummy(encode, call, modality, arguments, working)
            return _Share(outputs, levels, [])
        encoded = [*owned, *extra]
        outputs = _run(encode, select_units(arguments, encoded, plan, modality, facts))
    levels = feature_levels(outputs)
    dropped = count_rows_of_last(outputs, facts) if extra else 0
    if dropped:
        levels = [level[: level.shape[0] - dropped] for level in levels]
    if plan.rows is not None:
        return _Share(outputs, levels, [])
    rows = count_rows_of_units(outputs, [plan.sizes[unit] for unit in encoded], facts)
    if extra:
        # where the output does not tell units apart, all rows stand with the first
        rows = rows[:-1] if facts.listed else [rows[0] - dropped, *rows[1:-1]]
    return _Share(outputs, levels, rows)


def _config(call: ForwardCall) -> Any:
    assert call.base is not None, "the decoder ran outside the forward of its base model"
    return call.base.config


@contextmanager
def _tower(call: ForwardCall, modality: Modality) -> Iterator[None]:
    """Around a run of the tower on images of this rank's own."""
    place = f"tower ({modality.name}s)"
    with call.mesh.watch.phase(place), RankRandomness(place, call.mesh.rank, call.device):
        yield


def _report(call: ForwardCall, modality: Modality, encoded: list[int], received: int, clock: Stopwatch) -> None:
    if not call.observers:
        return
    plan = call.plans[modality.name]
    if call.encodes_all:
        costs = (sum(plan.costs[unit] for unit in encoded),) * plan.ranks
    else:
        costs = tuple(loads(plan.costs, plan.owners, plan.ranks))
    load = VisionLoad(
        modality=modality.name,
        units=len(encoded),
        patches=sum(plan.sizes[unit] for unit in encoded),
        loads=costs,
        bytes_received=received,
        tower=clock,
    )
    for observe in call.observers:
        observe(load)


def _agree_on_rows(call: ForwardCall, modality: Modality | None, measured: list[int]) -> tuple[int, ...]:
    """Exchanges the rows of features that units yielded; every rank of the world takes part.

    Args:
        call: The forward.
        modality: What was encoded; None on ranks whose batch lacks it.
        measured: Rows of this rank's units.

    Returns:
        Rows of all units of this rank's replica.

    Raises:
        StepError: If some replica's placeholders are not as many as its features; the same on every rank.
    """
    expected: list[int] = []
    if modality is not None and call.ids is not None and call.counts_placeholders:
        expected = [count_placeholders(call.ids, modality)]
    header = {"rows": measured, "placeholders": expected}
    headers = exchange_headers(call.mesh, header).wait()
    size = call.mesh.sequence_parallel_size
    problems = []
    for first in range(0, len(headers), size):
        group = headers[first : first + size]
        found = sum(sum(other["rows"]) for other in group)
        for rank, other in enumerate(group, first):
            if other["placeholders"] and other["placeholders"][0] != found:
                problems.append(
                    f"rank {rank}: the batch has {other['placeholders'][0]} placeholder tokens, but its images or videos yield "
                    f"{found} features; check that truncation did not cut placeholders off"
                )
    if problems:
        raise StepError("Refused before the step: " + "; ".join(problems))
    if modality is None:
        return ()
    plan = call.plans[modality.name]
    group = headers[call.mesh.data_parallel_rank * size :][:size]
    rows = [0] * len(plan.sizes)
    for rank in range(0 if call.encodes_all else size):
        for unit, count in zip(plan.owned(rank), group[rank]["rows"]):
            rows[unit] = count
    return tuple(rows)


def _check_rows(levels: list[Tensor], expected: int, modality: Modality) -> None:
    if levels[0].shape[0] != expected:
        raise UnsupportedError(
            f"The tower yielded {levels[0].shape[0]} rows of features for this rank's {modality.name}s, but their "
            f"placeholder tokens are {expected}; the processor and the model do not belong together."
        )


def _run_dummy(
    encode: Callable[..., Any],
    call: ForwardCall,
    modality: Modality,
    arguments: dict[str, Any],
    working: list[int] | None = None,
) -> tuple[Any, list[Tensor]]:
    """Runs a small unit and keeps none of its rows: no `0 * x`, since `0 * inf` is NaN."""
    facts = call.family.facts
    if facts.tiny_unit:
        unit = _tiny_unit(call, modality)
    elif modality.pixels in arguments:
        plan = call.plans[modality.name]
        unit = select_units(arguments, [cheapest(plan.costs, working)], plan, modality, facts)
    else:
        unit = build_unit(_description(call, modality), modality, call.device)
    plain = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}
    outputs = _run(encode, {**plain, **unit, "return_dict": True})
    return outputs, [level[:0] for level in feature_levels(outputs)]


def _tiny_unit(call: ForwardCall, modality: Modality) -> dict[str, Tensor]:
    base: Any = call.base
    config = _config(call).vision_config
    shape = smallest_unit(config, base.get_submodule(call.family.tower))
    # filled on the device: a list would be copied there
    grid = torch.full((1, 3), int(config.spatial_merge_size), dtype=torch.int64, device=call.device)
    grid[:, 0].fill_(1)
    assert modality.grid is not None
    return {modality.pixels: torch.zeros(shape, device=call.device), modality.grid: grid}


def _description(call: ForwardCall, modality: Modality) -> list[int]:
    return next(
        header[f"{modality.name}_smallest"] for header in call.headers.wait() if header[f"{modality.name}_smallest"]
    )


def run_absent_towers(call: ForwardCall, before: Modality | None = None, agree: bool = True) -> None:
    """Runs a dummy for each modality that other ranks of the world encode and this rank's batch lacks.

    Towers hold FSDP collectives, so all ranks run them equally often and in one order.

    Args:
        call: The forward.
        before: Stop in front of this modality. Default: run all that are left.
        agree: Whether ranks that run a tower tell its rows, for which all take part.
    """
    while call.pending and call.pending[0] != before:
        modality = call.pending.pop(0)
        if call.lockstep:
            assert call.base is not None
            with _tower(call, modality):
                _, levels = _run_dummy(_original(call.base, modality), call, modality, {})
            call.dummy_outputs += [level for level in levels if level.requires_grad]
        if agree and not call.family.facts.merged_rows:
            _agree_on_rows(call, None, [])


def restricted_placeholders(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `get_placeholder_mask`: where features were routed, it names only those of this rank's shard."""
    method = type(self).get_placeholder_mask
    original = functools.partial(method, self)
    arguments = parameters_of(method).by_name(self, args, kwargs)
    ids: Tensor | None = arguments.get("input_ids")
    call = call_of(ids)
    if ids is None or call is None or not call.routed:
        return original(**arguments)
    inside = ids.clone()
    for outside in [inside[:, positions] for positions in call.shard.layout.outside(call.shard.rank)]:
        for modality in call.present:
            assert modality.token is not None, "features without a placeholder token are not routed"
            # other tokens stay: some models look for what begins and ends a video
            outside.masked_fill_(outside.eq(modality.token), -1)
    return original(**{**arguments, "input_ids": inside})
