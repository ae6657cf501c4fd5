"""The trainer's rooms keep their order: a module imports from its own room and from those below."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src/aprtrain"

# Lowest first. Rooms of one layer stand side by side and do not know each other.
LAYERS: list[set[str]] = [
    {"features", "lora_spec", "plugins"},
    {"world", "config", "kernels"},
    {"network", "nodes", "config_sources"},
    {"loss"},
    {"data"},
    {"teacher", "qat", "report"},
    {"optim"},
    {"hidden"},
    {"checkpoints"},
    {"guards"},
    {"models", "evaluate", "reference", "samples", "recorded", "sampler", "reap"},
    {"selection", "rating"},
    {"memory"},
    {"budget", "teach"},
    {"loop"},
    {"resume"},
    {"finish"},
    {"run"},
    {"api"},
]
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}


def rooms_imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, room) of every import from the package, also inside functions, but for type checkers' own."""
    checking = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    typing = {
        id(inner)
        for block in checking
        if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for inner in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing:
            package, _, module = (node.module or "").partition(".")
            if package == "aprtrain":
                names = [module.partition(".")[0]] if module else [alias.name for alias in node.names]
                yield from ((node.lineno, name) for name in names)


def test_every_room_has_its_place() -> None:
    rooms = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert rooms - {"__init__"} == set(RANK)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_imports_from_a_higher_or_a_neighbouring_room(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for line, other in rooms_imported(ast.parse(path.read_text())):
        assert other == own or RANK[other] < RANK[own], f"{path}:{line}: {own} imports {other}"


def test_an_arrow_that_points_up_is_seen() -> None:
    tree = ast.parse("def f():\n    from aprtrain.run import run\nfrom aprtrain import loop, guards\n")
    assert sorted(rooms_imported(tree)) == [(2, "run"), (3, "guards"), (3, "loop")]
