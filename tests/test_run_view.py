"""What callbacks get of a run: its weights, its numbers, an early end, metrics of their own that `best` can name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unmask
from unmask.errors import ConfigError, UsageError
from unmask.model import Model
from unmask.storage.model_folder import unshared
from unmask.training.callbacks import Callback
from unmask.training.checkpoint.files import best_checkpoint, load_checkpoint
from unmask.training.loop import train
from unmask.training.run_view import RunView


class At(Callback):
    """Does something with the run at its steps and validations."""

    def __init__(self, on_step: Callable[[RunView], Any] | None = None, on_valid: Any = None) -> None:
        self.step, self.valid = on_step, on_valid
        self.notes: list[str] = []
        self.results: list[Any] = []

    def on_run(self, run: RunView) -> None:
        self.run = run

    def on_step(self, report: Any) -> None:
        if self.step is not None:
            self.results.append(self.step(self.run))

    def on_valid(self, step: int, bound: Any) -> None:
        if self.valid is not None:
            self.results.append(self.valid(self.run))

    def on_note(self, step: int, text: str) -> None:
        self.notes.append(text)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_weights_step_config_and_metrics(tmp_path: Path, make_config: Any) -> None:
    config = make_config(tmp_path / "r", keep=5)
    seen: dict[int, tuple[Model, Model, dict[str, float]]] = {}

    def look(run: RunView) -> None:
        if run.step in (4, 12):
            seen[run.step] = run.model(), run.averaged(), dict(run.metrics)
        assert run.config.steps == 12

    train(config, callbacks=[At(look)], device="cpu")
    for step, (model, averaged, metrics) in seen.items():
        saved = load_checkpoint(tmp_path / "r" / "checkpoints" / f"step-{step:08d}")
        assert saved is not None
        assert all(unshared(model.denoiser)[name].equal(t) for name, t in saved.tensors["model"].items())
        assert all(unshared(averaged.denoiser)[name].equal(t) for name, t in saved.tensors["ema"].items())
        assert {"loss", "lr", "grad_norm", "tokens_per_second", "valid_nats_per_token"} <= set(metrics)
    assert seen[4][0].generate(1, seed=0) != ""  # a model like any other


def test_looking_changes_nothing(tmp_path: Path, make_config: Any) -> None:
    dropout = {"denoiser": unmask.denoisers.DiT(hidden=16, blocks=1, heads=2, dropout=0.5)}
    train(make_config(tmp_path / "a", **dropout), device="cpu")
    look = At(lambda run: (run.model().generate(1, seed=1), run.averaged()))
    train(make_config(tmp_path / "b", **dropout), callbacks=[look], device="cpu")
    one, other = load_checkpoint(tmp_path / "a"), load_checkpoint(tmp_path / "b")
    assert one is not None
    assert other is not None
    assert all(t.equal(other.tensors["model"][name]) for name, t in one.tensors["model"].items())


def test_nothing_of_the_run_can_be_set(tmp_path: Path, make_config: Any) -> None:
    def meddle(run: RunView) -> None:
        with pytest.raises(AttributeError):
            run.step = 7  # type: ignore[misc]
        with pytest.raises(TypeError):
            run.metrics["loss"] = 0.0  # type: ignore[index]

    train(make_config(tmp_path / "r", steps=2), callbacks=[At(meddle)], device="cpu")


@pytest.mark.parametrize("when", ["step", "valid"])
def test_a_callback_ends_the_run_as_finished(tmp_path: Path, make_config: Any, when: str) -> None:
    def end(run: RunView) -> None:
        if run.step >= 5:
            run.stop("good enough")

    callback = At(end) if when == "step" else At(on_valid=end)
    model = train(make_config(tmp_path / "r"), callbacks=[callback], device="cpu")
    last = load_checkpoint(tmp_path / "r")
    assert last is not None
    assert last.step == (5 if when == "step" else 6)
    assert callback.notes == ["ended early: good enough"]
    assert [line["step"] for line in lines(tmp_path / "r") if "valid_ppl" in line][-1] == last.step
    assert model.num_parameters
    train(make_config(tmp_path / "r"), resume=True, device="cpu")  # and may go on
    assert load_checkpoint(tmp_path / "r").step == 12  # type: ignore[union-attr]


@pytest.mark.parametrize(("best_is", "step"), [("least", 4), ("most", 8)])
def test_best_may_name_a_metric_of_a_callback(tmp_path: Path, make_config: Any, best_is: str, step: int) -> None:
    scores = {0: 0.0, 4: -3.0, 8: 5.0, 12: 1.0}
    changes = {"best": "my_score", "best_is": best_is, "valid_every": 4, "keep": 1}
    config = make_config(tmp_path / "r", **changes)
    log = At(on_valid=lambda run: run.log("my_score", scores[run.step]))
    model = train(config, callbacks=[log], device="cpu")
    best = best_checkpoint(tmp_path / "r")
    assert best is not None
    assert best.name == f"step-{step:08d}"
    saved = load_checkpoint(best)
    assert saved is not None
    assert saved.state["best"] == scores[step]
    assert all(unshared(model.denoiser)[name].equal(t) for name, t in saved.tensors["ema"].items())
    assert {line["step"]: line["my_score"] for line in lines(tmp_path / "r") if "my_score" in line} == scores


def test_a_metric_that_nobody_logs_keeps_the_last_model(tmp_path: Path, make_config: Any) -> None:
    model = train(make_config(tmp_path / "r", best="nobody"), device="cpu")
    last = load_checkpoint(tmp_path / "r")
    assert last is not None
    assert all(unshared(model.denoiser)[name].equal(t) for name, t in last.tensors["ema"].items())


@pytest.mark.parametrize("name", ["loss", "valid_ppl", "step", "a b", "", "x" * 101])
def test_names_that_are_taken_or_no_names_are_refused(tmp_path: Path, make_config: Any, name: str) -> None:
    with pytest.raises(UsageError, match="metric"):
        train(make_config(tmp_path / "r", steps=2), callbacks=[At(lambda run: run.log(name, 1.0))], device="cpu")


def test_what_is_not_finite_is_kept_as_null_and_never_the_best(tmp_path: Path, make_config: Any) -> None:
    log = At(on_valid=lambda run: run.log("odd", float("nan") if run.step < 12 else 2.0))
    train(make_config(tmp_path / "r", best="odd"), callbacks=[log], device="cpu")
    assert [line["odd"] for line in lines(tmp_path / "r") if "odd" in line] == [None, None, 2.0]
    best = best_checkpoint(tmp_path / "r")
    assert best is not None
    assert best.name == "step-00000012"


def test_the_bound_is_best_when_least(make_config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="best"):
        make_config(tmp_path / "r", best_is="most")
