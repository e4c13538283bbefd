"""Ranks that wait or fail: what each says, and that all end."""

import importlib
import logging
import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_vdp import UlyssesVisionDPStrategy
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.testing import Batches, ParityModule, RankFailed, quiet_trainer, run_ranks, tiny_batch, tiny_model

FAMILY = "qwen2_5_vl"


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    return [tiny_batch(FAMILY, seed=seed, dtype=torch.float32) for seed in range(count)]


class _Collecting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _fit(module: ParityModule, world_size: int = 2, loader: Any = None, **arguments: Any) -> list[str]:
    """Fits, and returns what the watch logged on this rank."""
    heard = _Collecting()
    logging.getLogger("lightning_vdp.run.watch").addHandler(heard)
    arguments = {"hang_warning_s": 1.6, **arguments}
    strategy = UlyssesVisionDPStrategy(sequence_parallel_size=2, verify_first_batch=False, **arguments)
    loader = Batches(batches()) if loader is None else loader
    quiet_trainer(devices=world_size, strategy=strategy).fit(module, loader)
    return heard.messages


# ---- one rank fails


class _Faulty(ParityModule):
    """Rank 1 fails in its second step, at a place of the test's choice."""

    def __init__(self, place: str) -> None:
        super().__init__(tiny_model(FAMILY).train())
        self.place = place

    def fail(self, *args: Any, **kwargs: Any) -> None:
        if self.global_rank == 1 and self.trainer.fit_loop.total_batch_idx == 1:
            raise ArithmeticError("broken on purpose")

    def on_fit_start(self) -> None:
        model = self.model.model
        places: dict[str, nn.Module] = {
            "tower": model.visual.blocks[1],
            "projector": model.visual.merger,
            "layer": model.language_model.layers[1],
            "head": self.model.lm_head,
        }
        if self.place in places:
            places[self.place].register_forward_pre_hook(self.fail)
        if self.place == "backward":
            model.language_model.layers[0].register_full_backward_hook(self.fail)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if self.place == "training_step":
            self.fail()
        loss = super().training_step(batch, batch_idx)
        if self.place == "after the forward":
            self.fail()
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.place == "callback":
            self.fail()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.place == "optimizer":
            self.fail()

    def on_validation_start(self) -> None:
        if self.place == "validation":
            self.fail()


class _FaultyLoader(Batches):
    def __iter__(self) -> Any:
        for index, batch in enumerate(self.batches):
            if index == 1 and dist.get_rank() == 1:
                raise ArithmeticError("broken on purpose")
            yield batch


def _faulty(place: str) -> None:
    module = _Faulty(place)
    if place in OUR_OWN:
        _break_inside(place, module)
    loader = _FaultyLoader(batches()) if place == "dataloader" else None
    _fit(module, loader=loader)


def _break_inside(place: str, module: _Faulty) -> None:
    """Makes our own function fail on rank 1, in this forked process alone."""
    where = importlib.import_module(f"lightning_vdp.{OUR_OWN[place][0]}")
    own = getattr(where, OUR_OWN[place][1])

    def faulty(*args: Any, **kwargs: Any) -> Any:
        module.fail()
        return own(*args, **kwargs)

    setattr(where, OUR_OWN[place][1], faulty)


# functions of ours between two collectives
OUR_OWN = {
    "planning": ("forward.begin", "assign_units"),
    "features": ("vision.tower", "_check_rows"),
    "exchange": ("vision.tower", "route_features"),
    "cutting": ("sequence.decoder", "shard_sequence"),
    "attention": ("sequence.ulysses", "to_sequence"),
    "audit": ("forward.divide", "check_decoder_outputs"),
    "loss": ("sequence.loss", "all_reduce"),
    "outputs": ("forward.divide", "_mark_outputs"),
}

PLACES = {
    "dataloader": "between steps",
    "callback": "between steps",
    "training_step": "phase training_step",
    "tower": "phase tower (images)",
    "projector": "phase tower (images)",
    "planning": "phase training_step",
    "features": "phase training_step",
    "exchange": "phase training_step",
    "cutting": "phase training_step",
    "audit": "phase training_step",
    "outputs": "phase training_step",
    "layer": "phase training_step",
    "attention": "phase training_step",
    "head": "phase training_step",
    "loss": "phase training_step",
    "after the forward": "phase training_step",
    "backward": "phase backward",
    "optimizer": "phase optimizer_step",
}


@pytest.mark.parametrize("place", PLACES)
def test_failure_of_one_rank_ends_all_and_all_say_why(place: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(_faulty, 2, place, timeout=20)
    assert time.monotonic() - started < 10
    failures = caught.value.failures
    assert failures[1] == "ArithmeticError: broken on purpose"
    assert re.fullmatch(
        r"StepError: Rank 1 failed at training step \d, [^:]*: ArithmeticError: broken on purpose", failures[0]
    ), failures
    assert f", {PLACES[place]}: " in failures[0]


def _first_of_four() -> None:
    class Module(ParityModule):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            if self.global_rank == 0 and batch_idx == 1:
                raise ArithmeticError("broken on purpose")
            return super().training_step(batch, batch_idx)

    _fit(Module(tiny_model(FAMILY)), 4)


def test_the_rank_with_the_store_and_another_replica() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_first_of_four, 4, timeout=20)
    failures = caught.value.failures
    assert failures.pop(0) == "ArithmeticError: broken on purpose"
    assert set(failures.values()) == {
        "StepError: Rank 0 failed at training step 1, phase training_step: ArithmeticError: broken on purpose"
    }


