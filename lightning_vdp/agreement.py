"""What all ranks of the world agree on at once: a number or a text of each, and errors that one of them found."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_vdp.errors import StepError
from lightning_vdp.mesh import SequenceMesh

__all__ = ["gather_numbers", "gather_texts", "raise_problems", "raise_together"]


# bytes of a reason, so that one message holds it
_REASON = 1024


def gather_texts(mesh: SequenceMesh, text: str | None) -> list[str | None]:
    """One text of each rank of the world or None, by rank; as numbers: nothing that is received is ever unpickled."""
    encoded = ("" if text is None else text).encode()[:_REASON]
    mine = torch.zeros(_REASON, dtype=torch.uint8)
    mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    mine = mine.to(mesh.header_device)
    everyone = mine.new_empty(mesh.world_size * _REASON)
    dist.all_gather_single(everyone, mine, group=mesh.header_group)
    rows = everyone.view(mesh.world_size, -1).cpu().numpy()
    # a cut may have gone through a character
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") or None for row in rows]


def raise_problems(what: str, reasons: Sequence[str | None]) -> None:
    """Raises what ranks found, each reason with its ranks; nothing if nobody found anything."""
    by_reason: dict[str, list[int]] = {}
    for rank, reason in enumerate(reasons):
        if reason is not None:
            by_reason.setdefault(reason, []).append(rank)
    lines = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {reason}"
        for reason, ranks in by_reason.items()
    ]
    if lines:
        raise StepError(f"{what}: {'; '.join(lines)}")


def raise_together(mesh: SequenceMesh, problem: str | None, what: str) -> None:
    """Raises on every rank of the world what any of them found; all ranks call it.

    Args:
        mesh: Whose side group is used.
        problem: What this rank found, as one plain sentence.
        what: What then did not happen: how the message begins.

    Raises:
        StepError: If any rank found something; the same on every rank.
    """
    if any(gather_numbers(mesh, int(problem is not None))):
        raise_problems(what, gather_texts(mesh, problem))


def gather_numbers(mesh: SequenceMesh, value: int) -> list[int]:
    """One whole number of each rank of the world, by rank; all ranks call it."""
    mine = torch.tensor([value], dtype=torch.int64, device=mesh.header_device)
    values = mine.new_empty(mesh.world_size)
    dist.all_gather_single(values, mine, group=mesh.header_group)
    return list(map(int, values.tolist()))
