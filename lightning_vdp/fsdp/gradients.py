"""The norm of gradients that FSDP has divided."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

__all__ = ["clip_gradient_norm", "gradient_norm"]


def gradient_norm(root: nn.Module, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Norm of the gradients of all given parameters together, over all of their parts on all ranks.

    torch's own `FullyShardedDataParallel.clip_grad_norm_` computes it in float32; this one in float64 for float64
    gradients.

    Args:
        root: The FSDP root.
        parameters: Parameters as an optimizer holds them: this rank's parts.

    Returns:
        A scalar, the same on every rank.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # from the parameters, which every rank knows alike: a rank may hold no part of some gradient
    wide = any(parameter.dtype == torch.float64 for parameter in parameters)
    dtype = torch.float64 if wide else torch.float32
    sharded = isinstance(root, FullyShardedDataParallel) and root.sharding_strategy != ShardingStrategy.NO_SHARD
    # not that of the gradients, which may be offloaded
    device = getattr(root, "compute_device", None) or next(root.parameters()).device
    squares = torch.zeros((), dtype=dtype, device=device)
    if gradients:
        norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
        squares = torch.linalg.vector_norm(torch.stack(norms)).square().to(device)
    if sharded:
        dist.all_reduce(squares, group=root.process_group)
    return squares.sqrt()


def clip_gradient_norm(root: nn.Module, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales gradients so that their common norm is `max_norm` at most; returns the norm before.

    Args:
        root: The FSDP root.
        parameters: Parameters as an optimizer holds them: this rank's parts.
        max_norm: Largest norm.
    """
    parameters = list(parameters)
    norm = gradient_norm(root, parameters)
    # the same small number as torch.nn.utils.clip_grad_norm_
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device, parameter.grad.dtype))
    return norm
