"""Runs stopped by signals or killed at any point go on bit for bit: same losses, weights, average and optimizer."""

from __future__ import annotations

import itertools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quick_gc
import unmask.training.callbacks
import unmask.training.checkpoint.files
from matrix import ALL, environment, sample
from unmask.cli import run
from unmask.config import RunConfig, load_config, to_dict
from unmask.training.callbacks import Callback, StepReport
from unmask.training.checkpoint.files import load_checkpoint
from unmask.training.ema import Ema
from unmask.training.loop import train
from unmask.training.optim import AdamWAndMuon

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")

STEPS = 72


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, make_config: Any) -> RunConfig:
    """A run that nothing interrupts; dropout is on."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    config: RunConfig = make_config(folder, steps=STEPS, valid_every=12, save_every=4, keep=2, sample_every=36)
    assert config.denoiser.dropout > 0  # type: ignore[attr-defined]
    train(config, device="cpu")
    return config


@pytest.fixture
def recipe(reference: RunConfig, tmp_path: Path) -> Path:
    """The same run, to be made in tmp_path/run."""
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(to_dict(reference) | {"out": str(tmp_path / "run")}), encoding="utf-8")
    return path


def records(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clocked = ("tokens_per_second", "seconds", "train_seconds")
    return [{k: v for k, v in line.items() if k not in clocked} for line in lines]


def logged_steps(folder: Path) -> list[int]:
    """The step of every whole line; a kill may have cut the last one."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line)["step"] for line in lines]


def files(folder: Path) -> dict[str, bytes]:
    """The bytes of everything a run ends with, save the metrics and what names its folder."""
    kept = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and path.name not in ("metrics.jsonl", "recipe.json", "state.json", "manifest.json"):
            kept[name] = path.read_bytes()
    return kept


def assert_as_if_never_interrupted(folder: Path, reference: RunConfig) -> None:
    straight = Path(reference.out)
    assert records(folder) == records(straight)
    ours, theirs = files(folder), files(straight)
    assert ours.keys() == theirs.keys()  # the same checkpoints are kept, and nothing is left lying about
    assert any(name.endswith("optimizer.safetensors") for name in ours)
    assert any(name.endswith("ema.safetensors") for name in ours)
    assert [name for name in ours if ours[name] != theirs[name]] == []
    a, b = load_checkpoint(folder), load_checkpoint(straight)
    assert a is not None
    assert b is not None
    assert (a.step, a.skipped) == (STEPS, [])
    for found in (a, b):
        found.state["config"].pop("out")
        assert found.state.pop("train_seconds") > 0
    assert a.state == b.state


# --- seeds, precisions, moments ---------------------------------------------------------------------------------------


