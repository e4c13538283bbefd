"""Names that this package replaces and that newer versions of Lightning or transformers may move, and what it never does."""

import ast
from pathlib import Path
from typing import Any

import lightning
import pytest
import transformers
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import override

import lightning_vdp
from lightning_vdp import UlyssesVisionDPPrecision, UlyssesVisionDPStrategy
from lightning_vdp.run.compatibility import check_overrides
from lightning_vdp.run.notebook import NotebookLauncher
from lightning_vdp.testing import Batches, ParityModule, RankFailed, quiet_trainer, run_ranks, tiny_model

FAMILY = "qwen3_vl"


@pytest.mark.parametrize("cls", [UlyssesVisionDPStrategy, UlyssesVisionDPPrecision, NotebookLauncher])
def test_every_override_replaces_something(cls: type) -> None:
    check_overrides(cls)


def test_users_own_subclass_is_its_own_affair() -> None:
    class Own(UlyssesVisionDPStrategy):
        @override
        def no_such_method(self) -> None:  # type: ignore[misc]
            pass

    check_overrides(Own)


def _set_up() -> None:
    module = ParityModule(tiny_model(FAMILY))
    strategy = UlyssesVisionDPStrategy(sequence_parallel_size=2)
    quiet_trainer(devices=2, strategy=strategy).fit(module, Batches([]))


def _without_strategy_method(name: str) -> None:
    for cls in FSDPStrategy.__mro__:
        if name in vars(cls):
            delattr(cls, name)
    _set_up()


def _without_precision_method() -> None:
    for cls in FSDPPrecision.__mro__:
        if "clip_grad_by_norm" in vars(cls):
            delattr(cls, "clip_grad_by_norm")
    _set_up()


def _without_model_method(name: str) -> None:
    import transformers.models.qwen3_vl.modeling_qwen3_vl as modeling

    for cls in vars(modeling).values():
        if isinstance(cls, type) and name in vars(cls):
            delattr(cls, name)
    _set_up()


def _without_lookup() -> None:
    delattr(type(ALL_ATTENTION_FUNCTIONS), "get_interface")
    _set_up()


def _loss_elsewhere() -> None:
    own = PreTrainedModel.loss_function.fget(tiny_model(FAMILY))  # type: ignore[attr-defined]
    PreTrainedModel.loss_function = property(lambda self: own)  # type: ignore[misc,assignment]
    _set_up()


MOVED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "a method of the strategy": (
        _without_strategy_method,
        ("process_dataloader",),
        f"Lightning {lightning.__version__} has no `FSDPStrategy.process_dataloader`, which UlyssesVisionDPStrategy replaces",
    ),
    "clipping": (
        _without_precision_method,
        (),
        f"Lightning {lightning.__version__} has no `FSDPPrecision.clip_grad_by_norm`, which UlyssesVisionDPPrecision replaces",
    ),
    "features": (
        _without_model_method,
        ("get_image_features",),
        f"Qwen3VLModel of transformers {transformers.__version__} has no `get_image_features`, where lightning_vdp enters",
    ),
    "the attention registry": (
        _without_lookup,
        (),
        f"transformers {transformers.__version__} has no `ALL_ATTENTION_FUNCTIONS.get_interface`",
    ),
    "where a model looks for its loss": (
        _loss_elsewhere,
        (),
        f"`loss_function` of Qwen3VLForConditionalGeneration in transformers {transformers.__version__} no longer looks at "
        "`_loss_function`",
    ),
}


@pytest.mark.parametrize("case", MOVED)
def test_moved_name_is_an_error_at_setup_that_names_the_version(case: str) -> None:
    function, args, message = MOVED[case]
    with pytest.raises(RankFailed) as caught:
        run_ranks(function, 2, *args)
    failures = caught.value.failures
    assert len(set(failures.values())) == 1, failures
    assert failures[0].startswith("UnsupportedError: ")
    assert message in failures[0]


# ---- security


def _calls(path: Path) -> list[tuple[str, ast.Call]]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [(ast.unparse(call.func), call) for call in calls]


SOURCES = sorted(Path(lightning_vdp.__file__).parent.rglob("*.py"))
# simulated ranks hand their outcome to the process that forked them
PICKLES_OF_OUR_OWN = {"testing/processes.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    name = str(path.relative_to(SOURCES[0].parent)) if SOURCES[0].parent in path.parents else path.name
    for function, call in _calls(path):
        assert function not in ("eval", "exec", "compile", "yaml.load", "__import__"), ast.unparse(call)
        assert "_object" not in function or "gather" not in function, ast.unparse(call)
        assert "_object_list" not in function, ast.unparse(call)
        if name not in PICKLES_OF_OUR_OWN:
            assert "pickle" not in function, ast.unparse(call)
        if function == "torch.load":
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            # or what the user says, of whom torch asks for an explicit False
            assert keywords.get("weights_only") in ("True", "weights_only"), ast.unparse(call)
