"""Models and batches of benchmarks: Qwen2.5-VL and Qwen3-VL at sizes that two cores can run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks.mixes import MIXES, Grid
from lightning_vdp.testing.models import IMAGE_TOKEN, VIDEO_TOKEN, VISION_END, VISION_START, tiny_batch

__all__ = ["mix_batch", "patches", "qwen"]

FAMILY = "qwen2_5_vl"
PATCH, MERGE = 4, 2


def qwen(
    *, layers: int, hidden: int, tower_layers: int, tower_hidden: int, heads: int = 8, vocabulary: int = 512
) -> PreTrainedModel:
    """Builds a Qwen2.5-VL whose tower has window attention in all blocks but the last, and as many kv heads as heads.

    Args:
        layers: Of the decoder; 0 leaves the tower and the merge of its features.
        hidden: Width of the decoder.
        tower_layers: Blocks of the tower.
        tower_hidden: Width of the tower.
        heads: Of the decoder.
        vocabulary: Size of the vocabulary.
    """
    width = hidden // heads
    text: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 2**20,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [width // 2 - 2 * (width // 6), width // 6, width // 6],
        },
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision: dict[str, Any] = {
        "depth": tower_layers,
        "hidden_size": tower_hidden,
        "intermediate_size": 3 * tower_hidden,
        "num_heads": max(1, tower_hidden // 32),
        "patch_size": PATCH,
        "out_hidden_size": hidden,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 4 * MERGE * PATCH,
        "fullatt_block_indexes": [tower_layers - 1],
        "tokens_per_second": 2,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(config).train()


def mix_batch(mix: str, shrink: int = 1, seed: int = 0, words: int = 32) -> dict[str, Tensor]:
    """One sample of a mix as a batch, without labels and without a mask, which nothing here needs.

    Args:
        mix: One of `MIXES`.
        shrink: Divides the sides of all images.
        seed: Of the sample.
        words: Around each image.
    """
    grids = [_shrunk(grid, shrink) for grid in MIXES[mix](seed)]
    images = [grid for grid in grids if grid[0] == 1]
    videos = [grid for grid in grids if grid[0] > 1]
    batch = tiny_batch(FAMILY, (images,), (videos,), text=words, seed=seed, dtype=torch.float32)
    del batch["attention_mask"], batch["labels"]
    return batch


def _shrunk(grid: Grid, shrink: int) -> Grid:
    time, *sides = grid
    height, width = (max(1, round(side / MERGE / shrink)) * MERGE for side in sides)
    return time, height, width


def patches(batch: dict[str, Tensor]) -> Sequence[int]:
    """Patches of each unit of a batch: an image, or a frame of a video."""
    units = batch["image_grid_thw"].prod(1).tolist() if "image_grid_thw" in batch else []
    for time, height, width in batch.get("video_grid_thw", torch.empty(0, 3, dtype=torch.int64)).tolist():
        units += [height * width] * time
    return units
