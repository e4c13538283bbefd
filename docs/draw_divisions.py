"""Draws ``images/divisions.png``: what the ranks of a sequence group divide, and where they exchange."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

PICTURE = Path(__file__).parent / "images" / "divisions.png"
RANKS = ("#3573b1", "#dd8421")
PALE = ("#e3edf7", "#fcecd9")
TEXT, INK = "#c3c9d0", "#2b2f36"
# rows and columns of merged patches, and the rank whose tower encodes them
IMAGES = ((2, 2, 1), (3, 4, 0), (2, 3, 1), (1, 2, 1))
# runs of tokens: how many, and of which image
SEQUENCE = ((2, None), (4, 0), (2, None), (12, 1), (1, None), (6, 2), (2, None), (2, 3), (1, None))
HEADS = 4


def label(ax: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Writes text, centred unless ``style`` says otherwise."""
    defaults: dict[str, Any] = {"ha": "center", "va": "center", "color": INK, "fontsize": 9.5, "linespacing": 1.25}
    ax.text(x, y, text, **{**defaults, **style})


def number(ax: Axes, x: float, y: float, index: int) -> None:
    """Writes the number of an image."""
    label(ax, x, y, str(index + 1), color="white", fontweight="bold")


def name_rank(ax: Axes, x: float, y: float, rank: int) -> None:
    """Writes the name of a rank, in its color."""
    patch = {"boxstyle": "round,pad=0.2", "facecolor": PALE[rank], "edgecolor": "none"}
    label(ax, x, y, f"rank {rank}", color=RANKS[rank], fontweight="bold", bbox=patch)


def box(ax: Axes, x: float, y: float, width: float, height: float, rank: int) -> None:
    """Draws the rounded box of a rank, from its lower left corner."""
    shape = f"round,pad=0,rounding_size={min(1.2, height / 4)}"
    ax.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle=shape, facecolor=PALE[rank], edgecolor=RANKS[rank], linewidth=1.3
        )
    )


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK) -> None:
    """Draws an arrow."""
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 12}
    ax.annotate("", end, start, arrowprops=style)


def draw_image(ax: Axes, x: float, y: float, index: int, cell: float = 2.0) -> None:
    """Draws the grid of an image around its centre."""
    rows, columns, rank = IMAGES[index]
    for row in range(rows):
        for column in range(columns):
            corner = (x + (column - columns / 2) * cell, y + (row - rows / 2) * cell)
            ax.add_patch(Rectangle(corner, cell, cell, facecolor=RANKS[rank], edgecolor=PALE[rank], linewidth=0.5))
    number(ax, x, y, index)


def draw_shard(ax: Axes, x: float, y: float, rank: int, token: float = 1.75, height: float = 3.0) -> None:
    """Draws one rank's half of the sequence, each token in the color of the rank that encoded it."""
    images = [image for length, image in SEQUENCE for _ in range(length)]
    half = len(images) // 2
    shard = images[rank * half : (rank + 1) * half]
    box(ax, x - 1, y - 1, half * token + 2, height + 2, rank)
    for position, image in enumerate(shard):
        color = TEXT if image is None else RANKS[IMAGES[image][2]]
        corner = (x + position * token, y)
        ax.add_patch(Rectangle(corner, token, height, facecolor=color, edgecolor=PALE[rank], linewidth=0.5))
    for image in sorted({image for image in shard if image is not None}):
        positions = [position for position, other in enumerate(shard) if other == image]
        number(ax, x + (sum(positions) / len(positions) + 0.5) * token, y + height / 2, image)


