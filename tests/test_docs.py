"""The examples in docstrings run and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import unmask

MODULES = ["unmask"] + [
    found.name
    for found in pkgutil.walk_packages(unmask.__path__, "unmask.")
    if found.name != "unmask.__main__"  # importing it runs the command
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed, _ = doctest.testmod(importlib.import_module(name), report=True)
    assert failed == 0
    assert list(tmp_path.iterdir()) == []  # an example leaves nothing behind


def test_there_are_examples() -> None:
    """A guard for the test above: that it finds what it should."""
    finder = doctest.DocTestFinder()
    found = sum(len(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name)))
    assert found > 60
