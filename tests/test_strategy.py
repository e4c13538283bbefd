"""The strategy's life around `Trainer`: names, sizes, runs one after another, what it leaves behind."""

import copy
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lightning_vdp
from lightning_vdp import UlyssesVisionDPPrecision, UlyssesVisionDPStrategy, gather_sequence
from lightning_vdp.families.find import find_models
from lightning_vdp.families.wrappers import unwrap
from lightning_vdp.forward.divide import divide_models
from lightning_vdp.fsdp.policy import fsdp_parts
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.settings import Settings
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


def strategy(size: int = 2, **arguments: Any) -> UlyssesVisionDPStrategy:
    return UlyssesVisionDPStrategy(sequence_parallel_size=size, **arguments)


def traces(module: nn.Module) -> list[str]:
    """Every hook and instance patch on a module tree, and the attention registry's."""
    found = []
    for name, child in module.named_modules():
        for hook in [*child._forward_pre_hooks.values(), *child._forward_hooks.values()]:
            function = getattr(hook, "func", hook)
            if function.__module__.startswith("lightning_vdp"):
                found.append(f"{name}: {function.__name__}")
        # Lightning leaves its own `forward` on the module
        methods = {key for key, value in vars(child).items() if type(value).__name__ == "method"} - {"forward"}
        found += [f"{name}.{key}" for key in sorted(methods)]
    return found + list(vars(ALL_ATTENTION_FUNCTIONS).keys() - {"_local_mapping"})


# ---- names


def test_registered_names() -> None:
    names = {name for name in StrategyRegistry if name.startswith("ulysses_vdp")}
    assert names == {"ulysses_vdp", "ulysses_vdp_sp2", "ulysses_vdp_sp4", "ulysses_vdp_sp8"}
    assert StrategyRegistry.get("ulysses_vdp_sp4")._requested_sizes == (4, "auto")


