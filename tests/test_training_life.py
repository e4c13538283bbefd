"""What a Lightning user does around `fit`: loop features, precision, adapters, evaluation, launchers."""

import csv
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import slow
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.exceptions import SIGTERMException
from test_parity import batches, make_module
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision
from torch.utils.data import DataLoader
from transformers import AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_vdp import StepError, UlyssesVisionDPPrecision, UlyssesVisionDPStrategy
from lightning_vdp.cli import main
from lightning_vdp.metrics import Perplexity, TokenAccuracy
from lightning_vdp.testing import (
    Batches,
    ParityModule,
    PromoteFloat32,
    RankFailed,
    assert_parity,
    quiet_trainer,
    run_ranks,
    tiny_batch,
    tiny_model,
    whole_parameters,
)

FAMILY = "qwen2_5_vl"


def strategy(**arguments: Any) -> UlyssesVisionDPStrategy:
    return UlyssesVisionDPStrategy(2, **arguments)


def float32_batches(count: int = 3) -> list[dict[str, Tensor]]:
    return batches(FAMILY, count, dtype=torch.float32)


# ---- loop features


class _Manual(ParityModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class _TwoOptimizers(_Manual):
    """One optimizer for the tower and one for the rest, each after a forward of its own."""

    def configure_optimizers(self) -> Any:
        tower = [value for name, value in self.named_parameters() if "visual" in name]
        rest = [value for name, value in self.named_parameters() if "visual" not in name]
        return torch.optim.SGD(tower, lr=0.05), torch.optim.SGD(rest, lr=0.02, momentum=0.5)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.model(**batch).loss)
            optimizer.step()


def _compiled() -> ParityModule:
    module = make_module(FAMILY)
    for child in module.modules():
        if isinstance(child, GradientCheckpointingLayer):
            child.compile(backend="eager")
    return module


def _with(module_class: type[ParityModule]) -> ParityModule:
    return module_class(make_module(FAMILY).model)


@pytest.mark.parametrize("module", [_Manual, _TwoOptimizers])
def test_manual_optimization_under_the_second_version(module: type[ParityModule]) -> None:
    report = assert_parity(partial(_with, module), batches(FAMILY), fsdp_version=2)
    assert report.steps == (3 if module is _Manual else 6)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_compiled_blocks(version: int) -> None:
    assert_parity(_compiled, batches(FAMILY, 2), fsdp_version=version)


def _refusal(make: Callable[[], ParityModule], arguments: dict[str, Any], callbacks: list[Any]) -> str:
    with pytest.raises(ValueError) as caught:
        trainer = quiet_trainer(devices=2, strategy=strategy(**arguments), callbacks=callbacks, precision="bf16-mixed")
        trainer.fit(make(), Batches(float32_batches()))
    return str(caught.value)


def _mixed_dtypes() -> ParityModule:
    module = make_module(FAMILY)
    next(child for child in module.modules() if isinstance(child, GradientCheckpointingLayer)).norm1.to(torch.bfloat16)
    return module


REFUSED: dict[str, tuple[Callable[[], ParityModule], dict[str, Any], Callable[[], list[Any]]]] = {
    "Manual optimization .* set `fsdp_version=2`": (partial(_with, _Manual), {"fsdp_version": 1}, list),
    "WeightAveraging averages whole weights": (partial(make_module, FAMILY), {}, lambda: [WeightAveraging()]),
    "EMAWeightAveraging averages whole weights": (
        partial(make_module, FAMILY),
        {"fsdp_version": 2},
        lambda: [EMAWeightAveraging()],
    ),
    "`cpu_offload` moves weights between a CUDA device and the host": (
        partial(make_module, FAMILY),
        {"cpu_offload": True},
        list,
    ),
    "several dtypes in one block .* set `fsdp_version=2`": (_mixed_dtypes, {"fsdp_version": 1}, list),
    "VisionBlock trains .* in torch.bfloat16 and .* in torch.float32, .* need one dtype": (
        _mixed_dtypes,
        {"fsdp_version": 2},
        list,
    ),
}


