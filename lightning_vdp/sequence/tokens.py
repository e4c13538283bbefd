"""Per-token quantities from shards of logits, in chunks: float32 logits never exist for more than one chunk.

Results are whole sequences, the same on every rank of a group, and differentiable: what preference and reinforcement
learning losses are made of.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_vdp.batch.labels import IGNORED, shift
from lightning_vdp.errors import UserError
from lightning_vdp.shards import SequenceShard, gather_sequence, shard_sequence

__all__ = ["by_chunks", "token_entropy", "token_log_probs"]

# float32 values of one chunk of logits: 64 MiB
_CHUNK_VALUES = 2**24


def by_chunks(
    function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor, values: int | None = None
) -> list[Tensor]:
    """Applies a function to chunks of positions, and recomputes it in backward rather than keep what it saved.

    Args:
        function: Takes logits ``[N, V]`` and targets ``[N]`` of one chunk.
        logits: Shape ``[positions, V]``.
        targets: Shape ``[positions]``.
        values: Logits of one chunk. Default: 2^24.

    Returns:
        What the function returned for each chunk.
    """
    size = max(1, (values or _CHUNK_VALUES) // logits.shape[-1])
    if logits.shape[0] <= size:
        return [function(logits, targets)]
    parts = zip(logits.split(size), targets.split(size))
    return [checkpoint(function, part, target, use_reentrant=False) for part, target in parts]


def _positions(
    function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor, shard: SequenceShard | None
) -> Tensor:
    """Applies a per-position function to shards, and joins the results to ``[B, S - 1]``."""
    targets = shift(labels)
    local = targets if shard is None else shard_sequence(targets, shard)
    if local.shape != logits.shape[:-1]:
        raise UserError(
            f"Logits of {list(logits.shape[:-1])} rows and positions do not fit labels of {list(labels.shape)}; pass "
            "`outputs.logits` with `outputs.sequence_shard`, and the labels of the whole sequence."
        )
    flat = torch.cat(by_chunks(function, logits.flatten(0, -2), local.to(logits.device).flatten()))
    values = flat.view(local.shape)
    return (values if shard is None else gather_sequence(values, shard))[..., :-1]


def _log_probs(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    logits = logits.float()
    picked = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * logits.mean(-1)
    return (picked - logits.logsumexp(-1)).masked_fill(targets == IGNORED, 0.0)


def _entropy(logits: Tensor, targets: Tensor) -> Tensor:
    log_probs = logits.float().log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1).masked_fill(targets == IGNORED, 0.0)


def token_log_probs(
    logits: Tensor, labels: Tensor, shard: SequenceShard | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Log-probability of each label given what precedes it.

    Args:
        logits: `outputs.logits`: of this rank's shard, shape ``[B, T, V]``.
        labels: Labels of the whole sequence, not shifted, shape ``[B, S]``; -100 does not count.
        shard: `outputs.sequence_shard`; None where logits are whole.
        label_smoothing: Weight of the mean over the whole vocabulary, as in `torch.nn.functional.cross_entropy`.

    Returns:
        Float32, shape ``[B, S - 1]``: position t belongs to ``labels[:, t + 1]``; 0 where that does not count.

    Raises:
        UserError: If logits and labels do not fit.
    """
    return _positions(functools.partial(_log_probs, label_smoothing=label_smoothing), logits, labels, shard)


def token_entropy(logits: Tensor, labels: Tensor, shard: SequenceShard | None = None) -> Tensor:
    """Entropy of the distribution that predicts each label, in nats.

    Args:
        logits: `outputs.logits`, shape ``[B, T, V]``.
        labels: Labels of the whole sequence, not shifted, shape ``[B, S]``; only where they do not count matters.
        shard: `outputs.sequence_shard`; None where logits are whole.

    Returns:
        Float32, shape ``[B, S - 1]``; 0 where the label does not count.

    Raises:
        UserError: If logits and labels do not fit.
    """
    return _positions(_entropy, logits, labels, shard)
