"""What the language model keeps for backward on each rank, and the peak of a whole training step.

The first, against one process: eight layers of width 512 over 4,096 positions, as many key-value heads as heads, one unpadded
row; counted tensor by tensor, without weights. The second: a whole optimizer step of a model with images through
``Trainer.fit`` with FSDP on every block and gradient checkpointing, by four ranks that share a sample and, under plain FSDP, by
four that have one each: peak of live bytes above those before the step, gradients included, mean of two steps, worst rank. It
has in it what does not shrink with S: the weights that FSDP has gathered, and tensors of the whole sequence, each of which is
listed.
"""

import statistics
import weakref
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.measure import Peak, check_parity, fits, join, lacking, peak_bytes
from benchmarks.models import FAMILY, qwen
from benchmarks.report import Chart, Options, Report, at_most
from lightning_vdp import UlyssesVisionDPStrategy
from lightning_vdp.families.find import find_models
from lightning_vdp.forward.divide import divide_models
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.settings import Settings
from lightning_vdp.testing import Batches, ParityModule, quiet_trainer, run_ranks, tiny_batch
from lightning_vdp.testing.measure import SavedBytes

__all__ = ["run", "share_kept"]

_WORLD = 4


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


class _StepPeaks(Callback):
    """Measures steps from the third on, when optimizer states exist already."""

    def __init__(self) -> None:
        self._measuring: AbstractContextManager[Peak] | None = None
        self.peaks: list[Peak] = []
        self.losses: list[float] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx > 1:
            # those of the step before would be freed in the middle of this one
            trainer.optimizers[0].zero_grad()
            self._measuring = peak_bytes(pl_module.device)
            self.peaks.append(self._measuring.__enter__())

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


def _step_peak(options: Options, sequence_parallel_size: int) -> tuple[float, list[float]]:
    peaks = _StepPeaks()
    trainer = quiet_trainer(
        accelerator=options.device,
        devices=_WORLD,
        strategy=UlyssesVisionDPStrategy(sequence_parallel_size=sequence_parallel_size),
        callbacks=[peaks],
    )
    trainer.fit(_Module(_model()), Batches([_batch(options)] * (3 if options.quick else 4)))
    # gloo's threads free what was exchanged when they get to it, so that steps differ
    return statistics.median(peak.bytes for peak in peaks.peaks), peaks.losses


class _Made(TorchDispatchMode):
    """Remembers which operation made each storage that holds whole sequences.

    Args:
        length: Positions of the whole sequence.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, tuple[int, ...], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and self._length in tensor.shape:
                storage = tensor.untyped_storage()
                made = (weakref.ref(storage), str(func.overloadpacket), tuple(tensor.shape), storage.nbytes())
                self._made.setdefault(storage._cdata, made)
        return output

    def alive(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Operation, shape and bytes of those that somebody still holds."""
        return [(name, shape, size) for storage, name, shape, size in self._made.values() if storage() is not None]


def _kept_whole(options: Options) -> list[dict[str, Any]]:
    """What each of four ranks holds of the whole sequence between forward and backward."""
    device = join(options)
    model = _model()
    model.to(device.type)  # type: ignore[arg-type]
    mesh = SequenceMesh(device.type, 1, dist.get_world_size())
    divide_models(find_models(model), mesh, Settings(verify_first_batch=False))
    batch = {name: value.to(device) for name, value in _batch(options).items()}
    with _Made(batch["input_ids"].shape[1]) as made:
        loss = model(**batch).loss
        alive = made.alive()
    assert loss.requires_grad
    rows = [
        {"what": f"the batch's {name}", "shape": list(value.shape), "bytes": value.nbytes}
        for name, value in batch.items()
        if value.nbytes >= batch["input_ids"].nbytes
    ]
    rows += [{"what": name, "shape": list(shape), "bytes": size} for name, shape, size in alive]
    return sorted(rows, key=lambda row: -row["bytes"])


def _model() -> PreTrainedModel:
    model = qwen(layers=8, hidden=512, tower_layers=4, tower_hidden=64, vocabulary=8192)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return model


def run(options: Options) -> Report:
    """Measures at all sizes for which there are devices."""
    length = 512 if options.quick else 4096
    figures: dict[str, float] = {}
    notes = lacking(options, (2, 4))
    for size in (2, 4):
        if fits(options, size):
            figures[f"decoder_memory_ratio_s{size}"] = share_kept(size, length, options=options)
    rows: list[dict[str, Any]] = []
    difference = None
    if fits(options, _WORLD):
        # with groups of one rank this is plain FSDP, whose ranks take the same sample each
        plain, divided = (run_ranks(_step_peak, _WORLD, options, size, timeout=1200) for size in (1, _WORLD))
        peaks = [max(peak for peak, _ in ranks) for ranks in (divided, plain)]
        figures["step_peak_ratio_s4"] = peaks[0] / peaks[1]
        figures["step_peak_bytes_s4"], figures["step_peak_bytes_fsdp"] = peaks
        pairs = [pair for (_, own), (_, others) in zip(divided, plain) for pair in zip(own, others)]
        difference = check_parity(max(abs(one - other) / abs(other) for one, other in pairs))
        rows = run_ranks(_kept_whole, _WORLD, options, timeout=900)[0]
        notes.append("The table lists what every rank holds of the whole sequence between forward and backward.")
    shown = [key for key in figures if "ratio" in key]
    return Report(
        figures=figures,
        chart=Chart(
            "Bytes on the worst rank against ranks that hold whole samples",
            "part",
            ["decoder keeps, S = 2", "decoder keeps, S = 4", "peak of a step, S = 4"][: len(shown)],
            {
                "measured": [figures[key] for key in shown],
                "1 / S": [1 / int(key[-1]) for key in shown],
            },
        ),
        table=rows,
        limits={
            "decoder_memory_ratio_s2": at_most(0.53),
            "decoder_memory_ratio_s4": at_most(0.27),
            "step_peak_ratio_s4": at_most(0.35),
        },
        parity=difference,
        notes=notes,
    )
