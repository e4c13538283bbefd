"""Ranks, times and bytes: what all benchmarks measure with."""

import os
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import Options
from lightning_vdp.vision.monitor import Stopwatch

__all__ = [
    "Peak",
    "alternate",
    "check_parity",
    "fits",
    "gradients",
    "join",
    "lacking",
    "largest_difference",
    "peak_bytes",
    "worst",
]

# float32 sums in another order
_TOLERANCE = 1e-3


def fits(options: Options, ranks: int) -> bool:
    """Whether the machine has a device for each rank; processes on CPUs may be more than cores where nothing is timed."""
    return options.device == "cpu" or torch.cuda.device_count() >= ranks


def lacking(options: Options, sizes: Sequence[int]) -> list[str]:
    """Says which sizes of a sequence group were left out for want of devices."""
    return [f"S = {ranks} needs {ranks} devices." for ranks in sizes if not fits(options, ranks)]


def join(options: Options) -> torch.device:
    """Joins the world of simulated ranks.

    Returns:
        This rank's device.
    """
    if options.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def pretend(world_size: int) -> None:
    """Makes this process rank 0 of a world whose other ranks do not exist: collectives return at once, without their data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def worst(value: float) -> float:
    """The largest value of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def alternate(
    sides: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device, alone: Collection[str] = ()
) -> dict[str, float]:
    """Times several sides of a comparison, which take turns so that the machine's moods meet all of them.

    Args:
        sides: What to run, by name; every rank passes the same.
        rounds: Timed turns of each side, after one that is not timed.
        device: This rank's device.
        alone: Sides that rank 0 runs while the others wait.

    Returns:
        For each side, the median of the seconds until its last rank was done.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, run in sides.items():
            dist.barrier()
            watch = Stopwatch(device)
            if name not in alone or dist.get_rank() == 0:
                run()
            watch.stop()
            taken = worst(watch.seconds)
            if turn:
                seconds[name].append(taken)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


@dataclass
class Peak:
    """Bytes of tensors at their most, above those at the start."""

    bytes: int = 0


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Peak]:
    """Measures the peak of live bytes inside; allocations of kernels for themselves are counted too."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak.bytes = max(peak.bytes, live)


def gradients(module: nn.Module, summed_over: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Copies of a module's gradients by name, of all ranks of a group together where one is given."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            if summed_over is not None:
                dist.all_reduce(gradient, group=summed_over)
            found[name] = gradient
    return found


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference between tensors of the same names, relative to the largest value of each."""
    differences = [0.0]
    for name, value in expected.items():
        scale = float(value.abs().max()) or 1.0
        differences.append(float((found[name] - value).abs().max()) / scale)
    return max(differences)


def check_parity(difference: float) -> float:
    """Returns a difference between two sides.

    Raises:
        AssertionError: If it is more than rounding: then there is nothing to compare.
    """
    if not difference <= _TOLERANCE:
        raise AssertionError(f"The two sides differ by {difference:.2e}, which is more than rounding.")
    return difference
