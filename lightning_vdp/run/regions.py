"""Named regions that a profiler shows, such as that of ``Trainer(profiler="pytorch")``."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import record_function

__all__ = ["ATTENTION_EXCHANGE", "EXCHANGE", "LOSS", "TOWER", "region"]

TOWER = "ulysses_vdp::tower"
EXCHANGE = "ulysses_vdp::exchange"
ATTENTION_EXCHANGE = "ulysses_vdp::attention_exchange"
LOSS = "ulysses_vdp::loss"

P = ParamSpec("P")
R = TypeVar("R")


def region(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function show up under a name; one of the names above."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            # a region costs microseconds, which nobody has to pay who does not look
            if not torch.autograd._profiler_enabled():
                return function(*args, **kwargs)
            with record_function(name):
                return function(*args, **kwargs)

        return recorded

    return decorate
