"""Arguments of a call by name."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Parameters", "parameters_of"]


class Parameters:
    """The parameters of a method, to name arguments by: `inspect.Signature` does so too, but slowly for every step.

    Args:
        method: A function whose first parameter is the module.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self.signature = inspect.signature(method)
        kinds = {name: parameter.kind for name, parameter in list(self.signature.parameters.items())[1:]}
        self.positional = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self._named = frozenset(name for name, kind in kinds.items() if kind not in _VARIABLE)
        self._takes_others = inspect.Parameter.VAR_KEYWORD in kinds.values()

    def by_name(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, those among its `**kwargs` too; without the module itself.

        Raises:
            TypeError: If the method does not take them.
        """
        given = dict(zip(self.positional, args))
        if len(args) > len(self.positional) or not given.keys().isdisjoint(kwargs):
            raise self._refusal(module, args, kwargs)
        if not self._takes_others and not self._named.issuperset(kwargs):
            raise self._refusal(module, args, kwargs)
        given.update(kwargs)
        return given

    def _refusal(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError:
        try:
            self.signature.bind_partial(module, *args, **kwargs)
        except TypeError as error:
            return error
        return TypeError("positional arguments beyond the named ones")


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


# taken once for each method, since features are asked for in every step
parameters_of = functools.cache(Parameters)
