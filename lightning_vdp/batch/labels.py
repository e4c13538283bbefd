"""Labels of the whole sequence. Pure."""

from torch import Tensor
from torch.nn import functional

__all__ = ["IGNORED", "count_tokens", "shift"]


IGNORED = -100


def shift(labels: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """Moves labels ``[B, S]`` one position to the left, so that each stands where it is predicted."""
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def count_tokens(labels: Tensor, shifted: bool = False, ignore_index: int = IGNORED) -> int:
    """Number of labels ``[B, S]`` that count; those that are not shifted yet lose their first position."""
    return int(((labels if shifted else labels[..., 1:]) != ignore_index).sum())
