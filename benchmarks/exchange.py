"""Bytes of features that a rank receives: routed to the ranks that need them, or gathered by all.

Counted where the collectives are called, over 4 and 8 ranks, for one sample of each of three mixes with the sides of its images
halved; the tower has one narrow block, since the rows are the same whatever computes them. A rank needs the rows of its shard
whose images others encoded.
"""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from benchmarks.measure import fits, join, lacking
from benchmarks.mixes import MIXES
from benchmarks.models import mix_batch
from benchmarks.report import Chart, Options, Report, at_most, exactly
from benchmarks.vision import VisionSides
from lightning_vdp.testing import run_ranks
from lightning_vdp.testing.measure import ByteCounter
from lightning_vdp.testing.models import IMAGE_TOKEN, VIDEO_TOKEN

__all__ = ["run"]

_RANKS = (4, 8)


def _needed(sides: VisionSides) -> int:
    """Bytes of features that this rank's shard takes from images of others, placeholder by placeholder."""
    rows = 0
    for modality, token in (("image", IMAGE_TOKEN), ("video", VIDEO_TOKEN)):
        plan = sides.mesh.watch.plans.get(modality)
        if plan is None:
            continue
        owners = [owner for owner, count in zip(plan.owners, plan.rows) for _ in range(count)]
        places = sides.batch["input_ids"][0].eq(token).nonzero().flatten().tolist()
        assert len(places) == len(owners)
        rows += sum(
            place in sides.shard.positions and owner != sides.shard.rank for place, owner in zip(places, owners)
        )
    return rows * sides.divided.config.text_config.hidden_size * 4


def _measure(options: Options, mix: str) -> dict[str, float]:
    device = join(options)
    batch = mix_batch(mix, shrink=8 if options.quick else 2)
    received = []
    differences = []
    for exchange in ("routed", "gather"):
        sides = VisionSides(batch, device, 16, tower_layers=1, vision_exchange=exchange)
        counter = ByteCounter(sides.mesh.sequence_group)
        sides.run_divided(counter)
        received.append(sum(counter.received))
        if dist.get_rank() == 0:
            sides.run_plain()
        differences.append(sides.parity(sides.plain))
        if exchange == "routed":
            needed = _needed(sides)
    return {"routed": received[0], "gather": received[1], "needed": needed, "difference": max(differences)}


def _furthest(ratios: Iterable[float]) -> float:
    """The ratio that is furthest from one."""
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def run(options: Options) -> Report:
    """Counts all mixes at all sizes for which there are devices."""
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    sizes = [ranks for ranks in _RANKS if fits(options, ranks)]
    for ranks in sizes:
        for mix in MIXES:
            found = run_ranks(_measure, ranks, options, mix, timeout=900)
            routed, gathered, needed = (sum(rank[name] for rank in found) for name in ("routed", "gather", "needed"))
            rows.append(
                {
                    "mix": mix,
                    "S": ranks,
                    "ratio": routed / gathered,
                    "routed": routed / ranks,
                    "gather": gathered / ranks,
                    "needed": needed / ranks,
                    "difference": max(rank["difference"] for rank in found),
                    "excess": _furthest(rank["routed"] / rank["needed"] for rank in found if rank["needed"]),
                }
            )
        figures[f"exchange_ratio_s{ranks}"] = max(row["ratio"] for row in rows if row["S"] == ranks)
    if rows:
        figures["exchange_excess"] = _furthest(row["excess"] for row in rows)
    return Report(
        figures=figures,
        chart=Chart(
            "Bytes of features that a rank receives, mean over ranks",
            "MB",
            [f"{row['mix']}, S = {row['S']}" for row in rows],
            {name: [row[name] / 1e6 for row in rows] for name in ("gather", "routed")},
        ),
        table=rows,
        limits={"exchange_ratio_s4": at_most(0.37), "exchange_ratio_s8": at_most(0.2), "exchange_excess": exactly(1)},
        parity=max((row["difference"] for row in rows), default=None),
        notes=lacking(options, _RANKS),
    )
