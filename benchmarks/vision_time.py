"""Seconds for forward and backward of the tower on 24 screenshots, with Vision DP over two ranks and without.

The exchange of features and their merge are timed too. Without Vision DP both ranks encode every image; since two processes
also share caches and the way to memory, one that encodes every image while the other waits is timed beside them.
"""

from benchmarks.measure import alternate, fits, join, lacking
from benchmarks.models import mix_batch
from benchmarks.report import Chart, Options, Report, at_least
from benchmarks.vision import VisionSides
from lightning_vdp.testing import run_ranks

__all__ = ["run"]

_SIDES = {"divided": "Vision DP", "redundant": "every image on both ranks", "alone": "every image on one rank alone"}


def _measure(options: Options) -> tuple[dict[str, float], float]:
    device = join(options)
    batch = mix_batch("screenshots", shrink=8 if options.quick else 2)
    sides = VisionSides(batch, device, 64)
    sides.run_divided()
    sides.run_redundant()
    difference = sides.parity(sides.redundant)
    turns = {"divided": sides.run_divided, "redundant": sides.run_redundant, "alone": sides.run_plain}
    return alternate(turns, 2 if options.quick else 5, device, alone=("alone",)), difference


def run(options: Options) -> Report:
    """Times the three sides in turn."""
    title = "Forward and backward of the tower on 24 screenshots, S = 2"
    if not fits(options, 2):
        return Report({}, Chart(title, "s", [], {}), notes=lacking(options, (2,)))
    seconds, difference = run_ranks(_measure, 2, options, timeout=900)[0]
    return Report(
        figures={
            "vision_speedup_s2": seconds["redundant"] / seconds["divided"],
            "vision_speedup_alone_s2": seconds["alone"] / seconds["divided"],
        },
        chart=Chart(title, "s", list(_SIDES.values()), {"median": [seconds[side] for side in _SIDES]}),
        table=[{"side": name, "seconds": seconds[side]} for side, name in _SIDES.items()],
        limits={"vision_speedup_s2": at_least(1.9), "vision_speedup_alone_s2": at_least(1.6)},
        parity=difference,
    )
