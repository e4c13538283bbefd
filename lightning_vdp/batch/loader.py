"""Batches that all ranks fetch together: whoever runs out, or cannot read one, is not waited for in a step."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_vdp.agreement import gather_numbers, gather_texts
from lightning_vdp.errors import StepError
from lightning_vdp.mesh import SequenceMesh

__all__ = ["AgreedLoader"]

_END, _BATCH, _BROKEN, _STOPPED = range(4)


class AgreedLoader:
    """Wraps a rank's loader; what else the loader has is found here too.

    In training and evaluation all ranks stop when the first runs out. Where predictions are collected they stop when the
    last runs out: until then the others repeat their last batch, whose predictions do not count.

    Args:
        loader: What yields this rank's batches.
        mesh: The ranks.
        until_last: Whether to stop with the last rank instead of the first.
        is_stopped: Whether this rank was told to end; then all end.

    Raises:
        StepError: While it is read, if another rank cannot read a batch, or one has none to repeat.

    Attributes:
        batches_before_end: How many batches this rank has itself, as soon as it has run out before others.
    """

    def __init__(
        self,
        loader: Any,
        mesh: SequenceMesh,
        until_last: bool = False,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.loader = loader
        self.batches_before_end: int | None = None
        self._mesh = mesh
        self._until_last = until_last
        self._is_stopped = is_stopped
        length = sized_len(loader)
        lengths = gather_numbers(mesh, -1 if length is None else length)
        self._length = None if min(lengths) < 0 else max(lengths) if until_last else min(lengths)
        if self._length is not None and min(lengths) < max(lengths) and not until_last:
            rank_zero_warn(
                f"Ranks have between {min(lengths)} and {max(lengths)} batches; each takes {min(lengths)}, and the others see "
                "no more of theirs."
            )
        for name in ("state_dict", "load_state_dict"):
            # how Lightning recognizes a loader that can be resumed
            if hasattr(loader, name):
                vars(self)[name] = getattr(loader, name)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:
        # Lightning shuts workers down through it
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.loader._iterator = value

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length on some rank.")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] | None = None
        self.batches_before_end = None
        last: Any = None
        for number in count():
            state, fetched = _END, None
            if self.batches_before_end is None:
                iterator, state, fetched = _next(iterator, self.loader)
            # a rank that failed since its last step is missed here first
            with self._mesh.watch.step("fetch"):
                states = gather_numbers(self._mesh, _STOPPED if self._is_stopped() else state)
            if _STOPPED in states:
                raise SIGTERMException
            if _BROKEN in states:
                self._raise_broken(fetched if state == _BROKEN else None, number)
            ended = [rank for rank, state in enumerate(states) if state == _END]
            if len(ended) == len(states) or (ended and not self._until_last):
                if len(ended) < len(states) and self._length is None:
                    rank_zero_warn(
                        f"{_ranks(ended)} ran out of data after {number} batches, before others; all stop here, and the others "
                        "see no more of theirs."
                    )
                return
            if ended and number == 0:
                raise StepError(
                    f"{_ranks(ended)} got no batch at all to predict, so that there is none to repeat while others go on; give "
                    "every rank one, or use fewer ranks."
                )
            if state == _END:
                fetched = self._repeat(last, number)
            last = fetched
            yield fetched

    def _raise_broken(self, error: Exception | None, number: int) -> None:
        """Raises this rank's own error where it has one, and elsewhere which ranks had what."""
        stage, step = self._mesh.watch.locate()
        problems = gather_texts(self._mesh, None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        rank, problem = next((rank, problem) for rank, problem in enumerate(problems) if problem is not None)
        raise StepError(f"Rank {rank} failed at {stage} step {step}, reading batch {number}, between steps: {problem}")

    def _repeat(self, last: Any, number: int) -> Any:
        if self.batches_before_end is None:
            self.batches_before_end = number
        seen = getattr(getattr(self.loader, "batch_sampler", None), "seen_batch_indices", None)
        if seen is not None:
            # of a prediction writer: these predictions belong to no sample
            seen.append([])
        return last


def _next(iterator: Iterator[Any] | None, loader: Any) -> tuple[Iterator[Any] | None, int, Any]:
    """The next batch, or why there is none; begins where nothing has begun, which may fail like any other fetch."""
    try:
        iterator = iter(loader) if iterator is None else iterator
        return iterator, _BATCH, next(iterator)
    except StopIteration:
        return iterator, _END, None
    except Exception as error:
        return iterator, _BROKEN, error


def _ranks(ranks: list[int]) -> str:
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
