"""The guides' files, and two small runs made with them by the command line alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from guide_files import Bench, read_guides, write_guides

import unmask
from unmask import plugin_modules
from unmask.model import Model


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("guides")
    plugins = write_guides(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_modules, "loaded", [])
        for name in unmask._ROOMS:
            room = importlib.import_module(f"unmask.{name}").room
            patch.setattr(room, "_registered", dict(room._registered))
        plugin_modules.load_plugins(plugins[1::2])
        yield Bench(folder, plugins)
    for guide in read_guides():
        sys.modules.pop(guide.module, None)


@pytest.fixture(scope="module")
def sums(bench: Bench) -> Path:
    """The run of the corpus, the objective and the schedule."""
    return bench.trained("sums")


@pytest.fixture(scope="module")
def gru(bench: Bench) -> Path:
    """The run of the denoiser."""
    return bench.trained("gru")


@pytest.fixture(scope="module")
def diffusion(sums: Path) -> Model:
    return unmask.load(sums, device="cpu")


@pytest.fixture(scope="module")
def recurrent(gru: Path) -> Model:
    return unmask.load(gru, device="cpu")