@pytest.mark.filterwarnings("ignore:Weights to be trained")
@pytest.mark.parametrize("message", REFUSED)
def test_refused_with_a_message(message: str) -> None:
    make, arguments, callbacks = REFUSED[message]
    found = run_ranks(_refusal, 2, make, arguments, callbacks())
    assert found[0] == found[1]
    assert re.search(message, found[0]), found[0]


# ---- precision


class _Recording(ParityModule):
    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        super().__init__(model, learning_rate)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss


def _losses(precision: str, version: int, alone: bool) -> tuple[list[float], set[torch.dtype]]:
    module = _Recording(tiny_model(FAMILY).float().train(), learning_rate=0.2)
    arguments = {"devices": 1} if alone else {"devices": 2, "strategy": strategy(fsdp_version=version)}
    trainer = quiet_trainer(**arguments, precision=precision, max_epochs=4)
    trainer.fit(module, Batches(float32_batches()))
    return module.losses, {value.dtype for value in module.parameters()}


@cache
def _losses_alone() -> list[float]:
    ((losses, _),) = run_ranks(_losses, 1, "32-true", 1, True)
    return losses


@pytest.mark.parametrize("version", [*slow(1), 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_losses_of_a_run_in_lower_precision(precision: str, version: int) -> None:
    truth = _losses_alone()
    assert truth[-1] < truth[0] * 0.9
    for losses, dtypes in run_ranks(_losses, 2, precision, version, False):
        assert losses == pytest.approx(truth, rel=1e-5 if precision == "32-true" else 0.03)
        assert dtypes == {torch.bfloat16 if precision == "bf16-true" else torch.float32}


def _warned(dtype: torch.dtype) -> list[str]:
    module = ParityModule(tiny_model(FAMILY).to(dtype).train())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(devices=2, strategy=strategy(), precision="bf16-mixed")
        trainer.fit(module, Batches(float32_batches(1)))
    return [str(warning.message) for warning in caught if "master weights" in str(warning.message)]


def test_warning_where_there_are_no_float32_master_weights() -> None:
    assert len(run_ranks(_warned, 2, torch.bfloat16)[0]) == 1
    assert run_ranks(_warned, 2, torch.float32)[0] == []


# ---- adapters and freezing

DECODER = r".*language_model.*(q_proj|v_proj|gate_proj)"
TOWER = r".*visual.*(qkv|fc1|gate_proj)"
TARGETS = {"decoder": DECODER, "tower": TOWER, "both": f"({DECODER}|{TOWER})"}


def _adapted(targets: str, dtype: torch.dtype | None = None) -> ParityModule:
    from peft import LoraConfig, get_peft_model

    model = tiny_model(FAMILY)
    if dtype is not None:
        model.to(dtype)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS[targets], init_lora_weights=False))
    return ParityModule(adapted).train()


@pytest.mark.parametrize(
    ("targets", "version", "rows"),
    [
        ("tower", 1, [[(1, 6, 8)]]),
        ("both", 2, [[(1, 6, 8)]]),
        *slow(("decoder", 1, [[(1, 4, 4), (1, 6, 8)]]), ("tower", 2, [[(1, 6, 8)]])),
    ],
)
def test_adapters(targets: str, version: int, rows: Any) -> None:
    pytest.importorskip("peft")
    assert_parity(partial(_adapted, targets), batches(FAMILY, rows=rows), fsdp_version=version)


@pytest.mark.parametrize("version", [*slow(1), 2])
def test_projector_alone(version: int) -> None:
    assert_parity(_projector, batches("qwen3_vl", rows=[[(1, 6, 8)]]), fsdp_version=version)


def _projector() -> ParityModule:
    module = make_module("qwen3_vl")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("visual" in name and "merger" in name)
    return module


