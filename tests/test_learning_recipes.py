"""The recipes whose curves docs/learning.md compares: what they share, what makes each what it is, that each trains."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from unmask.config import RunConfig, load_config
from unmask.corpora.text import Text
from unmask.objectives.ar import AR
from unmask.training.loop import train

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = ["wiki", "wiki_ar", "wiki_paper", "stories", "stories_ar"]


def recipe(name: str) -> RunConfig:
    return load_config(BENCHMARKS / f"{name}.toml")


def test_the_papers_settings_are_measured_as_those_of_fast_are() -> None:
    wiki, as_published, paper, fast = recipe("wiki"), recipe("wiki_paper"), load_config("paper"), load_config("fast")
    for part in ("optim", "objective", "denoiser", "precision"):
        assert getattr(as_published, part) == getattr(paper, part)
    assert (wiki.optim, wiki.objective) == (fast.optim, fast.objective)
    # held_out: of a run without texts to validate on
    assert dataclasses.replace(as_published.data, held_out=wiki.data.held_out) == wiki.data
    for part in ("tokenizer", "batch", "valid_every", "valid_rows", "seed"):
        assert getattr(as_published, part) == getattr(wiki, part)
    # trained in continuous time, but a network that is told no time is measured by counts: the bounds can be compared
    assert (as_published.objective.form, wiki.objective.form) == ("time", "count")  # type: ignore[attr-defined]
    assert {one.objective.estimator(one.denoiser) for one in (as_published, wiki)} == {"count"}


@pytest.mark.parametrize("name", ["wiki", "stories"])
def test_autoregression_differs_by_what_it_is(name: str) -> None:
    diffusion, ar = recipe(name), recipe(f"{name}_ar")
    denoiser = dataclasses.replace(diffusion.denoiser, causal=True, dropout=ar.denoiser.dropout)  # type: ignore[call-arg, attr-defined]
    known = {"objective": AR(), "denoiser": denoiser, "out": ar.out, "steps": ar.steps}
    assert ar == dataclasses.replace(diffusion, **known)  # type: ignore[arg-type]
    assert {recipe(one).out for one in NAMES} == {f"runs/{one.replace('_ar', '-ar')}" for one in NAMES}


def test_stories_have_anchors() -> None:
    assert (recipe("stories").anchor, recipe("stories_ar").anchor) == ("both", "none")


@pytest.mark.parametrize("name", NAMES)
def test_each_trains_two_steps(name: str, corpus_file: Path, tmp_path: Path) -> None:
    small = {"out": tmp_path / name, "steps": 2, "batch": 4, "tokenizer": "bytes", "data.length": 16, "valid_rows": 4}
    small |= {"denoiser.hidden": 32, "denoiser.blocks": 2, "denoiser.heads": 2, "denoiser.size": "nano"}
    config = load_config(BENCHMARKS / f"{name}.toml", {key: str(value) for key, value in small.items()})
    text = Text(path=str(corpus_file), separator="\n")
    data = dataclasses.replace(config.data, train=text, valid=None, held_out=0.1)
    assert train(dataclasses.replace(config, data=data), device="cpu").length == 16
