"""Validation by any metric: all loggers get it, `best` may name it, and what cannot be is refused before the run."""

from __future__ import annotations

import importlib
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import unmask
from tiny import MakeConfig
from unmask.config import load_config
from unmask.data.packing import Rows
from unmask.errors import ConfigError, MissingExtraError, UsageError
from unmask.evaluation.measurement import Measurement
from unmask.metrics import MaskedAccuracy, Metric, Perplexity
from unmask.metrics.order_likelihood import OrderLikelihood
from unmask.model import Model
from unmask.training.callbacks import Callback
from unmask.training.checkpoint.files import best_checkpoint
from unmask.training.loop import train

BOTH = (MaskedAccuracy(rate=0.5), Perplexity(num_samples=4), MaskedAccuracy())
NAMES = ["masked_accuracy", "perplexity", "masked_accuracy_2"]


class Told(Callback):
    def __init__(self) -> None:
        self.measured: list[tuple[int, str, float]] = []
        self.seen: list[dict[str, float]] = []

    def on_run(self, run: Any) -> None:
        self.run = run

    def on_valid(self, step: int, bound: Any) -> None:
        self.seen.append({name: self.run.metrics[f"valid_{name}"] for name in NAMES})

    def on_measured(self, step: int, name: str, measured: Measurement) -> None:
        self.measured.append((step, name, measured.value))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_each_is_what_evaluate_gives_of_the_saved_model(tmp_path: Path, make_config: MakeConfig) -> None:
    told = Told()
    config = make_config(tmp_path / "r", steps=4, valid_every=2, valid_rows=8, valid_metrics=BOTH)
    model = train(config, callbacks=[told], device="cpu")
    assert [(step, name) for step, name, _ in told.measured] == [(step, name) for step in (0, 2, 4) for name in NAMES]
    assert told.seen == [
        {name: value for at, name, value in told.measured if at == step} for step in (0, 2, 4)
    ]  # known already when the validation is told
    written = [line for line in lines_of(tmp_path / "r") if any(f"valid_{name}" in line for name in NAMES)]
    assert [
        (line["step"], line[f"valid_{name}"]) for line, (_, name, _) in zip(written, told.measured, strict=True)
    ] == [(step, value) for step, _, value in told.measured]
    assert written[0]["valid_masked_accuracy_ci95"][0] <= written[0]["valid_masked_accuracy"]
    # the last model is the best one here, or not: of the step it was saved at, the numbers are those of its folder
    best = best_checkpoint(tmp_path / "r")
    assert best is not None
    rows = unmask.data.packing.rows_of(config.data, model.tokenizer, "valid")
    for metric, name in zip(BOTH, NAMES, strict=True):
        again = unmask.evaluate(model, rows, metric=type(metric)(**vars(metric) | {"max_rows": 8})).value
        then = [value for step, other, value in told.measured if (step, other) == (int(best.name[5:]), name)]
        assert then == [pytest.approx(again, rel=1e-5)]
    # and nothing of the training has changed by measuring
    plain = train(make_config(tmp_path / "p", steps=4, valid_every=2, valid_rows=8), device="cpu")
    losses = [[line["loss"] for line in lines_of(tmp_path / name) if "loss" in line] for name in ("r", "p")]
    assert losses[0] == losses[1]
    assert plain.score("a cat").nats == model.score("a cat").nats


