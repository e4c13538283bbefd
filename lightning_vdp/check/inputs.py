"""Input for any vision-language model, made from its signatures: placeholders are as many as features were measured."""

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["NoInput", "Pixels", "describe_vision", "make_batch", "make_video_batch", "vision_base"]

Arguments = dict[str, Any]
# sides of three images, in merged patches: no two alike, and their sum is odd
_SIDES = ((2, 2), (3, 4), (2, 3))
_WORDS = range(3, 100)
_IMAGES = 3
# marks places of features where the config names no token for them
_NO_TOKEN = -2


class NoInput(ValueError):
    """No input that the model takes is known."""


@dataclass(frozen=True)
class Pixels:
    """Arguments of a tower that a model was found to take.

    Args:
        arguments: Of the forward, by name.
        rows: Rows of features that each image yields.
    """

    arguments: Arguments
    rows: tuple[int, ...]


def vision_base(model: nn.Module) -> Any:
    """The innermost module with a method for features of images or of videos alone, or None."""
    for name in ("get_image_features", "get_video_features"):
        found = [module for module in model.modules() if callable(getattr(module, name, None))]
        if found:
            return found[-1]
    return None


def _method(base: Any) -> Any:
    return getattr(base, "get_image_features", None) or base.get_video_features


def _vision_config(base: Any) -> Any:
    for name in ("vision_config", "vq_config"):
        if getattr(base.config, name, None) is not None:
            return getattr(base.config, name)
    return base.config


def _side(value: Any) -> int:
    return int(value if isinstance(value, int) else value[0])


def _field(configs: Sequence[Any], names: str) -> Any:
    return next(
        (getattr(config, name) for config in configs for name in names.split() if getattr(config, name, None)), None
    )


def _merge(base: Any) -> int:
    """Patches along a side that become one row of features."""
    configs = (base.config, _vision_config(base))
    merge = _field(configs, "spatial_merge_size merge_size adapter_merge_size merge_kernel_size")
    if merge is None and isinstance(ratio := getattr(base.config, "downsample_ratio", None), float):
        merge = round(1 / ratio)
    return 1 if merge is None else _side(merge)


def _patch(base: Any) -> int:
    return _side(_field((_vision_config(base), base.config), "patch_size") or 8)


def _image(base: Any) -> int:
    return _side(_field((_vision_config(base), base.config), "image_size resolution") or 32)


