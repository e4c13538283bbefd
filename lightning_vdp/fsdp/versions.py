"""The versions of FSDP that there are."""

from lightning_vdp.fsdp.backend import FSDPBackend
from lightning_vdp.fsdp.fsdp1 import FSDP1Backend
from lightning_vdp.fsdp.fsdp2 import FSDP2Backend

__all__ = ["BACKENDS"]

BACKENDS: dict[int, type[FSDPBackend]] = {backend.version: backend for backend in (FSDP1Backend, FSDP2Backend)}
"""By `fsdp_version`. Whoever adds one implements `FSDPBackend`, and adds its number to `Settings`."""
