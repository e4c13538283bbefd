"""The tables of arguments in the documentation are complete."""

import inspect
import re
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

PAGE = (Path(__file__).parent.parent / "docs" / "trainer.rst").read_text()


@pytest.mark.parametrize(
    ("heading", "classes"), [("Trainer", [Trainer]), ("FSDPStrategy", [FSDPStrategy, FullyShardedDataParallel])]
)
def test_every_argument_has_a_row(heading: str, classes: list[type]) -> None:
    section = PAGE.split(f"\n{heading}\n---", 1)[1].split("\n----", 1)[0]
    rows = re.findall(r"^   \* - ``(\w+)``$", section, flags=re.MULTILINE)
    arguments = {name for cls in classes for name in inspect.signature(cls.__init__).parameters}
    assert len(rows) == len(set(rows))
    assert set(rows) == arguments - {"self", "kwargs", "module"}
