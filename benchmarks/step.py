"""Optimizer steps through ``Trainer.fit``: two ranks that share two samples, against plain FSDP and against redundant towers.

Under plain FSDP each of two ranks trains on a sample of its own; here both hold both samples and divide images and
sequences: the same work for the same gradients. A sample has four images, 4,096 patches in all, and 1,287 positions; the
tower has four blocks of width 256, the decoder two layers of width 1,024, so that computing takes seconds, which are shared
about evenly by tower and decoder, and the exchanges of weights are small beside it. The three kinds of fit take turns; a step
is timed from its batch to the next, everything included. All fits have the same losses.
"""

import itertools
import os
import statistics
import time
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from benchmarks.measure import check_parity, fits, lacking, worst
from benchmarks.models import FAMILY, qwen
from benchmarks.report import Chart, Options, Report, at_least
from lightning_vdp import UlyssesVisionDPStrategy
from lightning_vdp.testing import Batches, ParityModule, quiet_trainer, run_ranks, tiny_batch

__all__ = ["run"]

Side = Literal["divided", "redundant", "fsdp"]
_SIDES: dict[Side, str] = {
    "divided": "both samples on both ranks, divided",
    "redundant": "the same, every image on both ranks",
    "fsdp": "plain FSDP, a sample on each rank",
}


class _StepTimes(Callback):
    """Seconds from each batch to the next, and losses."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # the device is idle here: reading the loss waited for it
        self.starts.append(time.perf_counter())

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def _both_samples(options: Options, seed: int) -> dict[str, Tensor]:
    side = 8 if options.quick else 32
    rows = [[(1, side, side)] * 4] * 2
    batch = tiny_batch(FAMILY, rows, text=4 if options.quick else 51, seed=seed, dtype=torch.float32)
    # both rows are full
    del batch["attention_mask"]
    return batch


def _one_sample(batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A row of a batch whose rows are alike."""
    return {name: value.chunk(2)[rank] for name, value in batch.items()}


def _fit(options: Options, side: Side, steps: int) -> _StepTimes:
    batches = [_both_samples(options, seed) for seed in range(steps + 2)]
    rank = int(os.environ["RANK"])
    if side == "fsdp":
        batches = [_one_sample(batch, rank) for batch in batches]
    strategies: dict[Side, UlyssesVisionDPStrategy] = {
        "divided": UlyssesVisionDPStrategy(sequence_parallel_size=2),
        "redundant": UlyssesVisionDPStrategy(sequence_parallel_size=2, vision_data_parallel=False),
        # Lightning's refuses CPUs; with groups of one rank this is it, and nothing is touched
        "fsdp": UlyssesVisionDPStrategy(sequence_parallel_size=1),
    }
    times = _StepTimes()
    trainer = quiet_trainer(accelerator=options.device, devices=2, strategy=strategies[side], callbacks=[times])
    model = qwen(layers=2, hidden=1024, tower_layers=4, tower_hidden=256)
    trainer.fit(ParityModule(model, learning_rate=0.01), Batches(batches))
    return times


def _measure(options: Options) -> dict[Side, tuple[list[float], list[float]]]:
    """For each side, losses and seconds of steps until the last rank was done."""
    steps, rounds = (1, 1) if options.quick else (2, 3)
    found: dict[Side, tuple[list[float], list[float]]] = {side: ([], []) for side in _SIDES}
    for _ in range(rounds):
        for side, (losses, seconds) in found.items():
            times = _fit(options, side, steps)
            losses[:] = times.losses
            # the first step also compares the model divided and whole
            seconds += [worst(end - start) for start, end in itertools.pairwise(times.starts[1:])]
    return found


def run(options: Options) -> Report:
    """Times the three sides in turn."""
    title = "Optimizer step on two samples, two ranks"
    if not fits(options, 2):
        return Report({}, Chart(title, "s", [], {}), notes=lacking(options, (2,)))
    ranks = run_ranks(_measure, 2, options, timeout=1800)
    losses = {side: ranks[0][side][0] for side in _SIDES}
    # each rank of plain FSDP has the loss of its own sample
    losses["fsdp"] = [statistics.mean(pair) for pair in zip(*(rank["fsdp"][0] for rank in ranks))]
    differences = [
        abs(one - other) / abs(other) for side in _SIDES for one, other in zip(losses[side], losses["divided"])
    ]
    seconds = {side: statistics.median(ranks[0][side][1]) for side in _SIDES}
    return Report(
        figures={
            "step_throughput_vs_fsdp": seconds["fsdp"] / seconds["divided"],
            "step_speedup_vs_redundant": seconds["redundant"] / seconds["divided"],
        },
        chart=Chart(title, "s", list(_SIDES.values()), {"median": [seconds[side] for side in _SIDES]}),
        table=[
            {"side": name, "seconds": seconds[side], "fastest": min(ranks[0][side][1]), "loss": losses[side][-1]}
            for side, name in _SIDES.items()
        ],
        limits={"step_throughput_vs_fsdp": at_least(0.9)},
        parity=check_parity(max(differences)),
    )
