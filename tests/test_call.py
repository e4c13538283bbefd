"""Host copies of what moved to a device, shown on the device "meta", from which nothing can be read."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchFeature

from lightning_vdp.batch.host_copies import host_tensors, keep_host_copies, known_host_copy

NAMES = frozenset({"input_ids", "image_grid_thw"})


def moved(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.to("meta")
    if isinstance(batch, dict):
        return {name: moved(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value) for value in batch)
    return batch


def test_named_tensors_are_known_on_the_host_wherever_they_are() -> None:
    ids, grid = torch.arange(4).view(1, 4), torch.tensor([[1, 4, 4]])
    batch = {"chosen": {"input_ids": ids, "pixel_values": torch.zeros(2)}, "more": [({"image_grid_thw": grid}, "text")]}
    collected = host_tensors(batch, NAMES)
    on_device = moved(batch)
    keep_host_copies(collected, on_device)
    assert known_host_copy(on_device["chosen"]["input_ids"]) is ids
    assert known_host_copy(on_device["more"][0][0]["image_grid_thw"]) is grid
    assert known_host_copy(on_device["chosen"]["pixel_values"]) is None


def test_processors_outputs_that_move_in_place_keep_their_host_copies() -> None:
    ids = torch.arange(4).view(1, 4)
    batch = BatchFeature({"input_ids": ids})
    collected = host_tensors(batch, NAMES)
    batch["input_ids"] = ids.to("meta")
    keep_host_copies(collected, batch)
    assert known_host_copy(batch["input_ids"]) is ids


def test_a_tensor_written_to_since_has_no_host_copy() -> None:
    batch = {"input_ids": torch.arange(4).view(1, 4)}
    on_device = moved(batch)
    keep_host_copies(host_tensors(batch, NAMES), on_device)
    on_device["input_ids"][:, 2:] = -100
    assert known_host_copy(on_device["input_ids"]) is None


@pytest.mark.parametrize("other", [None, {}, [], {"input_ids": "text"}, {"input_ids": [1]}])
def test_another_structure_after_the_move_is_left_alone(other: Any) -> None:
    keep_host_copies(host_tensors({"input_ids": torch.zeros(1)}, NAMES), other)
