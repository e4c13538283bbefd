"""The console script ``lightning-vdp``: one table of subcommands, one way to report errors."""

import argparse
import inspect
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from subprocess import TimeoutExpired
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.imports import RequirementCache

import lightning_vdp
from lightning_vdp.checkpoint.export import export
from lightning_vdp.errors import UserError

PROGRAM = "lightning-vdp"
JSONARGPARSE = RequirementCache("jsonargparse[signatures]>=4.39")
# what Lightning raises for wrong input besides MisconfigurationException
LIGHTNINGS_ERRORS = (ValueError, RuntimeError, ImportError, FileNotFoundError)
PARSERS = {"jsonargparse", "yaml"}
LIBRARIES = PARSERS | {"lightning", "lightning_vdp", "torch", "__main__"} | sys.stdlib_module_names


class CommandError(Exception):
    """An error to report in one line, without a traceback.

    Args:
        message: what went wrong.
        hint: what to do about it.
        status: exit status of the script; 2 where the command line or a config file is wrong.
    """

    def __init__(self, message: str, hint: str = "--traceback shows where this was raised", status: int = 1) -> None:
        super().__init__(message)
        self.hint, self.status = hint, status


def fit(arguments: Sequence[str]) -> None:
    """Train a model, with validation in between."""
    _run_trainer("fit", arguments)


def validate(arguments: Sequence[str]) -> None:
    """Evaluate a model on the validation data."""
    _run_trainer("validate", arguments)


def test(arguments: Sequence[str]) -> None:
    """Evaluate a model on the test data."""
    _run_trainer("test", arguments)


def predict(arguments: Sequence[str]) -> None:
    """Run a model on the data to predict."""
    _run_trainer("predict", arguments)


def check(arguments: Sequence[str]) -> int:
    """Prove on the CPU that models train to the same numbers divided as in one process."""
    # only here, since it imports what training does not need
    from lightning_vdp.check.command import parse_check, run_check

    try:
        options = parse_check(arguments)
    except (UserError, ImportError) as error:
        raise CommandError(_one_line(str(error)), f"{PROGRAM} check --help lists every option", status=2) from error
    return run_check(options)


class _Parser(argparse.ArgumentParser):
    """Reports errors as this script does."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(message, f"{self.prog} --help lists every option", status=2)


def _export(arguments: Sequence[str]) -> None:
    """Write a checkpoint's model as a Hugging Face folder."""
    parser = _Parser(f"{PROGRAM} export", description=inspect.getdoc(_export))
    parser.add_argument("checkpoint", help="a checkpoint: a file, or the folder of a sharded one")
    parser.add_argument("folder", help="where to write what from_pretrained reads")
    parser.add_argument("--name", help="which model, where the LightningModule holds several")
    parser.add_argument("--config", help="folder or hub name of a config, for checkpoints of other strategies")
    parser.add_argument("--processor", help="folder or hub name; default: what the model was loaded from")
    parser.add_argument("--dtype", help="of the weights, such as bfloat16; default: as in the checkpoint")
    parser.add_argument("--merge", action="store_true", help="merge adapters into the weights")
    trust = "open a checkpoint that holds any Python object; such a file can run code"
    parser.add_argument("--trust-checkpoint", action="store_true", help=trust)
    options = parser.parse_args(arguments)
    processor = export(**vars(options))
    rest = "without a processor: give --processor" if processor is None else f"with the processor of {processor}"
    print(f"wrote {options.folder} {rest}")


