"""The package as a reader meets it: sizes of modules and functions, directions of imports, one meaning for each name."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_vdp"
MODULES = sorted(PACKAGE.rglob("*.py"))
# each room imports from those in front of it alone
ROOMS = (
    *("errors", "run", "collectives", "mesh", "agreement", "shards", "settings"),
    *("families", "batch", "call", "vision", "sequence", "metrics", "packing", "forward"),
    *("checkpoint", "fsdp", "strategy", "callbacks", "registration", "__init__"),
    *("testing", "check", "cli"),
)
MODULE_LINES, FUNCTION_LINES = 450, 80
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return (*module.split("."), "__init__")[1]


def imports(path: Path) -> Iterator[str]:
    """Modules of this package that a module imports, functions' own imports included."""
    names = {name_of(other) for other in MODULES}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == PACKAGE.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in names else str(node.module)


def test_every_room_is_listed() -> None:
    assert {room_of(name_of(path)) for path in MODULES} == set(ROOMS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_downward(path: Path) -> None:
    room = room_of(name_of(path))
    upward = [name for name in imports(path) if ROOMS.index(room_of(name)) > ROOMS.index(room)]
    assert upward == []


def test_modules_of_a_room_do_not_import_each_other_in_a_circle() -> None:
    graph = {name_of(path): set(imports(path)) - {name_of(path)} for path in MODULES}
    while graph:
        leaves = [name for name, needs in graph.items() if not needs & graph.keys()]
        assert leaves, f"a circle among {sorted(graph)}"
        for name in leaves:
            del graph[name]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MODULE_LINES
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, Function) and node.end_lineno is not None
    }
    assert {name: lines for name, lines in long.items() if lines > FUNCTION_LINES} == {}


def test_no_public_name_is_defined_for_two_meanings() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.ClassDef, *Function.__args__)):  # type: ignore[attr-defined]
                names = [node.name]
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            else:
                continue
            for name in names:
                if not name.startswith("_") and name not in ("P", "R", "log"):
                    places[name].append(name_of(path))
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
