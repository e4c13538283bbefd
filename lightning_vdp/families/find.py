"""Where a model keeps its tower, decoder and head. Facts about families are data here, not branches elsewhere."""

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_vdp.errors import UserError
from lightning_vdp.families.facts import FACTS, GATHERED, REFUSED, Facts
from lightning_vdp.families.family import LANGUAGE_MODEL, Family, Modality
from lightning_vdp.families.wrappers import plain_name, unwrap

__all__ = ["DividedModel", "family_of", "find_models", "own_heads", "query_heads", "smallest_unit", "tower_of"]


_TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder", "image_tower")
_GRID = re.compile("grid_t?hw$|^target_sizes")
_COUNTS = re.compile("^num_.*_per_(image|video)$|^batch_num_images$|^images_per_sample$")
_FEATURES = {"image": "get_image_features", "video": "get_video_features"}


def _placeholder(config: Any, kind: str) -> int | None:
    """The id of the token that stands for features of a kind."""
    names = (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_patch_id", "image_token_id", "image_token_index")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def family_of(base: PreTrainedModel) -> Family:
    """Reads off a base model how it is divided: transformers names methods and their arguments alike in all models."""
    facts = FACTS.get(base.config.model_type, Facts())
    modalities = []
    for name, method in _FEATURES.items():
        if callable(getattr(base, method, None)):
            parameters = inspect.signature(getattr(type(base), method)).parameters
            names = tuple(
                name for name, value in parameters.items() if name != "self" and value.kind is not value.VAR_KEYWORD
            )
            grid = next((argument for argument in names if _GRID.search(argument)), None)
            placeholder = facts.video_placeholder if name == "video" else name
            counts = next((argument for argument in names if _COUNTS.search(argument)), None)
            token = _placeholder(base.config, placeholder)
            modalities.append(Modality(name, names[0], grid, method, names, counts, token))
    routable = hasattr(base, "get_placeholder_mask") and None not in [modality.token for modality in modalities]
    positions = getattr(type(base), "get_rope_index", None)
    return Family(
        modalities=tuple(modalities),
        facts=replace(facts, routed=facts.routed and routable),
        tower=next((name for name in _TOWERS if _child(base, name) is not None), None),
        needs_token_types=positions is not None and "mm_token_type_ids" in inspect.signature(positions).parameters,
        arguments=frozenset(inspect.signature(type(base).forward).parameters),
    )


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
        return (self.base,) if self.head is None or self.head is self.base else (self.head, self.base)

    @property
    def loss_models(self) -> list[PreTrainedModel]:
        """The head, and models with a head of their own between it and the decoder, which compute the loss in some."""
        if self.head is None:
            return []
        inner = [part for _, part in _pretrained(self.base) if part is not self.head and _contains(part, self.decoder)]
        return [self.head, *(part for part in inner if isinstance(part, GenerationMixin))]

    @property
    def tower(self) -> nn.Module | None:
        """The vision encoder without wrappers; None for language models."""
        return None if self.family.tower is None else unwrap(self.base.get_submodule(self.family.tower))

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers without wrappers."""
        return [unwrap(layer) for layer in self.decoder.get_submodule("layers").children()]

    @property
    def gathered_attention(self) -> list[nn.Module]:
        """Attention modules of the decoder that must see the whole sequence."""
        modules = [unwrap(module) for layer in self.layers for module in layer.children()]
        if self.decoder.config.model_type in GATHERED:
            return [module for module in modules if hasattr(module, "o_proj")]
        # layers that share what another layer's indexer found have none of their own
        indexed = {type(module) for module in modules if any("indexer" in name for name, _ in module.named_children())}
        return [module for module in modules if type(module) in indexed]

    @property
    def batch_norms(self) -> list[nn.Module]:
        """What normalizes over all images of a batch, outside the decoder."""
        inside = set(self.decoder.modules())
        return [
            part
            for part in self.base.modules()
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part not in inside
        ]

    @property
    def query_heads(self) -> int:
        """Number of query heads of the decoder; the least if layers differ."""
        config = self.base.config.get_text_config()
        layers = getattr(config, "per_layer_config", None) or [config]
        return min(int(layer.num_attention_heads) for layer in layers)


def _contains(module: nn.Module, part: nn.Module) -> bool:
    return module is not part and any(child is part for child in module.modules())


def _child(module: nn.Module, name: str) -> nn.Module | None:
    child = module._modules.get(name)
    return None if child is None else unwrap(child)


def _pretrained(module: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    for name, child in module.named_modules():
        if isinstance(child, PreTrainedModel):
            yield plain_name(name), child


def own_heads(module: nn.Module) -> list[nn.Module]:
    """The language model heads inside a module that share their weights with no other part of it, without wrappers."""
    users = Counter(
        id(weight) for part in module.modules() for weight in part._parameters.values() if weight is not None
    )
    heads = []
    for _, model in _pretrained(module):
        head = model.get_output_embeddings()
        if head is not None and isinstance(unwrap(head), nn.Linear):
            own = unwrap(head)
            if own not in heads and all(users[id(weight)] == 1 for weight in own.parameters()):
                heads.append(own)
    return heads


def find_models(module: nn.Module) -> list[DividedModel]:
    """Finds every supported vision-language model and causal language model inside a module, wherever it hangs.

    Raises:
        UserError: If there is none, or one that cannot be divided; the message says what was found.
    """
    pretrained = list(_pretrained(module))
    for name, model in pretrained:
        reason = REFUSED.get(model.config.model_type)
        if reason is not None:
            raise UserError(
                f"{type(model).__name__} at '{name}' (model_type {model.config.model_type!r}) cannot be divided: {reason}; "
                "set `sequence_parallel_size=1`, or train it with strategy='fsdp'."
            )
    models = [
        DividedModel(name, family_of(base), _head_of(base, pretrained), base, _decoder_of(name, base))
        for name, base in _vision_language_bases(pretrained)
    ]
    within = {id(part) for model in models for part in (model.head or model.base).modules()}
    for name, head in pretrained:
        base = _child(head, "model")
        known = head.config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or type(head).__name__.endswith(
            "ForCausalLM"
        )
        if known and id(head) not in within and isinstance(base, PreTrainedModel) and _has_layers(base):
            models.append(DividedModel(name, LANGUAGE_MODEL, head, base, base))
    if not models:
        found = sorted({f"{type(model).__name__} (model_type {model.config.model_type!r})" for _, model in pretrained})
        raise UserError(
            f"No supported model in {type(module).__name__}: looked in all its submodules for a Hugging Face model with "
            f"`get_image_features` and a decoder, and for causal language models; found "
            f"{', '.join(found) if found else 'no Hugging Face model at all'}. Make the model an attribute of the "
            "LightningModule in `__init__` or `configure_model`, or train other models with strategy='fsdp'."
        )
    return models


def _has_layers(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layers", None), nn.ModuleList)


def _vision_language_bases(pretrained: list[tuple[str, PreTrainedModel]]) -> Iterator[tuple[str, PreTrainedModel]]:
    """Models with a method for image features, without those that only pass it on to one inside them."""
    having = [
        (name, model) for name, model in pretrained if any(hasattr(model, method) for method in _FEATURES.values())
    ]
    for name, base in having:
        inner = {id(child) for child in base.modules()} - {id(base)}
        if not any(id(other) in inner for _, other in having):
            yield name, base


def _decoder_of(name: str, base: PreTrainedModel) -> PreTrainedModel:
    decoder = unwrap(base.get_decoder())
    for _, part in _pretrained(decoder):
        # the decoder of some models has a head of its own
        if _has_layers(part):
            return part
    raise UserError(
        f"{type(base).__name__} at '{name}' has no decoder: expected a language model with `layers`, found "
        f"{type(decoder).__name__}. Build the whole model before the strategy sets it up."
    )


def _head_of(base: PreTrainedModel, pretrained: list[tuple[str, PreTrainedModel]]) -> PreTrainedModel | None:
    for _, parent in pretrained:
        if any(unwrap(child) is base for child in parent.children()):
            return parent
    return base if isinstance(base, GenerationMixin) else None


def query_heads(module: nn.Module) -> list[int]:
    """Query head counts of the supported models inside a module; empty if there is none (yet)."""
    try:
        return [model.query_heads for model in find_models(module)]
    except ValueError:
        return []


def tower_of(module: nn.Module, family: Family) -> nn.Module:
    """The vision tower of a base model or of a model with a head."""
    assert family.tower is not None
    parts = [module, *module.children()]
    base = next(unwrap(part) for part in parts if _child(unwrap(part), family.tower) is not None)
    return unwrap(base.get_submodule(family.tower))


def smallest_unit(config: Any, tower: nn.Module) -> tuple[int, int]:
    """Shape of the packed pixels of one square of patches that a tower merges.

    Args:
        config: The tower's config.
        tower: The tower.
    """
    projection: Any = unwrap(tower.get_submodule("patch_embed")).get_submodule("proj")
    width = projection.in_channels
    for side in projection.kernel_size:
        width *= side
    return int(config.spatial_merge_size) ** 2, int(width)