def _alike() -> None:
    class Module(ParityModule):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            raise ArithmeticError("broken everywhere")

    _fit(Module(tiny_model(FAMILY)))


def test_what_every_rank_raises_by_itself_stays_as_it_is() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_alike, 2, timeout=20)
    assert set(caught.value.failures.values()) == {"ArithmeticError: broken everywhere"}


def _killed(place: str) -> None:
    class Module(_Faulty):
        def fail(self, *args: Any, **kwargs: Any) -> None:
            if self.global_rank == 1 and self.trainer.fit_loop.total_batch_idx == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    _fit(Module(place))


@pytest.mark.parametrize("place", ["tower", "layer", "backward"])
def test_killed_rank_ends_all(place: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(_killed, 2, place, timeout=20)
    assert time.monotonic() - started < 15
    assert "Rank 0 of 2 raised" in str(caught.value)


# ---- one rank waits


class _Late(ParityModule):
    """Rank 1 comes late to its second step, at a place of the test's choice."""

    def __init__(self, place: str) -> None:
        super().__init__(tiny_model(FAMILY).train())
        self.place = place

    def on_fit_start(self) -> None:
        layers = self.model.model.language_model.layers
        module = {"layer": layers[1].self_attn.q_proj, "tower": self.model.model.visual.blocks[0].mlp}.get(self.place)
        if module is not None:
            module.register_forward_pre_hook(self.dawdle)

    def dawdle(self, *_: Any) -> None:
        if self.global_rank == 1 and self.trainer.fit_loop.total_batch_idx == 1:
            time.sleep(1.5)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if self.place == "training_step":
            self.dawdle()
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.place == "between steps":
            self.dawdle()


def _late(place: str, hang_warning_s: float | None) -> list[str]:
    return _fit(_Late(place), hang_warning_s=hang_warning_s)


@pytest.mark.parametrize("place", ["between steps", "training_step", "tower", "layer"])
def test_each_rank_says_where_it_is_when_one_waits(place: str) -> None:
    first, second = run_ranks(_late, 2, place, 0.5)
    # a busy machine may make other waits long enough to be told
    (late,) = [message for message in second if " in dawdle; " in message]
    assert late.startswith("Rank 1 of 2 has made no progress for ")
    assert "training step 1, " in late
    assert "; last unit plan: image owners [" in late
    assert late.endswith(". Peers missing: none is behind.")
    (waiting,) = [message for message in first if " in dawdle)" in message] if place != "tower" else [first[-1]]
    assert waiting.startswith("Rank 0 of 2 has made no progress for ")
    assert "training step 1, phase " in waiting
    if place == "between steps":
        assert "Peers missing: rank 1 (training step 1, between steps, " in waiting
    if place == "layer":
        assert ", phase layer 1, " in waiting
        assert "Peers missing: rank 1 (training step 1, phase training_step, " in waiting


@pytest.mark.parametrize("hang_warning_s", [30, pytest.param(None, marks=pytest.mark.slow)])
def test_nothing_is_said_of_ranks_in_time_or_when_switched_off(hang_warning_s: float | None) -> None:
    assert run_ranks(_late, 2, "layer", hang_warning_s) == [[], []]


def _frozen() -> list[str]:
    class Module(_Late):
        def dawdle(self, *_: Any) -> None:
            if self.global_rank == 1 and self.trainer.fit_loop.total_batch_idx == 1:
                # the thread that would answer stops too
                self.trainer.strategy.mesh.watch._stopped.set()
                time.sleep(1.5)

    return _fit(Module("layer"), hang_warning_s=0.5)


def test_a_rank_that_does_not_answer_is_named() -> None:
    first, second = run_ranks(_frozen, 2)
    assert not any(" in dawdle" in message for message in second)
    assert any(message.endswith("Peers missing: rank 1 (does not answer).") for message in first)


def _threads() -> tuple[list[str], list[str]]:
    import threading

    class Module(ParityModule):
        def on_train_start(self) -> None:
            self.during = [thread.name for thread in threading.enumerate()]

    module = Module(tiny_model(FAMILY))
    _fit(module)
    return module.during, [thread.name for thread in threading.enumerate()]


def test_teardown_ends_the_watch() -> None:
    for during, after in run_ranks(_threads, 2):
        assert "lightning_vdp watch" in during
        assert "lightning_vdp watch" not in after


def _cost(watched: bool) -> float:
    dist.init_process_group("gloo")
    mesh = SequenceMesh("cpu", 1, 1)
    if watched:
        mesh.start_watch(120.0)
    started = time.perf_counter()
    for _ in range(20_000):
        with mesh.watch.collective("layer 1"):
            pass
    seconds = time.perf_counter() - started
    mesh.close()
    return seconds / 20_000


def test_a_mark_costs_microseconds() -> None:
    (seconds,) = run_ranks(_cost, 1, True)
    assert seconds < 20e-6


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("hang_warning_s", 0),
        ("hang_warning_s", -1.0),
        ("hang_warning_s", "long"),
        ("hang_warning_s", True),
        ("check_batches_every_n_steps", -1),
        ("check_batches_every_n_steps", 2.5),
        ("check_batches_every_n_steps", None),
    ],
)
def test_numbers_out_of_range_are_refused(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{argument}` is {value!r}, but must be"):
        UlyssesVisionDPStrategy(**{argument: value})
