"""Precision under FSDP with what Lightning's plugin lacks: norm clipping, "64-true", the CPU, buffers left alone."""

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vdp.fsdp.gradients import clip_gradient_norm

__all__ = ["UlyssesVisionDPPrecision"]

PrecisionName = Literal["32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed", "64-true"]


class UlyssesVisionDPPrecision(FSDPPrecision):
    """Precision for `UlyssesVisionDPStrategy`, which puts it in place of Lightning's by itself.

    Other than Lightning's plugin for FSDP it clips gradients by their global norm, knows double precision, runs on
    the CPU, and changes neither buffers (rotary frequencies would lose long positions) nor the batch's own float
    fields (a reward stays float32): models cast pixels where they use them.

    Args:
        precision: "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed", or "64-true". Double precision goes
            through the plugin: ``Trainer(plugins=[UlyssesVisionDPPrecision("64-true")])``.
        scaler: For "16-mixed", a :class:`torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`.

    Raises:
        UserError: If the precision is none of these.
    """

    def __init__(self, precision: PrecisionName, scaler: Any = None) -> None:
        if precision == "64-true":
            super().__init__("32-true", scaler)
            self.precision: Any = precision
            self._desired_input_dtype = torch.float64
        else:
            super().__init__(precision)
            self.scaler = scaler or self.scaler
        self.fsdp_root: nn.Module | None = None
        # not that of the parameters, which may be offloaded
        self.compute_device = torch.device("cuda")

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.precision == "64-true":
            return module.to(torch.float64)
        if "true" in self.precision:
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(self._desired_input_dtype)
        return module

    @property
    @override
    def mixed_precision_config(self) -> MixedPrecision:
        if self.precision == "64-true":
            # all None: FSDP computes and reduces in the parameters' own dtype
            return MixedPrecision(cast_root_forward_inputs=False)
        config = super().mixed_precision_config
        config.buffer_dtype = None
        config.cast_root_forward_inputs = False
        return config

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        if "mixed" not in self.precision:
            return _DtypeContextManager(self._desired_input_dtype)
        return torch.autocast(
            self.compute_device.type, torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        )

    @override
    def convert_input(self, data: Any) -> Any:
        return data

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float = 0.0, *_: Any, **__: Any) -> None:
        if clip_val <= 0:
            return
        if self.fsdp_root is None:
            raise RuntimeError("Gradients can be clipped only after the strategy has set up the model.")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        clip_gradient_norm(self.fsdp_root, parameters, float(clip_val))

    @override
    def teardown(self) -> None:
        self.fsdp_root = None
        super().teardown()
