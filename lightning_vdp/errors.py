"""Errors that are raised on purpose: the message alone says what was found, what was expected and what to do."""

__all__ = ["StepError", "UnsupportedError", "UserError"]


class UserError(ValueError):
    """An argument, a model, a batch or a file cannot be used as it is."""


class UnsupportedError(UserError, RuntimeError):
    """A model, or an installed version of a library, does not do what this package needs of it."""


class StepError(UserError, RuntimeError):
    """One or more ranks cannot take this step, mostly for bad input; raised with the same text on every rank of the world."""
