"""Copies on the host of what a batch holds, kept while it moves to a device, so that planning waits for nothing."""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "host_copy",
    "host_tensors",
    "keep_host_copies",
    "keep_samples",
    "known_host_copy",
    "known_sample",
    "move_with_host_copies",
    "sample",
]


_HOST_COPY = "_vdp_host_copy"


_HOST_SAMPLE = "_vdp_host_sample"


_SAMPLED_VALUES = 256


# what planning reads, in addition to what says something of images
_PLANNED = frozenset(("input_ids", "labels", "shift_labels", "position_ids"))


# what ranks of a group compare by a few values
_COMPARED = frozenset(("pixel_values", "pixel_values_videos"))


def sample(tensor: Tensor) -> Tensor:
    """A few values of a tensor on the host, evenly spread; a copy."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED_VALUES)].clone()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def host_tensors(batch: Any, names: frozenset[str], take: Callable[[Tensor], Tensor] = _as_it_is) -> Any:
    """Collects the host tensors of a batch before it moves to a device, in the batch's own structure.

    Args:
        batch: Mappings, lists and tuples of tensors; processors' outputs, which move in place, among them.
        names: Keys of the mappings whose tensors are collected.
        take: What is collected of a tensor.
    """
    if isinstance(batch, Mapping):
        return {
            name: take(value)
            if name in names and isinstance(value, Tensor) and value.device.type == "cpu"
            else host_tensors(value, names, take)
            for name, value in batch.items()
        }
    if isinstance(batch, (list, tuple)):
        return [host_tensors(value, names, take) for value in batch]
    return None


def keep_host_copies(collected: Any, moved: Any, attribute: str = _HOST_COPY) -> None:
    """Remembers, on tensors that were moved to a device, the host tensor each came from.

    Planning reads sizes from there without a device sync. A tensor that lost its host copy on the way, or was written
    to since, costs one sync.

    Args:
        collected: What `host_tensors` returned before the move.
        moved: The batch after the move, of the same structure as far as it matters.
        attribute: The attribute of the moved tensor that remembers it.
    """
    if isinstance(collected, Tensor):
        if isinstance(moved, Tensor) and moved is not collected and not moved.is_inference():
            setattr(moved, attribute, (collected, moved._version))
    elif isinstance(collected, Mapping) and isinstance(moved, Mapping):
        for name, value in collected.items():
            keep_host_copies(value, moved.get(name), attribute)
    elif isinstance(collected, list) and isinstance(moved, (list, tuple)):
        for value, target in zip(collected, moved):
            keep_host_copies(value, target, attribute)


def known_host_copy(tensor: Tensor) -> Tensor | None:
    """Returns the tensor on the host if it is there already, without a device sync."""
    if tensor.device.type == "cpu":
        return tensor
    return _remembered(tensor, _HOST_COPY)


def keep_samples(samples: Any, moved: Any) -> None:
    """Remembers what `host_tensors` took with `sample`, as `keep_host_copies` does with whole tensors."""
    keep_host_copies(samples, moved, _HOST_SAMPLE)


def known_sample(tensor: Tensor) -> Tensor | None:
    """Returns a `sample` of the tensor if that takes no device sync."""
    if tensor.device.type == "cpu":
        return sample(tensor)
    return _remembered(tensor, _HOST_SAMPLE)


def _remembered(tensor: Tensor, attribute: str) -> Tensor | None:
    host, version = getattr(tensor, attribute, (None, None))
    return host if host is not None and version == tensor._version else None


def host_copy(tensor: Tensor) -> Tensor:
    """Returns the tensor on the host: the remembered copy, or a new one at the price of a device sync."""
    known = known_host_copy(tensor)
    if known is None:
        known = tensor.to(torch.device("cpu"))
        keep_host_copies(known, tensor)
    return known


def move_with_host_copies(batch: Any, move: Callable[[], Any], describing: AbstractSet[str]) -> Any:
    """Moves a batch to its device; what planning reads, and a sample of what ranks compare, stay on the host too.

    Args:
        batch: The batch on the host.
        move: What moves the batch and returns it.
        describing: The model's arguments that say something of images and videos.
    """
    # collected before: processors' outputs move in place
    collected = host_tensors(batch, _PLANNED.union(describing))
    samples = host_tensors(batch, _COMPARED, sample)
    moved = move()
    keep_host_copies(collected, moved)
    keep_samples(samples, moved)
    return moved
