"""The page of checked models, written from the rows of a check. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap

from lightning_vdp.check.rows import STATUSES, Row, Status

__all__ = ["list_table", "models_page", "paragraph"]

_MEANING = {
    "exact": "the loss and every gradient equal those of one process to rounding (float64, relative error at most 1e-9)",
    "undivided": "exact, but each rank does the whole work of the tower or the decoder",
    "refused": "the strategy says before the first step why it cannot divide the model",
    "wrong": "other numbers than in one process",
    "hung": "the ranks wait for each other",
    "unbuildable": "there is no small model or input for it here, or it crashes in one process already",
}


def list_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> list[str]:
    """Lines of a table in reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: auto", ""]
    for row in (header, *rows):
        lines += [f"   {'* -' if column == 0 else '  -'} {cell}".rstrip() for column, cell in enumerate(row)]
    return [*lines, ""]


def paragraph(text: str) -> list[str]:
    """Lines of a paragraph, none longer than 120 characters."""
    return wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _divided(row: Row) -> str:
    return ", ".join(name for name in ("tower", "decoder") if getattr(row.divided, name))


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.status != "exact" or row.gradient_error is None or row.loss_error is None:
        return row.status
    return f"exact ({max(row.gradient_error, row.loss_error):.0e})"


def _literal(text: str) -> str:
    # reasons quote code in backticks, which mean roles in this format
    return text.replace("`", "``").replace("*", "\\*").replace("|", "\\|")


def _saved(row: Row) -> str:
    if not row.saved_bytes or not row.saved_bytes_alone:
        return ""
    return f"{max(row.saved_bytes) / row.saved_bytes_alone:.0%}"


def _introduction(types: int, versions: Sequence[str], worst: Sequence[Status]) -> list[str]:
    counts = Counter(worst)
    return [
        "Checked models",
        "==============",
        "",
        ".. written by docs/write_models.py from the rows of lightning-vdp check; do not edit",
        "",
        *paragraph(
            f"The {types} model types that transformers {' or '.join(versions)} maps to image-text-to-text, each made "
            "small and trained for a step on each kind of batch that it takes, in one process and in simulated ranks:"
        ),
        "",
        *(f"- {counts[status]} **{status}**: {_MEANING[status]}" for status in STATUSES if counts[status]),
        "",
        "``lightning-vdp check MODEL`` checks a model on your machine.",
        "",
    ]


def _exact_table(exact: Mapping[str, Mapping[int, Row]], sizes: Sequence[int]) -> list[str]:
    lines = [
        "Exact",
        "-----",
        "",
        *paragraph(
            "The largest error of a gradient or the loss stands in brackets. *Saved* is what the forward of a rank keeps for "
            f"backward, relative to one process, on a short sequence with {sizes[0]} ranks."
        ),
        "",
    ]
    cells = []
    for name, of_type in exact.items():
        first = of_type[min(of_type)]
        batches = "; ".join(first.batches) + (f". {_literal(first.reason)}" if first.reason else "")
        errors = (_cell(of_type.get(size)) for size in sizes)
        cells.append((f"``{name}``", *errors, _divided(first), _saved(first), batches))
    return lines + list_table(cells, ("type", *(f"S = {size}" for size in sizes), "divided", "saved", "batches"))


def _others_table(others: Mapping[str, Row]) -> list[str]:
    if not others:
        return []
    cells = [(f"``{name}``", row.status, _literal(row.reason)) for name, row in others.items()]
    return ["Others", "------", "", *list_table(cells, ("type", "status", "reason"))]


def models_page(rows: Iterable[Row]) -> str:
    """Writes the page in reStructuredText.

    Args:
        rows: Rows of the check, of one or several sizes.
    """
    by_type: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_type.setdefault(row.model_type, {})[row.size] = row
    by_type = dict(sorted(by_type.items()))
    sizes = sorted({size for of_type in by_type.values() for size in of_type})
    versions = sorted({row.transformers for of_type in by_type.values() for row in of_type.values()})
    # of several sizes, the first with the worst status speaks for the type
    worst = {
        name: max(of_type.values(), key=lambda row: STATUSES.index(row.status)) for name, of_type in by_type.items()
    }
    exact = {name: by_type[name] for name, row in worst.items() if row.status in ("exact", "undivided")}
    others = {name: row for name, row in worst.items() if name not in exact}
    statuses = [row.status for row in worst.values()]
    lines = _introduction(len(by_type), versions, statuses) + _exact_table(exact, sizes) + _others_table(others)
    return "\n".join(lines).rstrip() + "\n"
