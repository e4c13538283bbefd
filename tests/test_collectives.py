from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_vdp.collectives import all_gather, all_reduce, all_to_all, attach

SIZES = [3, 0, 2]
SENT = [[1, 2, 0], [0, 3, 1], [2, 2, 2]]


def _gather(x: Tensor, group: Any) -> Tensor:
    return all_gather(x, SIZES, group)


class _Flat:
    """Elements as they lie."""

    def __init__(self, rank: int) -> None:
        self.input_sizes = SENT[rank]
        self.output_sizes = [row[rank] for row in SENT]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].reshape(-1)

    def unpack(self, flat: Tensor) -> tuple[Tensor, ...]:
        return (flat,)

    pack_adjoint, unpack_adjoint = unpack, pack


def _exchange(x: Tensor, group: Any) -> Tensor:
    return all_to_all([x], _Flat(dist.get_rank(group)), group)[0]


FUNCTIONS: dict[str, tuple[Callable[[Tensor, Any], Tensor], Callable[[int], tuple[int, ...]]]] = {
    "all_gather": (_gather, lambda rank: (SIZES[rank], 2)),
    "all_gather, even": (lambda x, group: all_gather(x, [2, 2, 2], group), lambda rank: (2, 3)),
    "all_reduce": (all_reduce, lambda rank: (2, 2)),
    "all_to_all": (_exchange, lambda rank: (sum(SENT[rank]),)),
}


def _inner_products(name: str, dtype: torch.dtype) -> tuple[float, float]:
    """For a linear map A over all ranks together: <A x, y> and <x, A^T y>."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    function, shape = FUNCTIONS[name]
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(shape(rank), generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    output = function(x, group)
    y = torch.randn(output.shape, generator=draw, dtype=torch.float64).to(dtype)
    output.backward(y)
    assert x.grad is not None
    assert x.grad.dtype == dtype
    sums = torch.stack([(output * y).sum(), (x * x.grad).sum()]).double().detach()
    dist.all_reduce(sums)
    return float(sums[0]), float(sums[1])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_is_the_adjoint(name: str, run_ranks: Callable[..., Any]) -> None:
    for forward, backward in run_ranks(_inner_products, 3, name, torch.float64):
        assert forward == pytest.approx(backward, rel=1e-12)
        assert abs(forward) > 0.1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_low_precision_stays_low(name: str, run_ranks: Callable[..., Any]) -> None:
    for forward, backward in run_ranks(_inner_products, 3, name, torch.bfloat16):
        assert forward == pytest.approx(backward, rel=0.05)


def _gathered_values() -> list[float]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    return all_gather(torch.full((SIZES[rank],), float(rank)), SIZES, dist.group.WORLD).tolist()


def test_all_gather_joins_rows_in_rank_order(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(_gathered_values, 3) == [[0.0, 0.0, 0.0, 2.0, 2.0]] * 3


def _backward_keeps_shared_gradient() -> list[list[float]]:
    dist.init_process_group("gloo")
    x = torch.ones(2, requires_grad=True)
    # add hands one gradient tensor to both of its inputs
    (all_reduce(x, dist.group.WORLD) + x).backward(torch.ones(2))
    assert x.grad is not None
    return [x.grad.tolist()]


def test_all_reduce_does_not_write_into_a_shared_gradient(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(_backward_keeps_shared_gradient, 2) == [[[3.0, 3.0]]] * 2


def test_attach_runs_backward_of_the_attached_with_zeros() -> None:
    carrier = torch.randn(3, requires_grad=True)
    other = torch.full((2, 2), float("inf"), requires_grad=True)
    output = attach(carrier, [(other * 2)[:0]])
    torch.testing.assert_close(output, carrier)
    output.sum().backward()
    torch.testing.assert_close(carrier.grad, torch.ones(3))
    # no `0 * inf`, which would be NaN
    torch.testing.assert_close(other.grad, torch.zeros(2, 2))
    assert attach(carrier, []) is carrier
