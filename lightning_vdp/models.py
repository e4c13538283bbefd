"""Where a model keeps its tower, decoder and head. Facts about families are data here, not branches elsewhere."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = [
    "FAMILIES",
    "DividedModel",
    "Family",
    "Modality",
    "find_models",
    "is_block",
    "query_heads",
    "smallest_unit",
    "tokens_of_image",
    "tower_of",
    "unwrap",
]


@dataclass(frozen=True)
class Modality:
    """One kind of vision input and the names under which transformers knows it.

    Args:
        name: What messages call it.
        pixels: Forward argument with the pixels: packed patches ``[patches, values]`` where there is a grid, else images
            ``[units, channels, height, width]``.
        grid: Forward argument with ``(time, height, width)`` in patches of each image or video, shape ``[units, 3]``;
            None where each row of the pixels is a unit.
        features: Method of the base model that runs the tower and the projector.
        token_id: Attribute of the config with the id of the placeholder token.
        splits_frames: Whether the tower treats the frames of a video apart, so that each is a unit of its own.
    """

    name: str
    pixels: str
    grid: str | None
    features: str
    token_id: str
    splits_frames: bool = False


IMAGE = Modality("image", "pixel_values", "image_grid_thw", "get_image_features", "image_token_id")
VIDEO = Modality(
    "video", "pixel_values_videos", "video_grid_thw", "get_video_features", "video_token_id", splits_frames=True
)
FIXED_SIZE_IMAGE = Modality("image", "pixel_values", None, "get_image_features", "image_token_id")


@dataclass(frozen=True)
class Family:
    """What differs between model types that share one way of being divided.

    Args:
        modalities: Kinds of vision input in the order in which the model's forward runs them.
        tower: Child of the base model that encodes patches; None in language models.
        decoder: Child of the base model that holds the language model's layers; None where that is the base model itself.
        base: Child of the model with a head that is the base model.
        tower_mlp_matrices: Weight matrices of a block's feed-forward layer in the tower: 3 where it is gated.
        needs_token_types: Positions are wrong or missing without the forward argument `mm_token_type_ids`.
    """

    modalities: tuple[Modality, ...] = (IMAGE, VIDEO)
    tower: str | None = "visual"
    decoder: str | None = "language_model"
    base: str = "model"
    tower_mlp_matrices: int = 2
    needs_token_types: bool = True


_QWEN_VL = Family()
_FIXED_SIZE = Family(modalities=(FIXED_SIZE_IMAGE,), tower="vision_tower", needs_token_types=False)
FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": Family(tower_mlp_matrices=3),
    "qwen3_vl": _QWEN_VL,
    "qwen3_vl_moe": _QWEN_VL,
    "qwen3_5": _QWEN_VL,
    "qwen3_5_moe": _QWEN_VL,
    "llava": _FIXED_SIZE,
    "internvl": _FIXED_SIZE,
}
"""Families of vision-language models by the `model_type` of their config."""

LANGUAGE_MODEL = Family(modalities=(), tower=None, decoder=None, needs_token_types=False)
"""Every causal language model that keeps its layers where transformers' conventions say."""


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the module inside FSDP's and activation checkpointing's wrappers."""
    while True:
        inner = getattr(module, "_fsdp_wrapped_module", None) or getattr(module, "_checkpoint_wrapped_module", None)
        if inner is None:
            return module
        module = inner


def is_block(module: nn.Module) -> bool:
    """Whether gradient checkpointing knows the module: a decoder layer or a block of the vision tower."""
    return isinstance(unwrap(module), GradientCheckpointingLayer)


@dataclass(frozen=True)
class DividedModel:
    """The parts of one model. A model used without its head has `head` None.

    Args:
        name: Where the model hangs in the LightningModule.
        family: Facts about its model type.
        head: The model with the language model head.
        base: The model that merges features into embeddings.
        decoder: The language model's stack of layers.
    """

    name: str
    family: Family
    head: PreTrainedModel | None
    base: PreTrainedModel
    decoder: PreTrainedModel

    @property
    def entries(self) -> tuple[PreTrainedModel, ...]:
        """The modules whose forward may be a user's call, outermost first."""
        return (self.base,) if self.head is None else (self.head, self.base)

    @property
    def tower(self) -> nn.Module | None:
        """The vision encoder without wrappers; None for language models."""
        return None if self.family.tower is None else unwrap(self.base.get_submodule(self.family.tower))

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers without wrappers."""
        return [unwrap(layer) for layer in self.decoder.get_submodule("layers").children()]

    @property
    def query_heads(self) -> int:
        """Number of query heads of the decoder."""
        return int(self.base.config.get_text_config().num_attention_heads)


def _child(module: nn.Module, name: str) -> nn.Module | None:
    child = module._modules.get(name)
    return None if child is None else unwrap(child)


def _pretrained(module: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    for name, child in module.named_modules():
        if isinstance(child, PreTrainedModel):
            for wrapper in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module"):
                name = name.replace(f".{wrapper}", "").replace(f"{wrapper}.", "")
            yield name, child


def find_models(module: nn.Module) -> list[DividedModel]:
    """Finds every supported vision-language model and causal language model inside a module, wherever it hangs.

    Raises:
        ValueError: If there is none; the message says what was looked for and what was found instead.
    """
    pretrained = list(_pretrained(module))
    models = [
        DividedModel(name, family, _head_of(base, family, pretrained), base, _decoder_of(name, base, family))
        for name, base, family in _vision_language_bases(pretrained)
    ]
    within = {id(part) for model in models for part in (model.head or model.base).modules()}
    for name, head in pretrained:
        base = _child(head, LANGUAGE_MODEL.base)
        known = head.config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and id(head) not in within
        if known and isinstance(base, PreTrainedModel) and isinstance(getattr(base, "layers", None), nn.ModuleList):
            models.append(DividedModel(name, LANGUAGE_MODEL, head, base, base))
    if not models:
        found = sorted({f"{type(model).__name__} (model_type {model.config.model_type!r})" for _, model in pretrained})
        raise ValueError(
            f"No supported model in {type(module).__name__}: looked in all its submodules for a Hugging Face model with a "
            f"vision tower and a decoder, of model_type {', '.join(FAMILIES)}, and for causal language models; found "
            f"{', '.join(found) if found else 'no Hugging Face model at all'}. Make the model an attribute of the "
            "LightningModule in `__init__` or `configure_model`, or train other models with strategy='fsdp'."
        )
    return models


def _vision_language_bases(
    pretrained: list[tuple[str, PreTrainedModel]],
) -> Iterator[tuple[str, PreTrainedModel, Family]]:
    for name, base in pretrained:
        family = FAMILIES.get(base.config.model_type)
        if family is not None and family.tower is not None and _child(base, family.tower) is not None:
            yield name, base, family


def _decoder_of(name: str, base: PreTrainedModel, family: Family) -> PreTrainedModel:
    decoder = _child(base, family.decoder) if family.decoder is not None else base
    if not isinstance(decoder, PreTrainedModel) or not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ValueError(
            f"{type(base).__name__} at '{name}' has no decoder: expected a child `{family.decoder}` with `layers`, found "
            f"{type(decoder).__name__}. Build the whole model before the strategy sets it up."
        )
    return decoder


def _head_of(
    base: PreTrainedModel, family: Family, pretrained: list[tuple[str, PreTrainedModel]]
) -> PreTrainedModel | None:
    return next((parent for _, parent in pretrained if _child(parent, family.base) is base), None)


def query_heads(module: nn.Module) -> list[int]:
    """Query head counts of the supported models inside a module; empty if there is none (yet)."""
    try:
        return [model.query_heads for model in find_models(module)]
    except ValueError:
        return []


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def tower_of(module: nn.Module, family: Family) -> nn.Module:
    """The vision tower of a base model or of a model with a head."""
    assert family.tower is not None
    base = module if _child(module, family.tower) is not None else _child(module, family.base)
    assert base is not None
    return unwrap(base.get_submodule(family.tower))


def tokens_of_image(height: int, width: int, config: Any, strategy: str | None = None) -> int:
    """Placeholder tokens of one image of a family whose images all have one size.

    Args:
        height: In pixels.
        width: In pixels.
        config: The model's config.
        strategy: "default" leaves the class token out, "full" keeps it. Default: the config's.
    """
    rows, columns = _pair(config.vision_config.patch_size)
    tokens = (height // rows) * (width // columns)
    if (strategy or getattr(config, "vision_feature_select_strategy", "default")) == "full":
        tokens += 1
    return int(tokens * getattr(config, "downsample_ratio", 1) ** 2)


def smallest_unit(modality: Modality, config: Any, tower: nn.Module) -> tuple[int, ...]:
    """Shape of the pixels of the smallest unit that a tower takes.

    Args:
        modality: Its layout of pixels.
        config: The tower's config.
        tower: The tower.
    """
    if modality.grid is None:
        return 1, int(config.num_channels), *_pair(config.image_size)
    projection: Any = unwrap(tower.get_submodule("patch_embed")).get_submodule("proj")
    width = projection.in_channels
    for side in projection.kernel_size:
        width *= side
    return int(config.spatial_merge_size) ** 2, int(width)