def test_a_run_that_goes_on_has_the_same_numbers(tmp_path: Path, make_config: MakeConfig) -> None:
    how: dict[str, Any] = {"valid_every": 2, "valid_rows": 8, "save_every": 2, "valid_metrics": BOTH[:1]}
    train(make_config(tmp_path / "whole", steps=4, **how), device="cpu")

    class Stop(Callback):
        def on_run(self, run: Any) -> None:
            self.run = run

        def on_measured(self, step: int, name: str, measured: Measurement) -> None:
            if step == 2:
                self.run.stop("enough")

    train(make_config(tmp_path / "half", steps=4, **how), callbacks=[Stop()], device="cpu")
    train(make_config(tmp_path / "half", steps=4, **how), resume=True, device="cpu")
    found = [
        [line for line in lines_of(tmp_path / name) if "valid_masked_accuracy" in line] for name in ("whole", "half")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("best", ["masked_accuracy", "nats_per_token"])
def test_a_best_without_its_prefix_is_told_before_the_run(best: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean 'valid_{best}'"):
        load_config("demo", {"best": best, "valid_metrics": "masked_accuracy"})


@pytest.mark.parametrize("best_is", ["least", "most"])
def test_best_may_name_one(tmp_path: Path, make_config: MakeConfig, best_is: str) -> None:
    values = {0: 3.0, 2: 1.0, 4: 9.0, 6: 5.0}

    @unmask.register
    @dataclass(frozen=True, kw_only=True)
    class Given(Metric):
        def measure(self, model: Model, data: Rows, *, seed: int) -> Measurement:
            return Measurement(next(numbers), None, 1)

    numbers = iter(values.values())
    try:
        changes: dict[str, Any] = {"best": "valid_given", "best_is": best_is, "valid_metrics": (Given(),)}
        train(make_config(tmp_path / "r", steps=6, valid_every=2, **changes), device="cpu")
        best = best_checkpoint(tmp_path / "r")
        assert best is not None
        assert int(best.name[5:]) == (2 if best_is == "least" else 4)
        assert load_config(tmp_path / "r").valid_metrics == (Given(),)
    finally:
        Metric.room._registered.pop("given", None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"best": "valid_masked_accuracy"}, "valid_metrics may add it"),
        ({"best": "valid_nats_per_tokn"}, "did you mean"),
        ({"best": "valid_masked_accuracy", "valid_metrics": BOTH}, "set best_is = most"),
        ({"best": "valid_perplexity", "best_is": "most", "valid_metrics": BOTH}, "leave out best_is"),
        ({"best_is": "most"}, "leave out best_is"),
        ({"wandb": " "}, "a project"),
    ],
)
def test_what_no_validation_can_tell_is_refused(
    tmp_path: Path, make_config: MakeConfig, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config(tmp_path / "r", **changes)


def test_a_recipe_names_them(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('valid_metrics = ["masked_accuracy", {name = "perplexity", num_samples = 8}]\nbest_is = "most"\n'
                      'best = "valid_masked_accuracy"\n', encoding="utf-8")  # fmt: skip
    config = load_config(recipe)
    assert config.valid_metrics == (MaskedAccuracy(), Perplexity(num_samples=8))
    words = load_config("demo", {"valid_metrics": unmask.config.Word("masked_accuracy,order_likelihood")})
    assert words.valid_metrics == (MaskedAccuracy(), OrderLikelihood())
    for wrong in ("masked_acuracy", '{name = "masked_accuracy", rat = 1}'):
        recipe.write_text(f"valid_metrics = [{wrong if wrong[0] == '{' else repr(wrong)}]\n", encoding="utf-8")
        with pytest.raises(ConfigError, match="did you mean"):
            load_config(recipe)


def test_a_metric_that_does_not_fit_ends_the_run_before_it_begins(tmp_path: Path, make_config: MakeConfig) -> None:
    config = make_config(
        tmp_path / "r",
        steps=2,
        objective=unmask.objectives.AR(),
        denoiser=unmask.denoisers.DiT(hidden=16, blocks=1, heads=2, causal=True),
        valid_metrics=(MaskedAccuracy(),),
    )
    with pytest.raises(UsageError, match="valid_metrics, MaskedAccuracy: "):
        train(config, device="cpu")
    assert not [line for line in lines_of(tmp_path / "r") if "loss" in line]


# --- dashboards -------------------------------------------------------------------------------------------------------


def test_tensorboard_gets_them(tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[tuple[str, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            pass

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, step))

        def add_text(self, name: str, text: str, step: int) -> None:
            pass

        def close(self) -> None:
            pass

    package: Any = types.ModuleType("tensorboard")
    package.__spec__ = types.SimpleNamespace(name="tensorboard")
    writer: Any = types.ModuleType("torch.utils.tensorboard")
    writer.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    train(make_config(tmp_path / "r", steps=2, valid_every=2, valid_metrics=BOTH), device="cpu")
    assert {(f"valid/{name}", step) for name in [*NAMES, "bits_per_byte"] for step in (0, 2)} <= {*scalars}


class Board:
    """What stands in for the package wandb: what it is told, and nothing of it goes anywhere."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.told: list[dict[str, float]] = []
        self.ended = 0

    def module(self) -> Any:
        package: Any = types.ModuleType("wandb")
        package.__spec__ = types.SimpleNamespace(name="wandb")
        package.init = self.init
        return package

    def init(self, **how: Any) -> Any:
        self.begun.append(how)
        return types.SimpleNamespace(log=self.told.append, finish=self.finish, define_metric=lambda *a, **k: None)

    def finish(self) -> None:
        self.ended += 1


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    made = Board()
    monkeypatch.setitem(sys.modules, "wandb", made.module())
    return made


def test_weights_and_biases_gets_all_of_them(tmp_path: Path, make_config: MakeConfig, board: Board) -> None:
    class Own(Callback):
        def on_run(self, run: Any) -> None:
            self.run = run

        def on_valid(self, step: int, bound: Any) -> None:
            self.run.log("mine", 1.0)

    how: dict[str, Any] = {"valid_every": 2, "log_every": 2, "save_every": 2, "valid_metrics": BOTH, "wandb": "tests"}
    train(make_config(tmp_path / "r", steps=2, **how), callbacks=[Own()], device="cpu")
    names = {(name, told["step"]) for told in board.told for name in told}
    wanted = {f"valid/{name}" for name in [*NAMES, "nats_per_token", "ppl", "bits_per_byte"]} | {"mine"}
    assert {(name, step) for name in wanted for step in (0, 2)} <= names
    assert {("train/loss", 2), ("train/lr", 2), ("train/grad_norm", 2)} <= names
    assert ("train/loss", 1) not in names
    assert board.ended == 1
    (begun,) = board.begun
    assert (begun["project"], begun["name"], begun["dir"]) == ("tests", "r", str(tmp_path / "r"))
    assert begun["config"]["valid_metrics"][0] == {
        "name": "masked_accuracy",
        "rate": 0.5,
        "max_rows": None,
        "batch": 16,
    }
    json.dumps(begun["config"])
    # nothing but numbers: no text of the data or of the model
    assert all(isinstance(value, int | float) for told in board.told for value in told.values())
    # a run that goes on is the same one there; a new one in the same place is not
    train(make_config(tmp_path / "r", steps=4, **how), resume=True, device="cpu")
    assert [one["id"] for one in board.begun] == [begun["id"]] * 2
    train(make_config(tmp_path / "s", steps=2, **how), device="cpu")
    assert board.begun[2]["id"] != begun["id"]


def test_without_the_package_or_its_server_the_run_says_so(
    tmp_path: Path, make_config: MakeConfig, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(**how: Any) -> Any:
        raise RuntimeError("api_key not configured\nmore")

    sys.modules["wandb"].init = refuses  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="api_key not configured; set WANDB_MODE=offline"):
        train(make_config(tmp_path / "r", steps=2, wandb="tests"), device="cpu")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else find(name, *a))
    with pytest.raises(MissingExtraError, match=r"unmask\[log\]"):
        train(make_config(tmp_path / "s", steps=2, wandb="tests"), device="cpu")
    assert not (tmp_path / "s").exists()
