"""What the figures were measured on."""

import os
import platform
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

__all__ = ["machine_facts"]


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _speed() -> str:
    """How fast Python is here and now: shared machines slow down."""
    start, total = time.perf_counter(), 0
    for number in range(10_000_000):
        total += number
    return f"{time.perf_counter() - start:.2f} s for ten million additions"


def machine_facts(device: str) -> dict[str, str]:
    """Processor, cores, memory, device and versions, by name.

    Args:
        device: "cpu" or "cuda".
    """
    facts = {
        "date": date.today().isoformat(),
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, one thread per process",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "device": "the processor",
        "python": f"{platform.python_version()}, {_speed()}",
        **{name: version(name) for name in ("torch", "transformers", "lightning", "lightning_vdp")},
    }
    if device == "cuda":
        facts["device"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return facts
