"""From a module to its parts: the models in it, their towers, decoders and heads."""

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_vdp.errors import UserError
from lightning_vdp.families.conventions import (
    COUNTS,
    FEATURE_METHODS,
    GRID,
    INDEXER,
    OUTPUT_PROJECTION,
    TOWERS,
    placeholder_fields,
)
from lightning_vdp.families.facts import Facts, facts_of
from lightning_vdp.families.family import LANGUAGE_MODEL, Family, Modality
from lightning_vdp.families.wrappers import class_name, plain_name, unwrap

__all__ = ["DividedModel", "family_of", "find_models", "query_heads", "smallest_unit", "tower_of", "untied_heads"]


@dataclass(frozen=True)
class DividedModel:
    """The parts of one model. A model used without its head has `head` None.

    Args:
        name: Where the model hangs in the LightningModule.
        family: How models of its type are divided.
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
    def decoder_facts(self) -> Facts:
        """The record of the decoder's model type."""
        return facts_of(self.decoder.config)

    @property
    def gathered_attention(self) -> list[nn.Module]:
        """Attention modules of the decoder that must see the whole sequence."""
        modules = [unwrap(module) for layer in self.layers for module in layer.children()]
        if self.decoder_facts.gathered_attention:
            return [module for module in modules if hasattr(module, OUTPUT_PROJECTION)]
        # layers that share what another layer's indexer found have none of their own
        indexed = {type(module) for module in modules if any(INDEXER in name for name, _ in module.named_children())}
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


def find_models(module: nn.Module) -> list[DividedModel]:
    """Finds every supported vision-language model and causal language model inside a module, wherever it hangs.

    Raises:
        UserError: If there is none, or one that cannot be divided; the message says what was found.
    """
    pretrained = list(_pretrained(module))
    _refuse(pretrained)
    models = [
        DividedModel(name, family_of(base), _head_of(base, pretrained), base, _decoder_of(name, base))
        for name, base in _vision_language_bases(pretrained)
    ]
    within = {id(part) for model in models for part in (model.head or model.base).modules()}
    models += [
        DividedModel(name, LANGUAGE_MODEL, head, base, base)
        for name, head, base in _language_models(pretrained)
        if id(head) not in within
    ]
    if not models:
        found = sorted({f"{class_name(model)} (model_type {model.config.model_type!r})" for _, model in pretrained})
        raise UserError(
            f"No supported model in {class_name(module)}: looked in all its submodules for a Hugging Face model with "
            f"`get_image_features` and a decoder, and for causal language models; found "
            f"{', '.join(found) if found else 'no Hugging Face model at all'}. Make the model an attribute of the "
            "LightningModule in `__init__` or `configure_model`, or train other models with strategy='fsdp'."
        )
    return models


def _refuse(pretrained: list[tuple[str, PreTrainedModel]]) -> None:
    for name, model in pretrained:
        reason = facts_of(model.config).refused
        if reason is not None:
            raise UserError(
                f"{class_name(model)} at '{name}' (model_type {model.config.model_type!r}) cannot be divided: {reason}; "
                "set `sequence_parallel_size=1`, or train it with strategy='fsdp'."
            )


def _vision_language_bases(pretrained: list[tuple[str, PreTrainedModel]]) -> Iterator[tuple[str, PreTrainedModel]]:
    """Models with a method for image features, without those that only pass it on to one inside them."""
    having = [
        (name, model)
        for name, model in pretrained
        if any(hasattr(model, method) for method in FEATURE_METHODS.values())
    ]
    for name, base in having:
        inner = {id(child) for child in base.modules()} - {id(base)}
        if not any(id(other) in inner for _, other in having):
            yield name, base


def _language_models(
    pretrained: list[tuple[str, PreTrainedModel]],
) -> Iterator[tuple[str, PreTrainedModel, PreTrainedModel]]:
    """Causal language models with their decoders."""
    for name, head in pretrained:
        base = _child(head, "model")
        known = head.config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if (known or type(head).__name__.endswith("ForCausalLM")) and _is_decoder(base):
            yield name, head, base


