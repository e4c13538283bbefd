"""Writes docs/models.rst from the rows of a check.

lightning-vdp check --all --sizes 2,4 --json models.json
python docs/write_models.py models.json
"""

import sys
from pathlib import Path

from lightning_vdp.check.pages import models_page
from lightning_vdp.check.rows import read_rows


def main() -> None:
    """Reads the files named on the command line, whose rows may be of several sizes."""
    rows = [row for path in sys.argv[1:] for row in read_rows(Path(path))]
    Path(__file__).with_name("models.rst").write_text(models_page(rows))


if __name__ == "__main__":
    main()
