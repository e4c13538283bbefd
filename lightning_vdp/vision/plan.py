"""From a forward's arguments to plans: what its units are, who owns them and where their features go."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_vdp.batch.contents import VisionContents, to_numbers
from lightning_vdp.batch.host_copies import host_copy
from lightning_vdp.call.call import ForwardCall
from lightning_vdp.call.units import UnitPlan
from lightning_vdp.families.facts import Facts
from lightning_vdp.families.family import Family, Modality
from lightning_vdp.settings import Settings
from lightning_vdp.vision.assign import assign
from lightning_vdp.vision.cost import TowerCost, patches
from lightning_vdp.vision.routes import Routes, plan_routes

__all__ = [
    "UnitDraft",
    "assign_units",
    "cheapest",
    "find_nothing_to_encode",
    "list_units",
    "route_units",
    "working_units",
]


@dataclass(frozen=True)
class UnitDraft:
    """The units of one modality in a batch, before they have owners.

    Args:
        sizes: Rows of the pixel tensor that each takes.
        rows: Rows of features that each yields; None where they are measured.
        grids: ``(time, height, width)`` of each in patches; empty where each row of the pixels is a unit.
        frames: Units that each row of the grid was split into; empty if rows are units.
    """

    sizes: tuple[int, ...]
    rows: tuple[int, ...] | None
    grids: tuple[tuple[int, ...], ...] = ()
    frames: tuple[int, ...] = ()


def list_units(modality: Modality, contents: VisionContents, config: Any, facts: Facts) -> UnitDraft:
    """Lists the units of one modality.

    Args:
        modality: Images or videos.
        contents: What the batch says of it.
        config: The model's config.
        facts: What is known about the model's type.
    """
    if contents.counts is not None:
        return UnitDraft(contents.counts, None)
    if contents.grids is None:
        return UnitDraft((1,) * math.prod(contents.shape[: facts.unit_dims]), None)
    grids: Sequence[Sequence[int]] = contents.grids
    frames: tuple[int, ...] = ()
    if modality.name == "video" and facts.splits_frames and any(time > 1 for time, _, _ in grids):
        frames = tuple(time for time, _, _ in grids)
        grids = split_frames(grids)
    sizes = patches(grids)
    rows = None
    if facts.merged_rows:
        merged = int(config.vision_config.spatial_merge_size) ** 2
        rows = tuple(size // merged for size in sizes)
    return UnitDraft(tuple(sizes), rows, tuple(map(tuple, grids)), frames)


def assign_units(
    drafts: Mapping[str, UnitDraft],
    family: Family,
    settings: Settings,
    ranks: int,
    cost: TowerCost | None = None,
) -> dict[str, UnitPlan]:
    """Gives units owners such that predicted costs are even.

    What a rank keeps adds up over modalities, so that memory is balanced over all of them; their towers run one after
    another and ranks wait for each other in each, so that time is balanced within each.

    Args:
        drafts: The units of each modality, by name.
        family: Facts about the model.
        settings: What is balanced, and how.
        ranks: Size of the sequence group.
        cost: What a unit costs the tower; None where its config does not say: then patches are counted.

    Returns:
        The plan of each modality, by name.
    """
    costs = {name: _costs(draft, cost, settings) for name, draft in drafts.items()}
    method = settings.vision_assignment if family.facts.listed else "contiguous"
    if settings.vision_balance == "memory" and method == "balanced":
        owners = iter(assign([cost for each in costs.values() for cost in each], ranks, method))
        assigned = {name: tuple(itertools.islice(owners, len(each))) for name, each in costs.items()}
    else:
        assigned = {name: tuple(assign(each, ranks, method)) for name, each in costs.items()}
    return {
        name: UnitPlan(draft.sizes, draft.rows, costs[name], assigned[name], ranks, draft.frames)
        for name, draft in drafts.items()
    }


def _costs(draft: UnitDraft, cost: TowerCost | None, settings: Settings) -> tuple[int, ...]:
    if cost is None or not draft.grids or settings.vision_balance == "memory":
        return draft.sizes
    return tuple(cost(draft.grids))


def working_units(
    modality: Modality, arguments: Mapping[str, Any], ids: Tensor | None, units: int, facts: Facts
) -> list[int] | None:
    """Units that make the tower do all it does for others: neither padding of a row nor images without tiles.

    A rank that encodes none of them encodes one in addition, so that all ranks run the tower equally often.

    Args:
        modality: The modality.
        arguments: Checked arguments of the forward or of the features method, by name.
        ids: Input ids of the batch, shape ``[B, S]``.
        units: Number of units.
        facts: Facts about the model type.

    Returns:
        The units in order, or None if all are alike.
    """
    for name, counts in facts.ragged.items():
        if arguments.get(name) is not None:
            return [unit for unit, count in enumerate(to_numbers(arguments[counts])) if count]
    if facts.unit_dims == 1 or ids is None or ids.shape[0] == 1:
        return None
    # rows are padded with empty images behind their own
    token, per_row = modality.token, units // ids.shape[0]
    if token is None:
        return None
    return [row * per_row for row in host_copy(ids).eq(token).any(1).nonzero().flatten().tolist()]


def cheapest(costs: Sequence[int], working: Sequence[int] | None) -> int:
    """The unit that a rank without any encodes in their place.

    Args:
        costs: The predicted cost of each unit.
        working: What `working_units` returned.
    """
    return min(working or range(len(costs)), key=costs.__getitem__)


def find_nothing_to_encode(
    modality: Modality, arguments: Mapping[str, Any], draft: UnitDraft, facts: Facts, replicas: int
) -> str | None:
    """Looks for batches in which no unit makes the tower do all that it does in those of other replicas.

    Args:
        modality: The modality.
        arguments: The forward's arguments by name, checked.
        draft: Its units.
        facts: Facts about the model type.
        replicas: Number of replicas, which must run towers alike.

    Returns:
        What is wrong and what to do, or None.
    """
    working = working_units(modality, arguments, arguments.get("input_ids"), len(draft.sizes), facts)
    untiled = next((name for name in facts.ragged if arguments.get(name) is None), None)
    if working == [] or (untiled is not None and replicas > 1):
        return (
            f"no {modality.name} of the batch has tiles or is more than padding, so that the tower would run less often than "
            "for other batches; leave empty ones out, and put one with tiles into each batch"
        )
    return None


def route_units(modality: Modality, ids: Tensor, call: ForwardCall) -> Routes:
    """Finds where this rank's features go and where those of its shard come from.

    Args:
        modality: The modality.
        ids: Input ids of the batch, shape ``[B, S]``.
        call: The forward.
    """
    assert modality.token is not None, "features without a placeholder token are not routed"
    columns = (host_copy(ids).numpy() == modality.token).nonzero()[1]
    return plan_routes(call.shard.layout.owners(columns), call.plans[modality.name], call.shard.rank)


def split_frames(grids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Makes each frame of a ``(time, height, width)`` grid a unit of its own."""
    return [[1, height, width] for time, height, width in grids for _ in range(time)]
