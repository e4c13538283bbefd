"""Losses from shards of logits: in chunks, per token, and as preference training needs them."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vdp import token_entropy, token_log_probs
from lightning_vdp.sequence import tokens
from lightning_vdp.testing import ParityModule, assert_parity, tiny_batch, tiny_model


def _plain_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    targets = labels[:, 1:]
    picked = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked * (targets != -100)


@pytest.mark.parametrize("values", [2**24, 64, 1], ids=["one chunk", "chunks", "a position each"])
def test_chunks_change_nothing(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_CHUNK_VALUES", values)
    torch.manual_seed(0)
    logits = torch.randn(2, 7, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (2, 7))
    labels[0, 3] = labels[1, :2] = -100
    truth = _plain_log_probs(logits, labels)
    weights = torch.randn(2, 6, dtype=torch.float64)
    (expected,) = torch.autograd.grad((truth * weights).sum(), logits)
    result = token_log_probs(logits, labels)
    (gradient,) = torch.autograd.grad((result * weights).sum(), logits)
    torch.testing.assert_close(result.double(), truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    entropy = token_entropy(logits, labels)
    probabilities = logits[:, :-1].softmax(-1)
    expected_entropy = -(probabilities * probabilities.log()).sum(-1) * (labels[:, 1:] != -100)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-6)


class _LargestFloat32(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                self.largest = max(self.largest, value.numel())
        return result


def test_float32_logits_never_exceed_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_CHUNK_VALUES", 4 * 50)
    logits = torch.randn(1, 40, 50).bfloat16().requires_grad_()
    labels = torch.randint(0, 50, (1, 40))
    watch = _LargestFloat32()
    with watch:
        token_log_probs(logits, labels).sum().backward()
    assert 50 <= watch.largest <= 4 * 50
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_logits_of_another_shard_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit labels"):
        token_log_probs(torch.zeros(1, 3, 5), torch.zeros(1, 7, dtype=torch.int64))


def _chunked(family: str) -> ParityModule:
    tokens._CHUNK_VALUES = 5 * 128  # in this forked rank alone
    return ParityModule(tiny_model(family).train())


@pytest.mark.parametrize("size", [2, 4])
def test_parity_of_the_chunked_loss(size: int) -> None:
    batches = [tiny_batch("qwen2_5_vl", seed=seed, rows=[[(1, 4, 4)], [(1, 6, 8)]]) for seed in range(3)]
    assert_parity(partial(_chunked, "qwen2_5_vl"), batches, world_size=size, sequence_parallel_size=size)


class _PolicyGradient(ParityModule):
    """A clipped policy gradient with an entropy bonus and float32 advantages in the batch."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        advantage, old = batch["advantage"], batch["old"]
        outputs = self.model(**batch["inputs"])
        shard, labels = getattr(outputs, "sequence_shard", None), batch["inputs"]["labels"]
        log_probs = token_log_probs(outputs.logits, labels, shard)
        ratio = (log_probs - old).exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -clipped.mean() - 0.1 * token_entropy(outputs.logits, labels, shard).mean()


def _policy_gradient() -> ParityModule:
    return _PolicyGradient(tiny_model("qwen3_vl").train())


def test_parity_of_a_policy_gradient() -> None:
    def batch(seed: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(seed)
        inputs = tiny_batch("qwen3_vl", seed=seed)
        length = inputs["labels"].shape[1]
        # far from the edges of the clipping, where rounding would decide
        old = torch.full((1, length - 1), -4.8, dtype=torch.float64)
        return {"inputs": inputs, "old": old, "advantage": torch.randn(1, length - 1, generator=draw)}

    assert_parity(_policy_gradient, [batch(seed) for seed in range(3)])


class _Preference(ParityModule):
    """A DPO-shaped step: two forwards of other lengths through the policy, and two through a frozen copy."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.reference = copy.deepcopy(model).requires_grad_(False).eval()
        with torch.no_grad():
            for parameter in self.reference.parameters():
                parameter.mul_(1.01)

    def _score(self, model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = model(**batch)
        return token_log_probs(outputs.logits, batch["labels"], getattr(outputs, "sequence_shard", None)).sum(-1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        chosen, rejected = (self._score(self.model, batch[side]) for side in ("chosen", "rejected"))
        with torch.no_grad():
            reference = self._score(self.reference, batch["chosen"]) - self._score(self.reference, batch["rejected"])
        return -functional.logsigmoid(0.1 * (chosen - rejected - reference)).mean()


def _preference(checkpointing: bool) -> ParityModule:
    module = _Preference(tiny_model("qwen2_5_vl").train())
    if checkpointing:
        module.model.gradient_checkpointing_enable()
    return module


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
def test_parity_of_a_preference_step(checkpointing: bool) -> None:
    pairs = [
        {
            "chosen": tiny_batch("qwen2_5_vl", seed=seed),
            "rejected": tiny_batch("qwen2_5_vl", seed=seed + 9, rows=[[(1, 6, 8)]], text=4),
        }
        for seed in range(3)
    ]
    assert_parity(partial(_preference, checkpointing), pairs)


class _Smoothed(ParityModule):
    """Cross entropy with smoothed labels: torch's own in one process, from shards of logits on ranks."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        labels = batch["labels"]
        outputs = self.model(**{name: value for name, value in batch.items() if name != "labels"})
        shard = getattr(outputs, "sequence_shard", None)
        if shard is None:
            flat = outputs.logits[:, :-1].flatten(0, 1)
            return functional.cross_entropy(flat, labels[:, 1:].flatten(), label_smoothing=0.2)
        log_probs = token_log_probs(outputs.logits, labels, shard, label_smoothing=0.2)
        return -log_probs.sum() / (labels[:, 1:] != -100).sum()


def _smoothed() -> ParityModule:
    return _Smoothed(tiny_model("qwen3_vl").train())


@pytest.mark.parametrize("size", [2, 3])
def test_parity_of_smoothed_labels(size: int) -> None:
    batches = [tiny_batch("qwen3_vl", seed=seed) for seed in range(3)]
    assert_parity(_smoothed, batches, world_size=size, sequence_parallel_size=size)


class _WholeLogits(ParityModule):
    """A loss of the user's own on whole logits, as if nothing were divided."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        outputs = self.model(**batch)
        assert outputs.logits.shape[:2] == batch["labels"].shape
        return outputs.loss + 0.1 * outputs.logits.logsumexp(-1).square().mean()


def _whole_logits() -> ParityModule:
    return _WholeLogits(tiny_model("qwen2_5_vl").train())


def test_parity_of_a_loss_on_whole_logits() -> None:
    batches = [tiny_batch("qwen2_5_vl", seed=seed) for seed in range(3)]
    assert_parity(_whole_logits, batches, strategy_arguments={"logits": "whole"})
