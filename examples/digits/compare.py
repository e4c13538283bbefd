"""Trains on the same samples three ways and compares the loss: ``python -m examples.digits.compare --steps 60``.

The third way is one process, not two replicas of half the batch: the mean of two halves' losses is not the mean over
the tokens of the whole batch where the halves hold unequally many, and one process needs no code of lightning_vdp.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

FOLDER = Path("runs/digits/compare")
PICTURE = Path("runs/digits/compare.png")
CONFIG = Path(__file__).with_name("cpu.yaml")
STRATEGY = "--trainer.strategy=lightning_vdp.UlyssesVisionDPStrategy"
TWO_RANKS = [STRATEGY, "--trainer.strategy.sequence_parallel_size=2"]
WAYS = {
    "two ranks, Vision DP": TWO_RANKS,
    "two ranks, every image on both": [*TWO_RANKS, "--trainer.strategy.vision_data_parallel=false"],
    # DDP, since Lightning then draws the rows in the same order as for several ranks
    "one process": ["--trainer.strategy=ddp", "--trainer.devices=1"],
}


def train(way: str, steps: int) -> list[float]:
    """Runs ``lightning-vdp fit`` for some steps.

    Args:
        way: a name in ``WAYS``.
        steps: number of optimizer steps.

    Returns:
        The loss of each step.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    name = way.replace(",", "").replace(" ", "-")
    options = {
        "max_steps": steps,
        "max_epochs": -1,
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": None,
        "logger.save_dir": FOLDER,
        "logger.name": name,
        "logger.version": "",
    }
    arguments = [f"--trainer.{option}={'null' if value is None else value}" for option, value in options.items()]
    command = [sys.executable, "-m", "lightning_vdp.cli", "fit", "--config", str(CONFIG), *arguments, *WAYS[way]]
    # one thread each, so that the division alone differs
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    with (FOLDER / name / "metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def draw(losses: dict[str, list[float]]) -> Figure:
    """Draws the loss curves above their differences from one process."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    reference = losses["one process"]
    for (way, values), line, marker in zip(losses.items(), ("-", "--", ":"), ("o", "x", "")):
        steps = range(1, len(values) + 1)
        (curve,) = top.plot(steps, values, line, label=way, linewidth=2)
        if values is not reference:
            differences = [abs(value - expected) for value, expected in zip(values, reference)]
            bottom.plot(steps, differences, marker, color=curve.get_color(), markersize=5, fillstyle="none")
    top.set_ylabel("loss")
    top.legend()
    bottom.set(xlabel="step", ylabel="difference from\none process")
    for ax in (top, bottom):
        ax.grid(alpha=0.3)
    return figure


def main() -> None:
    """Trains three ways, draws the curves, prints the largest difference."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run (default: 60)")
    steps = parser.parse_args().steps
    shutil.rmtree(FOLDER, ignore_errors=True)
    losses = {}
    for way in WAYS:
        print(f"{way}: {steps} steps", flush=True)
        losses[way] = train(way, steps)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    draw(losses).savefig(PICTURE, dpi=150)
    largest = max(max(values) - min(values) for values in zip(*losses.values(), strict=True))
    print(f"picture: {PICTURE}")
    print(f"largest difference of a step's loss: {largest:.1e}")


if __name__ == "__main__":
    main()
