"""Input for any vision-language model, made from its signatures: placeholders are as many as features were measured."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["describe_vision", "make_batch", "vision_base"]

Pixels = dict[str, Any]


def vision_base(model: nn.Module) -> Any:
    """The innermost module with a method for image features, or None."""
    found = [module for module in model.modules() if callable(getattr(module, "get_image_features", None))]
    return found[-1] if found else None


def _first_projection(tower: nn.Module) -> nn.Module | None:
    for module in tower.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d, nn.Linear)):
            return module
    return None


def _towers(base: Any) -> Iterator[nn.Module]:
    text = id(base.get_decoder()) if hasattr(base, "get_decoder") else None
    for name, child in base.named_children():
        if id(child) != text and ("vis" in name or "image" in name or "tower" in name or "encoder" in name):
            yield child


def _vision_config(base: Any) -> Any:
    config = base.config
    for name in ("vision_config", "vq_config"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return config


def _side(value: Any) -> int:
    return int(value if isinstance(value, int) else value[0])


def _merge(base: Any) -> int:
    for config in (base.config, _vision_config(base)):
        for name in ("spatial_merge_size", "merge_size", "adapter_merge_size"):
            if isinstance(getattr(config, name, None), int):
                return int(getattr(config, name))
        kernel = getattr(config, "merge_kernel_size", None)
        if kernel is not None:
            return _side(kernel)
    return 1


def _draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _grids(base: Any, seed: int, frames: int = 1) -> list[list[int]]:
    merge = _merge(base)
    sides = [(2, 2), (3, 4), (2, 3)] if seed % 2 == 0 else [(4, 2), (2, 2), (3, 3)]
    return [[frames, height * merge, width * merge] for height, width in sides]


def _packed(base: Any, names: list[str], seed: int, dtype: torch.dtype, frames: int = 1) -> Iterator[Pixels]:
    grid_name = next(name for name in names if name.endswith("grid_thw"))
    grids = _grids(base, seed, frames)
    patches = sum(time * height * width for time, height, width in grids)
    shapes: list[tuple[int, ...]] = []
    for tower in _towers(base):
        projection = _first_projection(tower)
        if isinstance(projection, nn.Linear):
            shapes.append((patches, projection.in_features))
        elif projection is not None:
            kernel = projection.kernel_size
            shapes.append((patches, projection.in_channels * int(torch.tensor(kernel).prod())))
            shapes.append((patches, projection.in_channels, *kernel))
    patch = _side(getattr(_vision_config(base), "patch_size", 8))
    shapes += [(patches, 3 * patch * patch), (patches, 3, patch, patch), (patches, 6 * patch * patch)]
    for shape in dict.fromkeys(shapes):
        inputs: Pixels = {names[0]: _draw(shape, seed, dtype), grid_name: torch.tensor(grids)}
        if "image_merge_sizes" in names or "video_merge_sizes" in names:
            inputs[next(name for name in names if name.endswith("merge_sizes"))] = torch.tensor([1, 2, 1])
        yield inputs


def _fixed(base: Any, names: list[str], seed: int, dtype: torch.dtype) -> Iterator[Pixels]:
    vision = _vision_config(base)
    size = _side(getattr(vision, "image_size", None) or 32)
    patch = _side(getattr(vision, "patch_size", None) or 8)
    images = 3
    plain = _draw((images, 3, size, size), seed, dtype)
    if "image_sizes" in names:
        unit = patch * _merge(base)
        sizes = torch.tensor([[size, size], [size - unit, size], [size, size - unit]])
        yield {"pixel_values": plain, "image_sizes": sizes}
        tall = torch.tensor([[size, size], [2 * size, size], [size, 2 * size]])
        yield {"pixel_values": _draw((images, 3, 3, size, size), seed, dtype), "image_sizes": tall}
    if "pixel_attention_mask" in names or "idefics" in base.config.model_type:
        yield {"pixel_values": plain[None]}
    if "spatial_shapes" in names:
        sides = torch.tensor([[4, 4], [4, 2], [2, 4]])
        mask = torch.zeros(images, 16, dtype=torch.int64)
        for row, (height, width) in enumerate(sides.tolist()):
            mask[row, : height * width] = 1
        yield {
            "pixel_values": _draw((images, 16, 3 * patch * patch), seed, dtype),
            "spatial_shapes": sides,
            "pixel_attention_mask": mask,
        }
    if "image_position_ids" in names:
        rows, columns = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
        positions = torch.stack([columns, rows], -1).view(1, 36, 2).expand(images, -1, -1).contiguous()
        yield {"pixel_values": _draw((images, 36, 3 * patch * patch), seed, dtype), "image_position_ids": positions}
    if "high_res_pixel_values" in names:
        high = _side(base.config.high_res_vision_config.image_size)
        yield {"pixel_values": plain, "high_res_pixel_values": _draw((images, 3, high, high), seed, dtype)}
    if "num_local_patches" in names:
        yield {
            "pixel_values": plain,
            "pixel_values_local": _draw((3, 3, size, size), seed + 1, dtype),
            "num_local_patches": torch.tensor([2, 0, 1]),
        }
    if "target_sizes" in names:
        sides = torch.tensor([[4, 4], [4, 8], [8, 4]])
        patches = int(sides.prod(-1).sum())
        yield {"pixel_values": _draw((1, 3, patch, patches * patch), seed, dtype), "target_sizes": sides}
    yield {"pixel_values": plain}
    yield {"pixel_values": plain[None]}


def _names(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name != "kwargs"]


def _rows(outputs: Any) -> int:
    for field in ("pooler_output", "last_hidden_state"):
        features = getattr(outputs, field, None)
        if isinstance(features, Tensor):
            return features.shape[:-1].numel()
        if isinstance(features, (list, tuple)) and features:
            return sum(part.shape[:-1].numel() for part in features)
    raise TypeError(f"No features in {type(outputs).__name__}.")


def describe_vision(model: nn.Module, seed: int, dtype: torch.dtype) -> tuple[Pixels, int]:
    """Finds pixels that the model takes, and counts their features.

    Args:
        model: In evaluation mode.
        seed: Of the pixels.
        dtype: Of the pixels.

    Returns:
        The arguments, and the rows of features they yield.

    Raises:
        ValueError: If nothing fits; the message says why the last one did not.
    """
    base = vision_base(model)
    if base is None:
        raise ValueError(f"{type(model).__name__} has no method for image features")
    names = _names(base.get_image_features)
    candidates = _packed if any(name.endswith("grid_thw") for name in names) else _fixed
    problems = []
    for inputs in candidates(base, names, seed, dtype):
        try:
            with torch.no_grad():
                return inputs, _rows(base.get_image_features(**inputs, return_dict=True))
        except Exception as error:
            shapes = {name: list(value.shape) for name, value in inputs.items()}
            problems.append(f"{shapes}: {type(error).__name__}: {error}")
    raise ValueError("no pixels fit; " + " || ".join(problem[:300] for problem in problems))


def _token(config: Any, kind: str) -> int:
    for name in (f"{kind}_token_id", f"{kind}_token_index", f"{kind}_patch_id"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise ValueError(f"{type(config).__name__} names no {kind} token")


def make_batch(model: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float64, text: int = 7) -> dict[str, Tensor]:
    """Makes a batch of one row with labels, with three images between words.

    Args:
        model: In evaluation mode.
        seed: Of words and pixels.
        dtype: Of the pixels.
        text: Words before, between and after.
    """
    pixels, rows = describe_vision(model, seed, dtype)
    base = vision_base(model)
    token = _token(base.config, "image")
    generator = torch.Generator().manual_seed(seed)

    def words() -> list[int]:
        return torch.randint(3, 100, (text,), generator=generator).tolist()

    parts = [rows // 3, rows // 3, rows - 2 * (rows // 3)]
    ids = words()
    for part in parts:
        ids += [token] * part + words()
    batch: dict[str, Tensor] = {"input_ids": torch.tensor([ids]), **pixels}
    image = batch["input_ids"] == token
    batch["labels"] = batch["input_ids"].masked_fill(image, -100)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    names = _names(type(base).forward)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in names:
            batch[name] = image.int()
    return batch