SUBCOMMANDS: Mapping[str, Callable[[Sequence[str]], int | None]] = {
    "fit": fit,
    "validate": validate,
    "test": test,
    "predict": predict,
    "check": check,
    "export": _export,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Fine-tunes vision-language models on long multimodal sequences.

    Args:
        arguments: the command line without the program's name; ``None`` takes it from ``sys.argv``.

    Returns:
        The exit status: 0, 1 for an error, 2 for a wrong command line or config file, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--traceback" in arguments
    # a console script has its own folder there, not the user's
    if sys.path[0] not in ("", os.getcwd()):
        sys.path.insert(0, os.getcwd())
    try:
        return _dispatch([argument for argument in arguments if argument != "--traceback"])
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        cause = error if show_traceback else _unwrap(error)
        report = None if show_traceback else _as_command_error(error, cause)
    if report is None:
        raise cause
    prefix = ""
    if rank := getattr(rank_zero_only, "rank", 0):
        # rank 0 usually meets the same error, reports it, and ends this rank while it sleeps
        time.sleep(2)
        prefix = f"[rank {rank}] "
    print(f"{prefix}{PROGRAM}: error: {report}\n{prefix}hint: {report.hint}", file=sys.stderr)
    return report.status


def _dispatch(arguments: Sequence[str]) -> int:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in SUBCOMMANDS:
        return SUBCOMMANDS[name](rest) or 0
    if name in ("-h", "--help"):
        print(_help())
    elif name == "--version":
        libraries = ", ".join(f"{library} {version(library)}" for library in ("lightning", "torch", "transformers"))
        print(f"{PROGRAM} {lightning_vdp.__version__} ({libraries})")
    elif name.startswith("-"):
        raise CommandError(f"no subcommand before {name}", f"one of {', '.join(SUBCOMMANDS)} comes first", status=2)
    else:
        close = get_close_matches(name, SUBCOMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the subcommands are {', '.join(SUBCOMMANDS)}"
        raise CommandError(f"unknown subcommand {name!r}", hint, status=2)
    return 0


def _help() -> str:
    def first_line(function: Callable[..., Any]) -> str:
        return (inspect.getdoc(function) or "").partition("\n")[0]

    rows = [(f"{name} ...", first_line(function)) for name, function in SUBCOMMANDS.items()]
    rows += [
        ("--version", "Print the version and those of the libraries below."),
        ("--traceback", "After a subcommand: show the whole traceback of an error."),
    ]
    return "\n".join(
        [
            f"usage: {PROGRAM} SUBCOMMAND [options]",
            "",
            first_line(main),
            "",
            *(f"  {name:14}{text}" for name, text in rows),
            "",
            f"{PROGRAM} SUBCOMMAND --help lists the options of a subcommand.",
            f"{PROGRAM} fit --print_config writes a config file to start from.",
        ]
    )


class _TrainerCLI(LightningCLI):
    """Takes arguments other than ``sys.argv``'s, and hands out the Trainer before it runs.

    Args:
        arguments: subcommand and options.
        on_trainer: called with the Trainer as soon as there is one.
    """

    def __init__(self, arguments: Sequence[str], on_trainer: Callable[[Trainer], None]) -> None:
        self.on_trainer = on_trainer
        super().__init__(args=list(arguments), parser_kwargs={"prog": PROGRAM, "exit_on_error": False})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # Lightning warns of arguments that are not sys.argv's; here they are, without --traceback
        self.config = parser.parse_args(args)

    def after_instantiate_classes(self) -> None:
        self.on_trainer(self.trainer)


def _run_trainer(subcommand: str, arguments: Sequence[str]) -> None:
    """Runs one of LightningCLI's subcommands; when it fails, no other rank of this node survives.

    Raises:
        CommandError: LightningCLI's parser is not installed, or the Trainer does not take one of its arguments.
    """
    if not JSONARGPARSE:
        raise CommandError(f"{subcommand} needs jsonargparse", 'pip install "lightning_vdp[examples]"')
    trainers: list[Trainer] = []

    def on_trainer(trainer: Trainer) -> None:
        trainers.append(trainer)
        _shield_launched_ranks(trainer)

    try:
        _TrainerCLI([subcommand, *arguments], on_trainer)
    except BaseException as error:
        # a wrong argument of the Trainer; in a run, Lightning's frames also raise it for hooks with other parameters
        if not trainers and _is_raised_by_lightning(error, (TypeError,)):
            raise CommandError(_one_line(str(error))) from error
        for trainer in trainers:
            known = not isinstance(error, Exception) or _as_command_error(error, _unwrap(error)) is not None
            _end_launched_ranks(trainer, grace_s=0 if known else 3)
            if isinstance(error, SystemExit) and trainer.interrupted:
                raise KeyboardInterrupt from None
        raise


def _shield_launched_ranks(trainer: Trainer) -> None:
    """Keeps Ctrl-C from the ranks that the Trainer launches, since the Trainer ends them itself."""
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, _SubprocessScriptLauncher):
        return
    launch = launcher.launch

    def shielded_launch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            return function(*args, **kwargs)

        # a blocked signal stays blocked in new processes, from before their first import on
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return launch(run, *args, **kwargs)

    launcher.launch = shielded_launch  # type: ignore[method-assign]


def _end_launched_ranks(trainer: Trainer, grace_s: float) -> None:
    """Ends the ranks that this process launched, after they had ``grace_s`` seconds to report errors of their own."""
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        deadline = time.monotonic() + grace_s
        for process in launcher.procs:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutExpired:
                process.kill()


def _unwrap(error: BaseException) -> BaseException:
    """Returns the error that jsonargparse wrapped in its own, or ``error``."""
    return list(_chain(error))[-1]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields ``error`` and, as long as it is jsonargparse's, what caused it."""
    yield error
    cause = error.__cause__ or error.__context__
    if cause is not None and _modules(error)[-1] in PARSERS:
        yield from _chain(cause)


def _modules(error: BaseException) -> list[str]:
    """Returns the top-level module of each frame of ``error``, outermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames] or [""]


def _as_command_error(error: BaseException, cause: BaseException) -> CommandError | None:
    """Returns the report of an error that its message alone explains, ``None`` for one that needs its traceback."""
    if isinstance(cause, CommandError):
        return cause
    if _modules(cause)[-1] in PARSERS:
        labels = dict.fromkeys(_label(str(wrapper), str(cause)) for wrapper in _chain(error))
        hint = f"{PROGRAM} SUBCOMMAND --help lists every option"
        return CommandError(_one_line(" ".join([*labels, str(cause)])), hint, status=2)
    if isinstance(cause, UserError) or _is_raised_by_lightning(cause, LIGHTNINGS_ERRORS):
        return CommandError(_one_line(str(cause)))
    return None


def _is_raised_by_lightning(error: BaseException, types: tuple[type[Exception], ...]) -> bool:
    """Tells whether ``error`` is Lightning's own, or of one of ``types`` and raised in Lightning's code."""
    modules = _modules(error)
    # with a user's frame in between, Lightning's message needs the line that led to it
    known = modules[-1] == "lightning" and LIBRARIES.issuperset(modules)
    return known and isinstance(error, (MisconfigurationException, *types))


def _label(message: str, cause: str) -> str:
    """Returns what jsonargparse put before the message of ``cause``, such as ``Parser key "model":``."""
    head = message.removesuffix(cause).strip().partition("\n")[0]
    return head if head.endswith(":") else ""


def _one_line(message: str) -> str:
    return re.sub(r"\s+", " ", message).strip()


if __name__ == "__main__":
    sys.exit(main())
