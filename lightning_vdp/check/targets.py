"""What a user may ask a check for: a model type, a config's file, a model of the hub, or a function that builds one."""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from lightning_vdp.check.build import build_model, tiny_config
from lightning_vdp.errors import UserError

__all__ = ["Target", "find_target"]


@dataclass(frozen=True)
class Target:
    """A model to check.

    Args:
        name: Name of the model in rows.
        make_model: Builds the model, small and in float64.
    """

    name: str
    make_model: Callable[[], PreTrainedModel]


def _from_config(config: PreTrainedConfig) -> PreTrainedModel:
    return build_model(tiny_config(config))


def _of_type(model_type: str) -> PreTrainedModel:
    return _from_config(CONFIG_MAPPING[model_type]())


def _from_factory(factory: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    return factory().double()


def _config(fields: dict[str, Any], source: str) -> PreTrainedConfig:
    model_type = fields.get("model_type", "")
    if model_type not in CONFIG_MAPPING_NAMES:
        remote = ": its code is its own (`auto_map`), which is not run" if "auto_map" in fields else ""
        raise UserError(
            f"{source} has model_type {model_type!r}, which the installed transformers does not know{remote}."
        )
    config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(fields)
    return config


def find_target(name: str) -> Target:
    """Finds what is meant by a model type, a config's file, a model of the hub, or ``package.module:ModelFactory``.

    Args:
        name: A model type, a path, a name on the hub, or a factory. A factory takes no arguments and returns a small model
            of transformers, the same each time.

    Raises:
        UserError: If it is none of them, or a model whose code transformers does not have.
        ImportError: If the module of a factory cannot be imported.
    """
    if name in CONFIG_MAPPING_NAMES:
        return Target(name, partial(_of_type, name))
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        config = _config(json.loads(path.read_text()), str(path))
        return Target(config.model_type, partial(_from_config, config))
    module, _, attribute = name.partition(":")
    if attribute:
        factory = getattr(importlib.import_module(module), attribute, None)
        if not callable(factory):
            raise UserError(f"{module} has no function {attribute}.")
        return Target(name, partial(_from_factory, factory))
    if path.suffix == ".json":
        raise UserError(f"There is no file {name}.")
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name)
    except OSError as error:
        raise UserError(
            f"{name!r} is no model_type of the installed transformers, no file, no package.module:ModelFactory, and no "
            f"model that can be fetched from the hub now ({str(error).splitlines()[0]})."
        ) from error
    config = _config(fields, name)
    return Target(config.model_type, partial(_from_config, config))
