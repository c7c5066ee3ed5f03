"""How the folders of src/unmask may lean on each other, and how large a file and a function may be."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import unmask
from unmask.registry import Room

PACKAGE = Path(unmask.__file__).parent
MAX_LINES, MAX_FUNCTION = 400, 60

# Imports between rooms that go against the others' direction, and why they may. Without them the rooms have an order.
AGAINST = {
    ("data", "storage"): "reading a file that nobody vouches for stands on nothing else",
    ("distributed", "storage"): "the same",
    ("samplers", "sampling"): "canvas and query are what a sampler works on; the loop that runs it stands beside them",
    ("objectives", "sampling"): "an objective makes the predictor that samplers ask",
}


class Import(NamedTuple):
    where: str  # the importing module
    target: str  # the imported module
    name: str  # with what is taken from it
    when: str  # "load", "call" or "typing"


@functools.cache
def modules() -> dict[str, Path]:
    def name(path: Path) -> str:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    return {name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    """The folder of a module in src/unmask; a module of the root is a room of its own."""
    parts = modules()[module].relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else module.removeprefix("unmask.")


def statements(node: ast.AST, when: str = "load") -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, when
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from statements(child, "typing")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from statements(child, "call")
        else:
            yield from statements(child, when)


@functools.cache
def imports() -> tuple[Import, ...]:
    made = []
    for module, path in modules().items():
        for statement, when in statements(ast.parse(path.read_text(encoding="utf-8"))):
            assert isinstance(statement, ast.Import) or statement.level == 0, f"{module}: name the module in full"
            if isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            else:
                names = [f"{statement.module}.{alias.name}" for alias in statement.names]
            for name in names:
                if name.split(".")[0] == "unmask":
                    target = name if name in modules() else name.rpartition(".")[0]
                    made.append(Import(module, target, name, when))
    return tuple(made)


def test_nothing_private_is_imported_from_another_room() -> None:
    """`_module` is its folder's, also of the folders in it; `_name` is its module's, and its folder's."""
    wrong = []
    for one in imports():
        parts = one.name.split(".")
        private = [i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
        if private and one.target != "unmask":  # the root's own are for the whole package
            owner = ".".join(parts[: private[0]])
            folder = modules()[owner].parent
            if folder not in modules()[one.where].parents:
                wrong.append(f"{one.where} imports {one.name}")
    assert wrong == []


def test_the_helpers_of_a_room_are_its_files() -> None:
    for name in unmask._ROOMS:
        room = importlib.import_module(f"unmask.{name}").room
        assert isinstance(room, Room)
        files = {path.stem for path in (PACKAGE / name).iterdir() if path.suffix == ".py" or path.is_dir()}
        assert room._helpers <= files, f"{name} names helpers that are no files"
        for plugin in room.names():
            assert issubclass(room.get(plugin), room.base), f"{name}/{plugin}.py holds no plug-in: name it a helper"


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some way around, or nothing."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if around := walk(other, [*path, node]):
                return around
        done.add(node)
        return []

    return next(filter(None, (walk(node, []) for node in sorted(graph))), [])


def test_no_import_goes_around() -> None:
    graph: dict[str, set[str]] = {}
    for one in imports():
        if one.when == "load" and one.where != one.target:
            graph.setdefault(one.where, set()).add(one.target)
    assert cycle(graph) == []


def test_the_rooms_have_an_order() -> None:
    graph: dict[str, set[str]] = {}
    for one in imports():
        pair = room_of(one.where), room_of(one.target)
        if one.when == "load" and pair[0] != pair[1] and pair not in AGAINST and pair[0] != "__main__":
            graph.setdefault(pair[0], set()).add(pair[1])
    assert cycle(graph) == []
    for lower, upper in AGAINST:
        assert cycle({**graph, lower: graph.get(lower, set()) | {upper}}), f"{lower} may import {upper}: no exception"


@pytest.mark.parametrize("circle", [{"a": {"b"}, "b": {"c"}, "c": {"b"}}, {"a": {"a"}}])
def test_a_cycle_is_seen(circle: dict[str, set[str]]) -> None:
    assert cycle(circle)


def test_files_and_functions_are_short() -> None:
    long = []
    for module, path in modules().items():
        source = path.read_text(encoding="utf-8")
        if (lines := source.count("\n")) > MAX_LINES:
            long.append(f"{module}: {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION:
                    long.append(f"{module}.{node.name}: {lines} lines")
    assert long == []
