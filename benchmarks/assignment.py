"""How even the predicted work of ranks is, and how long planning takes: lists of numbers, no processes.

Three ways to give images to 2 to 1,024 ranks: ours ("balanced"), the exact contiguous split, and the greedy contiguous split of
the Vision DP that others publish, which fills one rank after another until it holds its part of the patches. The batch grows
with the ranks: one sample for every two. What is balanced is the cost of a tower as wide and deep as Qwen2.5-VL's; greedy knows
patches alone.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.mixes import MIXES, Grid
from benchmarks.report import Chart, Options, Report, at_most
from lightning_vdp.vision.assign import balanced, contiguous, loads
from lightning_vdp.vision.cost import TowerCost, patches
from lightning_vdp.vision.plan import split_frames

__all__ = ["greedy", "run"]

_RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_COST = TowerCost(
    per_patch=32 * (4 * 1280 * 1280 + 3 * 1280 * 3420),
    per_pair=2 * 1280,
    full_blocks=4,
    window_blocks=28,
    window=64,
)


def greedy(sizes: Sequence[int], ranks: int) -> list[int]:
    """Gives units to one rank after another, to each until it holds its part of what is left for it and those behind it.

    Args:
        sizes: Patches of each unit.
        ranks: Number of ranks.

    Returns:
        The owner of each unit.
    """
    owners, rank, load, left = [], 0, 0, sum(sizes)
    for size in sizes:
        if rank < ranks - 1 and load >= left / (ranks - rank):
            left -= load
            rank, load = rank + 1, 0
        owners.append(rank)
        load += size
    return owners


def _units(mix: str, samples: int) -> list[Grid]:
    grids = [grid for seed in range(samples) for grid in MIXES[mix](seed)]
    # frames of a video are units of their own
    return [(time, height, width) for time, height, width in split_frames(grids)]


def _balance(costs: Sequence[int], owners: Sequence[int], ranks: int) -> float:
    sums = loads(costs, owners, ranks)
    return max(sums) * ranks / sum(sums)


def _median_ms(plan: Callable[[], object], turns: int) -> float:
    taken = []
    for _ in range(turns + 1):
        start = time.perf_counter()
        plan()
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken[1:])


def run(options: Options) -> Report:
    """Plans all mixes at all sizes."""
    turns = 3 if options.quick else 20
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for mix in MIXES:
        for ranks in _RANKS[:4] if options.quick else _RANKS:
            units = _units(mix, ranks // 2)
            costs, sizes = _COST(units), patches(units)
            # no plan is more even than this
            bound = max(max(costs) * ranks / sum(costs), 1.0)
            plans = {
                "balanced": balanced(costs, ranks),
                "contiguous": contiguous(costs, ranks),
                "greedy": greedy(sizes, ranks),
            }
            balances = {name: _balance(costs, plan, ranks) for name, plan in plans.items()}
            figures[f"balance_{mix}_r{ranks}"] = balances["balanced"]
            rows.append({"mix": mix, "ranks": ranks, "units": len(units), "bound": bound, **balances})
    for count, ranks in ((10_000, 64), (32, 8)):
        costs = _COST(_units("documents", -(-count // 32))[:count])
        figures[f"plan_ms_{count}x{ranks}"] = _median_ms(functools.partial(balanced, costs, ranks), turns)
    shown = [row for row in rows if row["ranks"] in (2, 8, 64, 1024)]
    return Report(
        figures=figures,
        chart=Chart(
            "Predicted work of the busiest rank over the mean",
            "max / mean",
            [f"{row['mix']}, {row['ranks']} ranks" for row in shown],
            {name: [row[name] for row in shown] for name in ("balanced", "contiguous", "greedy", "bound")},
        ),
        table=rows,
        limits={"plan_ms_10000x64": at_most(50), "plan_ms_32x8": at_most(0.2)},
    )
