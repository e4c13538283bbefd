"""What only CUDA devices can show; run with -m gpu."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_vdp import UlyssesVisionDPStrategy
from lightning_vdp.batch.host_copies import host_tensors, keep_samples, known_host_copy, sample
from lightning_vdp.batch.same import digest_batch
from lightning_vdp.call.randomness import RankRandomness
from lightning_vdp.families.find import find_models
from lightning_vdp.testing import (
    Batches,
    GradientRecorder,
    ParityModule,
    quiet_trainer,
    run_ranks,
    tiny_batch,
    tiny_model,
)

pytestmark = pytest.mark.gpu
needs = {
    count: pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices")
    for count in (1, 2)
}
FAMILY = "qwen3_vl"


class _Watching(ParityModule):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        assert batch["input_ids"].is_cuda
        # planning reads sizes without waiting for the device
        assert known_host_copy(batch["input_ids"]) is not None
        assert known_host_copy(batch["image_grid_thw"]) is not None
        return super().training_step(batch, batch_idx)


def _fit(devices: int, cuda: bool, precision: str, strategy: dict[str, Any]) -> tuple[list[float], list[float]]:
    recorder = GradientRecorder()
    model = tiny_model(FAMILY).train()
    module = (_Watching if cuda else ParityModule)(model)
    arguments: dict[str, Any] = {"devices": devices, "precision": precision, "callbacks": [recorder]}
    if cuda:
        arguments.update(
            accelerator="cuda", strategy=UlyssesVisionDPStrategy(sequence_parallel_size=devices, **strategy)
        )
    batches = [tiny_batch(FAMILY, seed=seed, dtype=torch.float32) for seed in range(3)]
    quiet_trainer(gradient_clip_val=1.0, **arguments).fit(module, Batches(batches))
    return recorder.record.losses, recorder.record.norms


@needs[2]
@pytest.mark.parametrize(
    "strategy", [{}, {"fsdp_version": 2}, {"vision_exchange": "gather"}, {"vision_data_parallel": False}], ids=str
)
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-3), ("bf16-mixed", 0.05)])
def test_two_devices_train_like_one_process_on_the_cpu(
    precision: str, tolerance: float, strategy: dict[str, Any]
) -> None:
    ((losses, norms),) = run_ranks(_fit, 1, 1, False, "32-true", {})
    for found_losses, found_norms in run_ranks(_fit, 2, 2, True, precision, strategy, timeout=180):
        assert found_losses == pytest.approx(losses, rel=tolerance)
        assert found_norms == pytest.approx(norms, rel=4 * tolerance)


@needs[1]
def test_one_device_is_plain_fsdp() -> None:
    ((losses, _),) = run_ranks(_fit, 1, 1, False, "32-true", {})
    ((found, _),) = run_ranks(_fit, 1, 1, True, "32-true", {}, timeout=180)
    assert found == pytest.approx(losses, rel=1e-3)


@needs[1]
def test_random_numbers_of_a_ranks_own_on_a_device() -> None:
    device = torch.device("cuda", 0)
    before, common = torch.cuda.get_rng_state(device), torch.get_rng_state()
    drawn, states = [], []
    for rank, count in ((0, 1), (1, 5)):
        torch.cuda.set_rng_state(before, device)
        with RankRandomness("decoder", rank, device):
            drawn.append(torch.rand(count, device=device)[0].item())
        states.append(torch.cuda.get_rng_state(device))
    assert drawn[0] != drawn[1]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], before)
    # what decides control flow is left alone
    assert torch.equal(torch.get_rng_state(), common)


@needs[1]
def test_pixels_are_compared_by_what_was_kept_on_the_host() -> None:
    batch = tiny_batch(FAMILY, dtype=torch.float32)
    samples = host_tensors(batch, frozenset({"pixel_values"}), sample)
    moved = {name: value.cuda() for name, value in batch.items()}
    keep_samples(samples, moved)
    family = find_models(tiny_model(FAMILY))[0].family
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            digests = digest_batch(moved, family)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum(map(bool, digests)) == 1
