"""Pixels that a vision-language model might take, by the layouts that the names of its arguments give away.

Layouts are tried in order until the model takes one, so each function yields candidates, the likeliest first.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["IMAGES", "Arguments", "Request", "first_field", "image_candidates", "parameter_names", "video_candidates"]

Arguments = dict[str, Any]

IMAGES = 3
"""Images of a batch."""

# their sides, in merged patches: no two alike, and their sum is odd
_SIDES = ((2, 2), (3, 4), (2, 3))


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Names of a function's arguments, without those of `**kwargs`."""
    return [name for name in inspect.signature(function).parameters if name not in ("kwargs", "self")]


def first_field(configs: Sequence[Any], *names: str) -> Any:
    """The first field of these names that is set in a config."""
    return next((value for config in configs for name in names if (value := getattr(config, name, None))), None)


def _side(value: Any) -> int:
    return int(value if isinstance(value, int) else value[0])


@dataclass(frozen=True)
class Request:
    """What pixels are wanted for.

    Args:
        base: The model that has the features method.
        method: The features method, which takes the pixels as its first argument.
        seed: Seed of the random pixels.
    """

    base: Any
    method: Callable[..., Any]
    seed: int

    @property
    def names(self) -> list[str]:
        """Arguments of the features method."""
        return parameter_names(self.method)

    @property
    def vision(self) -> Any:
        """The tower's config."""
        configs = (getattr(self.base.config, name, None) for name in ("vision_config", "vq_config"))
        return next((config for config in configs if config is not None), self.base.config)

    @property
    def merge(self) -> int:
        """Patches along a side that become one row of features."""
        names = ("spatial_merge_size", "merge_size", "adapter_merge_size", "merge_kernel_size")
        merge = first_field((self.base.config, self.vision), *names)
        if merge is None and isinstance(ratio := getattr(self.base.config, "downsample_ratio", None), float):
            merge = round(1 / ratio)
        return 1 if merge is None else _side(merge)

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""
        return _side(first_field((self.vision, self.base.config), "patch_size") or 8)

    @property
    def image(self) -> int:
        """Side of an image in pixels where all have the same size."""
        return _side(first_field((self.vision, self.base.config), "image_size", "resolution") or 32)

    @property
    def grids(self) -> list[list[int]]:
        """Time, height and width of the images in patches."""
        merge = 2 if any(name.endswith("merge_sizes") for name in self.names) else self.merge
        return [[1, height * merge, width * merge] for height, width in _SIDES]

    def draw(self, *shape: int, other: bool = False) -> Tensor:
        """Random pixels.

        Args:
            shape: Shape of the pixels.
            other: Whether they are other ones than those that the tower gets anyway.
        """
        draw = torch.Generator().manual_seed(self.seed + other)
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def draw_images(self) -> Tensor:
        """One picture for each image, all of the size that the tower's config says."""
        return self.draw(IMAGES, 3, self.image, self.image)

    def projections(self) -> Iterator[Any]:
        """For each child but the decoder, the first layer that could take patches."""
        decoder = self.base.get_decoder() if hasattr(self.base, "get_decoder") else None
        for _, child in self.base.named_children():
            if child is decoder:
                continue
            layers = (part for part in child.modules() if isinstance(part, (nn.Conv2d, nn.Conv3d, nn.Linear)))
            if first := next(layers, None):
                yield first


