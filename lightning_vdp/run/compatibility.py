"""Names of Lightning that this package replaces: one that a newer version has renamed would never be called again."""

import lightning

from lightning_vdp.errors import UnsupportedError

__all__ = ["check_overrides"]

_PACKAGE = __name__.partition(".")[0]


def check_overrides(cls: type) -> None:
    """Checks that each method which a class marks with `override` still replaces one.

    Args:
        cls: The class; its bases' own overrides are looked at too as far as they are this package's.

    Raises:
        UnsupportedError: If a base has no such method.
    """
    for own in cls.__mro__:
        if own.__module__.partition(".")[0] != _PACKAGE:
            continue
        bases = own.__mro__[1:]
        for name, member in vars(own).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if getattr(function, "__override__", False) and not any(name in vars(base) for base in bases):
                raise UnsupportedError(
                    f"Lightning {lightning.__version__} has no `{bases[0].__name__}.{name}`, which {own.__name__} replaces and "
                    "which nobody would call; install a version of Lightning that this version of lightning_vdp names."
                )
