"""Bytes that the vision tower keeps for backward on the worst rank, with Vision DP and without.

One sample of each of three mixes, with the sides of its images halved, is encoded by 2, 4 and 8 ranks with
``vision_balance="memory"``. What the tower keeps is counted tensor by tensor, without weights and the batch itself; the peak is
that of forward and backward of the tower, the exchange and the merge of features. No rank can keep less than 1/S of the
whole, nor less than the largest image: the greater of the two is the ideal.
"""

from typing import Any

import torch.distributed as dist

from benchmarks.measure import fits, join, lacking, peak_bytes, worst
from benchmarks.mixes import MIXES
from benchmarks.models import mix_batch, patches
from benchmarks.report import Chart, Options, Report, at_most
from benchmarks.vision import VisionSides
from lightning_vdp.testing import run_ranks
from lightning_vdp.testing.measure import SavedBytes

__all__ = ["run"]

_RANKS = (2, 4, 8)


def _measure(options: Options, mix: str) -> dict[str, float]:
    device = join(options)
    batch = mix_batch(mix, shrink=8 if options.quick else 2)
    sides = VisionSides(batch, device, 128, vision_balance="memory")
    kept = {}
    for name, model, step in (
        ("divided", sides.divided, sides.run_divided),
        ("redundant", sides.plain, sides.run_plain),
    ):
        if name == "redundant" and dist.get_rank() > 0:
            continue
        saved = SavedBytes(model, sides.batch.values())
        hooks = [
            model.model.visual.register_forward_pre_hook(lambda *_, saved=saved: saved.__enter__() and None),
            model.model.visual.register_forward_hook(lambda *_, saved=saved: saved.__exit__()),
        ]
        with peak_bytes(device) as peak:
            step()
        kept[name], kept[f"{name}_peak"] = saved.total, peak.bytes
        for hook in hooks:
            hook.remove()
    units = patches(batch)
    return {
        **{name: worst(kept.get(name, 0)) for name in ("divided", "redundant", "divided_peak", "redundant_peak")},
        "largest": max(units) / sum(units),
        "difference": sides.parity(sides.plain),
    }


def run(options: Options) -> Report:
    """Measures all mixes at all sizes for which there are devices."""
    ratios: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    sizes = [ranks for ranks in _RANKS if fits(options, ranks)]
    for mix in MIXES:
        for ranks in sizes:
            found = run_ranks(_measure, ranks, options, mix, timeout=900)[0]
            ratio, ideal = found["divided"] / found["redundant"], max(1 / ranks, found["largest"])
            ratios[f"vision_memory_over_ideal_{mix}_s{ranks}"] = ratio / ideal
            ratios[f"vision_memory_ratio_{mix}_s{ranks}"] = ratio
            ratios[f"vision_peak_ratio_{mix}_s{ranks}"] = found["divided_peak"] / found["redundant_peak"]
            rows.append(
                {
                    "mix": mix,
                    "S": ranks,
                    "ratio": ratio,
                    "ideal": ideal,
                    "kept, Vision DP": int(found["divided"]),
                    "kept, redundant": int(found["redundant"]),
                    "peak, Vision DP": int(found["divided_peak"]),
                    "peak, redundant": int(found["redundant_peak"]),
                    "difference": found["difference"],
                }
            )
    return Report(
        figures=ratios,
        chart=Chart(
            "Bytes that the tower keeps on the worst rank",
            "part of the redundant tower's",
            [f"{row['mix']}, S = {row['S']}" for row in rows],
            {name: [row[name] for row in rows] for name in ("ratio", "ideal")},
        ),
        table=rows,
        limits={f"vision_memory_over_ideal_{mix}_s{ranks}": at_most(1.05) for mix in MIXES for ranks in (2, 4)},
        parity=max((row["difference"] for row in rows), default=None),
        notes=lacking(options, _RANKS),
    )
