"""Drawing what a benchmark found."""

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.report import Chart

__all__ = ["draw"]

_COLORS = ("#2f6f9f", "#d98c3f", "#6aa56a", "#9a9a9a")


def draw(chart: Chart, path: Path) -> None:
    """Writes a chart as a PNG.

    Args:
        chart: What to draw.
        path: The file; its folder is made.
    """
    groups, series = len(chart.categories), len(chart.series)
    figure = Figure(figsize=(max(6.0, 1.5 + 0.9 * groups), 3.8), layout="constrained")
    ax = figure.add_subplot()
    for index, (name, values) in enumerate(chart.series.items()):
        color = _COLORS[index % len(_COLORS)]
        if chart.curves:
            ax.loglog(list(chart.categories), values, marker="o", color=color, label=name)
            continue
        width = 0.8 / series
        places = [group - 0.4 + (index + 0.5) * width for group in range(groups)]
        known = [(place, value) for place, value in zip(places, values) if value is not None]
        bars = ax.bar(
            [place for place, _ in known], [value for _, value in known], width * 0.92, color=color, label=name
        )
        if groups * series <= 24:
            ax.bar_label(bars, fmt="%.3g", fontsize=7, padding=1)
    if chart.curves:
        ax.set_xlabel("ranks")
    else:
        labels = [str(category).replace(", ", "\n", 1) for category in chart.categories]
        ax.set_xticks(range(groups), labels, fontsize=8)
    if series > 1:
        ax.legend(frameon=False, fontsize=8)
    ax.set_title(chart.title, fontsize=10)
    ax.set_ylabel(chart.unit)
    ax.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
