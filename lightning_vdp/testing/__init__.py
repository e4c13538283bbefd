"""For tests of this package and of users' own modules: simulated processes, parity assertions, tiny models."""

from lightning_vdp.testing.float64 import PromoteFloat32
from lightning_vdp.testing.models import TINY_FAMILIES, tiny_batch, tiny_model
from lightning_vdp.testing.parity import (
    Batches,
    FitRecord,
    GradientRecorder,
    ParityModule,
    ParityReport,
    assert_parity,
    measure_parity,
    quiet_trainer,
    whole_parameters,
)
from lightning_vdp.testing.processes import RankFailed, RanksTimedOut, run_ranks

__all__ = [
    "TINY_FAMILIES",
    "Batches",
    "FitRecord",
    "GradientRecorder",
    "ParityModule",
    "ParityReport",
    "PromoteFloat32",
    "RankFailed",
    "RanksTimedOut",
    "assert_parity",
    "measure_parity",
    "quiet_trainer",
    "run_ranks",
    "tiny_batch",
    "tiny_model",
    "whole_parameters",
]
