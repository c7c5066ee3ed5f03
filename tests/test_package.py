"""What is installed: every file that is not code, the public names, and nothing heavy before it is needed."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import unmask
from unmask.cli import run
from unmask.config import RunConfig, load_config

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "unmask"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_recipes_and_types_are_package_data() -> None:
    files = importlib.resources.files("unmask")
    assert files.joinpath("py.typed").is_file()
    recipes = [entry.name for entry in files.joinpath("recipes").iterdir() if entry.name.endswith(".toml")]
    assert "demo.toml" in recipes
    for name in recipes:
        assert isinstance(load_config(name.removesuffix(".toml")), RunConfig), name


def test_every_file_that_is_no_code_is_installed() -> None:
    patterns = project()["tool"]["setuptools"]["package-data"]["unmask"]
    files = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert files
    assert [file for file in files if not any(fnmatch(file, pattern) for pattern in patterns)] == []
    unused = [pattern for pattern in patterns if not any(fnmatch(file, pattern) for file in files)]
    assert unused == []


def test_every_folder_of_code_is_a_package() -> None:
    """setuptools finds a folder only with an __init__.py, and a wheel without it still works from the source tree."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_version_is_said_once() -> None:
    assert unmask.__version__ == project()["project"]["version"]


def test_the_command_is_installed() -> None:
    module, _, function = project()["project"]["scripts"]["unmask"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_public_names_are_sorted_and_there() -> None:
    assert unmask.__all__ == sorted(set(unmask.__all__))
    for name in unmask.__all__:
        assert getattr(unmask, name) is not None, name
    assert set(dir(unmask)) == set(unmask.__all__)
    namespace: dict[str, Any] = {}
    exec("from unmask import *", namespace)
    assert set(unmask.__all__) <= namespace.keys()
    missing = [name for name in ("load", "train", "Canvas", "samplers", "noise") if name not in unmask.__all__]
    assert missing == []
    with pytest.raises(AttributeError, match="no_such_name"):
        unmask.no_such_name  # noqa: B018


NO_TORCH = """
import sys, unmask, unmask.cli, unmask.errors
assert unmask.__version__ and "load" in dir(unmask)
names = [name for room in unmask._ROOMS for name in getattr(unmask, room).room.names()]
assert {"mdlm", "ancestral", "log_linear", "dit", "stdlib"} <= set(names), names
assert all(unmask.noise.room.summary(name) for name in unmask.noise.room.names())
for words in (["--help"], ["--version"], ["nonsense"]):
    unmask.cli.run(words)
heavy = sorted({"torch", "numpy", "safetensors", "tokenizers", "rich"} & sys.modules.keys())
assert not heavy, heavy
"""


def test_neither_the_import_nor_the_overview_loads_torch() -> None:
    done = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: unmask COMMAND" in done.stdout


def test_the_table_of_plugins_in_the_docs_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "--markdown"]) == 0
    made = capsys.readouterr().out
    kept = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert kept == made, "run: unmask plugins --markdown > docs/plugins.md"
