"""Batches for any vision-language model, made from its signatures: placeholders are as many as features were measured."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vdp.check.pixels import (
    IMAGES,
    Arguments,
    Request,
    first_field,
    image_candidates,
    parameter_names,
    video_candidates,
)
from lightning_vdp.families.conventions import FEATURE_METHODS, placeholder_fields

__all__ = [
    "NoInput",
    "Pixels",
    "find_image_pixels",
    "find_video_pixels",
    "make_batch",
    "make_video_batch",
    "vision_base",
]

_WORDS = range(3, 100)
# marks places of features where the config names no token for them
_NO_TOKEN = -2
# what `mm_token_type_ids` says of a placeholder
_IMAGE, _VIDEO = 1, 2


class NoInput(ValueError):
    """No input that the model takes is known."""


@dataclass(frozen=True)
class Pixels:
    """Arguments of a tower that a model was found to take.

    Args:
        arguments: Arguments of the model's forward, by name.
        rows: Rows of features that each image yields.
    """

    arguments: Arguments
    rows: tuple[int, ...]


@dataclass(frozen=True)
class _Text:
    """Rows of words and placeholders.

    Args:
        ids: Token ids, shape ``[rows, positions]``.
        mask: 1 where there is a token, 0 where there is padding.
        token: Id of the placeholder.
    """

    ids: Tensor
    mask: Tensor
    token: int


def vision_base(model: nn.Module) -> Any:
    """The innermost module with a method for features of images or of videos alone, or None."""
    for name in FEATURE_METHODS.values():
        found = [module for module in model.modules() if callable(getattr(module, name, None))]
        if found:
            return found[-1]
    return None


def find_image_pixels(model: nn.Module, seed: int) -> Pixels:
    """Finds pixels of three images that the model takes, and counts their features.

    Args:
        model: Model in float64.
        seed: Seed of the pixels.

    Raises:
        NoInput: If nothing fits; the message says why not.
    """
    base = vision_base(model)
    if base is None:
        raise NoInput(f"{type(model).__name__} has no method for image features")
    method = next(getattr(base, name) for name in FEATURE_METHODS.values() if hasattr(base, name))
    return _first_that_fits(method, image_candidates(Request(base, method, seed)), IMAGES)


def find_video_pixels(base: Any, seed: int) -> Pixels:
    """Finds pixels of one video that a model takes, and counts their features.

    Args:
        base: What `vision_base` found.
        seed: Seed of the pixels.

    Raises:
        NoInput: If nothing fits; the message says why not.
    """
    if not all(hasattr(base, name) for name in FEATURE_METHODS.values()):
        raise NoInput(f"{type(base).__name__} takes images or videos, not both")
    method = base.get_video_features
    return _first_that_fits(method, video_candidates(Request(base, method, seed)), 1)


def _first_that_fits(method: Callable[..., Any], candidates: Iterator[Arguments], images: int) -> Pixels:
    problems = []
    for arguments in candidates:
        try:
            with torch.no_grad():
                return Pixels(arguments, _rows(method(**arguments, return_dict=True), images))
        except Exception as error:
            shapes = {name: list(value.shape) for name, value in arguments.items() if isinstance(value, Tensor)}
            problems.append(f"{shapes}: {type(error).__name__}: {error}"[:300])
    raise NoInput("no pixels fit: " + " || ".join(problems))


def _rows(outputs: Any, images: int) -> tuple[int, ...]:
    """Rows of features of each image; of all images together where the outputs do not tell them apart."""
    features = _features(outputs)
    if not isinstance(features, Tensor):
        return tuple(part.shape[:-1].numel() for part in features)
    if features.dim() > 2:
        return (features.shape[1:-1].numel(),) * features.shape[0]
    rows = features.shape[0]
    return (rows // images,) * images if rows % images == 0 else (rows,)


def _features(outputs: Any) -> Any:
    for name in ("pooler_output", "last_hidden_state"):
        features = getattr(outputs, name, None)
        if isinstance(features, Tensor) or (isinstance(features, (list, tuple)) and features):
            return features
    deepstack = getattr(outputs, "deepstack_features", None)
    if deepstack:
        level = deepstack[0]
        return level[1] if isinstance(level, tuple) and isinstance(level[0], int) else level
    raise TypeError(f"No features in {type(outputs).__name__}.")


def _placeholder(config: Any, kind: str) -> int | None:
    mapping = getattr(config, "vocabulary_map", None) or {}
    values = (mapping.get(f"<{kind}>"), *(getattr(config, name, None) for name in placeholder_fields(kind)))
    return next((value for value in values if isinstance(value, int)), None)


def _sequence(config: Any, runs: Sequence[int], token: int, draw: torch.Generator, text: int) -> list[int]:
    """Words with runs of placeholders in between, each between the tokens that start and end it if there are such."""

    def words(count: int) -> list[int]:
        return torch.randint(_WORDS.start, _WORDS.stop, (count,), generator=draw).tolist()

    def edge(vision: str, image: str, short: str) -> list[int]:
        found = first_field((config,), f"{vision}_token_id", f"{image}_token_id", f"{short}_id", f"{short}_index")
        return [found] if isinstance(found, int) else []

    start = edge("vision_start", "image_start", "boi_token")
    end = edge("vision_end", "image_end", "eoi_token")
    ids = words(text)
    for count in runs:
        ids += start + [token] * count + end + words(text)
    return ids


def _padded(sequences: list[list[int]], token: int) -> _Text:
    """Rows padded on the right to an odd length, which no number of ranks divides."""
    longest = max(map(len, sequences))
    if longest % 2 == 0:
        sequences[0] += [_WORDS.start] * (longest + 1 - len(sequences[0]))
        longest += 1
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    return _Text(ids, mask, token)


def _batch(model: nn.Module, text: _Text, token_type: int, pixels: Arguments) -> dict[str, Any]:
    """The arguments that the model's forward takes, with labels."""
    names = parameter_names(type(model).forward) + parameter_names(type(vision_base(model)).forward)
    features = text.ids == text.token
    ids = text.ids.masked_fill(text.ids == _NO_TOKEN, _WORDS.start)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": text.mask, **pixels}
    batch["labels"] = ids.masked_fill(features | (text.mask == 0), -100)
    batch["mm_token_type_ids"] = features.int() * token_type
    for name in ("token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask"):
        batch[name] = features.int()
    if token_type == _VIDEO:
        batch["video_second_per_grid"] = torch.ones(1)
    return {name: value for name, value in batch.items() if name in names}


