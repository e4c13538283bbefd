"""What a unit costs the tower. Pure: lists of whole numbers in and out, no processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["TowerCost", "patches", "tower_cost"]

_Grid = Sequence[int]


def patches(grids: Sequence[_Grid]) -> list[int]:
    """Patches of each unit, from its ``(time, height, width)`` in patches."""
    return [time * height * width for time, height, width in grids]


@dataclass(frozen=True)
class TowerCost:
    """Multiply-adds of a tower as a function of a unit's grid.

    Args:
        per_patch: Multiply-adds of the linear layers, for one patch, over all blocks.
        per_pair: Multiply-adds of attention, for one pair of patches in a block.
        full_blocks: Blocks in which every patch of a frame attends to every other.
        window_blocks: Blocks in which patches attend inside windows.
        window: Patches of a window.
    """

    per_patch: int
    per_pair: int
    full_blocks: int
    window_blocks: int = 0
    window: int = 0

    def __call__(self, grids: Sequence[_Grid]) -> list[int]:
        """Cost of each unit."""
        costs = []
        for time, height, width in grids:
            frame = height * width
            pairs = self.full_blocks * frame + self.window_blocks * min(frame, self.window)
            costs.append(time * frame * (self.per_patch + self.per_pair * pairs))
        return costs


def tower_cost(config: Any, mlp_matrices: int = 2) -> TowerCost | None:
    """Reads the cost off a tower's config: widths, depth, and window attention where it has it.

    Args:
        config: The tower's config.
        mlp_matrices: Weight matrices of a block's feed-forward layer.

    Returns:
        The cost, or None if the config does not name widths and depth as others do.
    """
    width = _number(config, "embed_dim", "hidden_size")
    depth = _number(config, "depth", "num_hidden_layers")
    if width is None or depth is None:
        return None
    hidden = _number(config, "intermediate_size") or int(width * getattr(config, "mlp_ratio", 4))
    full = getattr(config, "fullatt_block_indexes", None)
    window_blocks = 0 if full is None else depth - len(full)
    window = 0 if full is None else (config.window_size // config.patch_size) ** 2
    return TowerCost(
        per_patch=depth * (4 * width * width + mlp_matrices * width * hidden),
        per_pair=2 * width,
        full_blocks=depth - window_blocks,
        window_blocks=window_blocks,
        window=window,
    )


def _number(config: Any, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int) and value), None)
