"""The step header: the few numbers that all ranks agree on before a forward's first collective of ours.

A header is a set of named fields, each a list of whole numbers. Ranks exchange them on a side group while the forward
goes on, and read them where first needed. An error that one rank found travels the same way, so that all ranks raise it.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_vdp.mesh import SequenceMesh

__all__ = ["FIELDS", "Header", "PendingHeaders", "StepError", "decode", "encode", "exchange_headers"]

Header = Mapping[str, Sequence[int]]

FIELDS = (
    "error",  # [1] if this rank found its input to be bad
    "modalities",  # names of the towers to run, by index in the family
    "image_units",  # patches of each image
    "video_units",  # patches of each video
    "image_smallest",  # description of the smallest image, for ranks without any
    "video_smallest",  # description of the smallest video
    "rows",  # measured rows of features of this rank's units
    "placeholders",  # placeholder tokens that these rows fill
    "length",  # positions of the sequence
    "tokens",  # labels that count in the loss
)
# one message of this many numbers holds most headers; longer ones take a second message
_CAPACITY = 96


class StepError(RuntimeError):
    """One or more ranks cannot take this step, mostly for bad input; raised with the same text on every rank of the world."""


def encode(header: Header) -> list[int]:
    """Flattens a header to ``[total, size, *values, size, *values, ...]`` in the order of `FIELDS`.

    Raises:
        KeyError: If a field is not one of `FIELDS`.
    """
    unknown = set(header) - set(FIELDS)
    if unknown:
        raise KeyError(f"Unknown header fields {sorted(unknown)}; known are {FIELDS}.")
    flat = [0]
    for name in FIELDS:
        values = header.get(name, ())
        flat += [len(values), *values]
    flat[0] = len(flat)
    return flat


def decode(flat: Sequence[int]) -> dict[str, list[int]]:
    """Undoes `encode`; what follows the header is ignored."""
    header, position = {}, 1
    for name in FIELDS:
        size = flat[position]
        header[name] = list(flat[position + 1 : position + 1 + size])
        position += 1 + size
    return header


class PendingHeaders:
    """Headers on their way; `wait` returns those of all ranks, as often as asked."""

    def __init__(self, mesh: SequenceMesh, flat: list[int], reason: str | None) -> None:
        self._mesh, self._flat, self._reason = mesh, flat, reason
        self._headers: list[dict[str, list[int]]] | None = None
        self._buffer, self._work = self._send(_CAPACITY)

    def _send(self, capacity: int) -> tuple[Tensor, dist.Work]:
        mesh = self._mesh
        row = (self._flat + [0] * capacity)[:capacity]
        mine = torch.tensor(row, dtype=torch.int64, device=mesh.header_device)
        buffer = mine.new_empty(mesh.world_size * capacity)
        return buffer, dist.all_gather_single(buffer, mine, group=mesh.header_group, async_op=True)

    def wait(self) -> list[dict[str, list[int]]]:
        """Returns the headers of all ranks of the world, by rank.

        Raises:
            StepError: If any rank's header carries an error; the same on every rank.
        """
        if self._headers is None:
            self._work.wait()
            rows = self._buffer.view(self._mesh.world_size, -1).tolist()
            longest = max(row[0] for row in rows)
            if longest > _CAPACITY:
                self._buffer, self._work = self._send(longest)
                self._work.wait()
                rows = self._buffer.view(self._mesh.world_size, -1).tolist()
            self._headers = [decode(row) for row in rows]
            self._raise_agreed()
        return self._headers

    def _raise_agreed(self) -> None:
        assert self._headers is not None
        if not any(header["error"] for header in self._headers):
            return
        reasons: list[str | None] = [None] * self._mesh.world_size
        dist.all_gather_object(reasons, self._reason, group=self._mesh.header_group)
        by_reason: dict[str, list[int]] = {}
        for rank, reason in enumerate(reasons):
            if reason is not None:
                by_reason.setdefault(reason, []).append(rank)
        lines = [
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {reason}"
            for reason, ranks in by_reason.items()
        ]
        raise StepError("Refused before the step: " + "; ".join(lines))


def exchange_headers(mesh: SequenceMesh, header: Header, error: str | None = None) -> PendingHeaders:
    """Starts to exchange this rank's header with the world; returns at once.

    Args:
        mesh: Whose side group carries the header.
        header: Values of some of `FIELDS`, other than "error".
        error: What this rank found to be wrong with its input, as one plain sentence.
    """
    return PendingHeaders(mesh, encode({**header, "error": [] if error is None else [1]}), error)
