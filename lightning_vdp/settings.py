"""The strategy's options."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """How the strategy divides, as its arguments say; see `UlyssesVisionDPStrategy`."""

    vision_data_parallel: bool = True
    vision_assignment: Literal["balanced", "contiguous"] = "balanced"
    vision_balance: Literal["time", "memory"] = "time"
    vision_exchange: Literal["routed", "gather"] = "routed"
    logits: Literal["shard", "whole"] = "shard"
    loss_tokens: Literal["replica", "global"] = "replica"
    verify_first_batch: bool = True
    check_batches_every_n_steps: int = 50
