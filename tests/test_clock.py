"""Seconds of training: steps count, and nothing else that a run does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unmask.training.callbacks import Callback
from unmask.training.checkpoint.saving import Saver
from unmask.training.clock import Clock
from unmask.training.loop import Run, train


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A time of our own, in which a step takes a second, and whatever else a run does takes far more."""
    now = [1000.0]
    monkeypatch.setattr("unmask.training.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes(owner: type, name: str, seconds: float) -> None:
        real = getattr(owner, name)

        def slow(self: Any, *args: Any, **options: Any) -> Any:
            now[0] += seconds
            return real(self, *args, **options)

        monkeypatch.setattr(owner, name, slow)

    takes(Run, "forward_backward", 1.0)
    takes(Run, "validate", 100.0)
    takes(Run, "sample", 100.0)
    takes(Saver, "save", 100.0)
    return now


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("background", [False, True])
def test_steps_count_and_nothing_else(tmp_path: Path, make_config: Any, now: list[float], background: bool) -> None:
    seen = []

    class Look(Callback):
        def on_run(self, run: Any) -> None:
            self.run = run

        def on_valid(self, step: int, bound: Any) -> None:
            seen.append((step, self.run.train_seconds))

    config = make_config(tmp_path / "r", valid_every=3, sample_every=4, async_save=background)
    train(config, callbacks=[Look()], device="cpu")
    lines = metrics(tmp_path / "r")
    steps = [line for line in lines if "loss" in line]
    assert [line["train_seconds"] for line in steps] == [float(step) for step in range(1, 13)]
    assert [line["tokens_per_second"] for line in steps] == [line["tokens"] for line in steps]
    looks = [(line["step"], line["train_seconds"]) for line in lines if "valid_ppl" in line]
    assert looks == seen == [(step, float(step)) for step in (0, 3, 6, 9, 12)]
    assert now[0] >= 1000 + 12 + 500


def test_they_go_on_where_a_run_goes_on(tmp_path: Path, make_config: Any, now: list[float]) -> None:
    config = make_config(tmp_path / "r")
    train(dataclasses.replace(config, steps=6), device="cpu")
    now[0] += 1e6
    train(config, resume=True, device="cpu")
    steps = [line for line in metrics(tmp_path / "r") if "loss" in line]
    assert [line["train_seconds"] for line in steps] == [float(step) for step in range(1, 13)]


def test_what_stands_does_not_go_on(now: list[float]) -> None:
    clock = Clock(5.0)
    now[0] += 3
    assert clock.seconds == 5
    for _ in range(2):  # once is as good as twice
        clock.go()
        now[0] += 1
    assert clock.seconds == 7
    for _ in range(2):
        clock.stop()
        now[0] += 1
    assert clock.seconds == 7
