"""Draws ``images/step.png``: one training step of a sequence group of two ranks, from the loader to the optimizer."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

PICTURE = Path(__file__).parent / "images" / "step.png"
RANKS = ("#3573b1", "#dd8421")
PALE = ("#e3edf7", "#fcecd9")
INK, GRAY, PALE_GRAY = "#2b2f36", "#5a616b", "#eceef1"
GROUP, PALE_GROUP = "#6a4fa3", "#e9e3f5"
WORLD, PALE_WORLD = "#3f7f5f", "#dff0e6"
# left edge and width of the column of files, of the lane of each rank, and of that of the other groups
FILES, LANES, OTHERS = 0.0, ((24.5, 28.0), (54.5, 28.0)), (84.5, 15.5)
ROW, GAP, HEIGHT = 4.4, 1.5, 108.0
LAYER = (7, 11)

# from top to bottom: the file, who does it, and what; a pair is what each of the two ranks does
Step = tuple[str, str, str | tuple[str, str]]
STEPS: tuple[Step, ...] = (
    ("batch/loader.py", "rank", "fetches the group's next batch"),
    ("batch/loader.py", "world", "does every rank have a batch?"),
    ("forward/begin.py", "rank", "checks the batch, plans who encodes what"),
    ("call/header.py", "world", "header: sizes, towers that run, bad input"),
    ("vision/tower.py", "rank", ("encodes images 1 and 4", "encodes images 2 and 3")),
    ("vision/exchange.py", "group", "image features go to the ranks whose positions need them"),
    ("the model itself", "rank", "puts features among the token embeddings"),
    ("sequence/decoder.py", "rank", ("keeps positions 0 to 1,999", "keeps positions 2,000 to 3,999")),
    ("sequence/ulysses.py", "group", "all-to-all: from positions to heads"),
    (
        "sequence/ulysses.py",
        "rank",
        ("attention: whole sequence,\nheads 0 to 7", "attention: whole sequence,\nheads 8 to 15"),
    ),
    ("sequence/ulysses.py", "group", "all-to-all: from heads to positions"),
    ("the model itself", "rank", "norms, projections and MLP of its positions"),
    ("sequence/loss.py", "rank", "logits and loss of its positions"),
    ("sequence/loss.py", "group", "all-reduce: one loss for the group"),
    ("autograd", "group", "backward: every exchange above, reversed"),
    ("fsdp/", "world", "gradients are averaged over all ranks"),
    ("strategy.py", "rank", "the optimizer updates its part of the weights"),
)


def label(ax: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Writes text, centred unless ``style`` says otherwise."""
    defaults: dict[str, Any] = {"ha": "center", "va": "center", "color": INK, "fontsize": 8.6, "linespacing": 1.15}
    ax.text(x, y, text, **{**defaults, **style})


def box(ax: Axes, x: float, y: float, width: float, height: float, face: str, edge: str) -> None:
    """Draws a rounded box from its lower left corner."""
    shape = "round,pad=0,rounding_size=0.8"
    ax.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=face, edgecolor=edge, linewidth=1.2, zorder=2)
    )


def bottom_of(row: int) -> float:
    """The lower edge of a row, counted from the top."""
    return HEIGHT - 8.5 - ROW - row * (ROW + GAP)


def draw_lanes(ax: Axes) -> None:
    """Draws the names and the backgrounds of the lanes."""
    low, high = bottom_of(len(STEPS) - 1) - 1.5, HEIGHT - 7
    for (left, width), color, pale, rank in zip(LANES, RANKS, PALE, (0, 1)):
        ax.add_patch(Rectangle((left, low), width, high - low, facecolor=pale, alpha=0.35, zorder=0))
        label(ax, left + width / 2, HEIGHT - 5, f"rank {rank}", color=color, fontsize=10.5, fontweight="bold")
    left, width = OTHERS
    ax.add_patch(Rectangle((left, low), width, high - low, facecolor=PALE_GRAY, alpha=0.6, zorder=0))
    label(ax, left + width / 2, HEIGHT - 5, "other groups", color=GRAY, fontsize=10, fontweight="bold")
    middle = (LANES[0][0] + LANES[1][0] + LANES[1][1]) / 2
    label(ax, middle, HEIGHT - 1.5, "one sequence group holds one batch", fontsize=9.5, color=GRAY)
    label(ax, FILES, HEIGHT - 5, "who does it", ha="left", fontsize=9.5, color=GRAY)


