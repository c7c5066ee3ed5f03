"""The defaults are a short run's, the paper's are a recipe, and what was written before them keeps its meaning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import unmask
from unmask.config import OptimConfig, RunConfig, load_config, to_dict
from unmask.corpora.hub import Hub
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.errors import ConfigError
from unmask.model import Model, load
from unmask.objectives.mdlm import MDLM
from unmask.training.checkpoint.files import Checkpoint
from unmask.training.checkpoint.resume import check_same_run
from unmask.training.loop import train

# options that came after the first runs and models were written
LATER = {"muon", "momentum", "muon_rms", "qk_norm", "zero_init"}


def older(data: Any) -> Any:
    """What an unmask without these options would have written."""
    return {key: older(value) for key, value in data.items() if key not in LATER} if isinstance(data, dict) else data


def test_the_papers_settings_are_a_recipe() -> None:
    paper = load_config("paper")
    adamw = OptimConfig(lr=3e-4, betas=(0.9, 0.999), muon=False, warmup=2500, schedule="constant", ema=0.9999)
    assert dataclasses.replace(paper.optim, decay_fraction=adamw.decay_fraction) == adamw
    assert paper.denoiser == DiT(size="small", conditioning="constant", dropout=0.1, qk_norm=False, zero_init=False)
    assert isinstance(paper.denoiser, DiT)
    assert paper.denoiser.dims == (768, 12, 12)
    assert paper.objective == MDLM(noise=unmask.noise.LogLinear(), steps=None, form="time")
    assert (paper.batch, paper.data.length, paper.tokenizer, paper.steps) == (512, 1024, "gpt2", 1_000_000)
    assert paper.data.train == Hub(dataset="Skylion007/openwebtext")


def test_a_short_run_learns_by_default(tmp_path: Path, make_config: Any) -> None:
    """Not as in the paper, whose warm-up alone is longer than most first runs."""

    def bits(name: str, optim: OptimConfig, **network: Any) -> float:
        denoiser = DiT(size="nano", hidden=32, blocks=2, heads=2, **network)
        config = make_config(tmp_path / name, steps=60, batch=16, denoiser=denoiser, valid_every=60)
        model = train(dataclasses.replace(config, optim=optim), device="cpu")
        assert model.objective == config.objective
        return float(json.loads(last_validation(tmp_path / name))["valid_bits_per_byte"])

    plain = bits("plain", OptimConfig())
    paper = bits("paper", load_config("paper").optim, qk_norm=False, zero_init=False)
    assert plain < 0.7 * paper


def last_validation(run: Path) -> str:
    return next(line for line in reversed((run / "metrics.jsonl").read_text().splitlines()) if "valid_nats" in line)


def test_what_an_older_run_wrote_keeps_its_meaning(tmp_path: Path) -> None:
    optim = OptimConfig(lr=3e-4, muon=False, warmup=2500)
    before = RunConfig(out=str(tmp_path), denoiser=DiT(qk_norm=False, zero_init=False), optim=optim)
    written = older(to_dict(before))
    (tmp_path / "recipe.json").write_text(json.dumps(written), encoding="utf-8")
    assert load_config(tmp_path) == before
    found = Checkpoint(1, {}, {"config": written, "data": []}, tmp_path)
    check_same_run(before, [], found)
    with pytest.raises(ConfigError, match=r"^optim\.muon is True, the run in .* has False; it cannot change"):
        check_same_run(load_config(tmp_path, {"optim.muon": "true"}), [], found)
    # a recipe that people write names what it wants to change, and the rest is today's
    recipe = tmp_path / "mine.json"
    recipe.write_text(json.dumps(written), encoding="utf-8")
    assert load_config(recipe).optim.muon


def test_a_model_of_an_older_version_is_the_same_network(tmp_path: Path) -> None:
    network = DiT(size="nano", hidden=16, blocks=1, heads=2, qk_norm=False).build(num_ids=258, mask_id=257)
    Model(denoiser=network, tokenizer=load_tokenizer("bytes"), objective=MDLM(), length=16).save(tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps(older(json.loads(config.read_text()))), encoding="utf-8")
    assert load(tmp_path / "m", device="cpu").denoiser.config == DiT(  # type: ignore[attr-defined]
        size="nano", hidden=16, blocks=1, heads=2, qk_norm=False, zero_init=False
    )