class Crash(Callback):
    """Ends a run from inside, once the numbers of a step are told and before anything else is done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.step == self.step:
            raise RuntimeError("crash")


CRASHED = list(itertools.product(["fp32", "bf16"], [0, 1, 2**40 + 7]))


@pytest.mark.parametrize(("precision", "seed"), sample(CRASHED, 0, keep=[("fp32", 0), ("bf16", 2**40 + 7)]))
def test_a_crash_at_any_step(
    tmp_path: Path, make_config: Any, precision: str, seed: int, tally: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, average, optimizer and the losses that follow are those of a run which never crashed, bit for bit."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no crash of the machine is played here
    how = {"steps": 14, "save_every": 5, "valid_every": 6, "keep": 9, "seed": seed, "precision": precision}
    straight = tmp_path / "straight"
    train(make_config(straight, micro_batch=3, **how), device="cpu")
    expected, losses = files(straight), records(straight)
    assert len({line["loss"] for line in losses if "loss" in line}) == 14
    # After a save, in the middle, at a step that would have saved, and twice in one run; in turn both ways of saving.
    crashes = [(6,), (8,), (10,), (7, 13)]
    for number, steps in enumerate(crashes if ALL else crashes[1::2]):
        folder = tmp_path / "-".join(map(str, steps))
        background = {"async_save": True, "save_every": 10} if number % 2 else {}  # at the same steps
        config = make_config(folder, micro_batch=3, **how | background)
        for i, step in enumerate(steps):
            with pytest.raises(RuntimeError, match="crash"):
                train(config, callbacks=[Crash(step)], resume=i > 0, device="cpu")
        train(config, resume=True, device="cpu")
        assert records(folder) == losses
        kept = files(folder)
        # In the background a save that has not begun gives way to a newer one: the last and the best never do.
        may_miss = {name for name in expected if "/step-" in name} if background else set()
        for pointer in ("latest", "best"):
            step = expected[f"checkpoints/{pointer}"].decode().strip()
            may_miss -= {name for name in may_miss if step in name}
        assert expected.keys() - may_miss <= kept.keys() <= expected.keys()
        assert [name for name in kept if kept[name] != expected[name]] == []
        tally("crashes gone on with bit for bit, one process")


# --- signals to the real program --------------------------------------------------------------------------------------


def same_threads() -> dict[str, str]:
    """For a program that continues what this one began: another number of threads may round otherwise."""
    return environment(OMP_NUM_THREADS=str(torch.get_num_threads()))


class Program:
    """`python -m unmask train`, in the background until the block ends."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.metrics = folder / "metrics.jsonl"
        self.before = self.metrics.stat().st_ino if self.metrics.exists() else None
        command = [sys.executable, "-m", "unmask", "train", *words, "--device", "cpu"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=same_threads(),
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGKILL)

    def _lines(self) -> int:
        """Logged so far; the file that an earlier process left does not count before it is mended."""
        mine = self.metrics.exists() and self.metrics.stat().st_ino != self.before
        return self.metrics.read_bytes().count(b"\n") if mine else 0

    def wait_for_lines(self, count: int) -> None:
        deadline = time.monotonic() + 180
        while self._lines() < count:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def send(self, number: signal.Signals) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=180)
        return self.process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT][: 2 if ALL else 1], ids=lambda s: s.name)
def test_a_request_to_stop(number: signal.Signals, recipe: Path, reference: RunConfig, tmp_path: Path) -> None:
    """SIGTERM and Ctrl-C finish the step, save, exit with 75 and say how to go on."""
    folder = tmp_path / "run"
    with Program(folder, str(recipe)) as program:
        program.wait_for_lines(10)
        code, out, err = program.send(number)
    assert (code, out) == (75, ""), err
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    found = load_checkpoint(folder)
    assert found is not None
    assert 9 <= found.step < STEPS
    assert last == (
        f"unmask: stopped at step {found.step} of {STEPS}, all is saved; go on with: unmask train {folder} --resume"
    )
    assert max(line["step"] for line in records(folder)) == found.step  # not one step was lost
    words = shlex.split(last.partition("go on with: unmask ")[2])
    assert run([*words, "--device", "cpu"]) == 0
    assert_as_if_never_interrupted(folder, reference)


def test_killed_at_random_moments(recipe: Path, reference: RunConfig, tmp_path: Path) -> None:
    """SIGKILL leaves no time for anything; what was saved last is where the run goes on."""
    moments = random.Random(0)
    folder = tmp_path / "run"
    kills = 0
    rounds = 3 if ALL else 2
    for _ in range(rounds):
        words = [str(recipe)] if load_checkpoint(folder) is None else [str(folder), "--resume"]
        # Counted from what the checkpoint keeps, so that every round gets further than the last.
        found = load_checkpoint(folder)
        lines = 0 if found is None else sum(step <= found.step for step in logged_steps(folder))
        with Program(folder, *words) as program:
            program.wait_for_lines(lines + moments.randrange(6, 14))
            time.sleep(moments.random() * 0.03)
            code, _, err = program.send(signal.SIGKILL)
        if code == 0:
            break  # a fast machine may be done by then
        assert code == -signal.SIGKILL, err
        kills += 1
    else:
        train(load_config(folder), resume=True, device="cpu")
    assert kills >= rounds - 1
    assert_as_if_never_interrupted(folder, reference)


