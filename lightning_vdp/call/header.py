"""The step header: the few numbers that all ranks agree on before a forward's first collective of ours.

A header is a set of named fields, each a list of whole numbers. Ranks exchange them on a side group while the forward
goes on, and read them where first needed. An error that one rank found travels the same way, so that all ranks raise it.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_vdp.agreement import gather_texts, raise_problems
from lightning_vdp.errors import StepError
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
    "digest",  # of the batch's tensors, where ranks compare them
    "loader",  # what is suspicious about the data loader
)
# one message of this many numbers holds most headers; longer ones take a second message
_CAPACITY = 96

Agree = Callable[[Sequence[Mapping[str, Sequence[int]]]], str | None]


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

    def __init__(self, mesh: SequenceMesh, flat: list[int], reason: str | None, agree: Agree | None = None) -> None:
        self._mesh, self._flat, self._reason, self._agree = mesh, flat, reason, agree
        mesh.watch.headers += 1
        self._headers: list[dict[str, list[int]]] | None = None
        self._buffer, self._work = self._send(_CAPACITY)

    def _send(self, capacity: int) -> tuple[Tensor, dist.Work]:
        mesh = self._mesh
        row = np.zeros(capacity, dtype=np.int64)
        row[: len(self._flat)] = self._flat[:capacity]
        mine = torch.from_numpy(row).to(mesh.header_device)
        buffer = mine.new_empty(mesh.world_size * capacity)
        return buffer, dist.all_gather_single(buffer, mine, group=mesh.header_group, async_op=True)

    def wait(self) -> list[dict[str, list[int]]]:
        """Returns the headers of all ranks of the world, by rank.

        Raises:
            StepError: If any rank's header carries an error, or the headers do not agree; the same on every rank.
        """
        if self._headers is None:
            with self._mesh.watch.collective("header"):
                self._headers = self._receive()
                reasons = (
                    gather_texts(self._mesh, self._reason) if any(header["error"] for header in self._headers) else []
                )
            raise_problems("Refused before the step", reasons)
            problem = None if self._agree is None else self._agree(self._headers)
            if problem is not None:
                raise StepError(f"Refused before the step: {problem}")
        return self._headers

    def _receive(self) -> list[dict[str, list[int]]]:
        rows = self._rows()
        longest = int(rows[:, 0].max())
        if longest > _CAPACITY:
            self._buffer, self._work = self._send(longest)
            rows = self._rows()
        # ranks of a group hold one batch, so that most rows come several times; nobody writes to headers
        keys = [row.tobytes() for row in rows]
        decoded = {key: decode(row.tolist()) for key, row in dict(zip(keys, rows)).items()}
        return [decoded[key] for key in keys]

    def _rows(self) -> NDArray[np.int64]:
        self._work.wait()
        return self._buffer.cpu().numpy().reshape(self._mesh.world_size, -1)


def exchange_headers(
    mesh: SequenceMesh, header: Header, error: str | None = None, agree: Agree | None = None
) -> PendingHeaders:
    """Starts to exchange this rank's header with the world; returns at once.

    Args:
        mesh: Whose side group carries the header.
        header: Values of some of `FIELDS`, other than "error".
        error: What this rank found to be wrong with its input, as one plain sentence.
        agree: Looks at all headers, without an error among them, and says what does not fit together.
    """
    return PendingHeaders(mesh, encode({**header, "error": [] if error is None else [1]}), error, agree)
