"""The strategy's options, and which values they take."""

from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning_vdp.errors import UserError

__all__ = ["Settings", "check_choice"]


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises a `UserError` if an argument has none of the values that it may have."""
    if value not in choices:
        raise UserError(f"`{name}` is {value!r}, but must be one of {', '.join(map(repr, choices))}.")


def _check_number(name: str, value: Any, kind: Any, what: str, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:
        raise UserError(f"`{name}` is {value!r}, but must be {what}.")


@dataclass(frozen=True)
class Settings:
    """What the strategy's arguments say, other than the sizes of groups and FSDP's; see `UlyssesVisionDPStrategy`.

    Raises:
        UserError: If an option has a value that its annotation does not name.
    """

    vision_data_parallel: bool = True
    vision_assignment: Literal["balanced", "contiguous"] = "balanced"
    vision_balance: Literal["time", "memory"] = "time"
    vision_exchange: Literal["routed", "gather"] = "routed"
    logits: Literal["shard", "whole"] = "shard"
    loss_tokens: Literal["replica", "global"] = "replica"
    verify_first_batch: bool = True
    check_batches_every_n_steps: int = 50
    hang_warning_s: float | None = 120.0
    shard_frozen_tower: bool = True
    fsdp_version: Literal[1, 2] = 2
    save_frozen_weights: bool = True
    trust_checkpoints: bool = False

    def __post_init__(self) -> None:
        for name, annotation in get_type_hints(type(self)).items():
            if get_origin(annotation) is Literal:
                check_choice(name, getattr(self, name), get_args(annotation))
        every = self.check_batches_every_n_steps
        _check_number("check_batches_every_n_steps", every, int, "a whole number, or 0 for never", 0)
        if self.hang_warning_s is not None:
            what = "a number of seconds above 0, or None"
            _check_number("hang_warning_s", self.hang_warning_s, (int, float), what, 1e-3)

    def check_group_size(self, sequence_parallel_size: int) -> None:
        """Refuses options that act in larger groups only.

        Args:
            sequence_parallel_size: Ranks of a sequence group.

        Raises:
            UserError: If an option would do nothing.
        """
        if self.loss_tokens == "global" and sequence_parallel_size == 1:
            raise UserError(
                "`loss_tokens='global'` acts in sequence groups of two ranks or more, but `sequence_parallel_size` is 1; weigh "
                "the loss in `training_step`, or leave it out."
            )
