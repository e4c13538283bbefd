"""What a benchmark found: figures with their limits, the table and chart behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Chart", "Limit", "Options", "Report", "at_least", "at_most", "exactly"]


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Args:
        device: "cpu" or "cuda".
        quick: Whether inputs are small and repetitions few: shows that a benchmark runs, not what it would find.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    quick: bool = False


@dataclass(frozen=True)
class Limit:
    """What a figure is held to."""

    relation: Literal["<=", ">=", "=="]
    value: float

    def met_by(self, figure: float) -> bool:
        """Whether a figure keeps the limit."""
        return {"<=": figure <= self.value, ">=": figure >= self.value, "==": figure == self.value}[self.relation]

    def __str__(self) -> str:
        return f"{self.relation} {self.value:g}"


def at_most(value: float) -> Limit:
    """A limit from above."""
    return Limit("<=", value)


def at_least(value: float) -> Limit:
    """A limit from below."""
    return Limit(">=", value)


def exactly(value: float) -> Limit:
    """A figure that is known."""
    return Limit("==", value)


@dataclass(frozen=True)
class Chart:
    """A bar chart, or curves where categories are numbers on a logarithmic axis.

    Args:
        title: Above the chart.
        unit: Of the values.
        categories: What stands below groups of bars.
        series: Values of each series, one for each category; None leaves a gap.
        curves: Whether to draw curves instead of bars.
        reference: A horizontal line to compare with, and its name.
    """

    title: str
    unit: str
    categories: Sequence[str | int]
    series: Mapping[str, Sequence[float | None]]
    curves: bool = False
    reference: tuple[str, float] | None = None


@dataclass(frozen=True)
class Report:
    """What one benchmark found.

    Args:
        figures: By key; ratios first.
        chart: The picture.
        table: Rows behind the figures, all with the same columns.
        limits: What some of the figures are held to.
        parity: Largest relative difference between the two sides, without which nothing is reported; None
            where both sides are counted only.
        notes: What was left out and why.
    """

    figures: Mapping[str, float]
    chart: Chart
    table: Sequence[Mapping[str, Any]] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict)
    parity: float | None = None
    notes: Sequence[str] = ()
