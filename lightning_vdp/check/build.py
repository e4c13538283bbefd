"""Building a small random model from a config, offline."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from lightning_vdp.check.shrink import shrink
from lightning_vdp.families.facts import facts_of
from lightning_vdp.testing.models import add_noise

__all__ = ["MODEL_TYPES", "build_model", "tiny_config"]

MODEL_TYPES = tuple(sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
"""Every model type that the installed transformers maps to image-text-to-text."""


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a small version of a config; see `shrink`."""
    fields = shrink(config.to_dict(), facts_of(config).small)
    small: PreTrainedConfig = type(config).from_dict(fields)
    return small


def _set_implementation(config: PreTrainedConfig, attention: str) -> None:
    config._attn_implementation = attention
    parts: list[Any] = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in parts:
        if isinstance(part, PreTrainedConfig):
            # the grouped kernels have no float64 on the CPU
            part._experts_implementation = "eager"


def build_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Builds the model of a config with random parameters in float64.

    Args:
        config: Small config of an image-text-to-text model.
        seed: Seed of the random parameters.
    """
    name: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type]
    cls = getattr(transformers, name if isinstance(name, str) else name[0])
    torch.manual_seed(seed)
    _set_implementation(config, "sdpa")
    try:
        model = cls(config)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        _set_implementation(config, "eager")
        model = cls(config)
    add_noise(model, seed + 1)
    built: PreTrainedModel = model.double()
    return built
