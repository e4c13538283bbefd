"""Mixes of vision inputs with fixed seeds, as grids ``(time, height, width)`` in patches of 14 pixels."""

import random
from collections.abc import Callable, Mapping

__all__ = ["MIXES", "documents", "grid_of", "screenshots", "video"]

PATCH, MERGE, FRAMES_PER_PATCH = 14, 2, 2
SCREENS = ((1920, 1080), (1280, 720), (1080, 2400), (750, 1334))
FEWEST_PIXELS, MOST_PIXELS = 3_136, 12_845_056

Grid = tuple[int, int, int]


def grid_of(width: float, height: float, frames: int = 1) -> Grid:
    """Grid of an image or video clip of a size in pixels, rounded to whole merged patches.

    Args:
        width: In pixels.
        height: In pixels.
        frames: Frames of the clip; two share a patch in time.
    """
    side = PATCH * MERGE
    rows, columns = (max(1, round(length / side)) * MERGE for length in (height, width))
    return max(1, frames // FRAMES_PER_PATCH), rows, columns


def screenshots(seed: int) -> list[Grid]:
    """24 screenshots of four devices."""
    draw = random.Random(seed)
    return [grid_of(*draw.choice(SCREENS)) for _ in range(24)]


def _document(draw: random.Random) -> Grid:
    pixels = min(max(draw.lognormvariate(13, 1), FEWEST_PIXELS), MOST_PIXELS)
    aspect = draw.uniform(0.5, 2)
    return grid_of((pixels * aspect) ** 0.5, (pixels / aspect) ** 0.5)


def documents(seed: int) -> list[Grid]:
    """32 scanned pages, whose areas are log-normal and whose aspect ratios are between 1:2 and 2:1."""
    draw = random.Random(seed)
    return [_document(draw) for _ in range(32)]


def video(seed: int) -> list[Grid]:
    """One clip of 16 to 64 frames of 640 x 360 pixels, beside 7 documents."""
    draw = random.Random(seed)
    return [grid_of(640, 360, draw.randint(16, 64)), *(_document(draw) for _ in range(7))]


MIXES: Mapping[str, Callable[[int], list[Grid]]] = {
    "screenshots": screenshots,
    "documents": documents,
    "video": video,
}
"""By name: from a seed, the grids of one sample."""
