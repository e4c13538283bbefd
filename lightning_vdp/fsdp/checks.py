"""What does not work with weights that FSDP has divided, refused before anything is wrapped."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.fsdp import CPUOffload

from lightning_vdp.errors import UserError

__all__ = ["check_run"]


def check_run(
    trainer: "pl.Trainer", module: nn.Module, cpu_offload: CPUOffload | None, precision: str, device: torch.device
) -> None:
    """Checks what a run asks for; warns of trained weights without a copy in float32.

    Args:
        trainer: The Trainer, with its callbacks.
        module: The LightningModule.
        cpu_offload: Whether weights are kept on the host.
        precision: Name of the precision, such as "bf16-mixed".
        device: Where this rank computes.

    Raises:
        UserError: If something in it does not work.
    """
    if cpu_offload is not None and cpu_offload.offload_params and device.type == "cpu":
        raise UserError(
            "`cpu_offload` moves weights between a CUDA device and the host, but the ranks run on the CPU; leave it out."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging):
            raise UserError(
                f"{type(callback).__name__} averages whole weights, of which each rank holds a part only; average "
                "`self.parameters()` in the LightningModule, which are this rank's parts, or leave the callback out."
            )
    if "mixed" in precision and trainer.state.fn == TrainerFn.FITTING:
        _warn_without_master_weights(module, precision)


def _warn_without_master_weights(module: nn.Module, precision: str) -> None:
    trained = {value.dtype for value in module.parameters() if value.requires_grad and value.is_floating_point()}
    low = trained & {torch.bfloat16, torch.float16}
    if low:
        rank_zero_warn(
            f"Weights to be trained are in {', '.join(map(str, low))}, so that {precision!r} has no float32 master weights, "
            "and small updates are lost; load the model with `dtype=torch.float32`."
        )
