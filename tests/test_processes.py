import os
import socket
import time
from typing import Any

import pytest
import torch.distributed as dist

from lightning_vdp.errors import UserError
from lightning_vdp.testing import RankFailed, RanksTimedOut, run_ranks


def _rank() -> int:
    return int(os.environ["RANK"])


def _sum() -> tuple[int, int]:
    import torch

    dist.init_process_group("gloo")
    total = torch.tensor(_rank())
    dist.all_reduce(total)
    return _rank(), int(total)


def test_ranks_form_a_world_and_return_by_rank() -> None:
    assert run_ranks(_sum, 3) == [(0, 3), (1, 3), (2, 3)]


def test_closures_and_arguments_reach_the_ranks() -> None:
    offset = 10
    assert run_ranks(lambda factor: offset + factor * _rank(), 2, 5) == [10, 15]


def _one_raises() -> None:
    dist.init_process_group("gloo")
    if _rank() == 1:
        raise KeyError("the cause")
    dist.barrier()


def test_failure_is_raised_with_the_traceback_of_its_rank() -> None:
    started = time.monotonic()
    with pytest.raises(
        RankFailed, match=r"Rank 1 of 2 raised[\s\S]*in _one_raises[\s\S]*KeyError: 'the cause'"
    ) as caught:
        run_ranks(_one_raises, 2)
    assert caught.value.failures[1] == "KeyError: 'the cause'"
    assert time.monotonic() - started < 10


def _refuses(*refusing: int) -> None:
    if _rank() in refusing:
        raise UserError("not like this")
    raise ValueError("not like this")


@pytest.mark.parametrize("refusing", [(), (1,), (0, 1)])
def test_refusals_are_told_from_other_errors(refusing: tuple[int, ...]) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_refuses, 2, *refusing)
    assert caught.value.failures.keys() == {0, 1}
    assert caught.value.deliberate == set(refusing)


def _fail_in_turn() -> None:
    time.sleep(0.3 * (2 - _rank()))
    raise KeyError(_rank())


def test_the_first_to_fail_comes_first() -> None:
    with pytest.raises(RankFailed, match=r"Rank 2 of 3 raised \(so did 0, 1\)") as caught:
        run_ranks(_fail_in_turn, 3)
    assert list(caught.value.failures) == [2, 1, 0]


def test_result_that_cannot_be_sent_is_a_failure() -> None:
    with pytest.raises(RankFailed, match="Rank 0 of 1 raised") as caught:
        run_ranks(lambda: lambda: None, 1)
    assert "pickle" in caught.value.failures[0]


def _one_waits() -> None:
    dist.init_process_group("gloo")
    if _rank() == 0:
        dist.barrier()
    else:
        _sleep_here()


def _sleep_here() -> None:
    time.sleep(60)


def test_timeout_names_the_line_where_each_rank_waits() -> None:
    with pytest.raises(RanksTimedOut) as caught:
        run_ranks(_one_waits, 2, timeout=3)
    message = str(caught.value)
    assert "2 of 2 ranks still ran after 3 s" in message
    first, second = message.split("rank 1:")
    assert "in barrier" in first
    assert "in _one_waits" in first
    assert "in _sleep_here" in second


def _looks_for_the_store() -> None:
    if _rank() == 0:
        time.sleep(0.6)
    else:
        time.sleep(0.3)
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=1).close()


def test_the_store_is_open_before_the_first_rank_initializes() -> None:
    # whom torch refuses once comes back up to half a second later, in every test
    run_ranks(_looks_for_the_store, 2)


def _two_worlds() -> list[tuple[int, int]]:
    sums = []
    for _ in range(2):
        sums.append(_sum())
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.3 * _rank())
    return sums


def test_a_world_can_end_and_begin_again() -> None:
    assert run_ranks(_two_worlds, 2) == [[(0, 1)] * 2, [(1, 1)] * 2]


def _one_dies() -> None:
    if _rank() == 1:
        os._exit(9)


def test_death_of_a_rank_is_told() -> None:
    with pytest.raises(RankFailed, match="Rank 1 died with exit code 9"):
        run_ranks(_one_dies, 2)


def test_a_process_group_of_its_own_is_refused() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="has a process group, which simulated ranks would inherit"):
        run_ranks(_rank, 2)


def test_fixture_runs_ranks(run_ranks: Any) -> None:
    assert run_ranks(_rank, 2) == [0, 1]
