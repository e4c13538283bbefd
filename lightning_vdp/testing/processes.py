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
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

__all__ = ["RankFailed", "RanksTimedOut", "run_ranks"]

# how long the other ranks may take to fail by themselves once one has failed
_GRACE_S = 5.0


class RankFailed(AssertionError):
    """A rank raised; the message holds that rank's traceback.

    Args:
        message: What happened.
        failures: The exception of each rank that raised, as ``"Type: message"``, by rank.
    """

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


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
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, port: int, folder: str
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
    path = Path(folder)
    with open(path / f"{rank}.stack", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        try:
            with _opened_store(port) if rank == 0 and world_size > 1 else contextlib.nullcontext():
                outcome: tuple[Any, ...] = ("returned", function(*args))
        except BaseException as error:
            outcome = ("raised", f"{type(error).__name__}: {error}", traceback.format_exc())
        (path / f"{rank}.part").write_bytes(pickle.dumps(outcome))
        (path / f"{rank}.part").rename(path / f"{rank}.outcome")
        sys.stdout.flush()
        sys.stderr.flush()
        if outcome[0] == "returned" and dist.is_initialized():
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
        function: What each rank runs; closures and lambdas too.
        world_size: Number of ranks.
        *args: Its arguments.
        timeout: Seconds for all ranks together.

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
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        port = _free_port()
        processes: list[BaseProcess] = [
            context.Process(target=_rank_main, args=(function, args, rank, world_size, port, folder), daemon=False)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            timed_out = not _wait(processes, Path(folder), timeout)
            stacks = _waiting_lines(processes, Path(folder)) if timed_out else {}
        finally:
            _end(processes)
        outcomes = [_outcome(Path(folder), rank) for rank in range(world_size)]
        # the first to fail is the cause; the others usually lost their connection to it
        in_time = sorted(Path(folder).glob("*.outcome"), key=lambda path: path.stat().st_mtime_ns)
    failures = {
        rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None and outcome[0] == "raised"
    }
    if failures:
        first = next(rank for rank in (int(path.stem) for path in in_time) if rank in failures)
        raise RankFailed(
            f"Rank {first} of {world_size} raised"
            + (f" (so did {', '.join(str(rank) for rank in failures if rank != first)})" if len(failures) > 1 else "")
            + f":\n{failures[first][2]}",
            {rank: outcome[1] for rank, outcome in failures.items()},
        )
    if timed_out:
        lines = "\n".join(f"rank {rank}: {stacks.get(rank, 'ended')}" for rank in range(world_size))
        raise RanksTimedOut(f"{len(stacks)} of {world_size} ranks still ran after {timeout} s:\n{lines}")
    results = []
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            raise RankFailed(f"Rank {rank} died with exit code {processes[rank].exitcode}.", {rank: "died"})
        results.append(outcome[1])
    return results


def _wait(processes: list[BaseProcess], folder: Path, timeout: float) -> bool:
    """Waits until all ranks ended, or one failed and the others had their grace; False at the timeout."""
    deadline = time.monotonic() + timeout
    failed_at = None
    while any(process.is_alive() for process in processes):
        now = time.monotonic()
        if failed_at is None and any(_failed(process, folder, rank) for rank, process in enumerate(processes)):
            failed_at = now
        if failed_at is not None and now - failed_at > _GRACE_S:
            return True
        if now > deadline:
            return False
        time.sleep(0.01)
    return True


def _failed(process: BaseProcess, folder: Path, rank: int) -> bool:
    outcome = _outcome(folder, rank)
    if outcome is not None:
        return bool(outcome[0] == "raised")
    return process.exitcode not in (None, 0)


def _outcome(folder: Path, rank: int) -> tuple[Any, ...] | None:
    path = folder / f"{rank}.outcome"
    return pickle.loads(path.read_bytes()) if path.exists() else None  # our own children wrote it


def _waiting_lines(processes: list[BaseProcess], folder: Path) -> dict[int, str]:
    running = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in running:
        pid = processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    lines = {}
    for rank in running:
        stack = (folder / f"{rank}.stack").read_text()
        frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File")]
        lines[rank] = "\n    ".join(frames) if frames else "no Python frame"
    return lines


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
