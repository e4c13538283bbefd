"""Measures what Vision DP and the divided decoder save, beside what they are compared with, in one run.

python -m benchmarks vision_memory
python -m benchmarks all --json benchmarks.json
"""

import argparse
import importlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.charts import draw
from benchmarks.report import Options, Report

NAMES = ("vision_memory", "vision_time", "decoder_memory", "exchange", "assignment", "step", "host", "scale")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print(console: Console, name: str, report: Report, seconds: float) -> None:
    table = Table("figure", "value", "limit", "", title=name, title_justify="left")
    for key, value in report.figures.items():
        limit = report.limits.get(key)
        met = "" if limit is None else "met" if limit.met_by(value) else "NOT MET"
        table.add_row(key, _shown(value), "" if limit is None else str(limit), met)
    console.print(table)
    if report.table:
        rows = Table(*report.table[0])
        for row in report.table:
            rows.add_row(*map(_shown, row.values()))
        console.print(rows)
    if report.parity is not None:
        console.print(f"The sides differ by {report.parity:.1e} at most.")
    for note in report.notes:
        console.print(note)
    console.print(f"{seconds:.0f} s\n")


def _record(report: Report, seconds: float) -> dict[str, Any]:
    return {
        "figures": dict(report.figures),
        "limits": {key: str(limit) for key, limit in report.limits.items()},
        "parity": report.parity,
        "table": [dict(row) for row in report.table],
        "notes": list(report.notes),
        "chart": asdict(report.chart),
        "seconds": round(seconds),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmarks that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*NAMES, "all"], help="which one")
    parser.add_argument(
        "--json",
        type=Path,
        help="file to write to; what it has of others stays",
    )
    parser.add_argument("--charts", type=Path, default=Path("runs/benchmarks"), help="folder of the charts")
    parser.add_argument("--quick", action="store_true", help="small inputs and few repetitions, to see that it runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what to measure on")
    chosen = parser.parse_args(arguments)
    # read when libraries load: profilers say on stderr when they start and stop, and that memory is older than they are
    for name, value in (("KINETO_LOG_LEVEL", "5"), ("TORCH_CPP_LOG_LEVEL", "ERROR"), ("OMP_NUM_THREADS", "1")):
        os.environ.setdefault(name, value)
    from benchmarks.machine import machine_facts

    console = Console()
    facts = machine_facts(chosen.device)
    console.print(", ".join(f"{name}: {fact}" for name, fact in facts.items()), "\n")
    options = Options(chosen.device, chosen.quick)
    recorded = json.loads(chosen.json.read_text()) if chosen.json is not None and chosen.json.exists() else {}
    for name in NAMES if chosen.name == "all" else [chosen.name]:
        start = time.monotonic()
        report: Report = importlib.import_module(f"benchmarks.{name}").run(options)
        seconds = time.monotonic() - start
        _print(console, name, report, seconds)
        if report.chart.categories:
            draw(report.chart, chosen.charts / f"{name}.png")
        # others that the file has stay as they are
        recorded[name] = {"quick": chosen.quick, "machine": facts, **_record(report, seconds)}
        if chosen.json is not None:
            chosen.json.write_text(
                json.dumps({key: recorded[key] for key in NAMES if key in recorded}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
