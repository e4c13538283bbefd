"""Running the tower on this rank's units, and on a dummy where the lockstep of all ranks asks for it."""

import dataclasses
import functools
import itertools
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
from lightning_vdp.call.units import UnitPlan
from lightning_vdp.errors import StepError, UnsupportedError
from lightning_vdp.families.facts import Facts
from lightning_vdp.families.family import Modality
from lightning_vdp.families.find import smallest_unit
from lightning_vdp.run.regions import TOWER, region
from lightning_vdp.vision.assign import loads
from lightning_vdp.vision.exchange import gather_features, received_rows, route_features
from lightning_vdp.vision.monitor import Stopwatch, VisionLoad
from lightning_vdp.vision.plan import cheapest, route_units, working_units
from lightning_vdp.vision.select import build_unit, select_units

__all__ = ["divided_features", "restricted_placeholders", "run_absent_towers"]


def divided_features(modality: Modality) -> Callable[..., Any]:
    """Makes the function that stands in for a base model's `get_image_features` or `get_video_features`."""
    return functools.partial(_features, modality)


def _own(base: nn.Module, modality: Modality) -> functools.partial[Any]:
    """The model's own method, under the stand-in on the instance."""
    return functools.partial(getattr(type(base), modality.features), base)


@region(TOWER)
def _run(own: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return own(**arguments)


def _features(modality: Modality, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop(CALL, None)
    own = _own(self, modality)
    arguments = parameters_of(own.func).by_name(self, args, kwargs)
    # on the pixels, since some models do not hand keyword arguments on
    carried = [call_of(arguments.get(name)) for name in (modality.pixels, modality.grid) if name is not None]
    call = next((each for each in carried if each is not None), None)
    if call is None:
        return own(*args, **kwargs)
    run_absent_towers(call, before=modality)
    call.pending.remove(modality)
    return _divide(own, arguments, call, modality)


def _divide(own: Callable[..., Any], arguments: dict[str, Any], call: ForwardCall, modality: Modality) -> Any:
    plan, facts = call.plans[modality.name], call.family.facts
    watch = Stopwatch(call.device)
    if call.encodes_all:
        # without the call: a model may encode videos by way of its method for images
        plain = {name: arguments[name].view_as(arguments[name]) for name in modality.carriers(facts)}
        with call.mesh.watch.phase(f"tower ({modality.name}s)"):
            outputs = _run(own, {**arguments, **plain})
        if not facts.merged_rows:
            _agree_on_rows(call, modality, [_total_rows(outputs)] if call.shard.rank == 0 else [])
        watch.stop()
        _report(call, modality, plan, list(range(len(plan.sizes))), 0, watch)
        return outputs
    owned = plan.owned(call.shard.rank)
    working = working_units(modality, arguments, call.ids, len(plan.sizes), facts)
    # beside units that make the tower do less, one that does not, whose features are dropped
    beside = working[:1] if owned and working and not set(working).intersection(owned) else []
    with _tower(call, modality):
        if owned:
            outputs = _run(own, select_units(arguments, [*owned, *beside], plan, modality, facts))
            levels = _levels(outputs)
        else:
            outputs, levels = _dummy(own, call, modality, arguments, working)
    watch.stop()
    dropped = _rows_of_the_last(outputs, facts) if beside else 0
    levels = [level[: level.shape[0] - dropped] for level in levels] if dropped else levels
    if plan.rows is None:
        measured: list[int] = []
        if owned:
            measured = _rows_of_units(outputs, [plan.sizes[unit] for unit in [*owned, *beside]], facts)
            if beside:
                # where the output does not tell units apart, all rows stand with the first
                measured = measured[:-1] if facts.listed else [measured[0] - dropped, *measured[1:-1]]
        rows = _agree_on_rows(call, modality, measured)
        plan = call.plans[modality.name] = dataclasses.replace(plan, rows=rows)
    _check_rows(levels, plan.rows_per_rank[call.shard.rank], modality)
    routes = None
    if call.routed:
        assert call.ids is not None
        routes = route_units(modality, call.ids, call)
    if routes is None:
        exchanged = gather_features(levels, plan, call.shard.group, call.shard.track("exchange"))
    else:
        exchanged = route_features(levels, routes, call.shard.group, call.shard.track("exchange"))
    row_bytes = sum(level.shape[1] * level.element_size() for level in levels)
    _report(call, modality, plan, owned, received_rows(plan, routes, call.shard.rank) * row_bytes, watch)
    units, *deepstack = exchanged
    # without the other fields, which describe this rank's units alone and would keep their activations
    field = _field(outputs)
    fields = {field: _like(getattr(outputs, field), units)}
    return type(outputs)(**fields, **({"deepstack_features": deepstack} if deepstack else {}))


def _field(outputs: Any) -> str:
    """Where a model leaves its features."""
    return "last_hidden_state" if getattr(outputs, "pooler_output", None) is None else "pooler_output"


def _config(call: ForwardCall) -> Any:
    assert call.base is not None, "the decoder ran outside the forward of its base model"
    return call.base.config


def _like(features: Any, units: list[Tensor]) -> Any:
    """Features of all units in the form in which a model returns those of some: a list, or one tensor for all."""
    if not isinstance(features, Tensor):
        return units
    if features.dim() == 2:
        return torch.cat(units)
    return torch.stack(units) if len({len(unit) for unit in units}) == 1 else torch.cat(units)[None]


@contextmanager
def _tower(call: ForwardCall, modality: Modality) -> Iterator[None]:
    """Around a run of the tower on images of this rank's own."""
    place = f"tower ({modality.name}s)"
    with call.mesh.watch.phase(place), RankRandomness(place, call.mesh.rank, call.device):
        yield


def _report(
    call: ForwardCall, modality: Modality, plan: UnitPlan, encoded: list[int], received: int, watch: Stopwatch
) -> None:
    if not call.observers:
        return
    own = sum(plan.costs[unit] for unit in encoded)
    divided = not call.encodes_all
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


def _levels(outputs: Any) -> list[Tensor]:
    """The tower's output and its deepstack levels, each as rows ``[rows, width]``."""
    levels = [getattr(outputs, _field(outputs)), *(getattr(outputs, "deepstack_features", None) or [])]
    return [
        level.flatten(0, -2) if isinstance(level, Tensor) else torch.cat([unit.flatten(0, -2) for unit in level])
        for level in levels
    ]


def _total_rows(outputs: Any) -> int:
    features = getattr(outputs, _field(outputs))
    return sum(part.shape[:-1].numel() for part in ([features] if isinstance(features, Tensor) else features))


def _rows_of_units(outputs: Any, sizes: list[int], facts: Facts) -> list[int]:
    """Rows of features of each unit that was encoded; where the output does not tell, all with the first one."""
    features, total, patches = getattr(outputs, _field(outputs)), _total_rows(outputs), sum(sizes)
    if facts.listed and isinstance(features, Tensor):
        if features.dim() > 2 and len(features) == len(sizes):
            return [features.shape[1:-1].numel()] * len(sizes)
        if all(total * size % patches == 0 for size in sizes):
            return [total * size // patches for size in sizes]
    elif facts.listed:
        rows = [unit.shape[:-1].numel() for unit in features]
        if len(rows) == len(sizes):
            return rows
        if len(rows) == patches:
            # a unit is a sample with several images
            ends = list(itertools.accumulate(sizes, initial=0))
            return [sum(rows[start:end]) for start, end in itertools.pairwise(ends)]
    return [total, *[0] * (len(sizes) - 1)]


def _rows_of_the_last(outputs: Any, facts: Facts) -> int:
    if facts.listed:
        return int(getattr(outputs, _field(outputs))[-1].shape[:-1].numel())
    # images that are alike, as many as the tower has encoded
    return int(_total_rows(outputs) // outputs.last_hidden_state.shape[0])


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


def _dummy(
    own: Callable[..., Any],
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
    outputs = _run(own, {**plain, **unit, "return_dict": True})
    return outputs, [level[:0] for level in _levels(outputs)]


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
                _, levels = _dummy(_own(call.base, modality), call, modality, {})
            call.dummy_outputs += [level for level in levels if level.requires_grad]
        if agree and not call.family.facts.merged_rows:
            _agree_on_rows(call, None, [])


def restricted_placeholders(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `get_placeholder_mask`: where features were routed, it names only those of this rank's shard."""
    method = type(self).get_placeholder_mask
    own = functools.partial(method, self)
    arguments = parameters_of(method).by_name(self, args, kwargs)
    ids: Tensor | None = arguments.get("input_ids")
    call = call_of(ids)
    if ids is None or call is None or not call.routed:
        return own(**arguments)
    inside = ids.clone()
    for outside in [inside[:, positions] for positions in call.shard.layout.outside(call.shard.rank)]:
        for modality in call.present:
            assert modality.token is not None, "features without a placeholder token are not routed"
            # other tokens stay: some models look for what begins and ends a video
            outside.masked_fill_(outside.eq(modality.token), -1)
    return own(**{**arguments, "input_ids": inside})
