"""The time to a bound: interpolated between validations, with the start and the stalls told."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from unmask.reader import to_dict

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("time_to_quality")


def run_lines() -> list[tuple[dict[str, Any], float]]:
    """Five steps of 10 tokens, a validation before them and after the second and the fifth; the third step is slow."""
    lines: list[tuple[dict[str, Any], float]] = [({"step": 0, "valid_nats_per_token": 6.0, "train_seconds": 0.0}, 4.0)]
    took = {1: (3.0, 3.0), 2: (1.0, 1.0), 3: (8.0, 2.0), 4: (1.0, 1.0), 5: (1.0, 1.0)}  # in all, and in training
    seconds = trained = 0.0
    for step, (whole, training) in took.items():
        seconds, trained = seconds + whole, trained + training
        record = {"step": step, "loss": 1.0, "tokens": 10, "seconds": seconds, "train_seconds": trained}
        lines.append((record, 4.0 + seconds))
        if step in (2, 5):
            bound = {2: 4.0, 5: 3.0}[step]
            look = {"step": step, "valid_nats_per_token": bound, "train_seconds": trained}
            lines.append((look, 4.5 + seconds))
    lines.append(({"step": 5, "note": "a loss that jumped"}, 99.0))
    return lines


def followed(bench: ModuleType, *, watched: bool = True) -> Any:
    metrics = bench.Metrics()
    for record, came in run_lines():
        metrics.add(record, came if watched else None)
    return metrics


def test_a_bound_lies_on_the_line_between_two_validations(bench: ModuleType) -> None:
    metrics = followed(bench)
    assert metrics.reached(6.5) == bench.Look(6.0, 0, 0, 0.0, 4.0)
    assert metrics.reached(5.5) == bench.Look(5.5, 0.5, 5.0, 1.0, 5.125)  # a quarter of the way to step 2
    assert metrics.reached(4.0) == bench.Look(4.0, 2.0, 20.0, 4.0, 8.5)
    assert metrics.reached(3.5) == bench.Look(3.5, 3.5, 35.0, 6.0, 13.5)
    assert metrics.reached(2.9) is None
    assert followed(bench, watched=False).reached(5.5) == bench.Look(5.5, 0.5, 5.0, 1.0, None)


def test_tokens_are_counted_where_few_steps_are_logged(bench: ModuleType, tmp_path: Path) -> None:
    """Validations lie before, between and after the logged steps; a kill cut off the last line."""
    lines = [
        {"step": 3, "valid_nats_per_token": 6.0, "train_seconds": 3.0},
        {"step": 10, "loss": 1.0, "tokens": 100, "seconds": 10.0, "train_seconds": 10.0},
        {"step": 17, "valid_nats_per_token": 5.0, "train_seconds": 17.0},
        {"step": 20, "loss": 1.0, "tokens": 50, "seconds": 20.0, "train_seconds": 20.0},
        {"step": 24, "valid_nats_per_token": 4.0, "train_seconds": 24.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 30, "lo')
    for path in (tmp_path, file):
        assert [look.tokens for look in bench.read(path).looks] == [300, 1350, 1700]
    with pytest.raises(SystemExit, match="give the folder of a run"):
        bench.read(tmp_path / "none")


def test_tokens_of_a_run_that_logged_no_step_are_unknown(bench: ModuleType) -> None:
    metrics = bench.Metrics()
    for step, bound in ((0, 6.0), (3, 5.0), (6, 4.0)):
        metrics.add({"step": step, "valid_nats_per_token": bound, "train_seconds": float(step)})
    assert [look.tokens for look in metrics.looks] == [0, None, None]
    assert bench.table("a", metrics, [4.5])[-1].split() == ["4.5000", "-", "4.5", "4", "-"]
    ElementTree.fromstring(bench.picture({"a": metrics}))


def test_the_first_time_counts(bench: ModuleType) -> None:
    """A bound that is lost again was reached all the same."""
    metrics = bench.Metrics()
    metrics.looks = [bench.Look(bound, step, 0, 0.0) for step, bound in enumerate([5.0, 3.0, 4.0, 2.0])]
    assert metrics.reached(3.5).step == 0.75


def test_the_start_and_the_stalls(bench: ModuleType) -> None:
    metrics = followed(bench)
    assert metrics.first_step == 7.0
    assert metrics.longest() == (bench.Gap(8.0, 3, "validation"), bench.Gap(2.0, 3, "validation"))
    said = "\n".join(bench.table("a", metrics, [3.5, 1.0]))
    assert "the first step is told after 7.0 s" in said
    assert "8.00 s before step 3, with a validation" in said
    assert "  3.5000       13.5        6.0" in said
    assert "1.0000 not reached: the best is 3.0000 at step 5" in said


@pytest.mark.parametrize("epoch", [None, 10.0])
def test_a_picture_of_two_runs(bench: ModuleType, epoch: float | None) -> None:
    picture = bench.picture({"a": followed(bench), "<b>": followed(bench)}, epoch)
    tree = ElementTree.fromstring(picture)
    panels = [child for child in tree if child.tag.endswith("svg")]
    assert [panel.get("x") for panel in panels] == ["0", panels[0].get("width")]
    for panel, across in zip(panels, ("seconds", "epochs" if epoch else "tokens"), strict=True):
        assert across in ["".join(text.itertext()) for text in panel.iter() if text.tag.endswith("text")]
        assert sum(line.tag.endswith("polyline") for line in panel.iter()) == 2
    marks = {text.text for text in panels[1].iter() if text.tag.endswith("text") and text.get("class") == "note"}
    assert ("5" in marks, "50" in marks) == (epoch is not None, epoch is None)  # 50 tokens, or five epochs of 10


def test_a_run_is_watched_and_read_again(
    bench: ModuleType, tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    recipe = tmp_path / "tiny.json"
    recipe.write_text(json.dumps(to_dict(make_config(tmp_path / "run", log_every=9))))
    how = ["--out", str(tmp_path / "run"), "--device", "cpu", "--valid_every", "4", "--json", str(tmp_path / "a.json")]
    monkeypatch.setattr(sys, "argv", ["time_to_quality.py", str(recipe), "--bound", "5.5", *how])
    bench.main()
    (watched,) = json.loads((tmp_path / "a.json").read_text()).values()
    assert [look["step"] for look in watched["validations"]] == [0, 4, 8, 12]
    arrived = [look["seconds"] for look in watched["validations"]]
    assert 0 < arrived[0] <= watched["first_step_seconds"] <= arrived[1]
    assert arrived == sorted(arrived)
    assert watched["longest_gap"]["seconds"] >= watched["longest_gap_in_training"]["seconds"] > 0
    again = ["--runs", str(tmp_path / "run"), "--plot", str(tmp_path / "a.svg"), "--json", str(tmp_path / "b.json")]
    monkeypatch.setattr(sys, "argv", ["time_to_quality.py", *again])
    bench.main()
    (read,) = json.loads((tmp_path / "b.json").read_text()).values()
    unwatched = [look | {"seconds": None} for look in watched["validations"]]
    assert read["validations"] == unwatched
    ElementTree.parse(tmp_path / "a.svg")
    assert str(tmp_path / "run") in capfd.readouterr().out


@pytest.mark.parametrize("more", [["--out", "there"], ["--plot", "none/a.svg"], ["--json", "none/a.json"]])
def test_what_cannot_be_written_is_said_before_the_training(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "metrics.jsonl").write_text("")
    monkeypatch.setattr(bench, "watch", None)
    monkeypatch.setattr(sys, "argv", ["time_to_quality.py", "demo", *more])
    with pytest.raises(SystemExit) as e:
        bench.main()
    assert e.value.code == 2


def test_a_run_that_is_stopped_is_told_all_the_same(
    bench: ModuleType, tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    recipe = tmp_path / "tiny.json"
    recipe.write_text(json.dumps(to_dict(make_config(tmp_path / "run", steps=100_000))))
    add = bench.Metrics.add

    def stopping(metrics: Any, record: dict[str, Any], came: float | None = None) -> None:
        add(metrics, record, came)
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(bench.Metrics, "add", stopping)
    how = ["--out", str(tmp_path / "run"), "--device", "cpu", "--plot", str(tmp_path / "a.svg")]
    monkeypatch.setattr(sys, "argv", ["time_to_quality.py", str(recipe), "--bound", "0.1", *how])
    assert bench.main() == 75
    assert "not reached" in capfd.readouterr().out
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
    ElementTree.parse(tmp_path / "a.svg")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ended")
def test_a_killed_command_leaves_no_run_behind(tmp_path: Path, make_config: Any) -> None:
    recipe, run = tmp_path / "tiny.json", tmp_path / "run"
    recipe.write_text(json.dumps(to_dict(make_config(run, steps=10**6, valid_every=10**6, save_every=10**6))))
    command = [
        sys.executable,
        str(BENCHMARKS / "time_to_quality.py"),
        str(recipe),
        "--out",
        str(run),
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and "loss" not in (
        (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
    ):
        time.sleep(0.1)
    process.kill()
    process.wait()
    while time.monotonic() < deadline and not (run / "checkpoints" / "latest").exists():
        time.sleep(0.1)
    assert (run / "checkpoints" / "latest").exists()  # written because it was asked to stop
