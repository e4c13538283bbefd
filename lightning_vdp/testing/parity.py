"""The exactness harness: a distributed fit compared with one plain process, in float64, parameter by parameter."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vdp.families.wrappers import plain_name
from lightning_vdp.fsdp.gradients import gradient_norm
from lightning_vdp.fsdp.precision import UlyssesVisionDPPrecision
from lightning_vdp.strategy import UlyssesVisionDPStrategy
from lightning_vdp.testing.float64 import PromoteFloat32
from lightning_vdp.testing.processes import run_ranks

__all__ = [
    "Batches",
    "FitRecord",
    "GradientRecorder",
    "ParityModule",
    "ParityReport",
    "assert_parity",
    "measure_parity",
    "quiet_trainer",
    "whole_parameters",
]

ModuleFactory = Callable[[], pl.LightningModule]


class ParityModule(pl.LightningModule):
    """The smallest module around a model: its own loss, and SGD, which does not blow up rounding as Adam does.

    Args:
        model: The model, which takes a batch as keyword arguments and returns an object with a `loss`.
        learning_rate: The learning rate of SGD with momentum.
    """

    def __init__(self, model: nn.Module, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The loss of one batch."""
        loss: Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Logs the loss of one batch as `val_loss`."""
        self.log("val_loss", self.model(**batch).loss, sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


@dataclass
class FitRecord:
    """What one fit did.

    Args:
        losses: The loss of each micro-step of this process.
        gradients: The gradient of every parameter before clipping, by name, for each optimizer step; on rank 0 only.
        norms: The norm of all gradients before clipping, for each optimizer step.
        parameters: Every parameter after the fit, by name; on rank 0 only.
        notes: The module's attribute `notes`, if it has one.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    notes: Any = None


@contextmanager
def _whole(root: nn.Module, with_grads: bool = False) -> Iterator[None]:
    if not isinstance(root, FullyShardedDataParallel):
        yield
        return
    # where a rank's part has no gradient, FSDP makes one in the default dtype, whatever the others' is
    default = torch.get_default_dtype()
    torch.set_default_dtype(next(root.parameters()).dtype)
    try:
        with FullyShardedDataParallel.summon_full_params(root, with_grads=with_grads, writeback=False):
            yield
    finally:
        torch.set_default_dtype(default)


def _whole_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_parameters(root: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters of a module that FSDP may have divided, under their plain names; call it on all ranks."""
    with _whole(root):
        return {plain_name(name): _whole_tensor(value.detach()).clone() for name, value in root.named_parameters()}


class GradientRecorder(Callback):
    """Records what one fit did in its `record`, a `FitRecord`."""

    def __init__(self) -> None:
        self.record = FitRecord()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        accumulated = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self.record.losses.append(float(loss.detach()) * accumulated)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        root = trainer.strategy.model
        assert root is not None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.record.norms.append(float(gradient_norm(root, parameters)))
        with _whole(root, with_grads=True):
            # every rank makes DTensors whole
            gradients = {
                plain_name(name): _whole_tensor(torch.zeros_like(value) if value.grad is None else value.grad).clone()
                for name, value in root.named_parameters()
                if value.requires_grad
            }
        if trainer.is_global_zero:
            self.record.gradients.append(gradients)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert trainer.strategy.model is not None
        parameters = whole_parameters(trainer.strategy.model)
        if trainer.is_global_zero:
            self.record.parameters = parameters
        self.record.notes = getattr(pl_module, "notes", None)


def quiet_trainer(**arguments: Any) -> pl.Trainer:
    """A Trainer on the CPU for one epoch that writes nothing; `arguments` are the Trainer's and win."""
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            **arguments,
        }
    )


