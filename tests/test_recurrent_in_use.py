"""Mamba, Caduceus and Hyena through the ordinary doors: train, stop, resume, save, load, write, score, serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

import unmask
from resuming import straight_and_stopped
from tiny import MakeConfig
from unmask.denoisers import Denoiser
from unmask.denoisers.caduceus import Caduceus
from unmask.denoisers.hyena import Hyena
from unmask.denoisers.mamba import Mamba
from unmask.objectives import Objective
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.server.app import make_app

CASES: dict[str, tuple[Denoiser, Objective]] = {
    "mamba": (Mamba(hidden=16, blocks=1, states=4), AR()),
    "hyena": (Hyena(hidden=16, blocks=1, length=32, filter_width=16), AR()),
    "ps": (Caduceus(hidden=16, blocks=1, states=4, equivariance="ps"), MDLM(form="count")),
    "ph": (Caduceus(hidden=16, blocks=1, states=4, equivariance="ph", conditioning="level"), MDLM()),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_a_denoiser_like_others(name: str, tmp_path: Path, make_config: MakeConfig) -> None:
    denoiser, objective = CASES[name]
    configs = [
        make_config(
            tmp_path / part, denoiser=denoiser, objective=objective, steps=8, save_every=4, optim={"muon": True}
        )
        for part in ("whole", "stopped")
    ]
    trained, checkpoint = straight_and_stopped(*configs)
    assert checkpoint.step == 8
    model = unmask.load(tmp_path / "whole", device="cpu")
    if isinstance(denoiser, Caduceus):  # the folder knows the letters' complements, the recipe need not
        assert model.denoiser.config.complement[ord("A")] == ord("T")
        assert denoiser.complement == ()
    texts = model.generate(2, 12, seed=1)
    assert texts == trained.generate(2, 12, seed=1)
    assert model.score("the cat", seed=1).nats == pytest.approx(trained.score("the cat", seed=1).nats, rel=1e-6)
    with TestClient(make_app(model, name="mine"), base_url="http://localhost") as client:
        for seed in (2, 3):
            answer = client.post(
                "/v1/completions", json={"model": "mine", "prompt": "the", "max_tokens": 8, "seed": seed}
            )
            assert answer.status_code == 200, answer.text
            [text] = model.generate(1, 11, "the", seed=seed)
            assert "the" + answer.json()["choices"][0]["text"] == text


def test_a_tokenizer_without_the_letters_is_refused_before_anything_is_written(
    tmp_path: Path, make_config: MakeConfig
) -> None:
    config = make_config(
        tmp_path / "run", denoiser=Caduceus(hidden=16, blocks=1, equivariance="ps"), tokenizer="bpe:300"
    )
    with pytest.raises(unmask.UsageError, match="token a letter"):
        unmask.train(config, device="cpu")
    assert not (tmp_path / "run" / "recipe.json").exists()
