"""A row of the check: what was found for one model at one size. Pure data."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from transformers import __version__ as transformers_version

__all__ = ["STATUSES", "Divided", "Row", "Status", "read_rows", "write_rows"]

Status = Literal["exact", "undivided", "refused", "wrong", "hung", "unbuildable"]
STATUSES: tuple[Status, ...] = ("exact", "undivided", "refused", "wrong", "hung", "unbuildable")


@dataclass(frozen=True)
class Divided:
    """How the ranks shared the work of each step.

    Args:
        lengths: For each step, positions of each rank's shard; empty where the decoder ran whole.
        units: For each step, images or frames that each rank encoded; empty without pixels.
    """

    lengths: list[list[int]] = field(default_factory=list)
    units: list[list[int]] = field(default_factory=list)

    @property
    def decoder(self) -> bool:
        """Whether no rank had a whole sequence."""
        return bool(self.lengths) and all(step and max(step) < sum(step) for step in self.lengths)

    @property
    def tower(self) -> bool:
        """Whether no rank encoded all units of a step with several."""
        steps = [step for step in self.units if sum(step) > 1]
        return bool(steps) and all(max(step) < sum(step) for step in steps)


@dataclass(frozen=True)
class Row:
    """What was found for one model at one size.

    Args:
        model_type: Model type of the config, or the name that the check was asked for.
        size: Number of ranks of the sequence group.
        status: "exact"; "undivided": exact, but each rank did the whole work of the tower or the decoder; "refused": by
            the strategy, with a reason; "wrong": other numbers than one process, or a crash of the ranks alone; "hung";
            "unbuildable": no model, no input, or a crash in one process already.
        reason: Why the status is not "exact"; empty where it is.
        loss_error: Largest relative error of the loss.
        gradient_error: Largest relative error of a gradient.
        parameter: The parameter with that error.
        divided: How the ranks shared the work.
        batches: What was special about the batches that were fitted, one a step.
        saved_bytes: Bytes that the first forward kept for backward, without parameters, in each rank.
        saved_bytes_alone: Bytes that the first forward kept for backward in one process.
        seconds: Time that the check took.
        transformers: Version of transformers.
    """

    model_type: str
    size: int
    status: Status
    reason: str = ""
    loss_error: float | None = None
    gradient_error: float | None = None
    parameter: str = ""
    divided: Divided = field(default_factory=Divided)
    batches: list[str] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)
    saved_bytes_alone: int = 0
    seconds: float = 0.0
    transformers: str = transformers_version

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON has it."""
        divided = {**asdict(self.divided), "tower": self.divided.tower, "decoder": self.divided.decoder}
        return {**asdict(self), "divided": divided}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Row":
        """The row that `to_dict` wrote."""
        known = {entry.name for entry in fields(cls)}
        divided = values.get("divided") or {}
        return cls(
            **{
                **{name: value for name, value in values.items() if name in known},
                "divided": Divided(divided.get("lengths", []), divided.get("units", [])),
            }
        )


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Writes rows as a JSON list, a row to a line."""
    path.write_text("[\n" + ",\n".join(json.dumps(row.to_dict()) for row in rows) + "\n]\n")


def read_rows(path: Path) -> list[Row]:
    """Reads what `write_rows` wrote."""
    return [Row.from_dict(values) for values in json.loads(path.read_text())]
