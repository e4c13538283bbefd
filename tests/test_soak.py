"""Random steps for a long time: nothing hangs, samples stay exact, memory stays flat; run with -m slow."""

import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_vdp import UlyssesVisionDPPrecision, UlyssesVisionDPStrategy
from lightning_vdp.testing import (
    GradientRecorder,
    ParityModule,
    PromoteFloat32,
    quiet_trainer,
    run_ranks,
    tiny_batch,
    tiny_model,
)

WORLD = 4
SAMPLE_EVERY = 50
FAMILY = "qwen3_vl"
GRIDS = [(1, 4, 4), (1, 4, 8), (1, 6, 8), (1, 8, 12), (1, 2, 2)]
CLIPS = [(2, 4, 4), (3, 4, 6), (1, 4, 4)]


def random_batch(seed: int, modalities: int | None) -> dict[str, Tensor]:
    """A batch of one to three rows; bit 0 of `modalities` asks for images, bit 1 for videos, None for any of them."""
    draw = random.Random(seed)
    wanted = draw.randrange(4) if modalities is None else modalities
    rows = draw.randint(1, 3)
    images = [[draw.choice(GRIDS) for _ in range(draw.randint(0, 3))] if wanted & 1 else [] for _ in range(rows)]
    videos = [[draw.choice(CLIPS) for _ in range(draw.randint(0, 1))] if wanted & 2 else [] for _ in range(rows)]
    if wanted & 1 and not any(images):
        images[0] = [draw.choice(GRIDS)]
    if wanted & 2 and not any(videos):
        videos[0] = [draw.choice(CLIPS)]
    return tiny_batch(
        FAMILY,
        rows=images,
        videos=videos,
        text=draw.randint(4, 24),
        seed=seed,
        padding=draw.choice(["left", "right"]),
        length=draw.choice([None, 33, 64]),
    )


class _Loader:
    """Batches of one replica, made one at a time."""

    def __init__(self, steps: int, replica: int, replicas: int, seed: int, alike: bool) -> None:
        self.steps, self.replica, self.replicas, self.seed, self.alike = steps, replica, replicas, seed, alike

    def __len__(self) -> int:
        return self.steps

    def batch(self, step: int) -> dict[str, Tensor]:
        # plain FSDP, at groups of one rank, needs the same kinds of vision input on all replicas
        modalities = random.Random(self.seed + step).randrange(4) if self.alike else None
        return random_batch(self.seed + step * self.replicas + self.replica, modalities)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.batch(step) for step in range(self.steps))


def _resident() -> int:
    """Bytes of this process in memory, without what its allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Samples(GradientRecorder):
    """Records each 50th step alone, and this process's memory at each."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[int] = []

    def _sampled(self, trainer: Any) -> bool:
        return trainer.fit_loop.total_batch_idx % SAMPLE_EVERY == 0

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self._sampled(trainer):
            super().on_before_backward(trainer, pl_module, loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._sampled(trainer):
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 10 == 9:
            self.memory.append(_resident())


def make_module(frozen: bool) -> ParityModule:
    # the weights stay, so that each step can be repeated alone
    module = ParityModule(tiny_model(FAMILY).train(), learning_rate=0.0)
    for name, parameter in module.named_parameters():
        if frozen and "model.visual" in name:
            parameter.requires_grad_(False)
    return module


def _soak(size: int, frozen: bool, steps: int, seed: int) -> tuple[Any, list[int]]:
    replicas = WORLD // size
    loader = _Loader(steps, int(os.environ["RANK"]) // size, replicas, seed, alike=size == 1)
    samples = _Samples()
    strategy = UlyssesVisionDPStrategy(
        sequence_parallel_size=size, use_orig_params=True, check_batches_every_n_steps=1, hang_warning_s=30.0
    )
    plugins = [UlyssesVisionDPPrecision("64-true")]
    with PromoteFloat32():
        trainer = quiet_trainer(devices=WORLD, strategy=strategy, plugins=plugins, callbacks=[samples])
        trainer.fit(make_module(frozen), loader)
    assert trainer.global_step == steps
    return samples.record, samples.memory


def _alone(size: int, frozen: bool, steps: int, seed: int) -> tuple[list[list[float]], list[dict[str, Tensor]]]:
    """Losses and mean gradients of each 50th step in plain torch."""
    replicas = WORLD // size
    losses, gradients = [], []
    model = make_module(frozen).double()
    with PromoteFloat32():
        for step in range(0, steps, SAMPLE_EVERY):
            model.zero_grad()
            batches = [_Loader(steps, r, replicas, seed, size == 1).batch(step) for r in range(replicas)]
            values = [model.training_step(batch, 0) for batch in batches]
            (sum(values) / replicas).backward()
            losses.append([float(value.detach()) for value in values])
            gradients.append(
                {
                    name: torch.zeros_like(value) if value.grad is None else value.grad.clone()
                    for name, value in model.named_parameters()
                    if value.requires_grad
                }
            )
    return losses, gradients


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen tower"])
@pytest.mark.parametrize(("size", "steps"), [(1, 150), (2, 200), (4, 150)], ids=["S=1", "S=2", "S=4"])
def test_random_steps(size: int, steps: int, frozen: bool) -> None:
    seed = 100_000 * (2 * size + frozen)
    found = run_ranks(_soak, WORLD, size, frozen, steps, seed, timeout=900)
    ((losses, gradients),) = run_ranks(_alone, 1, size, frozen, steps, seed, timeout=300)
    assert len(gradients) == -(-steps // SAMPLE_EVERY) == len(found[0][0].gradients)
    for rank, (record, _) in enumerate(found):
        for own, expected in zip(record.losses, losses):
            assert own == pytest.approx(expected[rank // size], rel=1e-9)
    for own, truth in zip(found[0][0].gradients, gradients):
        scale = max(float(value.abs().max()) for value in truth.values())
        for name, value in truth.items():
            error = float((own[name] - value).abs().max()) / max(float(value.abs().max()), 1e-9 * scale)
            assert error < 1e-9, (name, error)
    for rank, (_, memory) in enumerate(found):
        # after a warm-up of half the steps, in which allocators find their sizes; what every step left would add up
        middle, last = memory[len(memory) // 2 : -len(memory) // 4], memory[-len(memory) // 4 :]
        recorded = 8 * sum(value.numel() for step in found[rank][0].gradients for value in step.values())
        assert max(last) - max(middle) < 4e6 + recorded, " ".join(f"{value / 1e6:.1f}" for value in memory)
