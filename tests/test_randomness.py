"""Two runs are equal to the bit; ranks of a group draw other numbers where their data differ, and the same elsewhere."""

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_vdp import UlyssesVisionDPPrecision, UlyssesVisionDPStrategy
from lightning_vdp.call.randomness import RankRandomness
from lightning_vdp.testing import (
    Batches,
    ParityModule,
    PromoteFloat32,
    quiet_trainer,
    run_ranks,
    tiny_batch,
    tiny_model,
    whole_parameters,
)

FAMILY = "qwen2_5_vl"
CPU = torch.device("cpu")


class _Seen(nn.Dropout):
    """Dropout that remembers what it kept of a tensor of ones of its input's shape."""

    def __init__(self, places: dict[str, list[Tensor]], place: str) -> None:
        super().__init__(0.3)
        self.places, self.place = places, place

    def forward(self, x: Tensor) -> Tensor:
        mask = super().forward(torch.ones_like(x))
        if torch.is_grad_enabled():
            self.places.setdefault(self.place, []).append(mask.detach().clone())
        return x * mask


class _Dropping(ParityModule):
    """Dropout on the embeddings, in a block of the tower, in each layer, in attention, and on gathered logits."""

    def __init__(self, checkpointing: str = "", **strategy: Any) -> None:
        super().__init__(tiny_model(FAMILY, attention_dropout=0.2, attention="eager").train())
        self.places: dict[str, list[Tensor]] = {}
        base = self.model.model
        base.language_model.layers[0].mlp = nn.Sequential(base.language_model.layers[0].mlp, self.seen("layer 0"))
        base.language_model.layers[1].mlp = nn.Sequential(base.language_model.layers[1].mlp, self.seen("layer 1"))
        base.visual.blocks[0].mlp = nn.Sequential(base.visual.blocks[0].mlp, self.seen("tower"))
        self.after = self.seen("after")
        embeddings = base.get_input_embeddings()
        # inside the model, whose modes the comparison on the first batch changes
        embeddings.dropout = self.seen("embeddings")
        embeddings.register_forward_hook(lambda module, args, output: module.dropout(output))
        if checkpointing == "transformers":
            self.model.gradient_checkpointing_enable()

    def seen(self, place: str) -> _Seen:
        return _Seen(self.places, place)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.places.setdefault("cpu", []).append(torch.rand(3))
        return loss + 0 * self.after(torch.ones(4, dtype=loss.dtype)).sum()


def _blocks() -> set[type[nn.Module]]:
    return {type(module) for module in tiny_model(FAMILY).modules() if isinstance(module, GradientCheckpointingLayer)}


def _fit(
    checkpointing: str = "", vision_data_parallel: bool = True
) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    pl.seed_everything(11)
    module = _Dropping(checkpointing)
    arguments: dict[str, Any] = {"activation_checkpointing_policy": _blocks()} if checkpointing == "lightning" else {}
    strategy = UlyssesVisionDPStrategy(sequence_parallel_size=2, vision_data_parallel=vision_data_parallel, **arguments)
    world = int(os.environ["WORLD_SIZE"])
    trainer = quiet_trainer(devices=world, strategy=strategy, plugins=[UlyssesVisionDPPrecision("64-true")])
    # lengths that the ranks divide, so that masks of shards have one shape
    batches = [tiny_batch(FAMILY, seed=seed, rows=[[(1, 4, 4), (1, 4, 4)]], length=40) for seed in range(2)]
    with PromoteFloat32():
        trainer.fit(module, Batches(batches))
    return module.places, whole_parameters(trainer.strategy.model)


def _equal(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]], place: str) -> bool:
    assert len(one[place]) == len(other[place]) > 0
    return all(torch.equal(a, b) for a, b in zip(one[place], other[place]))


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return {
        "first": run_ranks(_fit, 2),
        "second": run_ranks(_fit, 2),
        "transformers": run_ranks(_fit, 2, "transformers"),
        "lightning": run_ranks(_fit, 2, "lightning"),
        "whole tower": run_ranks(_fit, 2, "", False),
    }


def test_two_runs_are_equal_to_the_bit(runs: dict[str, list[Any]]) -> None:
    for (places, parameters), (again, parameters_again) in zip(runs["first"], runs["second"]):
        assert all(_equal(places, again, place) for place in places)
        assert all(torch.equal(parameters[name], parameters_again[name]) for name in parameters)


