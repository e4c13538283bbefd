"""The first batch, run divided and whole."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_vdp import UlyssesVisionDPStrategy
from lightning_vdp.families.find import family_of
from lightning_vdp.forward.first_batch import FirstBatch, evaluating, find_difference, shorten
from lightning_vdp.testing import Batches, ParityModule, RankFailed, quiet_trainer, run_ranks, tiny_batch, tiny_model

FAMILY = "qwen2_5_vl"


class _Convolved(nn.Module):
    """A feed-forward layer behind a convolution over positions, which passes no attention registry."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.mix = nn.Conv1d(width, width, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.mix(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


class _Capped(nn.Module):
    """A feed-forward layer that takes only as many tokens as it has room for, the largest first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        scores = x.norm(dim=-1).flatten()
        chosen = scores.topk(len(scores) // 2).indices
        out = torch.zeros_like(x).flatten(0, 1)
        out[chosen] = self.inner(x.flatten(0, 1)[chosen])
        return out.view_as(x)


class _Centered(nn.Module):
    """A projector that takes the mean over all images of a batch away."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        features = self.inner(x)
        return features - features.mean(0)


def _mixing(kind: str) -> nn.Module:
    model = tiny_model(FAMILY)
    if kind == "images":
        model.model.visual.merger = _Centered(model.model.visual.merger)
        return model
    layer = model.model.language_model.layers[1]
    layer.mlp = _Convolved(layer.mlp, 64) if kind == "convolution" else _Capped(layer.mlp)
    return model


def _fit(kind: str, precision: str, verify: bool) -> int:
    loader = Batches([tiny_batch(FAMILY, seed=seed, dtype=torch.float32) for seed in range(2)])
    strategy = UlyssesVisionDPStrategy(sequence_parallel_size=2, verify_first_batch=verify)
    trainer = quiet_trainer(devices=2, strategy=strategy, precision=precision)
    trainer.fit(ParityModule(tiny_model(FAMILY) if kind == "plain" else _mixing(kind)), loader)
    return trainer.global_step


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("convolution", "32-true"),
        ("convolution", "bf16-mixed"),
        ("capacity", "32-true"),
        ("capacity", "bf16-mixed"),
        # in lower precision, what moves all positions alike may pass for rounding
        ("images", "32-true"),
    ],
)
def test_mixing_that_no_counter_sees_is_refused_alike_on_every_rank(kind: str, precision: str) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_fit, 2, kind, precision, True)
    assert len(set(caught.value.failures.values())) == 1
    assert "does not yield the same when its sequence is divided" in caught.value.failures[0]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_rounding_is_not_refused(precision: str) -> None:
    assert run_ranks(_fit, 2, "plain", precision, True) == [2, 2]


def test_verification_can_be_switched_off() -> None:
    assert run_ranks(_fit, 2, "convolution", "32-true", False) == [2, 2]


class _Modes(ParityModule):
    def __init__(self) -> None:
        super().__init__(tiny_model(FAMILY).train())
        self.model.model.visual.eval()
        self.forwards: list[tuple[bool, bool]] = []
        self.model.model.language_model.layers[0].register_forward_hook(self._see)

    def _see(self, layer: nn.Module, *_: Any) -> None:
        self.forwards.append((layer.training, torch.is_grad_enabled()))

    def on_train_start(self) -> None:
        self.model.model.visual.eval()

    def on_train_batch_end(self, *_: Any) -> None:
        self.frozen_mode = self.model.model.visual.training


def _modes() -> tuple[list[tuple[bool, bool]], bool]:
    module = _Modes()
    loader = Batches([tiny_batch(FAMILY, dtype=torch.float32)] * 2)
    quiet_trainer(devices=2, strategy="ulysses_vdp").fit(module, loader)
    return module.forwards, module.frozen_mode


def test_verification_runs_once_without_gradients_and_leaves_modes_alone() -> None:
    for forwards, visual_training in run_ranks(_modes, 2):
        assert forwards == [(False, False)] * 2 + [(True, True)] * 2
        assert visual_training is False


def _long_first_batch(limit: int) -> int:
    import lightning_vdp.forward.first_batch as first_batch

    first_batch.shorten = lambda *args: shorten(*args, limit=limit)  # in this forked rank alone
    rank = int(os.environ["RANK"])
    rows = [[(1, 4, 4), (1, 6, 8), (1, 4, 4)], [(1, 8, 4)]] if rank < 2 else [[], []]
    loader = Batches([tiny_batch("qwen3_vl", rows=rows, text=6, padding="left", dtype=torch.float32)])
    trainer = quiet_trainer(devices=4, strategy="ulysses_vdp_sp2")
    trainer.fit(ParityModule(tiny_model("qwen3_vl")), loader)
    return trainer.global_step


@pytest.mark.parametrize("limit", [8, 20, 40])
def test_a_long_first_batch_is_cut_also_where_replicas_hold_other_modalities(limit: int) -> None:
    assert run_ranks(_long_first_batch, 4, limit) == [1] * 4


def test_cut_keeps_whole_images_of_the_first_row() -> None:
    batch = tiny_batch("qwen2_5_vl", rows=[[(1, 4, 4), (1, 6, 8), (1, 4, 4)], [(1, 8, 4)]], text=5, padding="left")
    base = tiny_model("qwen2_5_vl").model
    config, family = base.config, family_of(base)
    # 5 words, 4 + 2 for the first image, 5 words, a marker, and then 12 tokens that would pass the limit
    short = shorten(batch, family, config, 2, limit=20)
    assert short is not None
    assert short["input_ids"].shape == (1, 17)
    assert short["attention_mask"].all()
    assert "labels" not in short
    assert short["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert torch.equal(short["pixel_values"], batch["pixel_values"][:16])
    everything = shorten(batch, family, config, 2, limit=10_000)
    assert everything is not None
    assert everything["pixel_values"] is batch["pixel_values"]
    words = shorten(batch, family, config, 2, limit=6)
    assert words is not None
    assert words["input_ids"].shape == (1, 6)
    assert "pixel_values" not in words


def test_difference_is_relative_to_a_typical_position() -> None:
    config = tiny_model(FAMILY).config
    whole = torch.randn(1, 6, 9)
    assert find_difference(whole * (1 + 1e-6), whole, config) is None
    other = whole.clone()
    other[0, 3] += 1
    assert "relative difference" in (find_difference(other, whole, config) or "")
    assert find_difference(whole[:, :0], whole[:, :0], config) is None


def test_evaluating_puts_modes_back() -> None:
    module = nn.Sequential(nn.Dropout(), nn.Dropout())
    module[1].eval()
    with evaluating(module):
        assert not module[0].training
        assert not torch.is_grad_enabled()
    assert [child.training for child in module.modules()] == [True, True, False]
    assert FirstBatch(True).__deepcopy__({}).expected
