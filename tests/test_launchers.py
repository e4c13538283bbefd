"""Every way to start the ranks: a script, torchrun, LightningCLI, a notebook cell."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import slow
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_vdp.cli import main
from lightning_vdp.testing import Batches, ParityModule, quiet_trainer, run_ranks, tiny_batch, tiny_model

FAMILY = "qwen2_5_vl"

SCRIPT = """
import json, sys
{before}
import torch
torch.set_num_threads(1)
import lightning_vdp
from lightning.pytorch import Trainer
from lightning_vdp.testing import Batches, ParityModule, tiny_batch, tiny_model

class Module(ParityModule):
    def on_fit_start(self):
        strategy = self.trainer.strategy
        print(json.dumps([strategy.global_rank, strategy.sequence_parallel_size, strategy.data_parallel_size]), flush=True)

if __name__ == "__main__":
    module = Module(tiny_model("qwen2_5_vl"))
    before = module.model.lm_head.weight.detach().clone()
    batches = Batches([tiny_batch("qwen2_5_vl", dtype=torch.float32)] * 2)
    trainer = Trainer(strategy={strategy}, accelerator="cpu", devices=2, max_epochs=1, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, batches)
    {after}
"""

YAML = """
trainer:
  accelerator: cpu
  devices: 2
  strategy: {strategy}
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
model:
  class_path: own_module.Module
data:
  class_path: own_module.Data
"""

MODULE = """
import json
import lightning.pytorch as pl
import torch
from lightning_vdp.testing import Batches, ParityModule, tiny_batch, tiny_model

class Module(ParityModule):
    def __init__(self):
        super().__init__(tiny_model("qwen2_5_vl"))

    def on_fit_start(self):
        strategy = self.trainer.strategy
        print(json.dumps([strategy.global_rank, strategy.sequence_parallel_size, strategy.data_parallel_size]), flush=True)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return Batches([tiny_batch("qwen2_5_vl", dtype=torch.float32)] * 2)
"""


def _run(command: list[str], folder: Path) -> list[list[int]]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return _found(done.stdout)


def _found(output: str) -> list[list[int]]:
    # ranks may share the output, in which their lines may run together
    return sorted(json.loads(found) for found in re.findall(r"\[\d+, \d+, \d+\]", output))


BOTH = [[0, 2, 1], [1, 2, 1]]


@pytest.mark.parametrize("launcher", ["script", *slow("torchrun")])
def test_script(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(before="", strategy='"ulysses_vdp"', after=""))
    command = [sys.executable, "train.py"]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    assert _run(command, tmp_path) == BOTH


def _fit() -> list[Any]:
    trainer = quiet_trainer(strategy="ulysses_vdp", devices=2)
    trainer.fit(ParityModule(tiny_model(FAMILY)), Batches([tiny_batch(FAMILY, dtype=torch.float32)] * 2))
    strategy = trainer.strategy
    found = [strategy.global_rank, strategy.sequence_parallel_size, strategy.data_parallel_size]
    return [found, type(strategy.cluster_environment).__name__]


def _agent() -> dict[int, list[Any]]:
    """What ``torchrun --standalone`` does, with workers that are forked and need not import everything again."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    return elastic_launch(config, _fit)()


def test_agent_of_torchrun() -> None:
    (results,) = run_ranks(_agent, 1)
    assert [results[rank] for rank in (0, 1)] == [[found, "TorchElasticEnvironment"] for found in BOTH]


def test_notebook_cell_brings_the_weights_back(tmp_path: Path) -> None:
    # what Python sets in an interactive session, which is how Lightning recognizes a notebook
    after = "assert not torch.equal(before, module.model.lm_head.weight); assert module.model.lm_head.weight.dim() == 2"
    cell = SCRIPT.format(before='sys.ps1 = ">>> "', strategy='"ulysses_vdp"', after=after)
    (tmp_path / "cell.py").write_text(cell)
    assert _run([sys.executable, "cell.py"], tmp_path) == BOTH


STRATEGIES = {
    "name": "ulysses_vdp",
    "class_path": "{class_path: lightning_vdp.UlyssesVisionDPStrategy, "
    "init_args: {sequence_parallel_size: 2, state_dict_type: sharded}}",
}


def _write_config(folder: Path, strategy: str) -> None:
    pytest.importorskip("jsonargparse")
    (folder / "own_module.py").write_text(MODULE)
    (folder / "train.yaml").write_text(YAML.format(strategy=STRATEGIES[strategy]))


def _fit_by_command(folder: Path) -> str:
    os.chdir(folder)
    with redirect_stdout(StringIO()) as output:
        assert main(["fit", "--config", "train.yaml"]) == 0
    return output.getvalue()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lightning_cli(strategy: str, tmp_path: Path) -> None:
    _write_config(tmp_path, strategy)
    assert _found("".join(run_ranks(_fit_by_command, 2, tmp_path))) == BOTH


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lightning_cli_as_a_command(strategy: str, tmp_path: Path) -> None:
    _write_config(tmp_path, strategy)
    assert _run([sys.executable, "-m", "lightning_vdp.cli", "fit", "--config", "train.yaml"], tmp_path) == BOTH


FAILING = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import lightning_vdp
from lightning_vdp.testing import Batches, ParityModule, quiet_trainer, tiny_batch, tiny_model

class Module(ParityModule):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == int(sys.argv[1]):
            if sys.argv[2] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("broken on purpose")
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    batches = Batches([tiny_batch("qwen2_5_vl", dtype=torch.float32)] * 3)
    quiet_trainer(strategy="ulysses_vdp", devices=2).fit(Module(tiny_model("qwen2_5_vl")), batches)
"""


def _processes_of(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == folder:
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raised", "killed"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("launcher", ["script", "torchrun"])
def test_failure_of_one_rank_ends_all(launcher: str, rank: int, how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    command = [sys.executable, "train.py"]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    started = time.monotonic()
    done = subprocess.run(
        [*command, str(rank), how],
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    seconds = time.monotonic() - started
    assert done.returncode != 0
    assert seconds < 90
    if how == "raised":
        assert "ArithmeticError: broken on purpose" in done.stderr
        assert f"Rank {rank} failed at training step 1, phase training_step: ArithmeticError" in done.stderr
    deadline = time.monotonic() + 15
    while _processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _processes_of(tmp_path)
