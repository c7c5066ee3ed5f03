"""Rates of the tokens' own in a run: counted or learned, saved with the model, resumed, and used."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unmask
from resuming import straight_and_stopped
from unmask.cli import run as command
from unmask.denoisers.dit import DiT
from unmask.distributed.world import World
from unmask.errors import UsageError
from unmask.objectives.token_rates import TokenRates
from unmask.processes.token_rates import Spindle
from unmask.storage.model_folder import unshared
from unmask.training.loop import Run

DIT = DiT(hidden=16, blocks=1, heads=2, dropout=0.0)
NAMES = {"spindle": "objective.rates.h_I", "power": "objective.rates.log_k_I"}


@pytest.fixture
def config(make_config: Any, tmp_path: Path) -> Any:
    return make_config(tmp_path / "run", denoiser=DIT, objective=TokenRates(), optim={"lr": 1e-2, "ema": 0.9})


@pytest.mark.parametrize(
    "objective", [TokenRates(centre="sentence"), TokenRates(rates="power", steps=10)], ids=lambda each: each.rates
)
def test_a_run_resumes_bit_for_bit(config: Any, tmp_path: Path, objective: TokenRates) -> None:
    config, rates = dataclasses.replace(config, objective=objective), objective.rates
    straight = dataclasses.replace(config, out=str(tmp_path / "straight"))
    model, one = straight_and_stopped(straight, config)
    if rates == "power":
        moved = one.tensors["model"][NAMES[rates]]
        assert (moved.abs() > 1e-3).float().mean() > 0.5  # of the tokens that are predicted at all
        assert not moved.equal(one.tensors["ema"][NAMES[rates]])  # and its average follows
    loaded = unmask.load(Path(straight.out) / "model", device="cpu")  # no corpus is asked
    assert unshared(loaded.denoiser)[NAMES[rates]].equal(unshared(model.denoiser)[NAMES[rates]])
    assert loaded.generate(1, 8, seed=1) == model.generate(1, 8, seed=1)


def test_the_spindle_is_made_from_the_training_rows(config: Any) -> None:
    run = Run(config, World(), resume=False, init=None)
    counts = np.bincount(run.rows.take(np.arange(len(run.rows))).x.ravel(), minlength=run.tokenizer.num_ids)
    np.testing.assert_array_equal(run.rows.token_counts(), counts)
    h_I = unshared(run.network)[NAMES["spindle"]]
    other = Spindle(run.tokenizer.num_ids, 0.3)
    other.count(counts, run.tokenizer.mask_id)
    assert h_I.equal(other.h_I)
    assert h_I.std() > 0.1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": 0}, "steps"),
        ({"strength": 0.0}, "use mdlm"),
        ({"strength": float("nan")}, "strength"),
        ({"k": 0.0}, "k must"),
        ({"rates": "linear"}, "spindle"),
        ({"centre": "document"}, "sentence"),
        ({"centre": "sentence", "rates": "power"}, "leave it out"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        TokenRates(**options)


def test_a_spindle_without_counts_is_refused(tmp_path: Path) -> None:
    network = DIT.build(num_ids=257 + 1, mask_id=257)
    tokenizer = unmask.data.tokenizers.load_tokenizer("bytes")
    model = unmask.Model(denoiser=network, tokenizer=tokenizer, objective=TokenRates(), length=8)
    for ask in (lambda: model.generate(1, 8), lambda: model.score("hello", num_samples=4)):
        with pytest.raises(UsageError, match="nobody has counted"):
            ask()
    model.objective.attach(network)
    with pytest.raises(UsageError, match="prepare"):
        model.save(tmp_path / "model")
    assert not any(tmp_path.iterdir())
    model.objective.prepare(network, lambda: np.arange(258))
    assert model.score("hello", num_samples=4).nats > 0


def test_bf16_weights_keep_alpha_falling() -> None:
    rates = Spindle(4, 0.3)
    rates.count(np.array([10_000, 1, 5, 0]), 3)
    c_I = rates.to(torch.bfloat16).numbers(torch.zeros(()))
    assert (rates.weight(torch.linspace(0.001, 1, 100)[:, None], c_I) > 0).all()


@pytest.mark.parametrize(
    "words",
    [
        ["--objective", "token_rates", "--objective.steps", "0"],
        ["--objective", "token_rates", "--objective.strength", "-0.3"],
        ["--objective", "d3pm", "--objective.auxiliary", "-0.01"],
        ["--objective", "mdlm", "--objective.noise", "table", "--objective.steps", "8"],
        ["--objective", "mdlm", "--objective.noise", "table", "--objective.noise.bins", "1"],
    ],
    ids=lambda words: " ".join(words[1:]),
)
def test_the_command_line_says_what_is_wrong_and_writes_nothing(
    words: list[str], corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data.train", "text", "--data.train.path", str(corpus_file), "--denoiser.size", "nano"]
    assert command(["train", "demo", *data, *words, "--out", str(tmp_path / "run"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("unmask: ")
    assert said.count("\n") == 1
    assert not any(tmp_path.iterdir())
