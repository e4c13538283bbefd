"""Hooks on modules and methods put over those of single instances, and taking them out again."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from transformers import __version__ as transformers_version

from lightning_vdp.errors import UnsupportedError
from lightning_vdp.families.wrappers import class_name
from lightning_vdp.sequence.ulysses import attention_dispatcher

__all__ = ["Patches"]


class Patches:
    """The hooks and patches of one strategy; `undo` takes all of them out."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def undo(self) -> None:
        """Takes out every hook and patch, the last one first."""
        while self._undo:
            self._undo.pop()()

    def hook(self, register: Callable[..., Any], hook: Callable[..., Any], **kwargs: Any) -> None:
        """Registers a forward hook or pre-hook that sees keyword arguments."""
        self._undo.append(register(hook, with_kwargs=True, **kwargs).remove)

    def method(
        self, instance: nn.Module, name: str, function: Callable[..., Any], attribute: str | None = None
    ) -> None:
        """Puts a bound method over one that the instance's class defines.

        Args:
            instance: What to patch; other instances of the class stay as they are.
            name: What callers call it.
            function: Takes the instance first.
            attribute: The attribute where the class looks for an override. Default: the name.

        Raises:
            UnsupportedError: If the class has no such method, does not look there, or somebody patched this instance already.
        """
        attribute = attribute or name
        if not hasattr(type(instance), name):
            raise UnsupportedError(
                f"{class_name(instance)} of transformers {transformers_version} has no `{name}`, where lightning_vdp "
                "enters; install a version of transformers that this version of lightning_vdp names."
            )
        if attribute in vars(instance):
            raise UnsupportedError(
                f"`{name}` of this {class_name(instance)} was replaced by somebody else, so that it cannot be divided; "
                "undo that, or set `sequence_parallel_size=1`."
            )

        original = getattr(type(instance), name)

        # callers read the signature, as generation does
        @functools.wraps(function if isinstance(original, property) else original)
        def standing_in(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        vars(instance)[attribute] = MethodType(standing_in, instance)
        self._undo.append(functools.partial(vars(instance).pop, attribute))
        if getattr(getattr(instance, name), "__func__", None) is not standing_in:
            raise UnsupportedError(
                f"`{name}` of {class_name(instance)} in transformers {transformers_version} no longer looks at "
                f"`{attribute}`, where lightning_vdp enters; install a version of transformers that this version of "
                "lightning_vdp names."
            )

    def dispatch_attention(self) -> None:
        """Makes attention calls that carry a `ForwardCall` pass through Ulysses."""
        attention_dispatcher.acquire()
        self._undo.append(attention_dispatcher.release)