def test_ranks_draw_their_own_numbers_where_their_data_differ(runs: dict[str, list[Any]]) -> None:
    (first, _), (second, _) = runs["first"]
    for place in ("tower", "layer 0", "layer 1"):
        assert not _equal(first, second, place)
        # other numbers in each step
        assert not torch.equal(first[place][0], first[place][1])
    assert not torch.equal(first["layer 0"][0], first["layer 1"][0])


def test_ranks_draw_the_same_numbers_elsewhere(runs: dict[str, list[Any]]) -> None:
    (first, _), (second, _) = runs["first"]
    for place in ("embeddings", "after", "cpu"):
        assert _equal(first, second, place)
        assert not torch.equal(first[place][0], first[place][1])
    (first, _), (second, _) = runs["whole tower"]
    for place in ("tower", "embeddings", "after", "cpu"):
        assert _equal(first, second, place)
    assert not _equal(first, second, "layer 0")


@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_recomputation_draws_the_same_numbers(runs: dict[str, list[Any]], kind: str) -> None:
    for (places, parameters), (again, checkpointed) in zip(runs["first"], runs[kind]):
        for place in ("embeddings", "after", "cpu"):
            assert _equal(places, again, place)
        for place in ("tower", "layer 0", "layer 1"):
            # each step's forward is followed by its recomputation
            forwards, recomputed = again[place][::2], again[place][1::2]
            assert all(torch.equal(a, b) for a, b in zip(forwards, recomputed))
            assert all(torch.equal(a, b) for a, b in zip(forwards, places[place]))
        for name, value in parameters.items():
            torch.testing.assert_close(checkpointed[name], value, rtol=1e-9, atol=1e-12, msg=name)


def _attention_weights() -> list[Tensor]:
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl as modeling

    kept: list[Tensor] = []
    own = nn.functional.dropout

    def dropout(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dim() == 4 and torch.is_grad_enabled():
            mask = own(torch.ones_like(x), *args, **kwargs)
            if (mask == 0).any():  # the tower's attention drops nothing
                kept.append(mask)
            return x * mask
        return own(x, *args, **kwargs)

    modeling.nn.functional.dropout = dropout  # in this forked process alone
    _fit()
    return kept


def test_attention_over_own_heads_drops_its_own(runs: dict[str, list[Any]]) -> None:
    first, second = run_ranks(_attention_weights, 2)
    assert len(first) == len(second) > 0
    assert first[0].shape == second[0].shape
    assert not any(torch.equal(a, b) for a, b in zip(first, second))


# ---- the seam itself


def test_common_state_moves_on_only_where_numbers_were_drawn() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with RankRandomness("decoder", 0, CPU):
        pass
    assert torch.equal(torch.get_rng_state(), before)
    drawn = {}
    states = []
    for rank, count in ((0, 1), (1, 5)):
        torch.set_rng_state(before)
        with RankRandomness("decoder", rank, CPU):
            drawn[rank] = torch.rand(count)
        states.append(torch.get_rng_state())
    assert drawn[0][0] != drawn[1][0]
    # however many each has drawn
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], before)


def test_common_state_is_back_after_an_error() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(ArithmeticError), RankRandomness("decoder", 0, CPU):
        raise ArithmeticError
    assert torch.equal(torch.get_rng_state(), before)


def _after_an_error_in_a_layer() -> list[float]:
    torch.manual_seed(3)
    module = _Dropping()
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise ArithmeticError

    class Module(_Dropping):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            layer = self.model.model.language_model.layers[1]
            handle = layer.register_forward_pre_hook(fail)
            with pytest.raises(ArithmeticError):
                self.model(**batch)
            handle.remove()
            self.drawn = torch.rand(2).tolist()
            raise InterruptedError

    module = Module()
    strategy = UlyssesVisionDPStrategy(sequence_parallel_size=2, verify_first_batch=False)
    with pytest.raises(InterruptedError):
        quiet_trainer(devices=2, strategy=strategy).fit(module, Batches([tiny_batch(FAMILY, dtype=torch.float32)]))
    assert calls
    return module.drawn


def test_ranks_share_random_numbers_again_after_an_error_in_a_layer() -> None:
    first, second = run_ranks(_after_an_error_in_a_layer, 2)
    assert first == second
