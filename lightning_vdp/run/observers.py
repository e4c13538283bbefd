"""Functions that are told of what happens in a run."""

from collections.abc import Callable
from typing import Any

__all__ = ["Observers"]


class Observers(list[Callable[[Any], None]]):
    """Functions that are called with each event; copies of a divided model share them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Observers":
        return self

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return Observers, ()
