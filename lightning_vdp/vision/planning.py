"""From a forward's arguments to plans: what its units are, who owns them and where their features go."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_vdp.call import ForwardCall, Settings, host_copy
from lightning_vdp.checks import counts_of, grids_of
from lightning_vdp.models import Facts, Modality
from lightning_vdp.vision.assignment import assign
from lightning_vdp.vision.cost import patches, tower_cost
from lightning_vdp.vision.routes import Routes, plan_routes
from lightning_vdp.vision.units import UnitPlan, split_frames

__all__ = ["UnitDraft", "assign_units", "describe_idle_owner", "list_units", "route_units"]


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


def list_units(modality: Modality, arguments: Mapping[str, Any], config: Any, facts: Facts) -> UnitDraft:
    """Lists the units of one modality, from checked arguments of a forward that has its pixels.

    Args:
        modality: The modality.
        arguments: The forward's arguments by name.
        config: The model's config.
        facts: Facts about the model type.
    """
    if modality.counts is not None and arguments.get(modality.counts) is not None:
        return UnitDraft(tuple(counts_of(arguments[modality.counts])), None)
    if modality.grid is None:
        return UnitDraft((1,) * arguments[modality.pixels].shape[: facts.unit_dims].numel(), None)
    grids = grids_of(arguments, modality)
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


def assign_units(draft: UnitDraft, facts: Facts, config: Any, settings: Settings, ranks: int) -> UnitPlan:
    """Gives units owners such that predicted costs are even.

    Args:
        draft: The units.
        facts: Facts about the model type.
        config: The model's config.
        settings: What is balanced, and how.
        ranks: Size of the sequence group.
    """
    costs = draft.sizes
    if draft.grids and settings.vision_balance == "time":
        cost = tower_cost(getattr(config, "vision_config", None), facts.tower_mlp_matrices)
        costs = draft.sizes if cost is None else tuple(cost(draft.grids))
    owners = tuple(assign(costs, ranks, settings.vision_assignment if facts.listed else "contiguous"))
    return UnitPlan(draft.sizes, draft.rows, costs, owners, ranks, draft.frames)


def describe_idle_owner(
    modality: Modality, arguments: Mapping[str, Any], plan: UnitPlan, facts: Facts, config: Any, replicas: int
) -> str | None:
    """Looks for ranks that would run the tower less often than others, since all they own is padding or has no tiles.

    Args:
        modality: The modality.
        arguments: The forward's arguments by name, checked.
        plan: Its units.
        facts: Facts about the model type.
        config: The model's config.
        replicas: Number of replicas, which must run towers alike.

    Returns:
        What is wrong and what to do, or None.
    """
    working: set[int] | None = None
    for name, counts in facts.ragged.items():
        if arguments.get(name) is not None:
            working = {unit for unit, count in enumerate(counts_of(arguments[counts])) if count}
        elif replicas > 1:
            working = set()
    ids = arguments.get("input_ids")
    if facts.unit_dims > 1 and isinstance(ids, Tensor) and ids.shape[0] > 1:
        # rows are padded with empty images behind their own
        token, per_row = modality.token(config), len(plan.sizes) // ids.shape[0]
        rows = range(ids.shape[0]) if token is None else host_copy(ids).eq(token).any(1).nonzero().flatten().tolist()
        working = {row * per_row for row in rows}
    if working is None:
        return None
    for rank in range(plan.ranks):
        owned = plan.owned(rank)
        if owned and not working.intersection(owned):
            return (
                f"rank {rank} of its group would get {modality.name}s {owned} alone, which are padding or have no tiles, so "
                "that it would run the tower less often than others; put more of them into a batch, or lower "
                "`sequence_parallel_size`"
            )
    return None


def route_units(modality: Modality, ids: Tensor, config: Any, call: ForwardCall) -> Routes:
    """Finds where this rank's features go and where those of its shard come from.

    Args:
        modality: The modality.
        ids: Input ids of the batch, shape ``[B, S]``.
        config: The model's config.
        call: The forward.
    """
    token = modality.token(config)
    assert token is not None, "features without a placeholder token are not routed"
    columns = host_copy(ids).eq(token).nonzero()[:, 1]
    return plan_routes(columns, call.plans[modality.name], call.shard.sizes, call.shard.rank)