# --- killed at chosen points ------------------------------------------------------------------------------------------


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(place: Any, name: str, number: int, *, after: bool) -> Callable[[], None]:
    """Arm a kill before or after the n-th call of a function."""

    def arm() -> None:
        real, calls = getattr(place, name), 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number and not after:
                die()
            result = real(*args, **kwargs)
            if calls == number and after:
                die()
            return result

        setattr(place, name, counted)

    return arm


def half_a_weights_file() -> None:
    """Killed in the middle of writing a tensor file."""
    real = unmask.training.checkpoint.files.write_tensors

    def partly(path: Path, tensors: Any) -> Any:
        facts = real(path, tensors)
        os.truncate(path, path.stat().st_size // 2)
        if path.name == "optimizer.safetensors":
            die()
        return facts

    unmask.training.checkpoint.files.write_tensors = partly  # type: ignore[assignment]


def half_a_line() -> None:
    """Killed in the middle of a line of metrics."""

    def partly(self: Any, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record)[:17])
        self.file.flush()
        die()

    unmask.training.callbacks.MetricsFile._write = partly  # type: ignore[method-assign]


POINTS: list[Callable[[], None]] = [
    at_call(os, "replace", 1, after=False),  # before the run has written anything
    at_call(os, "replace", 2, after=True),
    at_call(Ema, "update", 1, after=False),  # the weights have moved, the average has not
    at_call(AdamWAndMuon, "step", 6, after=True),
    at_call(unmask.training.checkpoint.files, "write_tensors", 1, after=False),
    at_call(unmask.training.checkpoint.files, "write_tensors", 2, after=True),
    half_a_weights_file,
    at_call(os, "fsync", 9, after=True),
    at_call(os, "rename", 1, after=False),  # the checkpoint is whole, under a name that does not count
    at_call(os, "rename", 1, after=True),  # it counts, and nothing else was done
    half_a_line,
    at_call(os, "replace", 3, after=True),  # metrics are mended when a run goes on
    at_call(os, "replace", 4, after=False),  # the pointer to the best lags behind
    at_call(shutil, "rmtree", 2, after=False),  # old checkpoints are being removed
    at_call(shutil, "rmtree", 3, after=True),
    at_call(os, "fsync", 31, after=False),
    at_call(os, "rename", 4, after=False),  # the model folder is being replaced
    at_call(os, "rename", 5, after=True),
]


def killed_at_every_point(recipe: str) -> None:
    """One child a point, each going on where the last was killed. In a process of its own: forks before torch works."""
    folder = Path(json.loads(Path(recipe).read_text(encoding="utf-8"))["out"])
    for arm in POINTS:
        child = os.fork()
        if child == 0:
            begun = load_checkpoint(folder) is not None
            config = load_config(folder if begun else recipe)
            arm()
            train(config, resume=begun, device="cpu")
            os._exit(0)  # the point was never reached
        _, status = os.waitpid(child, 0)
        found = load_checkpoint(folder)
        print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, found.step if found else 0, flush=True)


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch")
def test_killed_at_every_point_of_a_save(recipe: Path, reference: RunConfig, tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(recipe)]
    done = subprocess.run(command, env=same_threads(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fates = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [number for number, _ in fates] == [signal.SIGKILL] * len(POINTS), done.stderr
    steps = [step for _, step in fates]
    assert steps == sorted(steps)  # what was saved once is never lost
    assert 0 < steps[-1] < STEPS
    train(load_config(tmp_path / "run"), resume=True, device="cpu")
    assert_as_if_never_interrupted(tmp_path / "run", reference)


if __name__ == "__main__":
    quick_gc.install()
    killed_at_every_point(sys.argv[1])
