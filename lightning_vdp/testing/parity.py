"""The exactness harness: a distributed fit compared with one plain process, in float64, parameter by parameter."""

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
        model: Called with each batch as keyword arguments; must return an object with a `loss`.
        learning_rate: Of SGD with momentum.
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
        losses: Of each micro-step of this process.
        gradients: For each optimizer step, every parameter's gradient before clipping; rank 0 only.
        norms: For each optimizer step, the gradients' norm before clipping.
        parameters: Every parameter after the fit; rank 0 only.
        notes: What the module put into its attribute `notes`, if it has one.
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
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else _rank_from_launcher()
    size = strategy_arguments["sequence_parallel_size"]
    replicas = world_size // size
    return _fit(
        make_module(),
        batches[rank // size :: replicas],
        devices=world_size,
        strategy=UlyssesVisionDPStrategy(**strategy_arguments),
        plugins=[UlyssesVisionDPPrecision("64-true")],
        **arguments,
    )


def _rank_from_launcher() -> int:
    import os

    return int(os.environ["RANK"])


@dataclass(frozen=True)
class ParityReport:
    """Largest relative errors of a distributed fit, and where they are.

    Args:
        loss: Over all micro-steps and ranks.
        gradient: Over all optimizer steps and parameters.
        norm: Over all optimizer steps.
        parameter: Over all parameters after the last step.
        worst_gradient: Name of the parameter with the largest gradient error.
        worst_parameter: Name of the parameter with the largest error.
        steps: Optimizer steps compared.
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


def measure_parity(
    make_module: ModuleFactory,
    batches: Sequence[Any],
    *,
    world_size: int = 2,
    sequence_parallel_size: int = 2,
    accumulate_grad_batches: int = 1,
    fsdp_version: int = 1,
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
        batches: What the module's `training_step` takes, one after another.
        world_size: Number of ranks.
        sequence_parallel_size: Ranks of a sequence group.
        accumulate_grad_batches: Micro-steps of an optimizer step of one replica.
        fsdp_version: Version of torch's FSDP.
        strategy_arguments: Further arguments of `UlyssesVisionDPStrategy`.
        trainer_arguments: Further arguments of both Trainers.
        timeout: Seconds for each of the two fits.

    Returns:
        The largest relative errors.

    Raises:
        AssertionError: If a rank fails or hangs, or the two fits do not have the same steps and parameters.
    """
    replicas = world_size // sequence_parallel_size
    arguments = dict(trainer_arguments or {})
    alone = {**arguments, "accumulate_grad_batches": replicas * accumulate_grad_batches}
    divided = {**arguments, "accumulate_grad_batches": accumulate_grad_batches}
    strategy = {
        "sequence_parallel_size": sequence_parallel_size,
        "fsdp_version": fsdp_version,
        **(strategy_arguments or {}),
    }
    (truth,) = run_ranks(_fit_alone, 1, make_module, batches, alone, timeout=timeout)
    records: list[FitRecord] = run_ranks(
        _fit_divided, world_size, make_module, batches, world_size, strategy, divided, timeout=timeout
    )
    if not all(torch.isfinite(value).all() for step in truth.gradients for value in step.values()):
        raise AssertionError("One process has gradients that are not finite: the batches show nothing.")
    first = records[0]
    steps = len(truth.gradients)
    if steps == 0 or len(first.gradients) != steps:
        raise AssertionError(f"The ranks took {len(first.gradients)} optimizer steps, one process {steps}.")
    loss = 0.0
    for rank, record in enumerate(records):
        expected = truth.losses[rank // sequence_parallel_size :: replicas]
        if len(record.losses) != len(expected):
            raise AssertionError(f"Rank {rank} ran {len(record.losses)} micro-steps instead of {len(expected)}.")
        pairs = list(zip(record.losses, expected))
        loss = max([loss, *(abs(a - b) / (abs(b) or 1.0) if a == a else float("inf") for a, b in pairs)])
    gradient, worst_gradient = max(_worst(a, b) for a, b in zip(first.gradients, truth.gradients))
    parameter, worst_parameter = _worst(first.parameters, truth.parameters)
    norm = max(abs(a - b) / (abs(b) or 1.0) for record in records for a, b in zip(record.norms, truth.norms))
    return ParityReport(
        loss,
        gradient,
        norm,
        parameter,
        worst_gradient,
        worst_parameter,
        steps,
        tuple(record.notes for record in records),
        truth.notes,
    )


def assert_parity(
    make_module: ModuleFactory, batches: Sequence[Any], *, tolerance: float = 1e-9, **arguments: Any
) -> ParityReport:
    """Asserts that a distributed fit equals that of one process: loss, every gradient, their norm, every parameter.

    Args:
        make_module: See `measure_parity`.
        batches: See `measure_parity`.
        tolerance: Largest relative error.
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
