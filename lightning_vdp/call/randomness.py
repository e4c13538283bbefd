"""Random numbers of a rank's own where the ranks of a group work on different data, and common ones everywhere else.

Ranks of a group start from one seed, so that what they repeat (augmentations, dropout on embeddings) is the same on all.
Where they hold different positions or images, each goes on from a seed that is derived from the common state and its
rank. The common state moves on by one number if random numbers were drawn meanwhile, on every rank alike, however many
each has drawn. Activation checkpointing recomputes with the state of its forward, and so with the same numbers.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

__all__ = ["RankRandomness"]


class RankRandomness:
    """Within it, this rank draws random numbers that no other rank draws.

    On CUDA that goes for the device's generator alone: the CPU's decides control flow there, which ranks share. On the CPU
    there is one generator for both.

    Args:
        place: What is computed; other places get other numbers.
        rank: This rank, in the world.
        device: The device of the batch.
    """

    __slots__ = ("_before", "_device", "_salt", "_start")

    def __init__(self, place: str, rank: int, device: torch.device) -> None:
        self._salt = f"{place}/{rank}".encode()
        self._device = device
        self._before: Tensor | None = None
        self._start: Tensor | None = None

    @property
    def _generator(self) -> torch.Generator | None:
        if self._device.type == "cpu":
            return torch.default_generator
        if self._device.type == "cuda":
            index = self._device.index
            return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
        return None

    def __enter__(self) -> "RankRandomness":
        generator = self._generator
        if generator is not None:
            # on the host for every device
            self._before = generator.get_state()
            digest = hashlib.blake2b(self._before.numpy().tobytes() + self._salt, digest_size=8).digest()
            generator.manual_seed(int.from_bytes(digest, "big") >> 1)
            self._start = generator.get_state()
        return self

    def __exit__(self, *_: Any) -> None:
        generator, before, start = self._generator, self._before, self._start
        if generator is None or before is None or start is None:
            return
        self._before = self._start = None
        used = not torch.equal(generator.get_state(), start)
        generator.set_state(before)
        if used:
            torch.empty((), dtype=torch.int64, device=self._device).random_(generator=generator)
