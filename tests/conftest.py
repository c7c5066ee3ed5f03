"""What all tests share: threads, their order, a home and a cache of their own, and small models trained once."""

from __future__ import annotations

import os

# Threads that wait spin by default, which costs a small network a hundredfold when somebody else uses the cores.
# Read once, when torch is loaded; inherited by the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import quick_gc
from tiny import PLAIN, TINY, WORDS, MakeConfig, Record, Trained
from unmask.config import DataConfig, RunConfig
from unmask.corpora.text import Text
from unmask.model import Model, load
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.server.same_bits import ask_for_same_bits
from unmask.training.loop import train

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which torch may do by itself
ask_for_same_bits()  # as `unmask serve` does; nothing has been multiplied yet
# The workers of `make test` have a core each: a second thread would only take turns with the other worker's.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
hypothesis.settings.register_profile("unmask", deadline=None)
hypothesis.settings.load_profile("unmask")

# What takes longest, and what waits for other processes, comes first: the rest then fills both workers to the end.
FIRST = (
    "parallel/test_parallel.py",
    "parallel/",
    "numerics/test_learning.py",
    "faults/",
    "server/test_schema.py",
    "server/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        return next((i for i, start in enumerate(FIRST) if path.startswith(start)), len(FIRST))

    items.sort(key=rank)


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test reads or writes the user's home or token cache."""
    home = tmp_path_factory.mktemp("home")
    (home / ".cache" / "torch" / "kernels").mkdir(parents=True)  # torch warns where it cannot keep what it compiles
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
        patch.setenv("UNMASK_CACHE", str(home / "token-cache"))
        yield home


@pytest.fixture(scope="session", autouse=True)
def short_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        quick_gc.install(patch.setattr)
        yield


# --- counted ----------------------------------------------------------------------------------------------------------

_tally: dict[str, int] = {}


@pytest.fixture
def tally() -> Callable[..., None]:
    """Counts cases under a heading; the sums are shown at the end, and kept where UNMASK_FAULTS_REPORT says."""

    def count(heading: str, number: int = 1) -> None:
        _tally[heading] = _tally.get(heading, 0) + number

    return count


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    lines = [f"{heading}: {number}" for heading, number in sorted(_tally.items())]
    if lines:
        terminalreporter.section("cases that held")
        terminalreporter.write("\n".join(lines) + "\n")
    if lines and exitstatus == 0 and (report := os.environ.get("UNMASK_FAULTS_REPORT")):
        Path(report).write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text: 200 lines of four sentences, in an order that does not repeat soon."""
    path = tmp_path_factory.mktemp("corpus") / "lines.txt"
    path.write_text("".join(f"{WORDS[i * i % 7 % 4]}\n" for i in range(200)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def make_config(corpus_file: Path) -> MakeConfig:
    """A tiny run; keywords change it, those of `data` and `optim` given as dicts."""

    def make(out: Path, **changes: Any) -> RunConfig:
        data = DataConfig(train=Text(path=str(corpus_file)), length=32, held_out=0.1)
        base = RunConfig(
            out=str(out),
            steps=12,
            batch=8,
            denoiser=TINY,
            objective=MDLM(form="count"),
            data=dataclasses.replace(data, **changes.pop("data", {})),
            optim=dataclasses.replace(PLAIN, **changes.pop("optim", {})),
            log_every=1,
            valid_every=6,
            valid_rows=8,
            sample_every=0,
            save_every=4,
        )
        return dataclasses.replace(base, **changes)

    return make


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, make_config: MakeConfig) -> Trained:
    """A diffusion run of 60 steps. Shared: do not change it, copy it."""
    folder = tmp_path_factory.mktemp("runs") / "mdlm"
    config = make_config(folder, steps=60, valid_every=20, save_every=20, sample_every=30)
    record = Record()
    return Trained(folder, config, train(config, callbacks=[record], device="cpu"), record)


@pytest.fixture(scope="session")
def trained_ar(tmp_path_factory: pytest.TempPathFactory, make_config: MakeConfig) -> Trained:
    """The same with an autoregressive model."""
    folder = tmp_path_factory.mktemp("runs") / "ar"
    causal = dataclasses.replace(TINY, causal=True)
    config = make_config(folder, steps=60, valid_every=20, save_every=20, objective=AR(), denoiser=causal)
    record = Record()
    return Trained(folder, config, train(config, callbacks=[record], device="cpu"), record)


@pytest.fixture(scope="session")
def model(trained: Trained) -> Model:
    """The trained diffusion model. Shared: do not change it."""
    return trained.model


@pytest.fixture(scope="session")
def ar_model(trained_ar: Trained) -> Model:
    """The trained autoregressive model. Shared: do not change it."""
    return trained_ar.model


@pytest.fixture
def fresh_model(trained: Trained) -> Model:
    """The trained diffusion model, to do with as the test likes."""
    return load(trained.folder, device="cpu")