def _train_adapters(alone: bool) -> tuple[list[float], set[torch.dtype], set[torch.dtype], float]:
    module = _adapted("both", torch.bfloat16)
    before = {name: value.detach().clone() for name, value in module.named_parameters() if "lora_" in name}
    module = _Recording(module.model, learning_rate=0.5)
    arguments = {"devices": 1} if alone else {"devices": 2, "strategy": strategy(fsdp_version=2)}
    trainer = quiet_trainer(**arguments, precision="bf16-mixed", max_epochs=3)
    trainer.fit(module, Batches(float32_batches()))
    after = whole_parameters(trainer.strategy.model)
    dtypes = {value.dtype for name, value in after.items() if "lora_" in name}
    base = {value.dtype for name, value in after.items() if "lora_" not in name}
    return module.losses, dtypes, base, max(float((after[name] - value).abs().max()) for name, value in before.items())


def test_float32_adapters_on_a_bfloat16_model() -> None:
    pytest.importorskip("peft")
    ((truth, *_),) = run_ranks(_train_adapters, 1, True)
    for losses, adapters, base, change in run_ranks(_train_adapters, 2, False):
        assert losses == pytest.approx(truth, rel=0.02)
        assert (adapters, base) == ({torch.float32}, {torch.bfloat16})
        assert change > 1e-3


def _mixed_adapters() -> str:
    return _refusal(partial(_adapted, "both", torch.bfloat16), {"fsdp_version": 1}, [])


def test_float32_adapters_on_a_bfloat16_model_name_the_second_version() -> None:
    pytest.importorskip("peft")
    assert "set `fsdp_version=2`" in run_ranks(_mixed_adapters, 2)[0]


def _save_adapters(folder: str, version: int, kind: str) -> float:
    chosen = strategy(fsdp_version=version, state_dict_type=kind, save_frozen_weights=False)
    trainer = quiet_trainer(devices=2, strategy=chosen)
    module = _adapted("both")
    loader = Batches(float32_batches())
    trainer.fit(module, loader)
    trainer.save_checkpoint(Path(folder) / "adapters.ckpt")
    return float(trainer.validate(module, loader, verbose=False)[0]["val_loss"])


def _load_adapters(folder: str, version: int, kind: str) -> tuple[float, float]:
    chosen = strategy(fsdp_version=version, state_dict_type=kind, save_frozen_weights=False)
    trainer = quiet_trainer(devices=2, strategy=chosen, max_epochs=2)
    module = _adapted("both")
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data.zero_()
    loader, path = Batches(float32_batches()), Path(folder) / "adapters.ckpt"
    loss = float(trainer.validate(module, loader, ckpt_path=path, verbose=False)[0]["val_loss"])
    trainer.fit(module, loader, ckpt_path=path)
    return loss, trainer.global_step