def test_pytorch_lightning_trainer_says_what_to_do() -> None:
    other = pytest.importorskip("pytorch_lightning")
    with pytest.raises(Exception, match=r"import Trainer, LightningModule and callbacks from `lightning\.pytorch`"):
        other.Trainer(strategy="ulysses_vdp", accelerator="cpu", devices=2, logger=False)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("vision_assignment", "greedy"),
        ("vision_balance", "flops"),
        ("vision_exchange", "broadcast"),
        ("logits", "none"),
        ("loss_tokens", "batch"),
        ("fsdp_version", 3),
    ],
)
def test_unknown_choice_is_refused(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{argument}` is {value!r}, but must be one of"):
        UlyssesVisionDPStrategy(**{argument: value})


# ---- sizes and groups


class _Describing(ParityModule):
    def on_fit_start(self) -> None:
        chosen = self.trainer.strategy
        self.facts = {
            "sampler": chosen.distributed_sampler_kwargs,
            "sizes": (chosen.data_parallel_size, chosen.sequence_parallel_size),
            "ranks": (chosen.data_parallel_rank, chosen.sequence_parallel_rank),
            "mesh": (self.device_mesh.mesh_dim_names, self.device_mesh.mesh.tolist()),
            "group": dist.get_process_group_ranks(chosen.data_parallel_group),
            "fsdp_mesh": chosen.fsdp_mesh and (chosen.fsdp_mesh.mesh_dim_names, chosen.fsdp_mesh.mesh.tolist()),
        }


def _describe(name: Any, devices: int = 4) -> dict[str, Any]:
    module = _Describing(tiny_model(FAMILY))
    loader = Batches([tiny_batch(FAMILY, dtype=torch.float32)])
    quiet_trainer(devices=devices, strategy=name).fit(module, train_dataloaders=loader)
    return module.facts


def test_mesh_and_sampler_follow_replicas() -> None:
    facts = run_ranks(_describe, 4, "ulysses_vdp_sp2")
    for rank, fact in enumerate(facts):
        assert fact["sampler"] == {"num_replicas": 2, "rank": rank // 2}
        assert fact["sizes"] == (2, 2)
        assert fact["ranks"] == (rank // 2, rank % 2)
        assert fact["mesh"] == (("data_parallel", "sequence_parallel"), [[0, 1], [2, 3]])
        assert fact["group"] == [rank % 2, rank % 2 + 2]
        assert fact["fsdp_mesh"] == (("shard",), [0, 1, 2, 3])


def test_the_first_version_of_fsdp_shards_over_the_world_without_a_mesh() -> None:
    assert [fact["fsdp_mesh"] for fact in run_ranks(_describe, 2, strategy(2, fsdp_version=1), 2)] == [None] * 2


def test_automatic_size_is_the_devices_of_the_node() -> None:
    assert {fact["sizes"] for fact in run_ranks(_describe, 4, "ulysses_vdp")} == {(1, 4)}


# ---- what is left behind


class _Looking(ParityModule):
    def on_train_start(self) -> None:
        self.during = traces(self)


def _fit_and_look(size: int, version: int = 2) -> tuple[list[str], list[str], list[str]]:
    module = _Looking(tiny_model(FAMILY))
    before = traces(module)
    loader = Batches([tiny_batch(FAMILY, dtype=torch.float32)])
    quiet_trainer(devices=2, strategy=strategy(size, fsdp_version=version)).fit(module, train_dataloaders=loader)
    return before, module.during, traces(module)


@pytest.mark.parametrize(
    ("version", "steps"),
    # the root of `fully_shard` gathers its weights in the steps that the module defines
    [(1, []), (2, [".training_step", ".validation_step"])],
)
def test_no_hook_or_patch_with_one_rank_to_a_group(version: int, steps: list[str]) -> None:
    for before, during, after in run_ranks(_fit_and_look, 2, 1, version):
        assert before == after == []
        assert during == steps


def test_teardown_takes_out_every_hook_and_patch() -> None:
    for before, during, after in run_ranks(_fit_and_look, 2, 2):
        assert before == after == []
        assert any("shard_layer_inputs" in trace for trace in during)
        assert {"model.model.get_image_features", "model._loss_function", "get_interface"} <= set(during)


def _fail_in_setup() -> list[str]:
    module = ParityModule(tiny_model(FAMILY))
    # somebody else's patch, which is met after others were made
    module.model.prepare_inputs_for_generation = module.model.prepare_inputs_for_generation
    with pytest.raises(RuntimeError, match="replaced by somebody else"):
        quiet_trainer(devices=2, strategy=strategy()).fit(module, train_dataloaders=Batches([]))
    del module.model.prepare_inputs_for_generation
    return traces(module)


def test_failed_setup_leaves_nothing_behind() -> None:
    assert run_ranks(_fail_in_setup, 2) == [[], []]


# ---- one module through several runs


def _several_runs(alone: bool, policy: bool, version: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    arguments: dict[str, Any] = {"devices": 1, "precision": "64-true"}
    module = ParityModule(tiny_model(FAMILY))

    def trainer() -> pl.Trainer:
        if not alone:
            blocks = {"auto_wrap_policy": {type(module.model.model.language_model.layers[0])}} if policy else {}
            arguments.update(
                devices=2,
                precision=None,
                plugins=[UlyssesVisionDPPrecision("64-true")],
                strategy=strategy(activation_checkpointing_policy={nn.Embedding}, fsdp_version=version, **blocks),
            )
        return quiet_trainer(**arguments)

    loaders = [Batches([tiny_batch(FAMILY, seed=seed + run) for seed in range(2)]) for run in range(4)]
    with PromoteFloat32():
        first = trainer()
        first.fit(module, loaders[0])
        losses = [float(first.validate(module, loaders[1], verbose=False)[0]["val_loss"])]
        first.fit_loop.max_epochs = 2
        first.fit(module, loaders[2])
        second = trainer()
        second.fit(module, loaders[3])
        losses += [float(second.validate(module, loaders[0], verbose=False)[0]["val_loss"])]
    return whole_parameters(second.strategy.model), losses


@cache
def _several_runs_alone() -> tuple[dict[str, Tensor], list[float]]:
    ((parameters, losses),) = run_ranks(_several_runs, 1, True, False)
    return parameters, losses


@pytest.mark.parametrize(("policy", "version"), [(False, 1), (True, 1), (False, 2)])
def test_fit_validate_fit_and_a_new_trainer_on_one_module(policy: bool, version: int) -> None:
    truth, losses = _several_runs_alone()
    for parameters, own_losses in run_ranks(_several_runs, 2, False, policy, version):
        assert own_losses == pytest.approx(losses, rel=1e-6)
        for name, value in truth.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-9, atol=1e-12, msg=name)


def _other_sharding_afterwards() -> str:
    module = ParityModule(tiny_model(FAMILY))
    loader = Batches([tiny_batch(FAMILY, dtype=torch.float32)])
    quiet_trainer(devices=2, strategy=strategy()).fit(module, loader)
    with pytest.raises(ValueError, match="other values of") as caught:
        quiet_trainer(devices=2, strategy=strategy(sharding_strategy="SHARD_GRAD_OP")).fit(module, loader)
    return str(caught.value)


def test_another_sharding_of_a_wrapped_module_is_refused() -> None:
    messages = run_ranks(_other_sharding_afterwards, 2)
    assert messages[0] == messages[1]
    assert "`sharding_strategy`" in messages[0]


def _precision_afterwards() -> set[torch.dtype]:
    module = ParityModule(tiny_model(FAMILY))
    loader = Batches([tiny_batch(FAMILY, dtype=torch.float32)])
    quiet_trainer(devices=2, strategy=strategy()).fit(module, loader)
    with pytest.raises(ValueError, match="other values of `mixed_precision`"):
        quiet_trainer(devices=2, strategy=strategy(), precision="bf16-true").validate(module, loader)
    assert traces(module) == []
    return {parameter.dtype for parameter in module.parameters()}


def test_a_refused_run_changes_nothing() -> None:
    assert run_ranks(_precision_afterwards, 2) == [{torch.float32}] * 2


class _Stopping(ParityModule):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        raise InterruptedError("in the middle of a step")


def _after_a_stop() -> None:
    module = _Stopping(tiny_model(FAMILY))
    loader = Batches([tiny_batch(FAMILY, dtype=torch.float32)])
    with pytest.raises(InterruptedError):
        quiet_trainer(devices=2, strategy=strategy()).fit(module, loader)
    with pytest.raises(ValueError, match="An earlier run of _Stopping stopped in the middle of a step"):
        quiet_trainer(devices=2, strategy=strategy()).fit(module, loader)


def test_a_module_whose_run_stopped_in_a_step_is_refused() -> None:
    run_ranks(_after_a_stop, 2)


def _in_another_module() -> None:
    model = tiny_model(FAMILY)
    loader = Batches([tiny_batch(FAMILY, dtype=torch.float32)])
    quiet_trainer(devices=2, strategy=strategy()).fit(ParityModule(model), loader)
    with pytest.raises(
        ValueError, match="A part of ParityModule was wrapped by FSDP in an earlier run as part of another"
    ):
        quiet_trainer(devices=2, strategy=strategy()).fit(ParityModule(model), loader)


def test_a_wrapped_model_in_another_module_is_refused() -> None:
    run_ranks(_in_another_module, 2)


def _count_groups() -> list[int]:
    counts = []
    for _ in range(3):
        loader = Batches([tiny_batch(FAMILY, dtype=torch.float32)])
        chosen = strategy(timeout=timedelta(seconds=77))
        quiet_trainer(devices=4, strategy=chosen).fit(ParityModule(tiny_model(FAMILY)), loader)
        counts.append(len(dist.distributed_c10d._world.pg_map))
        for group in (chosen.mesh.sequence_group, chosen.mesh.data_parallel_group, chosen.mesh.header_group):
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    return counts


def test_process_groups_are_made_once() -> None:
    for counts in run_ranks(_count_groups, 4):
        assert len(set(counts)) == 1


def _foreign_lookup() -> None:
    dist.init_process_group("gloo")
    own = ALL_ATTENTION_FUNCTIONS.get_interface
    vars(ALL_ATTENTION_FUNCTIONS)["get_interface"] = foreign = lambda *args: own(*args)
    mesh = SequenceMesh("cpu", 1, 2)
    division = divide_models(find_models(tiny_model(FAMILY)), mesh, Settings())
    assert ALL_ATTENTION_FUNCTIONS.get_interface is not foreign
    division.undo()
    assert ALL_ATTENTION_FUNCTIONS.get_interface is foreign


def test_somebody_elses_attention_lookup_is_put_back() -> None:
    run_ranks(_foreign_lookup, 2)


# ---- copies and neighbours


def _divided(model: nn.Module, mesh: SequenceMesh) -> Any:
    return divide_models(find_models(model), mesh, Settings(logits="whole"))


def _copies() -> None:
    dist.init_process_group("gloo")
    with torch.no_grad():
        model = tiny_model(FAMILY).double().eval()
        batch = tiny_batch(FAMILY)
        mesh = SequenceMesh("cpu", 1, 2)
        truth = model(**batch).logits
        division = _divided(model, mesh)
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.mul_(1.5)
        plain = tiny_model(FAMILY).double().eval()
        plain.load_state_dict(twin.state_dict())
        torch.testing.assert_close(twin(**batch).logits, plain(**batch).logits, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(model(**batch).logits, truth, rtol=1e-5, atol=1e-8)
        assert twin(**batch).sequence_shard.sizes != (truth.shape[1],)
        division.undo()
        mesh.close()
        # hooks on the copy cannot be taken out: they do nothing from here on
        assert not hasattr(twin(**batch), "sequence_shard")
        torch.testing.assert_close(twin(**batch).logits, plain(**batch).logits)
        torch.testing.assert_close(model(**batch).logits, truth)


def test_deepcopy_of_a_divided_model_answers_with_its_own_weights() -> None:
    run_ranks(_copies, 2)


def _neighbours() -> None:
    dist.init_process_group("gloo")
    with torch.no_grad():
        models = [tiny_model(FAMILY, seed=seed).double().eval() for seed in (0, 1, 2)]
        batch = tiny_batch(FAMILY)
        truths = [model(**batch).logits for model in models]
        meshes = [SequenceMesh("cpu", 2, 2), SequenceMesh("cpu", 1, 4)]
        divisions = [_divided(model, mesh) for model, mesh in zip(models, meshes)]
        for _ in range(2):
            outputs = [model(**batch) for model in models]
            for output, truth in zip(outputs, truths):
                torch.testing.assert_close(output.logits, truth, rtol=1e-5, atol=1e-8)
            assert [len(output.sequence_shard.sizes) for output in outputs[:2]] == [2, 4]
            assert not hasattr(outputs[2], "sequence_shard")
        divisions[0].undo()
        torch.testing.assert_close(models[1](**batch).logits, truths[1], rtol=1e-5, atol=1e-8)
        assert not hasattr(models[0](**batch), "sequence_shard")
        divisions[1].undo()
        assert traces(models[0]) == traces(models[1]) == []


def test_models_with_other_sizes_in_one_process() -> None:
    run_ranks(_neighbours, 4)


# ---- data


class _Augmented(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = tiny_batch(FAMILY, seed=index, dtype=torch.float32)
        batch["pixel_values"] += torch.randn(()) + float(numpy.random.rand())
        return {**batch, "index": index}


class _Remembering(ParityModule):
    def __init__(self) -> None:
        super().__init__(tiny_model(FAMILY))
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.seen.append((int(batch.pop("index")), float(batch["pixel_values"].double().sum())))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Iterator[Any]:
        return DataLoader(_Augmented(), batch_size=None, shuffle=True, num_workers=2)


def _remember() -> list[tuple[int, float]]:
    pl.seed_everything(7, workers=True)
    module = _Remembering()
    quiet_trainer(devices=4, strategy=strategy(), use_distributed_sampler=True, limit_train_batches=3).fit(module)
    return module.seen


def test_ranks_of_a_group_draw_the_same_augmentations_in_workers() -> None:
    seen = run_ranks(_remember, 4, timeout=120)
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert len(seen[0]) == 3
    assert not {index for index, _ in seen[0]} & {index for index, _ in seen[2]}


# ---- precision


class _Dtypes(ParityModule):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.advantage = batch.pop("advantage").dtype
        loss = super().training_step(batch, batch_idx)
        self.rotary = {name: buffer.dtype for name, buffer in self.named_buffers() if name.endswith("inv_freq")}
        self.loss = float(loss)
        return loss


def _dtypes(precision: str | None) -> tuple[Any, Any, float]:
    module = _Dtypes(tiny_model("qwen3_vl"))
    batch = {**tiny_batch("qwen3_vl", dtype=torch.float32), "advantage": torch.ones(1, dtype=torch.float32)}
    divided = {"devices": 2, "strategy": strategy(), "precision": precision}
    quiet_trainer(**({"devices": 1} if precision is None else divided), max_steps=1).fit(module, Batches([batch]))
    return module.advantage, set(module.rotary.values()), module.loss


@cache
def _loss_alone() -> float:
    ((_, _, loss),) = run_ranks(_dtypes, 1, None)
    return loss


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_buffers_and_float_fields_keep_their_dtype(precision: str) -> None:
    truth = _loss_alone()
    for advantage, rotary, loss in run_ranks(_dtypes, 2, precision):
        assert advantage == torch.float32
        assert rotary == {torch.float32}
        assert loss == pytest.approx(truth, rel=1e-5 if precision == "32-true" else 0.03)


def test_precision_plugin_replaces_lightnings_own() -> None:
    trainer = quiet_trainer(devices=2, strategy="ulysses_vdp", precision="bf16-mixed")
    plugin = trainer.strategy.precision_plugin
    assert type(plugin) is UlyssesVisionDPPrecision
    assert plugin.precision == "bf16-mixed"
    assert plugin.mixed_precision_config.buffer_dtype is None


# ---- checkpoints


def _save(folder: str, size: int) -> dict[str, Tensor]:
    module = ParityModule(tiny_model(FAMILY))
    loader = Batches([tiny_batch(FAMILY, seed=seed, dtype=torch.float32) for seed in range(2)])
    trainer = quiet_trainer(devices=2, strategy=strategy(size))
    trainer.fit(module, loader)
    trainer.save_checkpoint(Path(folder) / "full.ckpt")
    return whole_parameters(trainer.strategy.model)


def _resume(folder: str, size: int) -> tuple[int, float]:
    module = ParityModule(tiny_model(FAMILY, seed=5))
    loader = Batches([tiny_batch(FAMILY, seed=seed, dtype=torch.float32) for seed in range(2)])
    trainer = quiet_trainer(devices=2, strategy=strategy(size), max_epochs=2)
    trainer.fit(module, loader, ckpt_path=str(Path(folder) / "full.ckpt"))
    return trainer.global_step, float(trainer.validate(module, loader, verbose=False)[0]["val_loss"])


def test_full_checkpoint_on_the_cpu(tmp_path: Path) -> None:
    saved = run_ranks(_save, 2, str(tmp_path), 2)[0]
    checkpoint = torch.load(tmp_path / "full.ckpt", weights_only=True)
    model = tiny_model(FAMILY, seed=9)
    model.load_state_dict({name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), saved[f"model.{name}"], rtol=0, atol=0)
    resumed = run_ranks(_resume, 2, str(tmp_path), 2)
    assert resumed[0] == resumed[1]
    assert resumed[0][0] == 4
    # the optimizer's momentum is in the checkpoint too: without a group the same steps follow
    assert run_ranks(_resume, 2, str(tmp_path), 1)[0][1] == pytest.approx(resumed[0][1], rel=1e-4)


# ---- whole forwards


def _generate(use_cache: bool) -> tuple[list[int], list[int]]:
    model = tiny_model(FAMILY).eval()
    batch = tiny_batch(FAMILY, dtype=torch.float32)
    batch.pop("labels")
    arguments = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache}
    truth = model.generate(**batch, **arguments)

    class Generating(ParityModule):
        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            self.answer = self.model.generate(**batch, **arguments)

    module = Generating(model)
    quiet_trainer(devices=2, strategy=strategy()).validate(module, Batches([batch]), verbose=False)
    return module.answer.tolist(), truth.tolist()


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "not cached"])
def test_generation_runs_whole_on_every_rank(use_cache: bool) -> None:
    for answer, truth in run_ranks(_generate, 2, use_cache):
        assert answer == truth


def _whole_logits() -> None:
    dist.init_process_group("gloo")
    model = tiny_model("qwen3_vl").double().eval()
    batch = tiny_batch("qwen3_vl", rows=[[(1, 4, 4)], [(1, 6, 8)]])
    with torch.no_grad():
        truth = model(**batch)
        division = divide_models(find_models(model), SequenceMesh("cpu", 1, 2), Settings())
        outputs = model(**batch)
        shard = outputs.sequence_shard
        assert outputs.logits.shape[1] == shard.size == len(shard.positions)
        torch.testing.assert_close(
            outputs.logits, truth.logits[:, shard.start :][:, : shard.size], rtol=1e-5, atol=1e-8
        )
        torch.testing.assert_close(gather_sequence(outputs.logits, shard), truth.logits, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(outputs.loss, truth.loss, rtol=1e-5, atol=1e-8)
        # a user's loss on the base model's outputs
        base = model.model(**{name: value for name, value in batch.items() if name != "labels"})
        assert base.last_hidden_state.shape[1] == base.sequence_shard.size
        division.undo()


def test_outputs_say_which_positions_they_belong_to() -> None:
    run_ranks(_whole_logits, 2)


def test_version_is_in_one_place() -> None:
    from importlib.metadata import version

    assert version("lightning_vdp") == lightning_vdp.__version__


# ---- what FSDP gathers on its own


def _gathered_apart(version: int, tied: bool) -> list[str]:
    model = tiny_model(FAMILY)
    if tied:
        model.lm_head.weight = model.model.language_model.embed_tokens.weight
    trainer = quiet_trainer(
        devices=2, plugins=[UlyssesVisionDPPrecision("64-true")], strategy=strategy(fsdp_version=version)
    )
    trainer.fit(ParityModule(model), Batches([tiny_batch(FAMILY)]))
    parts = [type(unwrap(part)).__name__ for part in fsdp_parts(trainer.strategy.model)]
    # headers need not be there before the forward starts
    assert not trainer.strategy.mesh.headers_first
    return parts


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_heads_of_their_own_are_gathered_when_they_run(version: int, tied: bool) -> None:
    for parts in run_ranks(_gathered_apart, 2, version, tied):
        assert sum(part.endswith("Linear") for part in parts) == (0 if tied else 1)
        assert not any("Embedding" in part for part in parts)
        assert sum("Layer" in part or "Block" in part for part in parts) == 4