def draw_heads(ax: Axes, x: float, y: float, by_heads: bool, width: float = 23, height: float = 12) -> None:
    """Draws a table of heads by tokens, divided by heads or by tokens."""
    rows, columns, gap = HEADS, 8, 0.8
    for row in range(rows):
        for column in range(columns):
            rank = int(row < rows // 2) if by_heads else int(column >= columns // 2)
            shift = gap * (-rank if by_heads else rank)
            corner_x = x + column * width / columns + (0 if by_heads else shift)
            corner_y = y + row * height / rows + (shift if by_heads else 0)
            size = width / columns, height / rows
            ax.add_patch(
                Rectangle((corner_x, corner_y), *size, facecolor=PALE[rank], edgecolor=RANKS[rank], linewidth=0.9)
            )
    if by_heads:
        for rank, center in enumerate((y + 0.75 * height, y + 0.25 * height - gap)):
            name_rank(ax, x + width / 2, center, rank)
    else:
        for rank, center in enumerate((x + 0.25 * width, x + 0.75 * width + gap)):
            name_rank(ax, center, y + height / 2, rank)
    label(ax, x - 1.5, y + height / 2, "heads", rotation=90, fontsize=9)
    label(ax, x + width / 2, y - 2.6, "tokens", fontsize=9)


def draw_vision(ax: Axes) -> None:
    """Draws Vision DP: from the images to each rank's tokens."""
    label(ax, 0, 85, "Vision DP divides the images", ha="left", fontsize=13, fontweight="bold")
    label(ax, 10, 78.5, "one batch,\nheld by both ranks")
    label(ax, 42.5, 78.5, "each rank runs the tower\non its share")
    label(ax, 84, 78.5, "each rank receives the features\nof its own tokens")
    for index, (left, middle) in enumerate(((4.5, 69.0), (14.0, 69.0), (5.0, 59.0), (14.0, 59.0))):
        draw_image(ax, left, middle, index)
    for rank, (y, share) in enumerate(((69.5, {1: 48.5}), (57.5, {0: 40.5, 2: 47.3, 3: 54.0}))):
        box(ax, 28, y - 4.5, 29.5, 9, rank)
        name_rank(ax, 33, y, rank)
        for index, x in share.items():
            draw_image(ax, x, y, index)
        arrow(ax, (20.5, 64 + 2 * (1 - 2 * rank)), (27.5, y), RANKS[rank])
        draw_shard(ax, 70, y - 1.5, rank)
    for source, y in enumerate((69.5, 57.5)):
        for target, end in enumerate((69.5, 57.5)):
            offset = 0.9 if target == source else -0.9
            up = 1 if source == 0 else -1
            arrow(ax, (58, y + up * offset), (68.5, end + up * offset), RANKS[source])
    label(ax, 63.2, 53, "exchange", fontsize=9)
    label(ax, 84, 53, "gray: text tokens", fontsize=9)


def draw_sequence(ax: Axes) -> None:
    """Draws Ulysses: from tokens to heads and back."""
    title = "Ulysses divides the tokens, and inside attention the heads"
    label(ax, 0, 43, title, ha="left", fontsize=13, fontweight="bold")
    captions = (
        "all heads\nof its own tokens",
        "attention over all tokens,\nwith its own heads",
        "all heads\nof its own tokens",
    )
    for column, (x, caption) in enumerate(zip((3.5, 39.5, 75), captions)):
        draw_heads(ax, x, 20, by_heads=column == 1)
        label(ax, x + 11.5, 36.5, caption)
    for x in (29.5, 64.7):
        arrow(ax, (x, 26), (x + 6.5, 26))
        label(ax, x + 3.2, 29, "all-to-all", fontsize=9)
    label(ax, 50, 11.5, "norms, projections, MLPs, the head and the loss: each rank on its own tokens", color="#5a616b")


def main() -> None:
    """Draws the picture."""
    figure = Figure(figsize=(8, 6.35))
    ax = figure.add_axes((0.015, 0.01, 0.97, 0.98))
    ax.set(xlim=(-0.5, 101), ylim=(8.5, 88), aspect="equal")
    ax.set_axis_off()
    draw_vision(ax)
    draw_sequence(ax)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=200, facecolor="white")


if __name__ == "__main__":
    main()
