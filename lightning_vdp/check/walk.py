"""Many checks, each in a separate process, so that a crash ends one check and not the rest."""

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from lightning_vdp.check.model import check_model
from lightning_vdp.check.rows import Row, Status
from lightning_vdp.check.targets import Target

__all__ = ["LIMIT_S", "walk"]

LIMIT_S = 240.0
"""Seconds that one model may take at one size."""


@dataclass(frozen=True)
class _Running:
    target: Target
    size: int
    process: BaseProcess
    path: Path
    started: float


def _nothing() -> None:
    pass


def _run(target: Target, size: int, path: Path, prepare: Callable[[], None]) -> None:
    # the ranks that this process forks belong to its group, and end with it
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    prepare()
    row = check_model(target.name, target.make_model, size, path.with_suffix(".fitting").touch)
    path.with_suffix(".part").write_text(json.dumps(row.to_dict()))
    path.with_suffix(".part").rename(path)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Within it, being terminated ends the checks first, like Ctrl-C."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: BaseProcess) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()


def _result(running: _Running, limit_s: float) -> Row | None:
    """The row of a check that ended or ran out of time, None while it runs."""
    seconds = time.monotonic() - running.started
    fitting = running.path.with_suffix(".fitting").exists()
    if running.process.is_alive():
        if seconds < limit_s:
            return None
        status: Status = "hung" if fitting else "unbuildable"
        reason = f"still ran after {limit_s:.0f} s" + ("" if fitting else ", in one process")
        return Row(running.target.name, running.size, status, reason, seconds=seconds)
    if running.path.exists():
        return Row.from_dict(json.loads(running.path.read_text()))
    status = "wrong" if fitting else "unbuildable"
    reason = f"its process died with exit code {running.process.exitcode}"
    return Row(running.target.name, running.size, status, reason, seconds=seconds)


def walk(
    targets: Sequence[Target],
    sizes: Sequence[int],
    on_row: Callable[[Row], None] = lambda row: None,
    jobs: int | None = None,
    prepare: Callable[[], None] = _nothing,
    limit_s: float = LIMIT_S,
) -> list[Row]:
    """Checks each target at each size.

    Args:
        targets: The models to check.
        sizes: The numbers of ranks of the sequence group at which to check them.
        on_row: Called with each row as soon as it is there.
        jobs: The number of checks that run at once. Default: as many as there are cores, at most four.
        prepare: Called in the process of each check before it begins.
        limit_s: Seconds that one check may take.

    Returns:
        The rows, in the order of targets and sizes.
    """
    jobs = jobs or min(4, len(os.sched_getaffinity(0)))
    order = [(target, size) for target in targets for size in sizes]
    rows: dict[tuple[str, int], Row] = {}
    with _terminable(), tempfile.TemporaryDirectory(prefix="check_") as folder:
        waiting: Iterator[tuple[Target, int]] = iter(order)
        running: list[_Running] = []
        left = len(order)
        try:
            while left:
                while len(running) < jobs and (next_one := next(waiting, None)):
                    running.append(_start(*next_one, Path(folder), prepare))
                time.sleep(0.02)
                for entry in list(running):
                    if (row := _result(entry, limit_s)) is not None:
                        running.remove(entry)
                        _end(entry.process)
                        rows[entry.target.name, entry.size] = row
                        left -= 1
                        on_row(row)
        finally:
            for entry in running:
                _end(entry.process)
    return [rows[target.name, size] for target, size in order]


def _start(target: Target, size: int, folder: Path, prepare: Callable[[], None]) -> _Running:
    path = folder / f"{abs(hash(target.name))}_{size}.json"
    process = get_context("fork").Process(target=_run, args=(target, size, path, prepare))
    process.start()
    return _Running(target, size, process, path, time.monotonic())
