"""The recipes of benchmarks/systems: what they share, and that each trains and is measured, as small as can be."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unmask
from unmask.config import load_config, read_recipe
from unmask.corpora.text import Text
from unmask.data.batch import make_batch
from unmask.denoisers.dit import DiT
from unmask.objectives import Objective
from unmask.objectives.mdlm import MDLM
from unmask.training.loop import train

FOLDER = Path(__file__).parents[1] / "benchmarks" / "systems"
COMMON = load_config(FOLDER / "common.toml")
RECIPES = sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "common")
KNOWN = [
    name for name in RECIPES if read_recipe(FOLDER / f"{name}.toml")["objective"]["name"] in Objective.room.names()
]
NAMED = {
    *("ar", "mdlm", "sedd", "sedd_uniform", "d3pm", "d3pm_uniform", "udlm", "bert_mouth", "diffusion_bert", "genmd4"),
    *("learned_schedule", "table8_no_continuous", "table8_no_carry_over", "table8_no_zero_masking", "d3pm_old"),
}
EACH_ITS_OWN = {"conditioning": "none", "causal": False}  # what a system may need of its own of the network


def test_they_are_there() -> None:
    assert set(KNOWN) >= NAMED
    assert COMMON.steps * COMMON.batch * COMMON.data.length == 131_072_000
    assert COMMON.objective == MDLM(form="count")


@pytest.mark.parametrize("name", KNOWN)
def test_they_differ_by_what_a_system_is(name: str) -> None:
    config = load_config(FOLDER / f"{name}.toml")
    assert config.out == f"runs/systems/{name}"
    assert isinstance(config.denoiser, DiT)
    if name == "d3pm_old":  # whose point is another network and optimizer
        assert config.optim.lr < COMMON.optim.lr
        assert not config.optim.muon
        config = dataclasses.replace(config, optim=COMMON.optim, denoiser=COMMON.denoiser)
    denoiser = dataclasses.replace(config.denoiser, **EACH_ITS_OWN)  # type: ignore[type-var]
    as_all = {"out": COMMON.out, "objective": COMMON.objective, "denoiser": denoiser}
    assert dataclasses.replace(config, **as_all) == COMMON  # type: ignore[arg-type]


def test_each_row_of_table_8_takes_one_thing_more_away() -> None:
    rows = ["table8_no_continuous", "table8_no_carry_over", "table8_no_zero_masking"]
    assert [load_config(FOLDER / f"{name}.toml").objective for name in rows] == [
        MDLM(steps=1000),
        MDLM(steps=1000, carry_over=False),
        MDLM(steps=1000, carry_over=False, zero_masking=False),
    ]


@pytest.mark.parametrize("name", KNOWN)
def test_each_trains_two_steps_and_is_measured(name: str, corpus_file: Path, tmp_path: Path) -> None:
    text = Text(path=str(corpus_file))
    small: dict[str, Any] = {"steps": 2, "batch": 4, "valid_every": 2, "valid_rows": 4, "tokenizer": "bytes"}
    config = load_config(
        FOLDER / f"{name}.toml",
        {"out": str(tmp_path / name), "data.length": "16", **{key: str(value) for key, value in small.items()}},
    )
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, train=text, valid=None, held_out=0.1),
        denoiser=dataclasses.replace(config.denoiser, hidden=32, blocks=2, heads=2),  # type: ignore[type-var]
    )
    model = train(config, device="cpu")
    text_of_its_own = "a text of its own, as long as that"
    measured = unmask.evaluate(model, [text_of_its_own], num_samples=4)
    assert 0 < model.score(text_of_its_own, num_samples=4).nats < math.inf  # as perplexity it may overflow
    assert measured.sign == ("=" if name == "ar" else "≤")
    assert len(model.generate(1, 8, seed=1)) == 1


@pytest.mark.parametrize("name", KNOWN)
def test_bf16_changes_neither_loss_nor_gradient_by_more_than_its_rounding(name: str) -> None:
    """At times next to both ends, too, where a weight, a rate or a noise level rounded to bf16 would be another."""
    config = load_config(FOLDER / f"{name}.toml")
    small = {"hidden": 32, "blocks": 1, "heads": 2, "dropout": 0.0}
    denoiser = dataclasses.replace(config.denoiser, **small)  # type: ignore[type-var]
    torch.manual_seed(0)
    network, objective = denoiser.build(num_ids=301, mask_id=300), config.objective
    objective.attach(network)
    objective.prepare(network, lambda: np.arange(1, 302))
    for parameter_name, p in network.named_parameters():
        if p.ndim > 1 and not parameter_name.startswith("objective."):
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    batch = make_batch(torch.randint(300, (4, 16)), seed=0, step=0)
    for time in (1e-6, 0.03, 0.5, 0.97, 1.0):
        at_once = dataclasses.replace(batch, time_B=torch.full((4,), time, dtype=torch.float64))
        found = []
        for bf16 in (False, True):
            network.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = objective.loss(network, at_once)
            loss.nats.backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()]
            found.append((float(loss.nats.detach()), torch.cat([grad.flatten() for grad in grads])))
        (nats, grad), (nats_bf16, grad_bf16) = found
        assert nats_bf16 == pytest.approx(nats, rel=5e-3, abs=1e-3), time
        assert float((grad_bf16 - grad).norm()) <= 0.05 * float(grad.norm()), time
