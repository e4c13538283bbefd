"""Simulated ranks: a function runs in forked processes that form one world on this machine."""

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessContext, ProcessExitedException, start_processes

from lightning_vdp.errors import UserError

__all__ = ["RankFailed", "RanksTimedOut", "run_ranks"]

# how long the other ranks may take to fail by themselves once one has failed
_GRACE_S = 5.0


@dataclass(frozen=True)
class _Outcome:
    """What became of one rank.

    Args:
        result: What its function returned.
        error: The exception that it raised, as ``"Type: message"``.
        traceback: The traceback of that exception.
        deliberate: Whether the exception was a `UserError`.
    """

    result: Any = None
    error: str | None = None
    traceback: str = ""
    deliberate: bool = False


class RankFailed(AssertionError):
    """A rank raised or died; the message holds that rank's traceback.

    Args:
        message: What happened.
        failures: The exception of each rank that raised, as ``"Type: message"``, by rank; the first to fail comes first.
        deliberate: The ranks whose exception was a `UserError`, which this package raises on purpose.
    """

    def __init__(self, message: str, failures: dict[int, str], deliberate: Collection[int] = ()) -> None:
        super().__init__(message)
        self.failures = failures
        self.deliberate = frozenset(deliberate)


class RanksTimedOut(AssertionError):
    """Ranks did not end in time; the message names for each the line where it waits."""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _opened_store(port: int) -> Iterator[None]:
    """Opens the world's store before rank 0 initializes: a rank that finds it closed tries again late."""
    held = [dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)]
    ended = threading.Event()

    def let_go() -> None:
        # the process group's own store is the same one, which must end with the group
        while not dist.is_initialized() and not ended.wait(0.002):
            pass
        held.clear()

    threading.Thread(target=let_go, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _rank_main(
    rank: int, function: Callable[..., Any], args: tuple[Any, ...], world_size: int, port: int, folder: Path
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    with open(folder / f"{rank}.stack", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        try:
            with _opened_store(port) if rank == 0 and world_size > 1 else contextlib.nullcontext():
                outcome = _Outcome(function(*args))
            # a result that cannot be pickled is an error of this rank
            pickled = pickle.dumps(outcome)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            outcome = _Outcome(None, text, traceback.format_exc(), isinstance(error, UserError))
            pickled = pickle.dumps(outcome)
        (folder / f"{rank}.part").write_bytes(pickled)
        (folder / f"{rank}.part").rename(folder / f"{rank}.outcome")
        sys.stdout.flush()
        sys.stderr.flush()
        if outcome.error is not None:
            sys.exit(1)
        if dist.is_initialized():
            # rank 0 hosts the store: it must outlive the others' goodbye
            with contextlib.suppress(Exception):
                dist.barrier()
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Runs ``function(*args)`` in forked processes with the environment of a launcher, one torch thread each.

    A Lightning Trainer inside takes the processes as its ranks and launches none. Without a Trainer, call
    ``torch.distributed.init_process_group("gloo")``.

    Args:
        function: The function that each rank runs; closures and lambdas too.
        world_size: The number of ranks.
        *args: The function's arguments.
        timeout: Seconds that all ranks together may take.

    Returns:
        What each rank returned, by rank.

    Raises:
        RuntimeError: If this process is in a process group, which the ranks would inherit.
        RankFailed: If a rank raised or died.
        RanksTimedOut: If ranks were still running at the timeout.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "This process has a process group, which simulated ranks would inherit; destroy it first, or "
            "keep Trainers with several devices out of it."
        )
    with tempfile.TemporaryDirectory(prefix="ranks_") as name:
        folder = Path(name)
        arguments = (function, args, world_size, _free_port(), folder)
        context = start_processes(_rank_main, arguments, world_size, join=False, start_method="fork")
        try:
            stacks = {} if _join(context, timeout) else _waiting_lines(context.processes, folder)
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        files = sorted(folder.glob("*.outcome"), key=lambda path: path.stat().st_mtime_ns)
        outcomes: dict[int, _Outcome] = {int(path.stem): pickle.loads(path.read_bytes()) for path in files}
    _raise_failures(outcomes, world_size)
    if stacks:
        lines = "\n".join(f"rank {rank}: {stacks.get(rank, 'ended')}" for rank in range(world_size))
        raise RanksTimedOut(f"{len(stacks)} of {world_size} ranks still ran after {timeout} s:\n{lines}")
    for rank, process in enumerate(context.processes):
        if rank not in outcomes:
            raise RankFailed(f"Rank {rank} died with exit code {process.exitcode}.", {rank: "died"})
    return [outcomes[rank].result for rank in range(world_size)]


def _join(context: ProcessContext, timeout: float) -> bool:
    """Waits until all ranks ended, or one failed and the others had their grace; False at the timeout."""
    deadline = time.monotonic() + timeout
    # what the ranks leave behind tells more than torch does
    with contextlib.suppress(ProcessExitedException):
        while not context.join(max(0.0, deadline - time.monotonic()), _GRACE_S):
            if time.monotonic() > deadline:
                return False
    return True


def _raise_failures(outcomes: dict[int, _Outcome], world_size: int) -> None:
    # the first to fail is the cause; the others usually lost their connection to it
    failures = {rank: outcome.error for rank, outcome in outcomes.items() if outcome.error is not None}
    if not failures:
        return
    first, *others = failures
    also = f" (so did {', '.join(map(str, sorted(others)))})" if others else ""
    raise RankFailed(
        f"Rank {first} of {world_size} raised{also}:\n{outcomes[first].traceback}",
        failures,
        [rank for rank in failures if outcomes[rank].deliberate],
    )


def _waiting_lines(processes: Sequence[BaseProcess], folder: Path) -> dict[int, str]:
    """Finds where each rank that still runs is: its frames, innermost first."""
    running = {rank: process.pid for rank, process in enumerate(processes) if process.is_alive()}
    for pid in running.values():
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    lines = {}
    for rank in running:
        stack = (folder / f"{rank}.stack").read_text()
        frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File")]
        lines[rank] = "\n    ".join(frames) if frames else "no Python frame"
    return lines