class Batches:
    """Ready-made batches as a loader: Lightning takes a list for several loaders."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = list(batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _fit(module: pl.LightningModule, batches: Sequence[Any], **arguments: Any) -> FitRecord:
    recorder = GradientRecorder()
    with PromoteFloat32():
        quiet_trainer(callbacks=[recorder], **arguments).fit(module, train_dataloaders=Batches(batches))
    return recorder.record


def _fit_alone(make_module: ModuleFactory, batches: Sequence[Any], arguments: dict[str, Any]) -> FitRecord:
    return _fit(make_module(), batches, devices=1, strategy="auto", precision="64-true", **arguments)


def _fit_divided(
    make_module: ModuleFactory,
    batches: Sequence[Any],
    world_size: int,
    strategy_arguments: dict[str, Any],
    arguments: dict[str, Any],
) -> FitRecord:
    rank, size = int(os.environ["RANK"]), strategy_arguments["sequence_parallel_size"]
    return _fit(
        make_module(),
        batches[rank // size :: world_size // size],
        devices=world_size,
        strategy=UlyssesVisionDPStrategy(**strategy_arguments),
        plugins=[UlyssesVisionDPPrecision("64-true")],
        **arguments,
    )


@dataclass(frozen=True)
class ParityReport:
    """Largest relative errors of a distributed fit, and where they are.

    Args:
        loss: The largest error of a loss, over all micro-steps and ranks.
        gradient: The largest error of a gradient, over all optimizer steps and parameters.
        norm: The largest error of the gradients' norm, over all optimizer steps.
        parameter: The largest error of a parameter after the last step.
        worst_gradient: The name of the parameter whose gradient has the largest error.
        worst_parameter: The name of the parameter that has the largest error.
        steps: The number of optimizer steps that were compared.
        notes: The module's notes in each rank.
        notes_alone: The module's notes in one process.
    """

    loss: float
    gradient: float
    norm: float
    parameter: float
    worst_gradient: str
    worst_parameter: str
    steps: int
    notes: tuple[Any, ...] = ()
    notes_alone: Any = None


def _error(value: Tensor, truth: Tensor, scale: float) -> float:
    """Largest difference relative to the truth, or to the scale of all tensors where the truth is zero to rounding."""
    size = float(truth.abs().max()) if truth.numel() else 0.0
    difference = float((value - truth).abs().max()) if truth.numel() else 0.0
    if not torch.isfinite(value).all():
        return float("inf")
    return difference / (size if size > 1e-12 * scale else scale or 1.0)


def _worst(values: dict[str, Tensor], truths: dict[str, Tensor]) -> tuple[float, str]:
    if values.keys() != truths.keys():
        raise AssertionError(f"Other parameters than in one process: {sorted(values.keys() ^ truths.keys())}.")
    scale = max((float(truth.abs().max()) for truth in truths.values() if truth.numel()), default=0.0)
    return max((_error(values[name], truths[name], scale), name) for name in truths)


def _relative(value: float, truth: float) -> float:
    return float("inf") if math.isnan(value) else abs(value - truth) / (abs(truth) or 1.0)


def _loss_error(records: Sequence[FitRecord], truth: FitRecord, sequence_parallel_size: int) -> float:
    replicas = len(records) // sequence_parallel_size
    largest = 0.0
    for rank, record in enumerate(records):
        expected = truth.losses[rank // sequence_parallel_size :: replicas]
        if len(record.losses) != len(expected):
            raise AssertionError(f"Rank {rank} ran {len(record.losses)} micro-steps instead of {len(expected)}.")
        largest = max([largest, *map(_relative, record.losses, expected)])
    return largest


def _compare(records: Sequence[FitRecord], truth: FitRecord, sequence_parallel_size: int) -> ParityReport:
    """Compares what the ranks recorded with the record of one process.

    Raises:
        AssertionError: If they do not have the same steps and parameters.
    """
    if not all(torch.isfinite(value).all() for step in truth.gradients for value in step.values()):
        raise AssertionError("One process has gradients that are not finite: the batches show nothing.")
    first = records[0]
    steps = len(truth.gradients)
    if steps == 0 or len(first.gradients) != steps:
        raise AssertionError(f"The ranks took {len(first.gradients)} optimizer steps, one process {steps}.")
    gradient, worst_gradient = max(map(_worst, first.gradients, truth.gradients))
    parameter, worst_parameter = _worst(first.parameters, truth.parameters)
    return ParityReport(
        loss=_loss_error(records, truth, sequence_parallel_size),
        gradient=gradient,
        norm=max(_relative(*norms) for record in records for norms in zip(record.norms, truth.norms)),
        parameter=parameter,
        worst_gradient=worst_gradient,
        worst_parameter=worst_parameter,
        steps=steps,
        notes=tuple(record.notes for record in records),
        notes_alone=truth.notes,
    )


def measure_parity(
    make_module: ModuleFactory,
    batches: Sequence[Any],
    *,
    world_size: int = 2,
    sequence_parallel_size: int = 2,
    accumulate_grad_batches: int = 1,
    fsdp_version: int = 2,
    strategy_arguments: dict[str, Any] | None = None,
    trainer_arguments: dict[str, Any] | None = None,
    timeout: float = 120.0,
) -> ParityReport:
    """Fits a module in simulated ranks and in one process on the same batches, and compares the two.

    Both run in float64 through ``Trainer.fit``. An optimizer step takes ``replicas * accumulate_grad_batches``
    batches: replica d gets batches d, d + replicas, ...; the one process accumulates over all of them.

    Args:
        make_module: Builds the same LightningModule, with the same parameters, each time it is called. Its optimizer
            should not divide by the size of gradients as Adam does: where a true gradient is zero, that is noise.
        batches: The batches that the module's `training_step` takes, one after another.
        world_size: The number of ranks.
        sequence_parallel_size: The number of ranks of a sequence group.
        accumulate_grad_batches: The number of micro-steps that a replica takes for one optimizer step.
        fsdp_version: The version of torch's FSDP, 1 or 2.
        strategy_arguments: Further arguments of `UlyssesVisionDPStrategy`.
        trainer_arguments: Further arguments of both Trainers.
        timeout: Seconds that each of the two fits may take.

    Returns:
        The largest relative errors.

    Raises:
        AssertionError: If a rank fails or hangs, or the two fits do not have the same steps and parameters.
    """
    arguments = dict(trainer_arguments or {})
    batches_per_step = world_size // sequence_parallel_size * accumulate_grad_batches
    alone = {**arguments, "accumulate_grad_batches": batches_per_step}
    divided = {**arguments, "accumulate_grad_batches": accumulate_grad_batches}
    strategy = {
        "sequence_parallel_size": sequence_parallel_size,
        "fsdp_version": fsdp_version,
        **(strategy_arguments or {}),
    }
    (truth,) = run_ranks(_fit_alone, 1, make_module, batches, alone, timeout=timeout)
    records = run_ranks(_fit_divided, world_size, make_module, batches, world_size, strategy, divided, timeout=timeout)
    return _compare(records, truth, sequence_parallel_size)


def assert_parity(
    make_module: ModuleFactory, batches: Sequence[Any], *, tolerance: float = 1e-9, **arguments: Any
) -> ParityReport:
    """Asserts that a distributed fit equals that of one process: loss, every gradient, their norm, every parameter.

    Args:
        make_module: See `measure_parity`.
        batches: See `measure_parity`.
        tolerance: The largest relative error that passes.
        **arguments: See `measure_parity`.

    Raises:
        AssertionError: If an error is larger; the message names the parameter.
    """
    report = measure_parity(make_module, batches, **arguments)
    errors = (report.loss, report.gradient, report.norm, report.parameter)
    if not all(error <= tolerance for error in errors):
        raise AssertionError(
            f"Not equal to one process within {tolerance}: loss {report.loss:.2e}, gradient {report.gradient:.2e} "
            f"({report.worst_gradient}), norm {report.norm:.2e}, parameter {report.parameter:.2e} "
            f"({report.worst_parameter}) after {report.steps} steps."
        )
    return report
