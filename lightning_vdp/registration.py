"""Registers the strategy under its names, and answers in the registry of the other Lightning package."""

import importlib.util
from typing import Any, NoReturn

from lightning.pytorch.strategies import StrategyRegistry

from lightning_vdp.strategy import UlyssesVisionDPStrategy

__all__ = ["register"]


def register() -> None:
    """Makes the strategy's names known to `Trainer(strategy=...)`."""
    UlyssesVisionDPStrategy.register_strategies(StrategyRegistry)
    # `lightning` and `pytorch_lightning` have registries and classes of their own
    if importlib.util.find_spec("pytorch_lightning") is not None:
        try:
            from pytorch_lightning.strategies import StrategyRegistry as OtherRegistry
        except Exception:  # a broken installation of a package that is not needed
            return
        for name in [name for name in StrategyRegistry if name.startswith(UlyssesVisionDPStrategy.strategy_name)]:
            if name not in OtherRegistry:
                OtherRegistry.register(name, _refuse, description="needs lightning.pytorch.Trainer")


def _refuse(**kwargs: Any) -> NoReturn:
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    raise MisconfigurationException(
        f"The strategy '{UlyssesVisionDPStrategy.strategy_name}' works with the package `lightning`, but this Trainer is "
        "that of `pytorch_lightning`, whose classes differ: import Trainer, LightningModule and callbacks from "
        "`lightning.pytorch`."
    )
