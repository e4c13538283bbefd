"""Metrics of next tokens that take shards of logits: each rank counts its own positions, so that none counts twice.

They are synchronized over the world, torchmetrics' default, whatever the sizes of groups are.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_vdp.batch.labels import IGNORED, shift
from lightning_vdp.errors import UserError
from lightning_vdp.sequence.tokens import by_chunks
from lightning_vdp.shards import SequenceShard, shard_sequence

__all__ = ["Perplexity", "TokenAccuracy"]


class _TokenMetric(Metric):
    """Sums something over the tokens to predict.

    Args:
        ignore_index: The label that does not count.
        **kwargs: See :class:`torchmetrics.Metric`; leave `process_group` at the world.
    """

    is_differentiable = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, ignore_index: int = IGNORED, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        # float64: float32 stops counting at 2^24
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def set_dtype(self, dst_type: Any) -> "_TokenMetric":
        return self

    @override
    def update(self, logits: Tensor, labels: Tensor, shard: SequenceShard | None = None) -> None:
        """Counts one batch.

        Args:
            logits: `outputs.logits`: of this rank's shard or of the whole sequence, shape ``[B, T, V]``.
            labels: Labels of the whole sequence, not shifted, shape ``[B, S]``.
            shard: `outputs.sequence_shard`, if the outputs have one.

        Raises:
            UserError: If logits and labels do not fit.
        """
        targets = shift(labels, self.ignore_index)
        if shard is not None:
            if logits.shape[1] == targets.shape[1] != shard.size:
                # whole logits, which every rank of the group holds
                logits = shard_sequence(logits, shard)
            targets = shard_sequence(targets, shard)
        if targets.shape != logits.shape[:-1]:
            raise UserError(
                f"Logits of {list(logits.shape[:-1])} rows and positions do not fit labels of {list(labels.shape)}; pass "
                "`outputs.logits` with `outputs.sequence_shard`, and the labels of the whole sequence."
            )
        flat = targets.to(logits.device).flatten()
        with torch.no_grad():
            sums = by_chunks(self._sum, logits.detach().flatten(0, -2), flat)
        self.total += torch.stack(sums).sum()
        self.count += (flat != self.ignore_index).sum()

    def _sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    @override
    def compute(self) -> Tensor:
        """The mean over tokens; NaN if there were none."""
        return self.total / self.count


class TokenAccuracy(_TokenMetric):
    """Share of the tokens that the model predicts best.

    Args:
        ignore_index: The label that does not count.
        **kwargs: See :class:`torchmetrics.Metric`; leave `process_group` at the world.
    """

    higher_is_better = True

    @override
    def _sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        right = (logits.argmax(-1) == targets) & (targets != self.ignore_index)
        return right.sum().double()


class Perplexity(_TokenMetric):
    """Exponential of the mean negative log-likelihood of tokens.

    Args:
        ignore_index: The label that does not count.
        **kwargs: See :class:`torchmetrics.Metric`; leave `process_group` at the world.
    """

    higher_is_better = False

    @override
    def _sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return torch.nn.functional.cross_entropy(
            logits, targets, ignore_index=self.ignore_index, reduction="sum"
        ).double()

    @override
    def compute(self) -> Tensor:
        """The perplexity; NaN if there were no tokens."""
        return super().compute().exp()