def make_batch(model: nn.Module, seed: int = 0, text: int = 7, rows: int = 1) -> dict[str, Any]:
    """Makes a batch with labels: three images between words, in one row or over two.

    Args:
        model: Model in float64.
        seed: Seed of words and pixels.
        text: Words before, between and after images.
        rows: 2 puts two images into the first row and one into the second, which is padded.

    Raises:
        NoInput: If no input is known that the model takes.
    """
    base = vision_base(model)
    names = parameter_names(type(model).forward)
    if base is None and not any("pixel" in name or "image" in name for name in names):
        return _words_alone(text, rows, seed)
    pixels = find_image_pixels(model, seed)
    token = _placeholder(base.config, "image" if hasattr(base, FEATURE_METHODS["image"]) else "video")
    if token is None:
        if "image_embeds_position_mask" not in names:
            raise NoInput(f"{type(base.config).__name__} names no image token")
        token = _NO_TOKEN
    arguments = dict(pixels.arguments)
    per_image = pixels.rows
    if len(per_image) == 1 and per_image[0] % IMAGES == 0:
        # told in sum, of images that are alike
        per_image = (per_image[0] // IMAGES,) * IMAGES
    counts = [per_image] if rows == 1 else [per_image[:2], per_image[2:]]
    if rows == 2:
        _spread(arguments)
    draw = torch.Generator().manual_seed(seed)
    sequences = [_sequence(base.config, part, token, draw, text) for part in counts]
    return _batch(model, _padded(sequences, token), _IMAGE, arguments)


def make_video_batch(model: nn.Module, seed: int = 0, text: int = 7) -> dict[str, Any]:
    """Makes a batch with labels: one video between words, its frames in one run or apart, as the model wants it.

    Args:
        model: Model in float64.
        seed: Seed of words and pixels.
        text: Words before, between and after.

    Raises:
        NoInput: If no input is known that the model takes.
    """
    base = vision_base(model)
    pixels = find_video_pixels(base, seed)
    frames = next((int(value[0, 0]) for name, value in pixels.arguments.items() if "grid_thw" in name), 1)
    rows = sum(pixels.rows)
    first, last = (getattr(base.config, f"video_{side}_token_id", None) for side in ("start", "end"))
    problem = "its config names no video token"
    # some have one token for images and videos, which others tell apart by what stands around all frames
    tokens = dict.fromkeys(_placeholder(base.config, kind) for kind in ("video", "image"))
    for runs, token, around in product(([rows], [rows // frames] * frames), tokens, (False, True)):
        if token is None:
            continue
        draw = torch.Generator().manual_seed(seed)
        sequence = _sequence(base.config, runs, token, draw, text)
        if around and first and last:
            sequence = [first, *sequence, last]
        batch = _batch(model, _padded([sequence], token), _VIDEO, dict(pixels.arguments))
        try:
            with torch.no_grad():
                model(**batch)
            return batch
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    raise NoInput(f"no videos fit: {problem}")


def _words_alone(text: int, rows: int, seed: int) -> dict[str, Any]:
    ids = torch.randint(_WORDS.start, _WORDS.stop, (rows, 5 * text), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _spread(arguments: Arguments) -> None:
    """Tiles of one row, [1, 3, ...], become those of two rows, [2, 2, ...], of which the last is empty."""
    pixels = arguments.get("pixel_values")
    for name, value in arguments.items():
        if isinstance(value, Tensor) and isinstance(pixels, Tensor) and value.shape[:2] == (1, 3) and pixels.dim() == 5:
            arguments[name] = torch.cat([value[0], torch.zeros_like(value[0, :1])]).unflatten(0, (2, 2))