def _packed(request: Request, grids: list[list[int]]) -> Iterator[Arguments]:
    """Patches of all images joined, with a grid of (time, height, width) or (height, width) for each image."""
    pixels, patch, merge = request.names[0], request.patch, request.merge
    grid_name = next(name for name in request.names if "_grid_" in name)
    if grid_name.endswith("hw") and not grid_name.endswith("thw"):
        grids = [grid[1:] for grid in grids]
    patches = sum(math.prod(grid) for grid in grids)
    shapes: list[tuple[int, ...]] = []
    for projection in request.projections():
        if isinstance(projection, nn.Linear):
            shapes.append((patches, projection.in_features))
        else:
            kernel = projection.kernel_size
            shapes.append((patches, projection.in_channels * math.prod(kernel)))
            shapes.append((patches, projection.in_channels, *kernel))
    shapes += [(patches, times * patch * patch) for times in (3, 6)] + [(patches, 3, patch, patch)]
    sizes = (name for name in request.names if name.endswith("merge_sizes"))
    extra = {name: torch.tensor([1, 2, 1][: len(grids)]) for name in sizes}
    for shape in dict.fromkeys(shapes):
        yield {pixels: request.draw(*shape), grid_name: torch.tensor(grids), **extra}
    # one row of pixels for each row of features
    merged = [[*grid[:-2], grid[-2] // merge, grid[-1] // merge] for grid in grids]
    rows = sum(math.prod(grid) for grid in merged)
    yield {pixels: request.draw(rows, patch * merge, patch * merge, 3), grid_name: torch.tensor(merged)}


def _sized(request: Request) -> Iterator[Arguments]:
    """Images with their sizes: one small picture and the tiles of a large one, or padded to the largest."""
    size = request.image
    if getattr(request.base.config, "image_grid_pinpoints", None):
        sizes = torch.tensor([[size, size], [2 * size, size], [size, 2 * size]])
        yield {"pixel_values": request.draw(IMAGES, 3, 3, size, size), "image_sizes": sizes}
    size, unit = 32, max(request.patch * request.merge, 8)
    sizes = torch.tensor([[size, size], [size - unit, size], [size, size - unit]])
    yield {"pixel_values": request.draw(IMAGES, 3, size, size), "image_sizes": sizes}


def _pooled(request: Request) -> Iterator[Arguments]:
    """Crops with the patches that each row of features pools; -1 fills up."""
    patch, side = request.patch, request.image // request.patch
    # an image is one crop, pooled two by two
    cells = [
        [row * side + column, row * side + column + 1, (row + 1) * side + column, (row + 1) * side + column + 1]
        for row in range(0, side - 1, 2)
        for column in range(0, side - 1, 2)
    ]
    rows = side // 2
    crops = request.draw(IMAGES, side * side, int(request.vision.num_channels) * patch * patch)
    pooling = torch.tensor([[crop * side * side + cell for cell in four] for crop in range(IMAGES) for four in cells])
    grids = torch.tensor([[rows, rows, 0, 0]] * IMAGES)
    yield {"pixel_values": crops, "image_token_pooling": pooling, "image_grids": grids}


def _padded_patches(request: Request) -> Iterator[Arguments]:
    """Patches of each image with its sides, padded to as many for all."""
    sides = torch.tensor([[4, 4], [4, 2], [2, 4]])
    mask = torch.zeros(IMAGES, 16, dtype=torch.int64)
    for row, (height, width) in enumerate(sides.tolist()):
        mask[row, : height * width] = 1
    patches = request.draw(IMAGES, 16, 3 * request.patch * request.patch)
    yield {"pixel_values": patches, "spatial_shapes": sides, "pixel_attention_mask": mask}


def _tiles_of_a_row(request: Request) -> Iterator[Arguments]:
    """Tiles by rows of the batch, [rows, tiles, ...]."""
    if "spatial_shapes" in request.names:
        return
    tiles = request.draw_images()[None]
    yield {"pixel_values": tiles, "pixel_attention_mask": torch.ones(1, IMAGES, dtype=torch.bool)}
    yield {"pixel_values": tiles}


def _positioned(request: Request) -> Iterator[Arguments]:
    """Patches of each image with their places, padded to as many for all."""
    kernel = int(first_field((request.vision,), "pooling_kernel_size") or 1)
    projection = next(request.projections(), None)
    wide = [projection.in_features] if isinstance(projection, nn.Linear) else []
    most = max(height * width for height, width in _SIDES) * kernel**2
    places = torch.full((IMAGES, most, 2), -1)
    for index, (height, width) in enumerate(_SIDES):
        rows, columns = torch.meshgrid(torch.arange(height * kernel), torch.arange(width * kernel), indexing="ij")
        places[index, : rows.numel()] = torch.stack([columns.flatten(), rows.flatten()], -1)
    for width in [*wide, 3 * request.patch**2]:
        yield {"pixel_values": request.draw(IMAGES, most, width), "image_position_ids": places}


def _in_two_resolutions(request: Request) -> Iterator[Arguments]:
    high = _side(request.base.config.high_res_vision_config.image_size)
    finer = request.draw(IMAGES, 3, high, high, other=True)
    yield {"pixel_values": request.draw_images(), "high_res_pixel_values": finer}


def _with_local_tiles(request: Request) -> Iterator[Arguments]:
    """Images as a whole and, of those that are large, in tiles."""
    size = request.image
    for local in (size, size // 2, 2 * size):
        tiles = {
            "pixel_values": request.draw_images(),
            "pixel_values_local": request.draw(3, 3, local, local, other=True),
            "num_local_patches": [2, 0, 1],
        }
        if "patches_grid" in request.names:
            tiles["patches_grid"] = [[2, 1], [0, 0], [1, 1]]
        yield tiles


def _strip(request: Request) -> Iterator[Arguments]:
    """Patches of all images side by side, [1, channels, patch, ...]."""
    sides = torch.tensor([[4, 4], [4, 8], [8, 4]])
    width = request.patch * int(sides.prod(-1).sum())
    size_name = next(name for name in request.names if name.startswith("target_sizes"))
    yield {request.names[0]: request.draw(1, 3, request.patch, width), size_name: sides}


def _with_prompts(request: Request) -> Iterator[Arguments]:
    """Images that a querying transformer reads with a prompt each, maybe as frames."""
    prompts = torch.arange(5, 5 + 5 * IMAGES).view(IMAGES, 5)
    yield {"pixel_values": request.draw_images(), "qformer_input_ids": prompts}
    frames = request.draw(IMAGES, 2, 3, request.image, request.image)
    yield {"pixel_values": frames, "qformer_input_ids": prompts}


def _flattened(request: Request) -> Iterator[Arguments]:
    """Patches that begin with their row and column."""
    rows, columns = torch.meshgrid(torch.arange(1, 5), torch.arange(1, 5), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], -1).double()
    patches = request.draw(IMAGES, 16, 3 * request.patch * request.patch)
    yield {"flattened_patches": torch.cat([places.expand(IMAGES, 16, 2), patches], -1)}


def _pixels_alone(request: Request) -> Iterator[Arguments]:
    """Nothing but pixels: projected patches, a picture for each image, square patches as units, or tiles of a row."""
    base, patch, plain = request.base, request.patch, request.draw_images()
    if hasattr(base, "vision_embed_tokens"):
        yield {"pixel_values": request.draw(IMAGES, 4, base.vision_embed_tokens.in_features)}
    yield {"pixel_values": plain}
    if time := first_field((request.vision,), "temporal_patch_size"):
        # [patches, time, height, width, channels]
        yield {"pixel_values": request.draw(7, time, patch, patch, 3)}
    yield {"pixel_values": plain[None]}


_LAYOUTS: Mapping[str, Callable[[Request], Iterator[Arguments]]] = {
    "image_sizes": _sized,
    "image_token_pooling": _pooled,
    "spatial_shapes": _padded_patches,
    "pixel_attention_mask": _tiles_of_a_row,
    "image_position_ids": _positioned,
    "high_res_pixel_values": _in_two_resolutions,
    "num_local_patches": _with_local_tiles,
    "target_sizes": _strip,
    "qformer_input_ids": _with_prompts,
    "flattened_patches": _flattened,
}
"""Layouts by the argument of the features method that gives them away."""


def image_candidates(request: Request) -> Iterator[Arguments]:
    """Arguments of a features method for three images."""
    if any("_grid_" in name for name in request.names):
        yield from _packed(request, request.grids)
        return
    for name, layout in _LAYOUTS.items():
        if name in request.names:
            yield from layout(request)
    yield from _pixels_alone(request)


def video_candidates(request: Request) -> Iterator[Arguments]:
    """Arguments of a features method for one video."""
    names = request.names
    if any(name.endswith("grid_thw") for name in names):
        merge = request.grids[0][1] // 2
        # some towers pair frames
        for frames in (3, 4):
            yield from _packed(request, [[frames, 2 * merge, 3 * merge]])
    if "target_sizes_videos" in names:
        yield from _strip(request)
    if "video_position_ids" in names:
        for arguments in _positioned(request):
            pixels, places = arguments.values()
            yield {names[0]: pixels, "video_position_ids": places, "num_frames_per_video": torch.tensor([len(pixels)])}
    time = int(first_field((request.vision, request.base.config), "video_temporal_patch_size") or 1)
    for frames in (3, 8):
        yield {names[0]: request.draw(1, frames, 3 * time, request.image, request.image)}
