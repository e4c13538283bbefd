"""The norm of gradients that FSDP has divided."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

__all__ = ["clip_gradient_norm", "gradient_norm"]


def gradient_norm(root: nn.Module, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Norm of the gradients of all given parameters together, over all of their parts on all ranks.

    `torch.nn.utils.get_total_norm` takes no plain tensors among DTensors, knows no parts of FSDP1, and computes in the
    gradients' dtype, which loses three digits in bfloat16. `FullyShardedDataParallel.clip_grad_norm_` computes in float32.
    This one computes in float32, and in float64 if a parameter is float64.

    Args:
        root: The FSDP root.
        parameters: Parameters as an optimizer holds them: this rank's parts, and whole ones that FSDP ignores.

    Returns:
        A scalar, the same on every rank.
    """
    parameters = list(parameters)
    # from the parameters, which every rank knows alike: a rank may hold no part of some gradient
    wide = any(parameter.dtype == torch.float64 for parameter in parameters)
    # not that of the gradients, which may be offloaded
    device = getattr(root, "compute_device", None) or getattr(root, "device", None) or next(root.parameters()).device
    zero = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)
    is_divided = _divided(root)
    squares = _add_squares(zero, (parameter for parameter in parameters if is_divided(parameter)))
    group = _shard_group(root, parameters)
    if group is not None:
        dist.all_reduce(squares, group=group)
    # each rank holds the same
    squares = _add_squares(squares, (parameter for parameter in parameters if not is_divided(parameter)))
    return squares.sqrt()


def _add_squares(squares: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Adds the squared norm of this rank's parts of gradients."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return squares
    norms = [torch.linalg.vector_norm(gradient, dtype=squares.dtype) for gradient in gradients]
    return squares + torch.linalg.vector_norm(torch.stack(norms)).square().to(squares.device)


def _divided(root: nn.Module) -> Callable[[nn.Parameter], bool]:
    """Makes what tells parameters of which this rank holds a part from those that it holds whole."""
    handles = [part._handle for part in FullyShardedDataParallel.fsdp_modules(root)]
    ids = {
        id(parameter)
        for handle in handles
        if handle is not None and handle.uses_sharded_strategy
        for parameter in handle.flat_param._params or [handle.flat_param]
    }
    return lambda parameter: isinstance(parameter, DTensor) or id(parameter) in ids


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_group(root: nn.Module, parameters: list[nn.Parameter]) -> dist.ProcessGroup | None:
    """The ranks that hold the parts of one gradient together; None if each holds it whole."""
    if isinstance(root, FullyShardedDataParallel):
        return None if root.sharding_strategy == ShardingStrategy.NO_SHARD else root.process_group
    mesh = next((parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)), None)
    return None if mesh is None else mesh.get_group(mesh.ndim - 1)


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
            part = local(parameter.grad)
            part.mul_(factor.to(part.device, part.dtype))
    return norm
