"""One model at one size: built small, run in one process, then in simulated ranks, and compared."""

import contextlib
import re
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lightning_vdp.check.inputs import NoInput, make_batch, make_video_batch, vision_base
from lightning_vdp.check.probe import Notes, ProbeModule
from lightning_vdp.check.rows import Divided, Row
from lightning_vdp.errors import UserError
from lightning_vdp.families.find import find_models
from lightning_vdp.testing.float64 import PromoteFloat32
from lightning_vdp.testing.parity import ParityReport, measure_parity
from lightning_vdp.testing.processes import RankFailed, RanksTimedOut

__all__ = ["TOLERANCE", "check_model", "make_batches"]

TOLERANCE = 1e-9
_FIT_SECONDS = 90.0

ModelFactory = Callable[[], PreTrainedModel]
Batch = dict[str, Any]


def make_batches(model: PreTrainedModel) -> dict[str, Batch]:
    """Makes the batches of the check, by what is special about them.

    Args:
        model: The small model in float64.

    Raises:
        NoInput: If not even images in one row can be made.
    """
    first = make_batch(model, seed=0)
    batches = {"words alone" if vision_base(model) is None else "three images in a row": first}
    others = {"two padded rows": partial(make_batch, seed=1, rows=2), "a video": partial(make_video_batch, seed=2)}
    for name, make in others.items():
        with contextlib.suppress(NoInput):
            batches[name] = make(model)
    return batches


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()[:900]


def _sentence(error: BaseException) -> str:
    return _one_line(f"{type(error).__name__}: {error}")[:600]


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if "transformers" in frame.filename), frames[-1])
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _find_problem_in_one_process(model: PreTrainedModel, batches: dict[str, Batch]) -> str | None:
    """Runs each batch forward and backward in this process; batches that alone fail are dropped.

    Returns:
        Why the first batch does not run, or None.
    """
    first = next(iter(batches))
    model.train()
    for name, batch in list(batches.items()):
        try:
            with PromoteFloat32():
                losses = [model(**batch).loss for _ in range(2)]
            if not isinstance(losses[0], torch.Tensor):
                raise NoInput(f"{type(model).__name__} returns no loss for labels")
            losses[0].backward()
            if not torch.equal(losses[0].detach(), losses[1].detach()):
                raise NoInput(f"{type(model).__name__} gives another loss each time")
        except Exception as error:
            if name == first:
                return f"crashes in one process: {_sentence(error)} ({_place(error)})"
            del batches[name]
        finally:
            model.zero_grad(set_to_none=True)
    return None


def check_model(name: str, make_model: ModelFactory, size: int, on_fit: Callable[[], None] = lambda: None) -> Row:
    """Checks one model at one size.

    Args:
        name: The name of the model in its row.
        make_model: Builds the same small model in float64 each time it is called.
        size: The number of ranks of the sequence group.
        on_fit: Called when one process has run the model and the ranks begin to.
    """
    start = time.monotonic()
    row = partial(Row, name, size)

    def ended(status: Any, reason: str = "", **values: Any) -> Row:
        return row(status, reason, seconds=round(time.monotonic() - start, 2), **values)

    try:
        model = make_model()
    except Exception as error:
        return ended("unbuildable", f"cannot be built: {_sentence(error)} ({_place(error)})")
    try:
        find_models(ProbeModule(model))
    except UserError as error:
        return ended("refused", _one_line(str(error)))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with PromoteFloat32():
            batches = make_batches(model)
        problem = _find_problem_in_one_process(model, batches)
    except Exception as error:
        problem = f"no input for it is known: {_sentence(error)}"
    finally:
        torch.set_default_dtype(default)
    if problem is not None:
        return ended("unbuildable", problem)
    kinds = list(batches)
    on_fit()
    try:
        report = measure_parity(
            lambda: ProbeModule(make_model()).train(),
            list(batches.values()),
            world_size=size,
            sequence_parallel_size=size,
            timeout=_FIT_SECONDS,
        )
    except RanksTimedOut as error:
        return ended("hung", _one_line(str(error)), batches=kinds)
    except RankFailed as error:
        return ended(*_failure(error, size), batches=kinds)
    except AssertionError as error:
        return ended("wrong", _sentence(error), batches=kinds)
    parts = ["decoder"] if vision_base(model) is None else ["tower", "decoder"]
    return ended(*_verdict(report, parts), **_measured(report), batches=kinds)


def _failure(error: RankFailed, size: int) -> tuple[str, str]:
    """Tells a refusal, which all ranks raise alike and on purpose, from a crash."""
    messages = sorted(set(error.failures.values()))
    if next(iter(error.failures)) not in error.deliberate:
        return "wrong", f"the ranks crash: {_one_line(messages[0])} ({_crash_place(error)})"
    reason = _one_line(messages[0].split(": ", 1)[-1])
    if len(error.failures) < size or len(messages) > 1:
        return "wrong", f"refused by ranks {sorted(error.failures)} of {size} alone: {reason}"
    return "refused", reason


def _crash_place(error: RankFailed) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    of_models = [frame for frame in frames if "/transformers/models/" in frame[0]]
    path, line = (of_models or frames or [("", "")])[-1]
    return f"{Path(path).name}:{line}"


def _measured(report: ParityReport) -> dict[str, Any]:
    notes: tuple[Notes, ...] = report.notes
    lengths = [[length for length in step if length is not None] for step in zip(*(rank.lengths for rank in notes))]
    units = [
        [sum(rank.values()) for rank in step] if any(step) else [] for step in zip(*(rank.units for rank in notes))
    ]
    return {
        "loss_error": report.loss,
        "gradient_error": report.gradient,
        "parameter": report.worst_gradient,
        "divided": Divided(lengths, units),
        "saved_bytes": [rank.saved_bytes for rank in notes],
        "saved_bytes_alone": report.notes_alone.saved_bytes,
    }


def _verdict(report: ParityReport, parts: list[str]) -> tuple[str, str]:
    errors = {
        "loss": report.loss,
        f"gradient of {report.worst_gradient}": report.gradient,
        "gradients' norm": report.norm,
        f"parameter {report.worst_parameter}": report.parameter,
    }
    large = [f"{name} off by {value:.1e}" for name, value in errors.items() if not value <= TOLERANCE]
    if large:
        return "wrong", "; ".join(large)
    divided = _measured(report)["divided"]
    undivided = [name for name in parts if not getattr(divided, name)]
    if undivided:
        return "undivided", f"every rank does the whole work of the {' and the '.join(undivided)}"
    return "exact", ""
