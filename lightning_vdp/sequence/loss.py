"""The causal language model's loss from shards of logits: the same number on every rank of a sequence group."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss

from lightning_vdp.batch.labels import IGNORED, shift
from lightning_vdp.call.call import CALL, ForwardCall
from lightning_vdp.collectives import all_reduce
from lightning_vdp.run.regions import LOSS, region
from lightning_vdp.sequence.tokens import by_chunks
from lightning_vdp.shards import shard_sequence

__all__ = ["model_uses_causal_loss", "sharded_causal_loss"]


@region(LOSS)
def sharded_causal_loss(
    self: nn.Module,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Cross entropy of the next token; stands in for the model's `loss_function`.

    Args:
        self: The model with the head.
        logits: Logits of this rank's shard, shape ``[B, T, V]``.
        labels: Labels of the whole sequence, shape ``[B, S]``; shifted before they are cut.
        vocab_size: V.
        num_items_in_batch: What the sum is divided by. Default: the labels that count; a batch without any has loss 0.
        ignore_index: Label that does not count.
        shift_labels: Labels of the whole sequence that are shifted already.
        **kwargs: Carry the call; without one this is the model's own loss.
    """
    call: ForwardCall | None = kwargs.pop(CALL, None)
    if call is None or call.whole:
        return ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **kwargs
        )
    whole = shift(labels, ignore_index) if shift_labels is None else shift_labels
    targets = shard_sequence(whole, call.shard).to(logits.device)

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction="sum")

    sums = by_chunks(cross_entropy, logits.reshape(-1, vocab_size), targets.reshape(-1))
    summed = all_reduce(torch.stack(sums).sum(), call.shard.group, call.shard.track("loss"))
    if num_items_in_batch is not None:
        return summed / num_items_in_batch
    if call.settings.loss_tokens == "global":
        return summed / _tokens_per_replica(call)
    return summed / (whole != ignore_index).sum().clamp(min=1).to(summed.device)


def _tokens_per_replica(call: ForwardCall) -> float:
    """Mean over replicas of their label counts, so that the mean over replicas weighs every token alike."""
    counts = [sum(header["tokens"]) for header in call.headers.wait()[:: call.mesh.sequence_parallel_size]]
    return max(sum(counts), 1) / len(counts)


def model_uses_causal_loss(model: nn.Module) -> bool:
    """Whether a model's loss is the one that `sharded_causal_loss` stands in for."""
    return getattr(model, "loss_function", None) is ForCausalLMLoss
