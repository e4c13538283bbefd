import inspect
import json
import multiprocessing
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlavaConfig, PreTrainedModel

from lightning_vdp import cli
from lightning_vdp.check.build import MODEL_TYPES, build_model, tiny_config
from lightning_vdp.check.inputs import vision_base
from lightning_vdp.check.model import TOLERANCE, _failure
from lightning_vdp.check.pages import models_page
from lightning_vdp.check.rows import Divided, Row, read_rows, write_rows
from lightning_vdp.check.targets import Target, find_target
from lightning_vdp.check.walk import walk
from lightning_vdp.testing import RankFailed
from tests.spoiled_adjoints import SPOILED_ADJOINTS, spoil

MOST_USED = (
    "gemma3",
    "gemma4",
    "glm4v",
    "idefics3",
    "internvl",
    "kimi_k25",
    "lfm2_vl",
    "llava",
    "llava_next",
    "llava_onevision",
    "minicpmv4_6",
    "mistral3",
    "paligemma",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
)


def rows_of(*names: str, sizes: tuple[int, ...] = (2,), **arguments: Any) -> dict[str, Row]:
    return {row.model_type: row for row in walk([find_target(name) for name in names], sizes, **arguments)}


def tiny_llava() -> PreTrainedModel:
    return build_model(tiny_config(LlavaConfig()))


def test_families_are_exact_and_divided() -> None:
    names = ("gemma3", "internvl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5")
    for name, row in rows_of(*names).items():
        assert row.status == "exact", f"{name}: {row.reason}"
        assert row.loss_error is not None
        assert row.gradient_error is not None
        assert max(row.loss_error, row.gradient_error) <= TOLERANCE
        assert row.parameter
        # three images in one row, then two rows
        assert [sum(step) for step in row.divided.units[:2]] == [3, 3]
        assert all(min(step) >= 1 for step in row.divided.units[:2])
        assert all(max(step) - min(step) <= 1 for step in row.divided.lengths)
        assert max(row.saved_bytes) < 0.8 * row.saved_bytes_alone
        assert row.batches[:2] == ["three images in a row", "two padded rows"]


@pytest.mark.slow
def test_most_used_families_at_four_ranks() -> None:
    rows = rows_of(*MOST_USED, sizes=(4,))
    assert {name: row.reason for name, row in rows.items() if row.status != "exact"} == {}


def packed(model_type: str) -> bool:
    """Whether a model takes the patches of all images joined."""
    try:
        base = vision_base(find_target(model_type).make_model())
    except Exception:
        return False
    method = getattr(base, "get_image_features", None)
    names = [] if method is None else inspect.signature(method).parameters
    return any(name.startswith(("image_grid", "target_sizes")) for name in names)


@pytest.mark.slow
def test_every_type_is_exact_or_refused() -> None:
    start = time.monotonic()
    rows = rows_of(*MODEL_TYPES)
    assert time.monotonic() - start < 25 * 60
    by_status = {
        status: [name for name, row in rows.items() if row.status == status] for status in ("wrong", "hung", "exact")
    }
    assert by_status["wrong"] == by_status["hung"] == []
    assert len(by_status["exact"]) >= 70
    assert len([name for name in by_status["exact"] if packed(name)]) >= 32
    assert all(row.reason for row in rows.values() if row.status != "exact")


@pytest.mark.slow
def test_a_spoiled_adjoint_turns_exact_rows_wrong() -> None:
    exact = [name for name, row in rows_of(*MODEL_TYPES).items() if row.status == "exact"]
    spoiled = rows_of(*exact, prepare=partial(spoil, "all_to_all"))
    wrong = [name for name, row in spoiled.items() if row.status == "wrong"]
    assert len(wrong) >= 0.9 * len(exact)


@pytest.mark.parametrize("name", sorted(SPOILED_ADJOINTS))
def test_each_spoiled_adjoint_is_seen(name: str) -> None:
    # sequences are gathered around sparse attention alone
    model_type = {"all_gather": "mistral_large4"}.get(name, "qwen2_vl")
    row = rows_of(model_type, prepare=partial(spoil, name))[model_type]
    assert row.status == "wrong"
    assert "off by" in row.reason


