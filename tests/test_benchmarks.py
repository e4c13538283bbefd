"""Benchmarks run, prove that both sides compute the same, and the page says what they found."""

import importlib
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import NAMES, main
from benchmarks.assignment import greedy
from benchmarks.measure import check_parity, largest_difference, peak_bytes
from benchmarks.report import Options, Report, at_least, at_most, exactly
from lightning_vdp.vision.assign import loads
from tests.conftest import slow

DOCS = Path(__file__).parent.parent / "docs"


def test_greedy_is_the_published_algorithm_with_its_weak_spot() -> None:
    assert loads([99, 100, 1], greedy([99, 100, 1], 2), 2) == [199, 1]
    draw = random.Random(0)
    for _ in range(50):
        sizes = [draw.randint(1, 100) for _ in range(draw.randint(1, 30))]
        ranks = draw.randint(1, 8)
        owners = greedy(sizes, ranks)
        assert owners == sorted(owners)
        assert set(owners) <= set(range(ranks))


def test_peaks_count_what_lived_at_once() -> None:
    def step() -> None:
        first = torch.ones(1000)
        second = first + 1
        del first
        second.sum()

    with peak_bytes(torch.device("cpu")) as peak:
        step()
    assert 8000 <= peak.bytes < 9000


def test_sides_that_differ_are_not_compared() -> None:
    difference = largest_difference({"weight": torch.tensor([1.0, 2.2])}, {"weight": torch.tensor([1.0, 2.0])})
    assert difference == pytest.approx(0.1)
    with pytest.raises(AssertionError, match="more than rounding"):
        check_parity(difference)
    with pytest.raises(AssertionError, match="more than rounding"):
        check_parity(float("nan"))


def test_limits_tell_whether_they_are_met() -> None:
    assert at_most(2).met_by(2)
    assert not at_most(2).met_by(2.1)
    assert at_least(2).met_by(2)
    assert not at_least(2).met_by(1.9)
    assert exactly(1).met_by(1)
    assert not exactly(1).met_by(1.01)


# nothing is computed there that could be compared
COUNTED = ("assignment", "host", "scale")


@pytest.mark.parametrize("name", [*COUNTED, *slow(*(name for name in NAMES if name not in COUNTED))])
def test_benchmark_runs(name: str) -> None:
    report = _report(name)
    assert report.figures
    assert all(key in report.figures for key in report.limits)
    assert all(isinstance(value, (int, float)) and value == value for value in report.figures.values())
    assert all(row.keys() == report.table[0].keys() for row in report.table)
    assert all(len(values) == len(report.chart.categories) for values in report.chart.series.values())
    assert (report.parity is None) == (name in COUNTED)
    if report.parity is not None:
        assert report.parity < 1e-3


def _report(name: str) -> Report:
    report: Report = importlib.import_module(f"benchmarks.{name}").run(Options(quick=True))
    return report


def test_command_writes_figures_and_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    record.write_text('{"scale": {"kept": true}}')
    main(["assignment", "--quick", "--json", str(record), "--charts", str(tmp_path)])
    recorded = json.loads(record.read_text())
    assert recorded["assignment"]["quick"] is True
    assert recorded["assignment"]["machine"]["torch"] == torch.__version__
    assert recorded["assignment"]["figures"]["plan_ms_32x8"] > 0
    assert recorded["scale"] == {"kept": True}
    assert (tmp_path / "assignment.png").read_bytes().startswith(b"\x89PNG")
    assert "plan_ms_32x8" in capsys.readouterr().out


def test_the_page_is_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "write_performance", raising=False)
    page = importlib.import_module("write_performance").page()
    assert (DOCS / "performance.rst").read_text() == page
    recorded = json.loads((DOCS / "performance.json").read_text())
    for name in NAMES:
        assert (DOCS / "images" / "benchmarks" / f"{name}.png").is_file()
    missed = {
        key
        for record in recorded.values()
        for key, limit in record["limits"].items()
        if not _meets(record["figures"][key], limit)
    }
    # what falls short is explained
    comments = json.loads((DOCS / "performance_comments.json").read_text())
    assert missed <= comments.keys()


def _meets(figure: float, limit: str) -> bool:
    relation, value = limit.split()
    return {"<=": at_most, ">=": at_least, "==": exactly}[relation](float(value)).met_by(figure)
