from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from lightning_vdp.call.header import FIELDS, decode, encode, exchange_headers
from lightning_vdp.errors import StepError
from lightning_vdp.mesh import SequenceMesh


def test_decode_undoes_encode() -> None:
    header = {"modalities": [0, 1], "image_units": [16, 48], "length": [52]}
    flat = encode(header)
    assert flat[0] == len(flat)
    assert decode([*flat, 99, 99]) == {**{name: [] for name in FIELDS}, **header}


def test_unknown_field_is_refused() -> None:
    with pytest.raises(KeyError, match="colour"):
        encode({"colour": [1]})


def _exchange(units: int) -> list[dict[str, list[int]]]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    header = {"length": [rank], "image_units": list(range(units * rank))}
    pending = exchange_headers(SequenceMesh("cpu", 3, 1), header)
    headers = pending.wait()
    assert pending.wait() is headers
    return headers


@pytest.mark.parametrize("units", [1, 300], ids=["one message", "two messages"])
def test_every_rank_reads_the_headers_of_all(units: int, run_ranks: Callable[..., Any]) -> None:
    for headers in run_ranks(_exchange, 3, units):
        assert [header["length"] for header in headers] == [[0], [1], [2]]
        assert [len(header["image_units"]) for header in headers] == [0, units, 2 * units]


def _two_under_way() -> None:
    dist.init_process_group("gloo")
    mesh = SequenceMesh("cpu", 1, 3)
    rank = dist.get_rank()
    first = exchange_headers(mesh, {"length": [rank]})
    second = exchange_headers(mesh, {"length": [10 + rank]})
    assert [header["length"] for header in second.wait()] == [[10], [11], [12]]
    assert [header["length"] for header in first.wait()] == [[0], [1], [2]]


def test_two_headers_under_way_are_read_in_any_order(run_ranks: Callable[..., Any]) -> None:
    run_ranks(_two_under_way, 3)


def _agree() -> str:
    dist.init_process_group("gloo")
    mesh = SequenceMesh("cpu", 1, 3)
    rank = dist.get_rank()
    reason = {0: None, 1: "the grid is empty", 2: "the grid is empty"}[rank]
    with pytest.raises(StepError) as caught:
        exchange_headers(mesh, {}, reason).wait()
    # the group is usable afterwards
    assert len(exchange_headers(mesh, {}).wait()) == 3
    return str(caught.value)


def test_an_error_is_raised_alike_on_all_ranks(run_ranks: Callable[..., Any]) -> None:
    assert run_ranks(_agree, 3) == ["Refused before the step: ranks 1, 2: the grid is empty"] * 3
