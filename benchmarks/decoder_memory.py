"""What the language model keeps for backward on each rank, and the peak of a whole training step, against one process.

The first: eight layers of width 512 over 4,096 positions, as many key-value heads as heads, one unpadded row; counted tensor by
tensor, without weights. The second: a whole optimizer step of a model with images through ``Trainer.fit`` with FSDP on every
block and gradient checkpointing, over four ranks and in one process: peak of live bytes above those before the step. It has
in it what does not shrink with S, each tensor of which is listed.
"""

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import Peak, check_parity, fits, join, peak_bytes, worst
from benchmarks.models import FAMILY, qwen
from benchmarks.report import Chart, Options, Report, at_most
from lightning_vdp import UlyssesVisionDPStrategy
from lightning_vdp.call import Settings
from lightning_vdp.divide import divide_models
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.models import find_models
from lightning_vdp.testing import Batches, ParityModule, quiet_trainer, run_ranks, tiny_batch
from lightning_vdp.testing.measure import SavedBytes

__all__ = ["run", "share_kept"]


def _kept(options: Options, length: int, key_value_heads: int, padded: bool, ranks: int) -> int:
    device = join(options)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=key_value_heads,
        vocab_size=128,
        max_position_embeddings=length,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.to(device.type)  # type: ignore[arg-type]
    batch: dict[str, Any] = {"input_ids": torch.randint(128, (1, length))}
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][:, -5:] = 0
    batch = {name: value.to(device) for name, value in batch.items()}
    mesh = SequenceMesh(device.type, dist.get_world_size() // ranks, ranks)
    division = divide_models(find_models(model), mesh, Settings(verify_first_batch=False))
    saved = SavedBytes(model)
    with saved:
        hidden = model.model(**batch, use_cache=False).last_hidden_state
    division.undo()
    assert hidden.requires_grad
    return saved.total


def share_kept(
    size: int, length: int, key_value_heads: int = 8, padded: bool = False, options: Options | None = None
) -> float:
    """What the worst of `size` ranks keeps for backward of a decoder, as a part of what one process keeps.

    Args:
        size: Ranks of a sequence group.
        length: Positions of the sequence.
        key_value_heads: Of the 8 heads.
        padded: Whether the row ends in padding, so that it has a mask.
        options: Where to measure. Default: on the CPU.
    """
    options = options or Options()
    (alone,) = run_ranks(_kept, 1, options, length, key_value_heads, padded, 1, timeout=600)
    return max(run_ranks(_kept, size, options, length, key_value_heads, padded, size, timeout=600)) / alone


class _Module(ParityModule):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _StepPeak(Callback):
    """Measures one step, when optimizer states exist already."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._measuring: AbstractContextManager[Peak] | None = None
        self.peak = Peak()
        self.losses: list[float] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._step:
            self._measuring = peak_bytes(pl_module.device)
            self.peak = self._measuring.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        if self._measuring is not None:
            self._measuring.__exit__(None, None, None)
            self._measuring = None


def _batch(options: Options) -> dict[str, Tensor]:
    """One row of 4,096 positions, half of them those of 16 images."""
    images, length = (4, 1024) if options.quick else (16, 4096)
    text = (length - images * 130) // (images + 1)
    batch = tiny_batch(FAMILY, ([(1, 32, 16)] * images,), text=text, length=length, dtype=torch.float32)
    # a few positions of padding are trained on like others
    del batch["attention_mask"]
    return batch


def _step_peak(options: Options, world_size: int) -> tuple[float, list[float]]:
    model = qwen(layers=8, hidden=512, tower_layers=4, tower_hidden=64, vocabulary=8192)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    peak = _StepPeak(step=2)
    trainer = quiet_trainer(
        accelerator=options.device,
        devices=world_size,
        strategy=UlyssesVisionDPStrategy(sequence_parallel_size=world_size),
        callbacks=[peak],
    )
    trainer.fit(_Module(model), Batches([_batch(options)] * 3))
    return peak.peak.bytes, peak.losses
