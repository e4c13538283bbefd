"""Which rank owns which unit. Pure: lists of whole numbers in and out, no processes."""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["assign", "balanced", "contiguous", "loads"]


def assign(costs: Sequence[int], ranks: int, method: str = "balanced") -> list[int]:
    """Gives every unit an owner.

    Args:
        costs: Cost of each unit, not negative.
        ranks: Number of ranks.
        method: "balanced" or "contiguous".

    Returns:
        The owner of each unit, in the order of `costs`.
    """
    return {"balanced": balanced, "contiguous": contiguous}[method](costs, ranks)


def contiguous(costs: Sequence[int], ranks: int) -> list[int]:
    """Splits units into runs, one for each rank in order, with the smallest possible maximum load."""
    if not costs:
        return []
    ends = list(accumulate(costs))
    low, high = max(max(costs), -(-ends[-1] // ranks)), ends[-1]
    while low < high:
        middle = (low + high) // 2
        if _cuts(ends, ranks, middle) is None:
            low = middle + 1
        else:
            high = middle
    cuts = _cuts(ends, ranks, low)
    assert cuts is not None
    owners = []
    for rank, (start, stop) in enumerate(zip([0, *cuts], cuts)):
        owners += [rank] * (stop - start)
    return owners


def _cuts(ends: Sequence[int], ranks: int, limit: int) -> list[int] | None:
    """Ends of greedy runs with loads up to the limit, or None if they need more ranks."""
    cuts, done = [], 0
    for _ in range(ranks):
        cut = bisect_right(ends, done + limit)
        cuts.append(cut)
        if cut == len(ends):
            return cuts
        done = ends[cut - 1] if cut else 0
    return None


def _longest_first(costs: Sequence[int], ranks: int) -> list[int]:
    """The LPT rule: the most expensive unit goes to the least loaded rank (Graham 1969)."""
    queue = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for unit in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = queue[0]
        owners[unit] = rank
        heapq.heapreplace(queue, (load + costs[unit], rank))
    return owners


def balanced(costs: Sequence[int], ranks: int) -> list[int]:
    """The better of the exact contiguous split and the LPT rule; contiguous where they are equal."""
    split = contiguous(costs, ranks)
    if len(costs) <= 1 or ranks == 1:
        return split
    spread = _longest_first(costs, ranks)
    return spread if max(loads(costs, spread, ranks)) < max(loads(costs, split, ranks)) else split


def loads(costs: Sequence[int], owners: Sequence[int], ranks: int) -> list[int]:
    """Sum of the costs that each rank owns."""
    sums = [0] * ranks
    for cost, owner in zip(costs, owners):
        sums[owner] += cost
    return sums
