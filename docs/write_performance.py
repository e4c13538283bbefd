"""Writes docs/performance.rst from docs/performance.json.

python -m benchmarks all --json docs/performance.json --charts docs/images/benchmarks
python docs/write_performance.py
"""

import json
from pathlib import Path

from benchmarks.pages import performance_page

FOLDER = Path(__file__).parent


def page() -> str:
    """The page, from the record and the comments beside it."""
    recorded, comments = (
        json.loads((FOLDER / name).read_text()) for name in ("performance.json", "performance_comments.json")
    )
    return performance_page(recorded, comments)


if __name__ == "__main__":
    (FOLDER / "performance.rst").write_text(page())
