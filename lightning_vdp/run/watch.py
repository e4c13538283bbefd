"""Watching the ranks of a run: who waits where for how long, and telling the others when one fails.

What a rank is doing is noted in well under a microsecond. A thread looks at the note now and then; ranks write to the
store of the process group only once one of them waits for long or fails.
"""

import json
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from lightning_vdp.errors import StepError

__all__ = ["Track", "Watch", "run_store", "untracked"]

log = logging.getLogger(__name__)

Track = Callable[[str], AbstractContextManager[Any]]
"""Makes the context of a collective, in which the watch knows of it, given its direction: "forward" or "backward"."""

_LOST = re.compile(r"gloo|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe|Socket (closed|Timeout)")
_TICK_S = (0.05, 1.0)
# how long a rank that fails stays for the others to take note: with it the store may end
_GRACE_S = 3.0
# how long ranks wait for each other's answers, at least
_ANSWER_S = 0.5


def untracked(way: str) -> AbstractContextManager[Any]:
    """The context of a collective that nobody watches."""
    return nullcontext()


class _Doing:
    __slots__ = ("_phase", "_watch")

    def __init__(self, watch: "Watch", phase: str) -> None:
        self._watch, self._phase = watch, phase

    def __enter__(self) -> None:
        watch = self._watch
        watch.doing.append(self._phase)
        watch.moved_at = time.monotonic()

    def __exit__(self, kind: Any, *_: Any) -> None:
        watch = self._watch
        if kind is not None and not watch.failed_in:
            watch.failed_in = self._phase
        watch.doing.pop()
        watch.moved_at = time.monotonic()


