"""A pytest plugin; switch it on in ``conftest.py`` with ``pytest_plugins = ["lightning_vdp.testing.plugin"]``."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_vdp.testing.processes import run_ranks

__all__ = ["run_ranks_fixture"]


@pytest.fixture(name="run_ranks")
def run_ranks_fixture() -> Callable[..., list[Any]]:
    """Runs a function in N simulated ranks: ``run_ranks(function, world_size, *args, timeout=60.0)``.

    Returns what each rank returned. A rank's failure is raised with that rank's traceback; at the timeout, the error
    names for each rank the line where it waits.
    """
    return run_ranks
