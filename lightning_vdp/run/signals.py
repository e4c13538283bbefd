"""SIGTERM: the rank that gets one tells the others at the next batch, and all end together.

Lightning broadcasts from within the signal handler, where other ranks are in the middle of other collectives: a hang.
"""

from typing import Any

import lightning.pytorch as pl

from lightning_vdp.errors import UnsupportedError

__all__ = ["Sigterm"]

_HANDLER = "_sigterm_notifier_fn"


class Sigterm:
    """Takes note of SIGTERM in place of the Trainer's own handler, without a collective.

    The Trainer's flag, at which a rank ends by itself, is set only when all ranks know.

    Args:
        trainer: Before it registers its handlers.

    Attributes:
        noted: Whether this rank got the signal.

    Raises:
        UnsupportedError: If Lightning has moved its handler.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self.noted = False
        self._trainer = trainer
        self._connector: Any = trainer._signal_connector
        if not hasattr(type(self._connector), _HANDLER):
            raise UnsupportedError(
                f"Lightning {pl.__version__} has no `{_HANDLER}`, which this version of lightning_vdp replaces; install a "
                "version of Lightning that it names."
            )
        vars(self._connector)[_HANDLER] = self._note

    def _note(self, signum: Any, frame: Any) -> None:
        launcher: Any = self._trainer.strategy.launcher
        if launcher is not None and not self.noted:
            launcher.kill(signum)
        self.noted = True

    def restore(self) -> None:
        """Puts the Trainer's own handler back."""
        vars(self._connector).pop(_HANDLER, None)
