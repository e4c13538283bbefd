"""Collectives inside the autograd graph, each with its exact adjoint as backward and no factor of its own.

================  ====================  ==========================
function          forward               backward
================  ====================  ==========================
`all_to_all`      all-to-all            the reverse all-to-all
`all_gather`      all-gather            reduce-scatter, SUM
`all_reduce`      all-reduce, SUM       all-reduce, SUM
`attach`          identity              identity, zeros for the attached
================  ====================  ==========================

FSDP's mean over the world then gives the gradient of the mean over all ranks of the loss that each returns.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_vdp.watch import Mark, unmarked

__all__ = ["all_gather", "all_reduce", "all_to_all", "attach"]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, input_sizes: list[int], output_sizes: list[int], group: dist.ProcessGroup, mark: Mark
    ) -> Tensor:
        ctx.input_sizes, ctx.output_sizes, ctx.group, ctx.mark = input_sizes, output_sizes, group, mark
        with mark("forward"):
            return _exchange(flat, input_sizes, output_sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.mark("backward"):
            return _exchange(gradient, ctx.output_sizes, ctx.input_sizes, ctx.group), None, None, None, None


def _exchange(flat: Tensor, input_sizes: list[int], output_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    output = flat.new_empty(sum(output_sizes))
    dist.all_to_all_single(output, flat.contiguous(), output_sizes, input_sizes, group=group)
    return output


def all_to_all(
    flat: Tensor,
    input_sizes: Sequence[int],
    output_sizes: Sequence[int],
    group: dist.ProcessGroup,
    mark: Mark = unmarked,
) -> Tensor:
    """Sends a run of elements to every rank of the group and receives one from each.

    Args:
        flat: Elements ordered by destination, shape ``[sum(input_sizes)]``.
        input_sizes: Number of elements for each destination.
        output_sizes: Number of elements that each source sends to this rank.
        group: The ranks that take part.
        mark: Says who watches.

    Returns:
        The received elements ordered by source, shape ``[sum(output_sizes)]``.
    """
    return _AllToAll.apply(flat, list(input_sizes), list(output_sizes), group, mark)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: dist.ProcessGroup, mark: Mark) -> Tensor:
        ctx.sizes, ctx.group, ctx.mark = sizes, group, mark
        widest = max(sizes)
        gathered = rows.new_empty((len(sizes) * widest, *rows.shape[1:]))
        with mark("forward"):
            dist.all_gather_single(gathered, _padded(rows, widest), group=group)
        if min(sizes) == widest:
            return gathered
        return torch.cat([part[:size] for part, size in zip(gathered.split(widest), sizes)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sizes, group = ctx.sizes, ctx.group
        widest = max(sizes)
        if min(sizes) != widest:
            gradient = torch.cat([_padded(part, widest) for part in gradient.split(sizes)])
        reduced = gradient.new_empty((widest, *gradient.shape[1:]))
        with ctx.mark("backward"):
            dist.reduce_scatter_single(reduced, gradient.contiguous(), group=group)
        return reduced[: sizes[dist.get_rank(group)]], None, None, None


def _padded(rows: Tensor, count: int) -> Tensor:
    if rows.shape[0] == count:
        return rows.contiguous()
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    return padded


def all_gather(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, mark: Mark = unmarked) -> Tensor:
    """Concatenates every rank's rows in rank order; sizes may differ, also be 0.

    Args:
        rows: This rank's rows, shape ``[sizes[rank], ...]``.
        sizes: Number of rows of each rank of the group.
        group: The ranks that take part.
        mark: Says who watches.

    Returns:
        Shape ``[sum(sizes), ...]``, the same on every rank.
    """
    sizes = list(sizes)
    if max(sizes) == 0:
        return rows
    return _AllGather.apply(rows, sizes, group, mark)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup, mark: Mark) -> Tensor:
        ctx.group, ctx.mark = group, mark
        with mark("forward"):
            return _summed(value, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.mark("backward"):
            return _summed(gradient, ctx.group), None, None


def _summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    # a copy: a gradient that autograd handed over may be shared with other consumers
    value = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(value, group=group)
    return value


def all_reduce(value: Tensor, group: dist.ProcessGroup, mark: Mark = unmarked) -> Tensor:
    """Sums a tensor over the group; any shape, the same on every rank."""
    return _AllReduce.apply(value, group, mark)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, *attached: Tensor) -> Tensor:
        ctx.attached = [(tensor.shape, tensor.dtype, tensor.device) for tensor in attached]
        return carrier.view_as(carrier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.attached]
        return gradient, *zeros


def attach(carrier: Tensor, attached: Sequence[Tensor]) -> Tensor:
    """Returns `carrier` such that its backward also runs the backward of `attached`, with zero gradients.

    Args:
        carrier: Any tensor on the path to the loss.
        attached: Tensors (zero-row slices, usually) whose backward must run on this rank because other ranks run theirs.
    """
    return _Attach.apply(carrier, *attached) if attached else carrier