def test_what_cannot_be_divided_or_built_says_why() -> None:
    rows = rows_of("mllama", "florence2", "fast_vlm")
    assert rows["mllama"].status == "refused"
    assert "MllamaForConditionalGeneration" in rows["mllama"].reason
    assert rows["florence2"].status == "refused"
    assert "encoder-decoder" in rows["florence2"].reason
    assert rows["fast_vlm"].status == "unbuildable"
    assert "timm" in rows["fast_vlm"].reason


def sleeping() -> PreTrainedModel:
    time.sleep(60)
    raise AssertionError


def dying() -> PreTrainedModel:
    os._exit(7)


def crashing() -> PreTrainedModel:
    model = tiny_llava()
    model.model.multi_modal_projector.linear_2 = torch.nn.Linear(3, 3)
    return model


def test_one_model_does_not_take_the_rest_along() -> None:
    targets = [
        Target("sleeping", sleeping),
        Target("dying", dying),
        Target("crashing", crashing),
        find_target("mllama"),
    ]
    seen: list[str] = []
    rows = walk(targets, [2], on_row=lambda row: seen.append(row.model_type), jobs=2, limit_s=4)
    assert [(row.model_type, row.status) for row in rows] == [
        ("sleeping", "unbuildable"),
        ("dying", "unbuildable"),
        ("crashing", "unbuildable"),
        ("mllama", "refused"),
    ]
    assert sorted(seen) == ["crashing", "dying", "mllama", "sleeping"]
    assert "still ran after 4 s" in rows[0].reason
    assert "exit code 7" in rows[1].reason
    assert "one process" in rows[2].reason or "no input" in rows[2].reason


def test_termination_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "pid"

    def noting() -> PreTrainedModel:
        path.write_text(str(os.getpid()))
        return sleeping()

    process = multiprocessing.get_context("fork").Process(target=walk, args=([Target("noting", noting)], [2]))
    process.start()
    while not path.exists() or not path.read_text():
        time.sleep(0.02)
    process.terminate()
    process.join(10)
    assert process.exitcode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


def test_rows_survive_json(tmp_path: Path) -> None:
    row = Row(
        "x", 2, "exact", loss_error=1e-16, divided=Divided([[3, 2]], [[2, 1]]), saved_bytes=[5, 4], saved_bytes_alone=9
    )
    path = tmp_path / "rows.json"
    write_rows([row], path)
    assert read_rows(path) == [row]
    (values,) = json.loads(path.read_text())
    names = ["model_type", "size", "status", "reason", "loss_error", "gradient_error", "parameter", "divided"]
    assert set(names) <= values.keys()
    assert values["divided"]["tower"] is values["divided"]["decoder"] is True


@pytest.mark.parametrize(
    ("lengths", "units", "decoder", "tower"),
    [
        ([[3, 2]], [[2, 1]], True, True),
        ([[3, 3], [5, 0]], [[3, 0]], False, False),
        ([[]], [[]], False, False),
        ([], [], False, False),
        # one unit cannot be divided, and says nothing
        ([[3, 2]], [[1, 0], [2, 1]], True, True),
        ([[3, 2]], [[1, 0]], True, False),
        ([[3, 2]], [[3, 3]], True, True),
    ],
)
def test_what_counts_as_divided(lengths: list[list[int]], units: list[list[int]], decoder: bool, tower: bool) -> None:
    divided = Divided(lengths, units)
    assert (divided.decoder, divided.tower) == (decoder, tower)


def test_a_crash_is_no_refusal() -> None:
    def failure(path: str, deliberate: tuple[int, ...], ranks: int) -> tuple[str, str]:
        message = f'Rank 0 raised:\n  File "{path}", line 3, in f\n    x = y[0]\nUserError: no'
        return _failure(RankFailed(message, dict.fromkeys(range(ranks), "UserError: no"), deliberate), 2)

    ours = "/elsewhere/lightning_vdp/x.py"
    assert failure(ours, (0, 1), 2) == ("refused", "no")
    assert failure(ours, (), 2) == ("wrong", "the ranks crash: UserError: no (x.py:3)")
    assert failure("/elsewhere/torch/x.py", (), 2)[0] == "wrong"
    # the first to fail is the cause
    assert failure(ours, (1,), 2)[0] == "wrong"
    assert failure(ours, (0,), 1) == ("wrong", "refused by ranks [0] of 2 alone: no")


