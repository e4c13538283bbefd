"""Methods of the strategy during which the watch knows what this rank does."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning_vdp.run.watch import Watch

__all__ = ["log_cause", "watched"]

_log = logging.getLogger(__name__)


def watched(method: Callable[..., Any]) -> Any:
    """Makes a method of Lightning's strategy a step of the watch, so that ranks which miss this one can say where it is.

    Args:
        method: The method; what has it needs a `mesh` with a `watch`.
    """

    @wraps(method)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.mesh.watch.step(method.__name__):
            return method(self, *args, **kwargs)

    return step


def log_cause(watch: Watch, exception: Exception) -> None:
    """Tells the other ranks of an exception, and logs what this rank knows of its cause on another one.

    Args:
        watch: The watch of this rank.
        exception: What ended the run here.
    """
    cause = watch.tell(exception)
    if cause is not None:
        _log.error(cause)
