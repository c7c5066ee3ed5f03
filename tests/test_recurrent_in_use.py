"""Mamba, Caduceus and Hyena through the ordinary doors: train, stop, resume, save, load, write, score, serve."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient

import unmask
from resuming import straight_and_stopped
from tiny import MakeConfig
from unmask.config import load_config
from unmask.corpora.fasta import Fasta
from unmask.data.batch import make_batch
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers import Denoiser
from unmask.denoisers.caduceus import Caduceus
from unmask.denoisers.hyena import Hyena
from unmask.denoisers.mamba import Mamba
from unmask.objectives import Objective
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.server.app import make_app
from unmask.training.loop import train

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


LONG = 131_072
SPLIT = {"train": "chr1", "valid": "chr2"}
LONGEST: dict[str, tuple[Denoiser, Objective]] = {
    "mamba": (Mamba(hidden=4, blocks=1, states=2), AR()),
    "hyena": (Hyena(hidden=4, blocks=1, length=LONG, filter_width=4), AR()),
    "caduceus": (Caduceus(hidden=4, blocks=1, states=2, equivariance="ps"), MDLM(form="count")),
}


@pytest.mark.parametrize("name", LONGEST)
def test_what_a_step_keeps_grows_with_the_length(name: str) -> None:
    """Twice the length, twice the numbers that are kept for the gradient: not four times."""
    denoiser, objective = LONGEST[name]
    network = denoiser.for_tokenizer(load_tokenizer("dna")).build(num_ids=7, mask_id=6)
    sizes = []
    for length in (2048, 4096):
        kept: dict[int, int] = {}

        def keep(t: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        batch = make_batch(torch.randint(0, 4, (1, length)), seed=0, step=0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = objective.loss(network, batch)
        sizes.append(sum(kept.values()))
        assert torch.isfinite(loss.nats)
    assert 1.7 < sizes[1] / sizes[0] < 2.3


def test_a_chromosome_is_read_in_rows_of_131_072(tmp_path: Path) -> None:
    denoiser, objective = Caduceus(hidden=4, blocks=1, states=2), MDLM(form="count")
    rng = random.Random(0)
    bases = "".join(rng.choices("ACGT", k=2 * LONG))
    (tmp_path / "g.fa").write_text(f">chr1\n{bases}\n>chr2\n{bases[:LONG]}\n")
    options = {"out": str(tmp_path / "run"), "tokenizer": "dna", "data.length": str(LONG), "steps": "1", "batch": "1"}
    options |= {"sample_every": "0", "valid_every": "1", "valid_rows": "1"}
    config = dataclasses.replace(load_config("fast", options), denoiser=denoiser, objective=objective)
    parts = {name: Fasta(path=str(tmp_path / "g.fa"), records=(record,)) for name, record in SPLIT.items()}
    data = dataclasses.replace(config.data, **parts, cache=str(tmp_path / "cache"))
    model = train(dataclasses.replace(config, data=data), device="cpu")
    assert model.length == LONG