def test_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 128}}))
    for name in (str(path), str(tmp_path)):
        target = find_target(name)
        assert target.name == "llava"
    assert target.make_model().config.text_config.hidden_size == 64
    (tmp_path / "my_models.py").write_text("from tests.test_check import tiny_llava\nx = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    assert find_target("my_models:tiny_llava").make_model().config.model_type == "llava"
    path.write_text(json.dumps({"model_type": "own", "auto_map": {"AutoModel": "own.Own"}}))
    problems = {
        str(path): "its code is its own",
        "my_models:x": "no function x",
        str(tmp_path / "no.json"): "There is no file",
    }
    for name, problem in problems.items():
        with pytest.raises(ValueError, match=problem):
            find_target(name)


def test_unknown_names_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str) -> Any:
        raise OSError("no network\nmore")

    monkeypatch.setattr("lightning_vdp.check.targets.PreTrainedConfig.get_config_dict", offline)
    with pytest.raises(ValueError, match=r"'qwen9_vl' is no model_type .* \(no network\)"):
        find_target("qwen9_vl")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.json"
    assert cli.main(["check", "mllama", "llava", "--json", str(path), "--jobs", "2"]) == 1
    output = capsys.readouterr()
    assert "refused: MllamaForConditionalGeneration" in " ".join(output.out.split())
    assert "1 exact, 1 refused" in output.out
    assert "2/2" in output.err
    assert [row.status for row in read_rows(path)] == ["refused", "exact"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "nothing to check"),
        (["llava", "--sizes", "1"], "whole numbers from 2 on"),
        (["llava", "--no-such-option"], "--no-such-option"),
        (["llava", "--sabotage", "all_to_all"], "--sabotage"),
        (["no_module:factory"], "no_module"),
    ],
)
def test_wrong_command_lines(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lightning-vdp: error: ")
    assert problem in error


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--sizes" in shown
    assert "--sabotage" not in shown


def test_exit_status_of_exact_models() -> None:
    assert cli.main(["check", "llava", "--sizes", "2"]) == 0


def test_page_of_models() -> None:
    divided = Divided([[3, 2]], [[2, 1]])
    rows = [
        Row("b", 2, "exact", "", 1e-16, 3e-15, "p", divided, ["a video"], [6, 5], 10),
        Row("b", 4, "exact", "", 1e-16, 4e-15, "p", divided),
        Row("a", 2, "refused", "its `decoder` is *odd*"),
        Row("c", 2, "exact", "", 1e-16, 1e-15, "p", divided),
        Row("c", 4, "wrong", "loss off"),
    ]
    page = models_page(rows)
    assert "1 **exact**" in page
    assert "1 **refused**" in page
    assert "1 **wrong**" in page
    assert (
        "   * - ``b``\n     - exact (3e-15)\n     - exact (4e-15)\n     - tower, decoder\n     - 60%\n     - a video\n"
        in page
    )
    assert "its ``decoder`` is \\*odd\\*" in page
    assert page.index("``b``") < page.index("Others") < page.index("``a``") < page.index("loss off")


def test_written_page_is_that_of_its_rows() -> None:
    """The page in the docs is generated, and no figure on it is typed."""
    folder = Path(__file__).parent.parent / "docs"
    page = (folder / "models.rst").read_text()
    assert page == models_page(read_rows(folder / "models.json"))


def test_checked_types_are_those_of_the_page() -> None:
    rows = read_rows(Path(__file__).parent.parent / "docs" / "models.json")
    if {row.transformers for row in rows} == {transformers.__version__}:
        assert {row.model_type for row in rows} == set(MODEL_TYPES)
    assert not [row.model_type for row in rows if row.status in ("wrong", "hung")]
