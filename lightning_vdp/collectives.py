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
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_vdp.run.watch import Track, untracked

__all__ = ["Layout", "all_gather", "all_reduce", "all_to_all", "attach"]


class Layout(Protocol):
    """How tensors lie in the flat buffers of an all-to-all, and the adjoints of going there and back."""

    @property
    def input_sizes(self) -> list[int]:
        """Number of elements for each destination."""

    @property
    def output_sizes(self) -> list[int]:
        """Number of elements that each source sends to this rank."""

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors to elements ordered by destination, shape ``[sum(input_sizes)]``."""

    def unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Elements ordered by source, shape ``[sum(output_sizes)]``, to tensors."""

    def pack_adjoint(self, flat: Tensor) -> tuple[Tensor, ...]:
        """From the gradient of what `pack` returns to that of what it takes."""

    def unpack_adjoint(self, gradients: Sequence[Tensor]) -> Tensor:
        """From the gradients of what `unpack` returns to that of what it takes; leaves them as they are."""


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layout: Layout, group: dist.ProcessGroup, track: Track, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.layout, ctx.group, ctx.track = layout, group, track
        with track("forward"):
            # what is sent is freed before what is received is unpacked
            received = _exchange(layout.pack(tensors), layout.input_sizes, layout.output_sizes, group)
        return layout.unpack(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        received = _AllToAll.way_back(ctx, ctx.layout.unpack_adjoint(gradients))
        return None, None, None, *ctx.layout.pack_adjoint(received)

    @staticmethod
    def way_back(ctx: Any, flat: Tensor) -> Tensor:
        with ctx.track("backward"):
            return _exchange(flat, ctx.layout.output_sizes, ctx.layout.input_sizes, ctx.group)


def _exchange(flat: Tensor, input_sizes: list[int], output_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    output = flat.new_empty(sum(output_sizes))
    dist.all_to_all_single(output, flat, output_sizes, input_sizes, group=group)
    return output


def all_to_all(
    tensors: Sequence[Tensor], layout: Layout, group: dist.ProcessGroup, track: Track = untracked
) -> tuple[Tensor, ...]:
    """Sends some elements of tensors to every rank of the group and receives others from each, in one exchange.

    Packing and unpacking belong to it, so that autograd sees one function rather than each view and copy.

    Args:
        tensors: Tensors of one dtype.
        layout: How they lie in the buffers.
        group: The ranks that take part.
        track: Tells the watch that this rank is in the collective.

    Returns:
        What the layout unpacks.
    """
    return _AllToAll.apply(layout, group, track, *tensors)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: dist.ProcessGroup, track: Track) -> Tensor:
        ctx.sizes, ctx.group, ctx.track = sizes, group, track
        widest = max(sizes)
        gathered = rows.new_empty((len(sizes) * widest, *rows.shape[1:]))
        with track("forward"):
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
        with ctx.track("backward"):
            dist.reduce_scatter_single(reduced, gradient.contiguous(), group=group)
        return reduced[: sizes[dist.get_rank(group)]], None, None, None


def _padded(rows: Tensor, count: int) -> Tensor:
    if rows.shape[0] == count:
        return rows.contiguous()
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    return padded


def all_gather(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, track: Track = untracked) -> Tensor:
    """Concatenates every rank's rows in rank order; sizes may differ, also be 0.

    Args:
        rows: This rank's rows, shape ``[sizes[rank], ...]``.
        sizes: Number of rows of each rank of the group.
        group: The ranks that take part.
        track: Tells the watch that this rank is in the collective.

    Returns:
        Shape ``[sum(sizes), ...]``, the same on every rank.
    """
    sizes = list(sizes)
    if max(sizes) == 0:
        return rows
    return _AllGather.apply(rows, sizes, group, track)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup, track: Track) -> Tensor:
        ctx.group, ctx.track = group, track
        with track("forward"):
            return _summed(value, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.track("backward"):
            return _summed(gradient, ctx.group), None, None


def _summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    # a copy: a gradient that autograd handed over may be shared with other consumers
    value = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(value, group=group)
    return value


def all_reduce(value: Tensor, group: dist.ProcessGroup, track: Track = untracked) -> Tensor:
    """Sums a tensor over the group; any shape, the same on every rank."""
    return _AllReduce.apply(value, group, track)


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
