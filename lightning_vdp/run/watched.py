"""Methods of the strategy during which the watch knows what this rank does."""

from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["watched"]


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