def _draw(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _projections(base: Any) -> Iterator[Any]:
    """For each child but the decoder, the first layer that could take patches."""
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    for _, child in base.named_children():
        if child is decoder:
            continue
        layers = (part for part in child.modules() if isinstance(part, (nn.Conv2d, nn.Conv3d, nn.Linear)))
        if first := next(layers, None):
            yield first


def _packed(base: Any, names: list[str], seed: int, grids: list[list[int]]) -> Iterator[Arguments]:
    """Patches of all images joined, with a grid of (time, height, width) or (height, width) for each image."""
    grid_name = next(name for name in names if "_grid_" in name)
    if grid_name.endswith("hw") and not grid_name.endswith("thw"):
        grids = [grid[1:] for grid in grids]
    patches = sum(math.prod(grid) for grid in grids)
    patch, merge = _patch(base), _merge(base)
    shapes: list[tuple[int, ...]] = []
    for projection in _projections(base):
        if isinstance(projection, nn.Linear):
            shapes.append((patches, projection.in_features))
        else:
            kernel = projection.kernel_size
            shapes.append((patches, projection.in_channels * math.prod(kernel)))
            shapes.append((patches, projection.in_channels, *kernel))
    shapes += [(patches, times * patch * patch) for times in (3, 6)] + [(patches, 3, patch, patch)]
    extra: Arguments = {}
    for name in names:
        if name.endswith("merge_sizes"):
            extra[name] = torch.tensor([1, 2, 1][: len(grids)])
    for shape in dict.fromkeys(shapes):
        yield {names[0]: _draw(shape, seed), grid_name: torch.tensor(grids), **extra}
    # one row of pixels for each row of features
    merged = [[*grid[:-2], grid[-2] // merge, grid[-1] // merge] for grid in grids]
    rows = sum(math.prod(grid) for grid in merged)
    yield {names[0]: _draw((rows, patch * merge, patch * merge, 3), seed), grid_name: torch.tensor(merged)}


def _tiles(base: Any, seed: int) -> Iterator[Arguments]:
    """Images as one small picture and the tiles of a large one."""
    size = _image(base)
    sizes = torch.tensor([[size, size], [2 * size, size], [size, 2 * size]])
    if getattr(base.config, "image_grid_pinpoints", None):
        yield {"pixel_values": _draw((3, 3, 3, size, size), seed), "image_sizes": sizes}


def _varying(base: Any, seed: int) -> Iterator[Arguments]:
    """Images of several sizes, padded to the largest."""
    size, unit = 32, _patch(base) * _merge(base)
    unit = max(unit, 8)
    sizes = torch.tensor([[size, size], [size - unit, size], [size, size - unit]])
    yield {"pixel_values": _draw((3, 3, size, size), seed), "image_sizes": sizes}


def _fixed(base: Any, names: list[str], seed: int) -> Iterator[Arguments]:
    size, patch = _image(base), _patch(base)
    plain = _draw((3, 3, size, size), seed)
    model_type = base.config.model_type
    if "image_sizes" in names:
        yield from _tiles(base, seed)
        yield from _varying(base, seed)
    if "image_token_pooling" in names:
        yield from _pooled(base, seed)
    if "spatial_shapes" in names:
        sides = torch.tensor([[4, 4], [4, 2], [2, 4]])
        mask = torch.zeros(3, 16, dtype=torch.int64)
        for row, (height, width) in enumerate(sides.tolist()):
            mask[row, : height * width] = 1
        patches = _draw((3, 16, 3 * patch * patch), seed)
        yield {"pixel_values": patches, "spatial_shapes": sides, "pixel_attention_mask": mask}
    elif "pixel_attention_mask" in names:
        # tiles of a row, [rows, tiles, ...]
        mask = torch.ones(1, 3, dtype=torch.bool)
        yield {"pixel_values": plain[None], "pixel_attention_mask": mask}
        yield {"pixel_values": plain[None]}
    if "idefics" in model_type or "smolvlm" in model_type:
        yield {"pixel_values": plain[None]}
    if "image_position_ids" in names:
        yield from _positioned(base, seed)
    if "high_res_pixel_values" in names:
        high = _side(base.config.high_res_vision_config.image_size)
        yield {"pixel_values": plain, "high_res_pixel_values": _draw((3, 3, high, high), seed + 1)}
    if "num_local_patches" in names:
        for local in (size, size // 2, 2 * size):
            tiles = {
                "pixel_values": plain,
                "pixel_values_local": _draw((3, 3, local, local), seed + 1),
                "num_local_patches": [2, 0, 1],
            }
            if "patches_grid" in names:
                tiles["patches_grid"] = [[2, 1], [0, 0], [1, 1]]
            yield tiles
    if "target_sizes" in names:
        sides = torch.tensor([[4, 4], [4, 8], [8, 4]])
        yield {"pixel_values": _draw((1, 3, patch, patch * int(sides.prod(-1).sum())), seed), "target_sizes": sides}
    if "qformer_input_ids" in names:
        prompts = torch.arange(5, 20).view(3, 5)
        yield {"pixel_values": plain, "qformer_input_ids": prompts}
        yield {"pixel_values": _draw((3, 2, 3, size, size), seed), "qformer_input_ids": prompts}
    if names[0] == "flattened_patches":
        rows, columns = torch.meshgrid(torch.arange(1, 5), torch.arange(1, 5), indexing="ij")
        places = torch.stack([rows.flatten(), columns.flatten()], -1).double()
        patches = torch.cat([places.expand(3, 16, 2), _draw((3, 16, 3 * patch * patch), seed)], -1)
        yield {"flattened_patches": patches}
    if hasattr(base, "vision_embed_tokens"):
        yield {"pixel_values": _draw((3, 4, base.vision_embed_tokens.in_features), seed)}
    yield {"pixel_values": plain}
    if time := _field((_vision_config(base),), "temporal_patch_size"):
        # square patches as units, [patches, time, height, width, channels]
        yield {"pixel_values": _draw((7, time, patch, patch, 3), seed)}
    yield {"pixel_values": plain[None]}


def _positioned(base: Any, seed: int) -> Iterator[Arguments]:
    """Patches of each image with their places, padded to as many for all."""
    kernel = int(_field((_vision_config(base),), "pooling_kernel_size") or 1)
    projection = next(_projections(base), None)
    wide = [projection.in_features] if isinstance(projection, nn.Linear) else []
    most = max(height * width for height, width in _SIDES) * kernel**2
    places = torch.full((3, most, 2), -1)
    for index, (height, width) in enumerate(_SIDES):
        rows, columns = torch.meshgrid(torch.arange(height * kernel), torch.arange(width * kernel), indexing="ij")
        places[index, : rows.numel()] = torch.stack([columns.flatten(), rows.flatten()], -1)
    for width in [*wide, 3 * _patch(base) ** 2]:
        yield {"pixel_values": _draw((3, most, width), seed), "image_position_ids": places}


def _pooled(base: Any, seed: int) -> Iterator[Arguments]:
    """Crops with the patches that each row of features pools; -1 fills up."""
    vision = _vision_config(base)
    patch, side = _patch(base), _image(base) // _patch(base)
    # an image is one crop, pooled two by two
    cells = [
        [row * side + column, row * side + column + 1, (row + 1) * side + column, (row + 1) * side + column + 1]
        for row in range(0, side - 1, 2)
        for column in range(0, side - 1, 2)
    ]
    rows = side // 2
    crops = _draw((3, side * side, int(vision.num_channels) * patch * patch), seed)
    pooling = torch.tensor([[crop * side * side + cell for cell in four] for crop in range(3) for four in cells])
    grids = torch.tensor([[rows, rows, 0, 0]] * 3)
    yield {"pixel_values": crops, "image_token_pooling": pooling, "image_grids": grids}


def _names(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name not in ("kwargs", "self")]


def _tensors(outputs: Any) -> Any:
    for field in ("pooler_output", "last_hidden_state"):
        features = getattr(outputs, field, None)
        if isinstance(features, Tensor) or (isinstance(features, (list, tuple)) and features):
            return features
    deepstack = getattr(outputs, "deepstack_features", None)
    if deepstack:
        level = deepstack[0]
        return level[1] if isinstance(level, tuple) and isinstance(level[0], int) else level
    raise TypeError(f"No features in {type(outputs).__name__}.")


def _rows(outputs: Any, images: int) -> tuple[int, ...]:
    """Rows of features of each image; of all images together where the outputs do not tell them apart."""
    features = _tensors(outputs)
    if not isinstance(features, Tensor):
        return tuple(part.shape[:-1].numel() for part in features)
    if features.dim() > 2:
        return (features.shape[1:-1].numel(),) * features.shape[0]
    rows = features.shape[0]
    return (rows // images,) * images if rows % images == 0 else (rows,)


def _grids(base: Any, names: list[str], frames: int = 1) -> list[list[int]]:
    merge = _merge(base)
    if any(name.endswith("merge_sizes") for name in names):
        merge = 2
    return [[frames, height * merge, width * merge] for height, width in _SIDES]


def _try(method: Any, candidates: Iterator[Arguments], images: int) -> Pixels:
    problems = []
    for arguments in candidates:
        try:
            with torch.no_grad():
                return Pixels(arguments, _rows(method(**arguments, return_dict=True), images))
        except Exception as error:
            shapes = {name: list(value.shape) for name, value in arguments.items() if isinstance(value, Tensor)}
            problems.append(f"{shapes}: {type(error).__name__}: {error}"[:300])
    raise NoInput("no pixels fit: " + " || ".join(problems))


def describe_vision(model: nn.Module, seed: int) -> Pixels:
    """Finds pixels of three images that the model takes, and counts their features.

    Args:
        model: In float64.
        seed: Of the pixels.

    Raises:
        NoInput: If nothing fits; the message says why not.
    """
    base = vision_base(model)
    if base is None:
        raise NoInput(f"{type(model).__name__} has no method for image features")
    method = _method(base)
    names = _names(method)
    if any("_grid_" in name for name in names):
        return _try(method, _packed(base, names, seed, _grids(base, names)), 3)
    return _try(method, _fixed(base, names, seed), 3)


def _videos(base: Any, names: list[str], seed: int) -> Iterator[Arguments]:
    """Pixels of one video."""
    if any(name.endswith("grid_thw") for name in names):
        merge = _grids(base, names)[0][1] // 2
        # some towers pair frames
        for frames in (3, 4):
            yield from _packed(base, names, seed, [[frames, 2 * merge, 3 * merge]])
    if "target_sizes_videos" in names:
        patch, sides = _patch(base), torch.tensor([[4, 4], [4, 8], [8, 4]])
        strip = _draw((1, 3, patch, patch * int(sides.prod(-1).sum())), seed)
        yield {names[0]: strip, "target_sizes_videos": sides}
    if "video_position_ids" in names:
        for arguments in _positioned(base, seed):
            pixels, places = arguments.values()
            yield {names[0]: pixels, "video_position_ids": places, "num_frames_per_video": torch.tensor([len(pixels)])}
    size, time = _image(base), int(_field((_vision_config(base), base.config), "video_temporal_patch_size") or 1)
    for frames in (3, 8):
        yield {names[0]: _draw((1, frames, 3 * time, size, size), seed)}


def _describe_video(base: Any, seed: int) -> Pixels:
    """Finds pixels of one video that a model takes, and counts their features."""
    if not hasattr(base, "get_image_features") or not hasattr(base, "get_video_features"):
        raise NoInput(f"{type(base).__name__} takes no videos beside images")
    names = _names(base.get_video_features)
    return _try(base.get_video_features, _videos(base, names, seed), 1)


def _token(config: Any, kind: str) -> int | None:
    mapping = getattr(config, "vocabulary_map", None) or {}
    names = (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_patch_id")
    values = (mapping.get(f"<{kind}>"), *(getattr(config, name, None) for name in names))
    return next((value for value in values if isinstance(value, int)), None)


def _sequence(config: Any, runs: Sequence[int], token: int, draw: torch.Generator, text: int) -> list[int]:
    """Words with runs of placeholders in between, each between the tokens that start and end it if there are such."""

    def words(count: int) -> list[int]:
        return torch.randint(_WORDS.start, _WORDS.stop, (count,), generator=draw).tolist()

    start = _field((config,), "vision_start_token_id image_start_token_id boi_token_id boi_token_index")
    end = _field((config,), "vision_end_token_id image_end_token_id eoi_token_id eoi_token_index")
    ids = words(text)
    for count in runs:
        ids += [start] * isinstance(start, int) + [token] * count + [end] * isinstance(end, int) + words(text)
    return ids


def _padded(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask, padded on the right to an odd length, which no number of ranks divides."""
    longest = max(map(len, sequences))
    if longest % 2 == 0:
        sequences[0] += [_WORDS.start] * (longest + 1 - len(sequences[0]))
        longest += 1
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    return ids, mask


def _batch(model: nn.Module, ids: Tensor, mask: Tensor, token: int, kind: int, arguments: Arguments) -> dict[str, Any]:
    names = _names(type(model).forward) + _names(type(vision_base(model)).forward)
    features = ids == token
    ids = ids.masked_fill(ids == _NO_TOKEN, _WORDS.start)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, **arguments}
    batch["labels"] = ids.masked_fill(features | (mask == 0), -100)
    batch["mm_token_type_ids"] = features.int() * kind
    for name in ("token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask"):
        batch[name] = features.int()
    if kind == 2:
        batch["video_second_per_grid"] = torch.ones(1)
    return {name: value for name, value in batch.items() if name in names}


def make_batch(model: nn.Module, seed: int = 0, text: int = 7, rows: int = 1) -> dict[str, Any]:
    """Makes a batch with labels: three images between words, in one row or over two.

    Args:
        model: In float64.
        seed: Of words and pixels.
        text: Words before, between and after images.
        rows: 2 puts two images into the first row and one into the second, which is padded.

    Raises:
        NoInput: If no input is known that the model takes.
    """
    base = vision_base(model)
    names = _names(type(model).forward)
    if base is None and not any("pixel" in name or "image" in name for name in names):
        return _words_alone(text, rows, seed)
    pixels = describe_vision(model, seed)
    token = _token(base.config, "image" if hasattr(base, "get_image_features") else "video")
    if token is None:
        if "image_embeds_position_mask" not in names:
            raise NoInput(f"{type(base.config).__name__} names no image token")
        token = _NO_TOKEN
    arguments = dict(pixels.arguments)
    per_image = pixels.rows
    if len(per_image) == 1 and per_image[0] % _IMAGES == 0:
        # told in sum, of images that are alike
        per_image = (per_image[0] // _IMAGES,) * _IMAGES
    counts = [per_image] if rows == 1 else [per_image[:2], per_image[2:]]
    if rows == 2:
        _spread(arguments)
    draw = torch.Generator().manual_seed(seed)
    ids, mask = _padded([_sequence(base.config, part, token, draw, text) for part in counts])
    return _batch(model, ids, mask, token, 1, arguments)


def make_video_batch(model: nn.Module, seed: int = 0, text: int = 7) -> dict[str, Any]:
    """Makes a batch with labels: one video between words, its frames in one run or apart, as the model wants it.

    Args:
        model: In float64.
        seed: Of words and pixels.
        text: Words before, between and after.

    Raises:
        NoInput: If no input is known that the model takes.
    """
    base = vision_base(model)
    pixels = _describe_video(base, seed)
    frames = next((int(value[0, 0]) for name, value in pixels.arguments.items() if "grid_thw" in name), 1)
    rows = sum(pixels.rows)
    first, last = (getattr(base.config, f"video_{side}_token_id", None) for side in ("start", "end"))
    problem = "its config names no video token"
    # some have one token for images and videos, which others tell apart by what stands around all frames
    tokens = dict.fromkeys(_token(base.config, kind) for kind in ("video", "image"))
    for runs, token, around in product(([rows], [rows // frames] * frames), tokens, (False, True)):
        if token is None:
            continue
        draw = torch.Generator().manual_seed(seed)
        sequence = _sequence(base.config, runs, token, draw, text)
        if around and first and last:
            sequence = [first, *sequence, last]
        ids, mask = _padded([sequence])
        batch = _batch(model, ids, mask, token, 2, dict(pixels.arguments))
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