def _decoder_of(name: str, base: PreTrainedModel) -> PreTrainedModel:
    decoder = unwrap(base.get_decoder())
    for _, part in _pretrained(decoder):
        # the decoder of some models has a head of its own
        if _is_decoder(part):
            return part
    raise UserError(
        f"{class_name(base)} at '{name}' has no decoder: expected a language model with `layers`, found "
        f"{class_name(decoder)}. Build the whole model before the strategy sets it up."
    )


def _head_of(base: PreTrainedModel, pretrained: list[tuple[str, PreTrainedModel]]) -> PreTrainedModel | None:
    for _, parent in pretrained:
        if any(unwrap(child) is base for child in parent.children()):
            return parent
    return base if isinstance(base, GenerationMixin) else None


def _modality(base: PreTrainedModel, kind: str, facts: Facts) -> Modality | None:
    """What a base model calls the arguments of one kind of vision input; None where it takes none of that kind."""
    method = getattr(type(base), FEATURE_METHODS[kind], None)
    if method is None:
        return None
    parameters = inspect.signature(method).parameters
    names = tuple(name for name, value in parameters.items() if name != "self" and value.kind is not value.VAR_KEYWORD)
    return Modality(
        name=kind,
        pixels=names[0],
        grid=next((name for name in names if GRID.search(name)), None),
        features=FEATURE_METHODS[kind],
        arguments=names,
        counts=next((name for name in names if COUNTS.search(name)), None),
        token=_placeholder(base.config, facts.video_placeholder if kind == "video" else kind),
    )


def _placeholder(config: Any, kind: str) -> int | None:
    """The id of the token that stands for features of a kind."""
    names = (*placeholder_fields(kind), "image_token_id", "image_token_index")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def family_of(base: PreTrainedModel) -> Family:
    """Reads off a base model how it is divided: transformers names methods and their arguments alike in all models."""
    facts = facts_of(base.config)
    found = [_modality(base, kind, facts) for kind in FEATURE_METHODS]
    modalities = tuple(modality for modality in found if modality is not None)
    routable = hasattr(base, "get_placeholder_mask") and None not in [modality.token for modality in modalities]
    positions = getattr(type(base), "get_rope_index", None)
    return Family(
        modalities=modalities,
        facts=replace(facts, routed=facts.routed and routable),
        tower=next((name for name in TOWERS if _child(base, name) is not None), None),
        needs_token_types=positions is not None and "mm_token_type_ids" in inspect.signature(positions).parameters,
        arguments=frozenset(inspect.signature(type(base).forward).parameters),
    )


def query_heads(module: nn.Module) -> list[int]:
    """Query head counts of the supported models inside a module; empty if there is none (yet)."""
    try:
        return [model.query_heads for model in find_models(module)]
    except ValueError:
        return []


def untied_heads(module: nn.Module) -> list[nn.Module]:
    """The language model heads inside a module that share their weights with no other part of it, without wrappers."""
    users = Counter(
        id(weight) for part in module.modules() for weight in part._parameters.values() if weight is not None
    )
    heads = []
    for _, model in _pretrained(module):
        head = model.get_output_embeddings()
        if head is not None and isinstance(unwrap(head), nn.Linear):
            plain = unwrap(head)
            if plain not in heads and all(users[id(weight)] == 1 for weight in plain.parameters()):
                heads.append(plain)
    return heads


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


def _contains(module: nn.Module, part: nn.Module) -> bool:
    return module is not part and any(child is part for child in module.modules())


def _child(module: nn.Module, name: str) -> nn.Module | None:
    child = module._modules.get(name)
    return None if child is None else unwrap(child)


def _pretrained(module: nn.Module) -> Iterator[tuple[str, PreTrainedModel]]:
    for name, child in module.named_modules():
        if isinstance(child, PreTrainedModel):
            yield plain_name(name), child


def _is_decoder(module: nn.Module | None) -> TypeGuard[PreTrainedModel]:
    return isinstance(module, PreTrainedModel) and isinstance(getattr(module, "layers", None), nn.ModuleList)