@pytest.mark.parametrize(("version", "kind"), [(1, "full"), (2, "sharded"), *slow((1, "sharded"), (2, "full"))])
def test_checkpoint_of_adapters_alone(tmp_path: Path, version: int, kind: str) -> None:
    peft = pytest.importorskip("peft")
    loss = run_ranks(_save_adapters, 2, str(tmp_path), version, kind)[0]
    if kind == "full":
        names = torch.load(tmp_path / "adapters.ckpt", weights_only=True)["state_dict"]
        assert names
        assert all("lora_" in name for name in names)
    for again, steps in run_ranks(_load_adapters, 2, str(tmp_path), version, kind):
        assert again == pytest.approx(loss, rel=1e-6)
        assert steps == 6
    assert main(["export", str(tmp_path / "adapters.ckpt"), str(tmp_path / "adapter")]) == 0
    assert sorted(path.name for path in (tmp_path / "adapter").glob("adapter*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = peft.PeftModel.from_pretrained(tiny_model(FAMILY), tmp_path / "adapter")
    with torch.no_grad():
        losses = [float(loaded.eval()(**batch).loss) for batch in float32_batches()]
    assert sum(losses) / 3 == pytest.approx(loss, rel=1e-5)


# ---- evaluation


class _Evaluated(ParityModule):
    def __init__(self) -> None:
        super().__init__(tiny_model(FAMILY).double().eval())
        self.metrics = nn.ModuleDict({"perplexity": Perplexity(), "accuracy": TokenAccuracy()})

    def _evaluate(self, batch: dict[str, Any]) -> None:
        outputs = self.model(**batch)
        self.log("loss", outputs.loss, sync_dist=True, batch_size=1)
        for name, metric in self.metrics.items():
            metric.update(outputs.logits, batch["labels"], getattr(outputs, "sequence_shard", None))
            self.log(name, metric, on_epoch=True, batch_size=1)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate(batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate(batch)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.model(**batch).loss


def _uneven_batches() -> list[dict[str, Tensor]]:
    rows: list[Any] = [[[(1, 4, 4)]], [[]], [[(1, 6, 8)], []], [[(1, 4, 8), (1, 4, 4)]]]
    return [tiny_batch(FAMILY, seed=seed, rows=rows[seed], text=4 + 3 * seed) for seed in range(4)]


def _evaluate(world: int, size: int, arguments: dict[str, Any]) -> tuple[list[dict[str, float]], list[float]]:
    module = _Evaluated()
    rank = int(os.environ["RANK"]) // size
    loader = Batches(_uneven_batches()[rank :: world // size])
    chosen = {"precision": "64-true", "strategy": "auto"}
    if world > 1:
        plugins = [UlyssesVisionDPPrecision("64-true")]
        chosen = {"strategy": UlyssesVisionDPStrategy(size, **arguments), "plugins": plugins}
    trainer = quiet_trainer(devices=world, **chosen)
    with PromoteFloat32():
        results = [*trainer.validate(module, loader, verbose=False), *trainer.test(module, loader, verbose=False)]
        predictions = trainer.predict(module, loader)
    return results, [float(loss) for loss in predictions]


@cache
def _evaluated_alone() -> tuple[dict[str, float], list[float]]:
    (((truth, _), losses),) = run_ranks(_evaluate, 1, 1, 1, {})
    return truth, losses


@pytest.mark.parametrize(
    ("world", "size", "arguments"),
    [
        (2, 2, {}),
        (2, 2, {"fsdp_version": 2}),
        (4, 2, {"fsdp_version": 2}),
        (4, 2, {"logits": "whole"}),
    ],
)
def test_evaluation_equals_one_process(world: int, size: int, arguments: dict[str, Any]) -> None:
    truth, losses = _evaluated_alone()
    assert 0 < truth["accuracy"] < 1
    for rank, (results, predicted) in enumerate(run_ranks(_evaluate, world, world, size, arguments)):
        for result in results:
            assert result == pytest.approx(truth, rel=1e-9)
        assert predicted == pytest.approx(losses[rank // size :: world // size], rel=1e-9)


def test_metrics_of_plain_logits() -> None:
    logits, labels = torch.randn(2, 6, 11), torch.randint(0, 11, (2, 6))
    labels[0, 3:] = -100
    perplexity, accuracy = Perplexity(), TokenAccuracy()
    perplexity.update(logits, labels)
    accuracy.update(logits, labels)
    targets = labels[:, 1:].flatten()
    truth = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets).exp()
    assert float(perplexity.compute()) == pytest.approx(float(truth), rel=1e-6)
    right = (logits[:, :-1].argmax(-1).flatten() == targets)[targets != -100]
    assert float(accuracy.compute()) == pytest.approx(float(right.double().mean()))
    with pytest.raises(ValueError, match=r"do not fit labels of \[2, 6\]"):
        perplexity.update(logits[:, :3], labels)


class _Unsized:
    def __init__(self, batches: list[Any], broken: bool = False) -> None:
        self.batches, self.broken = batches, broken

    def __iter__(self) -> Any:
        yield from self.batches
        if self.broken:
            raise OSError("a truncated image")


def _run_out(sized: bool, counts: list[int], stage: str) -> tuple[int, int, list[str]]:
    own = float32_batches(counts[int(os.environ["RANK"]) // 2])
    module = ParityModule(tiny_model(FAMILY))
    trainer = quiet_trainer(devices=4, strategy=strategy(), max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = Batches(own) if sized else _Unsized(own)
        if stage == "fit":
            trainer.fit(module, loader)
        else:
            trainer.validate(module, loader, verbose=False)
    messages = [str(warning.message) for warning in caught if "no more of theirs" in str(warning.message)]
    return trainer.global_step, trainer.current_epoch, messages


@pytest.mark.parametrize(("sized", "stage"), [(True, "fit"), (False, "fit"), (False, "validate")])
def test_replicas_with_other_numbers_of_batches_end_together(sized: bool, stage: str) -> None:
    results = run_ranks(_run_out, 4, sized, [3, 2], stage)
    assert {result[:2] for result in results} == {(4, 2) if stage == "fit" else (0, 0)}
    expected = "between 2 and 3 batches; each takes 2" if sized else "Ranks 2, 3 ran out of data after 2 batches"
    assert expected in results[0][2][0]


def _read_a_broken_batch() -> str:
    rank = int(os.environ["RANK"])
    trainer = quiet_trainer(devices=2, strategy=UlyssesVisionDPStrategy(1))
    loader = _Unsized(float32_batches(2 if rank else 3), broken=rank == 1)
    with pytest.raises(OSError if rank else StepError) as caught:
        trainer.fit(ParityModule(tiny_model(FAMILY)), loader)
    return str(caught.value)


def test_every_rank_says_that_a_batch_could_not_be_read() -> None:
    other, own = run_ranks(_read_a_broken_batch, 2)
    assert re.fullmatch(
        r"Rank 1 failed at .* step \d, reading batch 2, between steps: OSError: a truncated image", other
    )
    assert own == "a truncated image"


class _Predicting(ParityModule):
    def predict_step(self, batch: dict[str, Any]) -> int:
        self.model(**{name: value for name, value in batch.items() if name != "number"})
        return int(batch["number"])


def _predict_all(size: int) -> list[int]:
    samples = [{**batch, "number": number} for number, batch in enumerate(float32_batches(5))]
    loader = DataLoader(samples, batch_size=1, collate_fn=lambda items: items[0])
    chosen = UlyssesVisionDPStrategy(size, fsdp_version=2)
    trainer = quiet_trainer(devices=4, strategy=chosen, use_distributed_sampler=True)
    return [number for number in trainer.predict(_Predicting(tiny_model(FAMILY)), loader) if number is not None]


def test_every_sample_is_predicted_once() -> None:
    predicted = run_ranks(_predict_all, 4, 2)
    assert predicted[0] == predicted[1] == [0, 2, 4]
    assert predicted[2] == predicted[3] == [1, 3]


def _predict_nothing() -> str:
    loader = _Unsized(float32_batches(2) if os.environ["RANK"] == "1" else [])
    trainer = quiet_trainer(devices=2, strategy=UlyssesVisionDPStrategy(1))
    with pytest.raises(StepError) as caught:
        trainer.predict(_Evaluated(), loader)
    return str(caught.value)


def test_a_rank_without_anything_to_predict_is_named_on_all() -> None:
    messages = run_ranks(_predict_nothing, 2)
    assert messages[0] == messages[1]
    assert messages[0].startswith("Rank 0 got no batch at all to predict")


# ---- generation


class _Generating(ParityModule):
    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        batch.pop("labels")
        self.answer = self.model.generate(**batch, **self.arguments)


def _prompt(replica: int) -> dict[str, Tensor]:
    rows: list[Any] = [[[(1, 4, 4)]], [[]]]
    return tiny_batch(FAMILY, seed=replica, rows=rows[replica], text=6, dtype=torch.float32)


def _generate(replicas: int, stop: int, use_cache: bool, version: int, alone: int | None) -> list[int]:
    replica = alone if alone is not None else int(os.environ["RANK"]) // 2
    module = _Generating(tiny_model(FAMILY).eval())
    module.arguments = {"max_new_tokens": 6, "do_sample": False, "use_cache": use_cache, "eos_token_id": stop}
    chosen = {"devices": 1} if alone is not None else {"devices": 4, "strategy": strategy(fsdp_version=version)}
    quiet_trainer(**chosen).validate(module, Batches([_prompt(replica)]), verbose=False)
    return module.answer[0].tolist()


@pytest.mark.parametrize(("use_cache", "version"), [(True, 2), *slow((True, 1), (False, 2))])
def test_generation_of_replicas_with_other_lengths_and_images(use_cache: bool, version: int) -> None:
    whole = run_ranks(_generate, 1, 1, 127, use_cache, version, 0)[0]
    # what replica 0 would answer third ends it there
    stop = whole[_prompt(0)["input_ids"].shape[1] + 2]
    truths = [run_ranks(_generate, 1, 1, stop, use_cache, version, replica)[0] for replica in (0, 1)]
    lengths = [len(truth) - _prompt(replica)["input_ids"].shape[1] for replica, truth in enumerate(truths)]
    assert lengths[0] <= 3 < lengths[1]
    answers = run_ranks(_generate, 4, 2, stop, use_cache, version, None, timeout=30)
    for rank, answer in enumerate(answers):
        expected = truths[rank // 2]
        assert answer[: len(expected)] == expected


# ---- launchers


def _launched(variables: str) -> tuple[tuple[int, int], list[int], str]:
    rank = int(os.environ["RANK"])
    node, local = divmod(rank, 2)
    if variables == "slurm":
        for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        slurm = {"JOB_ID": 1, "JOB_NAME": "fit", "NTASKS": 4, "NTASKS_PER_NODE": 2, "NNODES": 2}
        slurm |= {"PROCID": rank, "LOCALID": local, "NODEID": node}
        os.environ.update({f"SLURM_{name}": str(value) for name, value in slurm.items()})
    else:
        os.environ.update(TORCHELASTIC_RUN_ID="none", LOCAL_RANK=str(local), GROUP_RANK=str(node), LOCAL_WORLD_SIZE="2")
    module = ParityModule(tiny_model(FAMILY))
    trainer = quiet_trainer(devices=2, num_nodes=2, strategy="ulysses_vdp")
    trainer.fit(module, Batches(float32_batches(2)))
    chosen = trainer.strategy
    sizes = (chosen.data_parallel_size, chosen.sequence_parallel_size)
    return sizes, chosen.device_mesh.mesh[node].tolist(), type(chosen.cluster_environment).__name__


@pytest.mark.parametrize("variables", ["slurm", "torchrun"])
def test_an_automatic_group_never_spans_nodes(variables: str) -> None:
    environment = {"slurm": "SLURMEnvironment", "torchrun": "TorchElasticEnvironment"}[variables]
    for rank, (sizes, group, found) in enumerate(run_ranks(_launched, 4, variables)):
        assert sizes == (2, 2)
        assert group == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found == environment


SCRIPT = """
import torch
torch.set_num_threads(1)
import lightning_vdp
from lightning.pytorch import Trainer
from lightning_vdp.testing import Batches, ParityModule, tiny_batch, tiny_model

trainer = Trainer(strategy="ulysses_vdp", accelerator="cpu", devices=2, num_nodes=2, max_epochs=1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(ParityModule(tiny_model("qwen2_5_vl")), Batches([tiny_batch("qwen2_5_vl", dtype=torch.float32)] * 2))
strategy = trainer.strategy
print(f"[{strategy.node_rank} {strategy.data_parallel_rank} {strategy.sequence_parallel_rank}]", flush=True)
"""


@pytest.mark.slow
def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment["OMP_NUM_THREADS"] = "1"
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"),
                *("--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}", "train.py"),
            ],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    found = [sorted(re.findall(r"\[\d \d \d\]", output)) for output, _ in outputs]
    assert found == [["[0 0 0]", "[0 0 1]"], ["[1 1 0]", "[1 1 1]"]]


def _threads() -> int:
    del os.environ["OMP_NUM_THREADS"]
    torch.set_num_threads(7)
    quiet_trainer(devices=2, strategy=strategy()).validate(ParityModule(tiny_model(FAMILY)), Batches([]), verbose=False)
    return torch.get_num_threads()


def test_ranks_share_the_cores_of_a_machine() -> None:
    assert run_ranks(_threads, 2) == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2


class _Terminated(ParityModule):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == self.victim:
            os.kill(os.getpid(), signal.SIGTERM)
        self.last = batch_idx
        return super().training_step(batch, batch_idx)


def _terminate(rank: int) -> int:
    module = _Terminated(tiny_model(FAMILY))
    module.victim = rank
    with pytest.raises(SIGTERMException):
        quiet_trainer(devices=2, strategy=strategy()).fit(module, Batches(float32_batches(6)))
    return module.last


@pytest.mark.parametrize("rank", [0, 1])
def test_a_terminated_rank_ends_all_after_its_step(rank: int) -> None:
    assert run_ranks(_terminate, 2, rank) == [1, 1]


# ---- weights that one rank has loaded


class _Large(ParityModule):
    def __init__(self, folder: str, loads: str, tied: bool) -> None:
        super().__init__(nn.Identity())
        self.folder, self.loads, self.tied = folder, loads, tied

    def configure_model(self) -> None:
        if not isinstance(self.model, nn.Identity):
            return
        model_class, config = type(tiny_model(FAMILY)), AutoConfig.from_pretrained(self.folder)
        if (self.global_rank == 0 and self.loads == "rank 0") or self.loads == "all":
            self.model = model_class.from_pretrained(self.folder, dtype=torch.float64)
            return
        with torch.device("meta"):
            self.model = model_class(config).to(torch.float64)


def _fit_large(folder: str, loads: str, tied: bool, version: int) -> dict[str, Tensor]:
    module = _Large(folder, loads, tied)
    plugins = [UlyssesVisionDPPrecision("64-true")]
    trainer = quiet_trainer(devices=2, strategy=strategy(fsdp_version=version), plugins=plugins)
    trainer.fit(module, Batches(batches(FAMILY)))
    return whole_parameters(trainer.strategy.model)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_on_the_meta_device_are_those_of_rank_zero(tmp_path: Path, tied: bool) -> None:
    tiny_model(FAMILY, tie_word_embeddings=tied).save_pretrained(tmp_path)
    truth = run_ranks(_fit_large, 2, str(tmp_path), "all", tied, 2)[0]
    found = run_ranks(_fit_large, 2, str(tmp_path), "rank 0", tied, 2)[0]
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], value) for name, value in truth.items())


@pytest.mark.parametrize(
    ("loads", "version", "message"),
    [("none", 2, "rank 0 has weights on the meta device"), ("rank 0", 1, "set `fsdp_version=2`, which needs neither")],
)
def test_weights_that_nobody_can_fill_are_refused(tmp_path: Path, loads: str, version: int, message: str) -> None:
    tiny_model(FAMILY).save_pretrained(tmp_path)
    with pytest.raises(RankFailed, match=message) as failed:
        run_ranks(_fit_large, 2, str(tmp_path), loads, False, version)
    assert len(set(failed.value.failures.values())) == 1


# ---- what passes through


def _profile(folder: str) -> list[str]:
    profiler = PyTorchProfiler(dirpath=folder, filename="profile", export_to_chrome=False, row_limit=1000)
    trainer = quiet_trainer(devices=2, strategy=strategy(), profiler=profiler)
    trainer.fit(ParityModule(tiny_model(FAMILY)), Batches(float32_batches(6)))
    return [path.name for path in Path(folder).iterdir()]


def test_profiler_shows_named_regions(tmp_path: Path) -> None:
    run_ranks(_profile, 2, str(tmp_path))
    summary = (tmp_path / "fit-profile-0.txt").read_text()
    for name in ("tower", "exchange", "attention_exchange", "loss"):
        assert f"ulysses_vdp::{name} " in summary


class _Logging(ParityModule):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, sync_dist=True, batch_size=1)
        return loss


def _log_and_stop(folder: str, version: int) -> tuple[int, str, list[str]]:
    best = ModelCheckpoint(folder, filename="{epoch}", monitor="val_loss", save_top_k=1, save_last=True)
    trainer = quiet_trainer(
        devices=2,
        strategy=strategy(fsdp_version=version),
        max_epochs=9,
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=True,
        # the loss cannot fall by so much
        callbacks=[best, EarlyStopping("val_loss", min_delta=100.0, patience=2)],
    )
    trainer.fit(_Logging(tiny_model(FAMILY)), Batches(float32_batches()), Batches(float32_batches(1)))
    return trainer.current_epoch, Path(best.best_model_path).name, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("version", [*slow(1), 2])
def test_loggers_checkpoints_and_early_stopping_pass_through(tmp_path: Path, version: int) -> None:
    results = run_ranks(_log_and_stop, 2, str(tmp_path), version)
    assert results[0][:2] == results[1][:2]
    epochs, best, files = results[0]
    assert epochs == 3
    assert {best, "last.ckpt", "metrics.csv"} <= set(files)
    with open(tmp_path / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    assert len(losses) == 9
    assert losses[-1] < losses[0]


TRAINER_ARGUMENTS: list[tuple[dict[str, Any], int]] = [
    ({"fast_dev_run": 2}, 2),
    ({"max_steps": 2}, 2),
    ({"min_epochs": 1, "min_steps": 2}, 4),
    ({"max_time": "00:00:10:00"}, 4),
    ({"limit_train_batches": 2, "limit_val_batches": 1}, 2),
    ({"limit_train_batches": 0.5}, 2),
    ({"overfit_batches": 1}, 1),
    ({"val_check_interval": 2}, 4),
    ({"check_val_every_n_epoch": 2, "max_epochs": 2}, 8),
    ({"num_sanity_val_steps": 1}, 4),
    ({"enable_progress_bar": True, "enable_model_summary": True}, 4),
    ({"deterministic": True, "benchmark": True, "inference_mode": False, "detect_anomaly": True}, 4),
    ({"profiler": "simple", "sync_batchnorm": True, "reload_dataloaders_every_n_epochs": 1}, 4),
    ({"precision": "16-true"}, 4),
]
STRATEGY_ARGUMENTS: list[dict[str, Any]] = [
    {"process_group_backend": "gloo", "timeout": timedelta(seconds=99)},
    {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    {"precision_plugin": FSDPPrecision("bf16-mixed"), "checkpoint_io": TorchCheckpointIO()},
    {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "device_mesh": (1, 2)},
]
FIRST_VERSION_ARGUMENTS: list[dict[str, Any]] = [
    {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True, "limit_all_gathers": False},
    {"use_orig_params": False},
    {"sharding_strategy": "NO_SHARD"},
]


def _fit_with_arguments(version: int) -> list[int]:
    only = [{"sync_module_states": True}] if version == 2 else FIRST_VERSION_ARGUMENTS
    rows = [(trainer, {}) for trainer, _ in TRAINER_ARGUMENTS] + [({}, chosen) for chosen in STRATEGY_ARGUMENTS + only]
    steps = []
    for trainer_arguments, strategy_arguments in rows:
        chosen = strategy(fsdp_version=version, **strategy_arguments)
        trainer = quiet_trainer(devices=2, strategy=chosen, **trainer_arguments)
        trainer.fit(ParityModule(tiny_model(FAMILY)), Batches(float32_batches(4)), Batches(float32_batches(1)))
        steps.append(trainer.global_step)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_arguments_that_the_documentation_says_to_work(version: int) -> None:
    expected = [steps for _, steps in TRAINER_ARGUMENTS]
    for steps in run_ranks(_fit_with_arguments, 2, version, timeout=400):
        assert steps[: len(expected)] == expected
        assert set(steps[len(expected) :]) == {4}