def draw_layer(ax: Axes) -> None:
    """Draws the frame around what every decoder layer does."""
    first, last = LAYER
    low, high = bottom_of(last) - 0.75, bottom_of(first) - 0.55
    left, right = LANES[0][0] - 1.1, LANES[1][0] + LANES[1][1] + 1.1
    ax.add_patch(
        Rectangle((left, low), right - left, high - low, fill=False, edgecolor=GRAY, linewidth=1, linestyle="--")
    )
    label(ax, left - 1.2, (low + high) / 2, "every decoder layer", rotation=90, fontsize=8.6, color=GRAY)


def draw_step(ax: Axes, row: int, step: Step) -> None:
    """Draws one row: two boxes of work, or a bar of communication across the ranks that take part."""
    file, who, what = step
    bottom = bottom_of(row)
    middle = bottom + ROW / 2
    if row == 0 or STEPS[row - 1][0] != file:
        style: dict[str, Any] = {"family": "monospace"} if "." in file or "/" in file else {"style": "italic"}
        label(ax, FILES, middle, file, ha="left", fontsize=8.4, **style)
    if who == "rank":
        texts = (what, what) if isinstance(what, str) else what
        for (left, width), color, pale, text in zip(LANES, RANKS, PALE, texts):
            box(ax, left, bottom, width, ROW, pale, color)
            label(ax, left + width / 2, middle, fold(text), zorder=3)
        return
    assert isinstance(what, str)
    left, right = LANES[0][0], LANES[1][0] + LANES[1][1]
    face, edge = (PALE_GROUP, GROUP) if who == "group" else (PALE_WORLD, WORLD)
    if who == "world":
        right = OTHERS[0] + OTHERS[1]
    box(ax, left, bottom + 0.5, right - left, ROW - 1, face, edge)
    label(ax, (left + right) / 2, middle, f"\u2194  {what}  \u2194", color=edge, fontweight="bold", zorder=3)


def fold(text: str, width: int = 30) -> str:
    """Breaks a text that is too wide for a lane in the middle."""
    if "\n" in text or len(text) <= width:
        return text
    places = [place for place, letter in enumerate(text) if letter == " "]
    middle = min(places, key=lambda place: abs(place - len(text) / 2))
    return f"{text[:middle]}\n{text[middle + 1 :]}"


def draw_weights(ax: Axes) -> None:
    """Notes what FSDP does meanwhile, from the tower to the head."""
    top, low = bottom_of(4) + ROW, bottom_of(12)
    left, width = OTHERS
    box(ax, left + 0.8, low, width - 1.6, top - low, PALE_WORLD, WORLD)
    text = (
        "FSDP gathers\nthe weights of\neach block\nfrom all ranks\nand frees them:\n"
        "every rank must\nenter the tower\nand every layer,\nequally often"
    )
    label(ax, left + width / 2, (top + low) / 2, text, color=WORLD, linespacing=1.45, zorder=3)


def draw_key(ax: Axes) -> None:
    """Says what the colors of the bars mean."""
    y = bottom_of(len(STEPS) - 1) - 5.2
    for x, face, edge, text in (
        (LANES[0][0], PALE_GROUP, GROUP, "between the ranks of a group"),
        (LANES[1][0], PALE_WORLD, WORLD, "between all ranks of the run"),
    ):
        box(ax, x, y, 4, 2, face, edge)
        label(ax, x + 5, y + 1, text, ha="left", color=GRAY)


def main() -> None:
    """Draws the picture."""
    low = bottom_of(len(STEPS) - 1) - 6.2
    figure = Figure(figsize=(8, 8 * (HEIGHT + 1 - low) / 101.5))
    ax = figure.add_axes((0.01, 0.005, 0.98, 0.99))
    ax.set(xlim=(-0.5, 101), ylim=(low, HEIGHT + 1), aspect="equal")
    ax.set_axis_off()
    draw_lanes(ax)
    draw_layer(ax)
    draw_weights(ax)
    for row, step in enumerate(STEPS):
        draw_step(ax, row, step)
    draw_key(ax)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=200, facecolor="white")


if __name__ == "__main__":
    main()
