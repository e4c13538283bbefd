"""The page of measured performance, written from what the benchmarks recorded. Pure."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from lightning_vdp.check.pages import list_table, paragraph

__all__ = ["performance_page"]

_HEADINGS = {
    "vision_memory": "Memory of the vision tower",
    "vision_time": "Time of the vision tower",
    "decoder_memory": "Memory of the decoder and of a whole step",
    "exchange": "The exchange of features",
    "assignment": "Who encodes which image",
    "step": "A whole optimizer step",
    "host": "Time on the host",
    "scale": "Up to 1,024 ranks",
}
# numbers of which the table of figures would be too long to read
_IN_TABLE_ONLY = ("balance_", "vision_memory_ratio_", "vision_peak_ratio_")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " x ".join(map(str, value))
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)


def _figures(record: Mapping[str, Any], comments: Mapping[str, str]) -> list[str]:
    rows = []
    for key, value in record["figures"].items():
        if key.startswith(_IN_TABLE_ONLY):
            continue
        limit = record["limits"].get(key, "")
        rows.append((f"``{key}``", _value(value), limit, comments.get(key, "")))
    header = ("figure", "measured", "wanted", "")
    if not any(row[3] for row in rows):
        return list_table([row[:3] for row in rows], header[:3])
    return list_table(rows, header)


def _section(name: str, record: Mapping[str, Any], comments: Mapping[str, str]) -> list[str]:
    heading = _HEADINGS[name]
    lines = [heading, "-" * len(heading), ""]
    lines += [(inspect.getdoc(importlib.import_module(f"benchmarks.{name}")) or "").strip(), ""]
    lines += _figures(record, comments)
    lines += [f".. image:: images/benchmarks/{name}.png", f"   :alt: {record['chart']['title']}", ""]
    if record["table"]:
        columns = list(record["table"][0])
        lines += list_table([[_value(row[column]) for column in columns] for row in record["table"]], columns)
    if record["parity"] is not None:
        lines += [f"The sides differ by {record['parity']:.0e} at most (float32).", ""]
    machine = record["machine"]
    lines += [
        *paragraph(f"Measured on {machine['date']} in {record['seconds']} s, with Python {machine['python']}."),
        "",
    ]
    for note in record["notes"]:
        lines += [*paragraph(note), ""]
    if name in comments:
        lines += [*paragraph(comments[name]), ""]
    return lines


def performance_page(recorded: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Writes the page in reStructuredText.

    Args:
        recorded: What ``python -m benchmarks all --json`` wrote.
        comments: What a reader should know of a figure or a benchmark, by its name: why it falls short, above all.

    Raises:
        ValueError: If the figures are those of a quick run, or some are missing.
    """
    if any(record["quick"] for record in recorded.values()) or set(recorded) != set(_HEADINGS):
        raise ValueError("Pages are written from a whole run; take `--quick` away and run `all`.")
    machine = next(iter(recorded.values()))["machine"]
    facts = [f"{name}: {fact}" for name, fact in machine.items() if name not in ("date", "python")]
    lines = [
        "Performance",
        "===========",
        "",
        ".. written by docs/write_performance.py from the record of python -m benchmarks; do not edit",
        "",
        *paragraph(
            "Every figure was measured side by side with what it is compared with, in one run. Where two sides compute, no "
            "figure is given unless both are shown to compute the same. Absolute times depend on the machine; compare the "
            "ratios. Nothing here was run on a GPU."
        ),
        "",
        "::",
        "",
        '    pip install -e ".[benchmarks]"',
        "    python -m benchmarks all --json docs/performance.json --charts docs/images/benchmarks",
        "    python docs/write_performance.py",
        "",
        *paragraph("One benchmark runs by its name, ``--quick`` shows that it runs, ``--device cuda`` takes GPUs."),
        "",
        *paragraph("; ".join(facts) + "."),
        "",
    ]
    for name, record in recorded.items():
        lines += _section(name, record, comments)
    return "\n".join(lines).rstrip() + "\n"
