"""The documentation is complete: tables of arguments, links, and files that pages name."""

import inspect
import re
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "trainer.rst").read_text()


@pytest.mark.parametrize(
    ("heading", "classes"), [("Trainer", [Trainer]), ("FSDPStrategy", [FSDPStrategy, FullyShardedDataParallel])]
)
def test_every_argument_has_a_row(heading: str, classes: list[type]) -> None:
    section = PAGE.split(f"\n{heading}\n---", 1)[1].split("\n----", 1)[0]
    rows = re.findall(r"^   \* - ``(\w+)``$", section, flags=re.MULTILINE)
    arguments = {name for cls in classes for name in inspect.signature(cls.__init__).parameters}
    assert len(rows) == len(set(rows))
    assert set(rows) == arguments - {"self", "kwargs", "module"}


@pytest.mark.parametrize("page", ["README.rst", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.rst"))])
def test_links_within_the_repository_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text()
    links = re.findall(r"`[^`<]+<([^`>:]+)>`_", text) + re.findall(r"^\.\. image:: (\S+)$", text, flags=re.MULTILINE)
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert not missing


def test_files_named_by_the_page_on_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.rst").read_text()
    names = set(re.findall(r"``((?:\w+/)?\w+\.py|\w+/)``", text))
    assert names
    assert not [
        name for name in names if not any((folder / name).exists() for folder in (ROOT, ROOT / "lightning_vdp"))
    ]
