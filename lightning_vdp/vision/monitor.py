"""What a rank's tower did in one forward, for whoever wants to look."""

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Stopwatch", "VisionLoad"]


class Stopwatch:
    """Time between making it and `stop`; on CUDA measured by events, so that nothing waits until it is read."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start: Any = self._now()
        self._stop: Any = self._start

    def _now(self) -> Any:
        if not self._cuda:
            import time

            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        """Marks the end."""
        self._stop = self._now()

    @property
    def seconds(self) -> float:
        """The time; on CUDA this waits for the device."""
        if not self._cuda:
            return float(self._stop - self._start)
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1000


@dataclass(frozen=True)
class VisionLoad:
    """One run of the tower for one modality.

    Args:
        modality: "image" or "video".
        units: Units that this rank encoded; 0 if it ran a dummy.
        patches: Rows of pixels that it encoded.
        loads: Predicted cost of each rank of the group.
        bytes_received: Bytes of features that other ranks sent it.
        tower: How long the tower's forward took.
    """

    modality: str
    units: int
    patches: int
    loads: tuple[int, ...]
    bytes_received: int
    tower: Stopwatch
