"""The subcommand ``lightning-vdp check``."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

from lightning_vdp.check.build import MODEL_TYPES
from lightning_vdp.check.rows import STATUSES, Row, write_rows
from lightning_vdp.check.targets import Target, find_target
from lightning_vdp.check.walk import LIMIT_S, walk
from lightning_vdp.errors import UserError

__all__ = ["Options", "parse_check", "run_check"]

_COLOURS = {"exact": "green", "undivided": "yellow", "refused": "cyan", "unbuildable": "dim"}


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers from 2 on, such as 2,4")
    return sizes


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lightning-vdp check",
        description="Proves on this machine's CPU that a model trains to the same numbers divided as in one process: it is "
        "made small, and its loss and every gradient are compared in float64.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a model_type of transformers, a config.json, a model of the hub, or package.module:ModelFactory",
    )
    parser.add_argument(
        "--all", action="store_true", help="every image-text-to-text model type of the installed transformers"
    )
    parser.add_argument(
        "--sizes", type=_sizes, default=[2], help="ranks of a sequence group, comma-separated (default: 2)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--jobs", type=int, help="checks that run at once (default: one for each core, at most four)")
    parser.add_argument(
        "--timeout", type=float, default=LIMIT_S, help="seconds for one model and size (default: %(default)s)"
    )
    return parser


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _parts(row: Row) -> str:
    lengths = "+".join(map(str, row.divided.lengths[0])) if row.divided.lengths else "whole"
    units = next((step for step in row.divided.units if step), [])
    return f"images {'+'.join(map(str, units)) or 'whole'}, positions {lengths}" if row.loss_error is not None else ""


def _saved(row: Row) -> str:
    if not row.saved_bytes or not row.saved_bytes_alone:
        return ""
    return f"{max(row.saved_bytes) / 1e6:.2f} MB ({max(row.saved_bytes) / row.saved_bytes_alone:.0%})"


def _table(rows: Sequence[Row]) -> Table:
    table = Table(
        "model", "S", "status", "loss error", "gradient error", "worst parameter", "divided", "saved per rank"
    )
    for row in rows:
        colour = _COLOURS.get(row.status, "bold red")
        status = f"[{colour}]{row.status}[/]" + (f": {row.reason}" if row.reason else "")
        table.add_row(
            row.model_type,
            str(row.size),
            status,
            _error(row.loss_error),
            _error(row.gradient_error),
            row.parameter.removeprefix("model."),
            _parts(row),
            _saved(row),
        )
    return table


@dataclass(frozen=True)
class Options:
    """What a command line asks for.

    Args:
        targets: The models to check.
        sizes: The numbers of ranks of the sequence group at which to check them.
        json: The file to write the rows to.
        jobs: The number of checks that run at once; None leaves it to `walk`.
        timeout: Seconds that one model may take at one size.
    """

    targets: tuple[Target, ...]
    sizes: tuple[int, ...]
    json: Path | None
    jobs: int | None
    timeout: float


def parse_check(arguments: Sequence[str]) -> Options:
    """Reads the command line after ``check``.

    Raises:
        UserError: If nothing is asked for, or something unknown.
        ImportError: If the module of a factory cannot be imported.
    """
    options = _parser().parse_args(list(arguments))
    names = dict.fromkeys([*options.models, *(MODEL_TYPES if options.all else ())])
    if not names:
        raise UserError("there is nothing to check: name a model, or ask for --all")
    targets = tuple(find_target(name) for name in names)
    return Options(targets, tuple(options.sizes), options.json, options.jobs, options.timeout)


def run_check(options: Options) -> int:
    """Checks, prints a table, and writes the rows.

    Args:
        options: What to check.

    Returns:
        0 if all models asked for are exact and divided, else 1.
    """
    transformers_logging.set_verbosity_error()
    console = Console(width=None if sys.stdout.isatty() else 220)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # no thread that refreshes the bar: the checks are forked from this process
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("checking", total=len(options.targets) * len(options.sizes))

        def show(row: Row) -> None:
            progress.update(task, advance=1, description=f"{row.model_type}: {row.status}", refresh=True)

        rows = walk(options.targets, options.sizes, show, options.jobs, limit_s=options.timeout)
    console.print(_table(rows))
    counts = Counter(row.status for row in rows)
    console.print(", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]))
    if options.json is not None:
        write_rows(rows, options.json)
    return 0 if all(row.status == "exact" for row in rows) else 1