class Watch:
    """What this rank is doing; from `start` to `stop` also what happens if it takes too long or fails.

    Args:
        rank: This rank, in the world.
        peers: Ranks of the sequence group.
        world_size: Number of ranks.
    """

    def __init__(self, rank: int, peers: Sequence[int], world_size: int) -> None:
        self.rank, self.peers, self.world_size = rank, list(peers), world_size
        self.doing: list[str] = []
        self.moved_at = 0.0
        self.failed_in = ""
        self.steps = 0
        self.headers = 0
        self.collectives = 0
        self.plans: Mapping[str, Any] = {}
        self.locate: Callable[[], tuple[str, int]] = _nowhere
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._store: Any = None
        self._warn_after_s = 0.0
        self._device: torch.device | None = None
        self._device_work: Any = None
        self._reported_at = 0.0
        self._alarm = 0
        self._failure: str | None = None
        self._told: str | None = None

    # ---- what this rank is doing

    def phase(self, name: str) -> _Doing:
        """Notes what this rank does, while inside."""
        return _Doing(self, name)

    def collective(self, phase: str, way: str = "forward") -> _Doing:
        """Notes a collective that this rank enters, while inside."""
        self.collectives += 1
        return _Doing(self, phase if way == "forward" else f"{phase}, {way}")

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Notes a hook of the Trainer, while inside; if another rank's failure ends it, the error says so.

        Raises:
            StepError: If the world ended because another rank had failed.
        """
        self.failed_in = ""
        self.steps += 1
        with _Doing(self, name):
            try:
                yield
            except StepError:
                # the same on every rank already
                raise
            except Exception as error:
                cause = self.tell(error)
                if cause is None:
                    raise
                raise StepError(cause) from error
        self._note_device_work()

    def _note_device_work(self) -> None:
        # the host runs ahead of a device: the step is over when its work is
        if self._thread is not None and self._device is not None and self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._device_work = event

    # ---- telling

    def tell(self, error: BaseException) -> str | None:
        """Tells the other ranks that this one failed, if it is the first.

        Args:
            error: What this rank raised.

        Returns:
            None if this rank is the cause, or what another rank said before.
        """
        if self._thread is None or self._told is not None:
            return None
        stage, step = self.locate()
        phase = self.failed_in or next(reversed(self.doing), "")
        lines = str(error).strip().splitlines()
        text = f"Rank {self.rank} failed at {stage} step {step}, {_phase(phase)}: {type(error).__name__}: {(lines or [''])[0]}"
        lost = _lost_connection(error)
        if lost:
            text += " (mostly because the process of another rank has ended)"
        try:
            first = self._failure or self._store.compare_set("failure", "", text).decode()
            if first != text:
                if self._failure is None:
                    # who told first need not wait for this rank's thread, which ends with it
                    self._failure = first
                    self._store.add("told", 1)
                return first if lost else None
            self._told = text
            self._store.add("told", 1)
            while self._raise_alarm(int(self._store.get("alarm"))) is None:
                pass
            deadline = time.monotonic() + (0 if lost else _GRACE_S)
            while self._store.add("told", 0) < self.world_size and time.monotonic() < deadline:
                time.sleep(0.02)
        except Exception:
            # the store ended with another rank
            return self._failure if lost else None
        return None

    # ---- the thread

    def start(self, store: Any, warn_after_s: float, device: torch.device) -> None:
        """Starts to look after this rank, until `stop`.

        Args:
            store: The store of the process group, under a prefix that no other run has.
            warn_after_s: Seconds without progress inside a step after which every rank says where it is.
            device: The device whose unfinished work counts as waiting.
        """
        self._store, self._warn_after_s, self._device = store, warn_after_s, device
        self._alarm, self._reported_at, self._failure, self._told = 0, 0.0, None, None
        self._device_work = None
        self.doing.clear()
        self._store.compare_set("alarm", "", "0")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_vdp watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self.locate = _nowhere
        if self._thread is None:
            return
        self._stopped.set()
        # it may be in the middle of an answer, whose peers are gone
        self._thread.join(timeout=5.0)
        self._thread = self._device_work = self._store = None

    @property
    def _tick_s(self) -> float:
        return min(max(self._warn_after_s / 8, _TICK_S[0]), _TICK_S[1])

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while not self._stopped.wait(self._tick_s):
            try:
                self._look()
            except Exception as error:
                # the store has ended with the run
                log.debug("Rank %d is no longer watched: %s", self.rank, error)
                return

    def _waits(self) -> bool:
        if self.doing:
            return True
        return self._device_work is not None and not self._device_work.query()

    def _look(self) -> None:
        number = int(self._store.get("alarm"))
        if number == self._alarm:
            moved_at = self.moved_at
            waited = self._waits() and time.monotonic() - moved_at > self._warn_after_s
            if not waited or moved_at == self._reported_at:
                return
            # of ranks that raise it at the same time one does, and the others join
            number = self._raise_alarm(number) or int(self._store.get("alarm"))
        self._alarm = number
        self._answer(number)

    def _raise_alarm(self, last: int) -> int | None:
        number = str(last + 1)
        return last + 1 if self._store.compare_set("alarm", str(last), number).decode() == number else None

    def _answer(self, number: int) -> None:
        """Says where this rank is and who is behind; or takes note that one failed."""
        if self._store.check(["failure"]):
            if self._failure is None:
                self._failure = self._store.get("failure").decode()
                if self._told is None:
                    self._store.add("told", 1)
            return
        self._reported_at = self.moved_at
        mine = self._describe()
        self._store.set(f"{number}/{self.rank}", json.dumps(mine))
        self._stopped.wait(max(2.5 * self._tick_s, _ANSWER_S))
        others = {rank: self._read(f"{number}/{rank}") for rank in range(self.world_size) if rank != self.rank}
        missing = [self._behind(rank, state, mine) for rank, state in others.items()]
        named = "; ".join(text for text in missing if text) or "none is behind"
        log.warning("Rank %d of %d %s. Peers missing: %s.", self.rank, self.world_size, _sentence(mine), named)

    def _read(self, key: str) -> dict[str, Any] | None:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _behind(self, rank: int, state: dict[str, Any] | None, mine: dict[str, Any]) -> str | None:
        if state is None:
            return f"rank {rank} (does not answer)"
        behind = (state["steps"], state["headers"]) < (mine["steps"], mine["headers"])
        behind |= rank in self.peers and state["collectives"] < mine["collectives"]
        return (
            f"rank {rank} ({state['stage']} step {state['step']}, {state['phase']}, {state['line']})"
            if behind
            else None
        )

    def _describe(self) -> dict[str, Any]:
        stage, step = self.locate()
        doing = list(self.doing)
        return {
            "stage": stage,
            "step": step,
            "phase": _phase(doing[-1] if doing else ""),
            "waited_s": round(time.monotonic() - self.moved_at, 1),
            "steps": self.steps,
            "headers": self.headers,
            "collectives": self.collectives,
            "plan": _describe_plans(self.plans),
            "line": _main_line(),
        }


def _lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone, rather than this rank's own work."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_LOST.search(str(error))))


def _nowhere() -> tuple[str, int]:
    return "forward", 0


def _phase(name: str) -> str:
    return f"phase {name}" if name else "between steps"


def _sentence(state: Mapping[str, Any]) -> str:
    return (
        f"has made no progress for {state['waited_s']} s: {state['stage']} step {state['step']}, {state['phase']}, "
        f"{state['line']}; last unit plan: {state['plan']}"
    )


def _describe_plans(plans: Mapping[str, Any]) -> str:
    parts = [f"{name} owners {_short(plan.owners)} with {_short(plan.sizes)} patches" for name, plan in plans.items()]
    return ", ".join(parts) or "no images"


def _short(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:16]))
    return f"[{shown}{', ...' if len(values) > 16 else ''}]"


def _main_line() -> str:
    """Where this process's main thread is, outside torch if it came from there."""
    identity = threading.main_thread().ident
    frame = sys._current_frames().get(identity) if identity is not None else None
    if frame is None:
        return "at an unknown line"
    frames = traceback.extract_stack(frame)
    outermost = next((entry for entry in reversed(frames) if "/torch/" not in entry.filename), frames[-1])
    return f"{outermost.filename}:{outermost.lineno} in {outermost.name}"


def run_store(run: int) -> Any:
    """A connection of its own to the store of the process group, under a prefix for one run."""
    store: Any = dist.distributed_c10d._get_default_store()
    with suppress(Exception):
        # the main thread may wait in its own connection
        store = store.clone()
    return dist.PrefixStore(f"lightning_vdp/{run}", store)
