import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_vdp
from lightning_vdp import cli

MODULE = """
from pathlib import Path
import os, time
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException

class Model(BoringModel):
    def __init__(self, width: int = 1) -> None:
        super().__init__()

class BrokenModel(Model):
    def training_step(self, batch, batch_idx):
        raise ValueError("a bug of the user")

class BrokenInit(Model):
    def __init__(self) -> None:
        {}["missing"]

class WrongHook(Model):
    def training_step(self):
        pass

class Misconfigured(Model):
    def training_step(self, batch, batch_idx):
        raise MisconfigurationException("from the user")

class Slow(Callback):
    def on_train_batch_start(self, trainer, *args) -> None:
        Path(f"rank-{trainer.global_rank}").write_text(str(os.getpid()))
        time.sleep(0.5)
"""
QUIET = [
    "--seed_everything=1",
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.enable_checkpointing=false",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a user's module, importable only through what the script does."""
    environment = dict(os.environ)
    (tmp_path / "user_module.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name in ("user_module", "broken_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    # Lightning leaves seeds and ranks there
    os.environ.clear()
    os.environ.update(environment)


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().err.splitlines()
    assert "Traceback" not in "".join(lines)
    return [line for line in lines if line.startswith(("lightning-vdp: error: ", "hint: "))]


def test_help_lists_every_subcommand_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, function in cli.SUBCOMMANDS.items():
        assert f"  {name} ..." in text
        assert (function.__doc__ or "missing").splitlines()[0] in text


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "usage: lightning-vdp" in capsys.readouterr().out


def test_help_of_a_subcommand_is_lightnings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["fit", "--help"])
    assert exit_info.value.code == 0
    assert "--trainer.strategy" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"lightning-vdp {lightning_vdp.__version__} (lightning ")


def test_table_takes_further_subcommands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(arguments: list[str]) -> None:
        """Show a plan."""
        print("planned", *arguments)

    monkeypatch.setattr(cli, "SUBCOMMANDS", {**cli.SUBCOMMANDS, "plan": plan})
    assert cli.main(["plan", "--size", "2"]) == 0
    assert capsys.readouterr().out == "planned --size 2\n"
    assert cli.main(["--help"]) == 0
    assert "plan ...      Show a plan." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["fti"], "unknown subcommand 'fti'", "did you mean fit?"),
        (["bananas"], "unknown subcommand 'bananas'", "the subcommands are fit, "),
        (["--config", "a.yaml", "fit"], "no subcommand before --config", "comes first"),
        (["fit", "--config", "missing.yaml"], "File does not exist: '", "--help"),
        (["fit", "--config", "broken.yaml"], "Problems parsing config: while parsing", "--help"),
        (["fit", "--config", "unknown_key.yaml"], "does not accept option 'trainer.nonsense'", "--help"),
        (["fit", "--no_such_option=1"], "unrecognized arguments: --no_such_option", "--help"),
        (["fit", "--model", "nowhere.Model"], "'nowhere.Model': No module named 'nowhere'", "--help"),
        (["fit", "--model", "user_module.Nothing"], "module 'user_module' has no attribute 'Nothing'", "--help"),
        (["fit", "--model", "user_module.Model", "--model.width", "x"], "Expected a <class 'int'>", "--help"),
        (["fit"], "the following arguments are required: fit.model", "--help"),
    ],
)
def test_wrong_command_line_is_one_line_and_a_hint(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, hint: str
) -> None:
    (folder / "broken.yaml").write_text("model: [")
    (folder / "unknown_key.yaml").write_text("model: user_module.Model\ntrainer: {nonsense: 1}")
    assert cli.main(arguments) == 2
    error, last = error_lines(capsys)
    assert message in error
    assert hint in last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.strategy=ulysses_vpd"], "You selected an invalid strategy name"),
        (["--trainer.devices=two"], "`devices` selected with `CPUAccelerator` should be an int > 0"),
        (["--trainer.limit_train_batches=-3"], "You have passed invalid value -3 for limit_train_batches"),
        (["--ckpt_path=missing.ckpt"], "missing.ckpt"),
        (
            ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=nothing", "--trainer.max_epochs=1"],
            "Early stopping conditioned on metric `nothing` which is not available",
        ),
    ],
)
def test_lightnings_own_error_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main(["fit", "--model=user_module.Model", *QUIET, *options]) == 1
    error, _ = error_lines(capsys)
    assert message in error


def test_error_of_this_package_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the strategy's own ValueError, raised at construction
    strategy = "--trainer.strategy=lightning_vdp.UlyssesVisionDPStrategy"
    size = "--trainer.strategy.sequence_parallel_size=-1"
    assert cli.main(["fit", "--model=user_module.Model", *QUIET, strategy, size]) in (1, 2)
    error, _ = error_lines(capsys)
    assert "sequence_parallel_size" in error


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("user_module.BrokenModel", ValueError),
        ("user_module.BrokenInit", KeyError),
        ("user_module.Misconfigured", Exception),
        ("broken_module.Model", ModuleNotFoundError),
    ],
)
def test_error_of_the_users_code_keeps_its_traceback(folder: Path, model: str, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        cli.main(["fit", f"--model={model}", *QUIET, "--trainer.fast_dev_run=true"])
    assert model.split(".")[0] in str(raised.traceback[-1].path)


def test_hook_that_takes_other_arguments_keeps_its_traceback(folder: Path) -> None:
    # raised in Lightning's code, which calls it
    with pytest.raises(TypeError, match="training_step"):
        cli.main(["fit", "--model=user_module.WrongHook", *QUIET, "--trainer.fast_dev_run=true"])


def test_traceback_flag_shows_every_error(folder: Path) -> None:
    with pytest.raises(Exception, match="File does not exist"):
        cli.main(["fit", "--config", "missing.yaml", "--traceback"])


def test_missing_jsonargparse_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "JSONARGPARSE", False)
    assert cli.main(["fit"]) == 1
    error, hint = error_lines(capsys)
    assert "jsonargparse" in error
    assert hint == 'hint: pip install "lightning_vdp[examples]"'


def test_working_folder_comes_first_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with pytest.raises(SystemExit):
            cli.main(["fit", "--model=user_module.Model", "--print_config"])
    assert "class_path: user_module.Model" in capsys.readouterr().out
    assert sys.path[0] == str(folder)
    assert sys.path.count(str(folder)) == 1


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_interrupt_ends_every_rank_without_tracebacks(folder: Path) -> None:
    options = ["--model=user_module.Model", *QUIET, "--trainer.devices=2", "--trainer.strategy=ddp"]
    command = [sys.executable, "-m", "lightning_vdp.cli", "fit", *options, "--trainer.callbacks+=user_module.Slow"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    ranks = [folder / "rank-0", folder / "rank-1"]
    deadline = time.monotonic() + 60
    while not all(rank.exists() for rank in ranks) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    deadline = time.monotonic() + 5
    pids = [int(rank.read_text()) for rank in ranks]
    assert process.pid in pids
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))
