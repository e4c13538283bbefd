"""Errors that this package raises on purpose: their message says what was found, what was expected and what to do."""

__all__ = ["StepError"]


class StepError(RuntimeError):
    """One or more ranks cannot take this step, mostly for bad input; raised with the same text on every rank of the world."""
