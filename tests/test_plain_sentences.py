"""What is of the wrong kind is told in a sentence, and what is misspelled before any model is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unmask import constraints, samplers
from unmask.cli import run
from unmask.errors import UsageError
from unmask.model import Model
from unmask.text.bulk import Order

# --- in Python --------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Model], Any], str]] = {
    "sampler": (lambda m: m.generate(sampler="confidence"), "'confidence'"),
    "sampler of fill": (lambda m: m.fill("a[MASK]", sampler="x"), "'x'"),
    "sampler of edit": (lambda m: m.edit("a b", "b", sampler="block"), r"unmask\.samplers\.Block\(\)"),
    "sampler of refine": (lambda m: m.refine("a b", sampler="margin"), r"unmask\.samplers\.Margin\(\)"),
    "sampler of particles": (lambda m: m.particles(lambda z: z.sum(1), sampler="entropy"), r"Entropy\(\)"),
    "a class": (lambda m: m.generate(sampler=samplers.Confidence), "Ancestral"),
    "constraint": (lambda m: m.generate(constraint="[a-z]+"), "Regex"),
    "constraint of fill": (lambda m: m.fill("a[MASK]", constraint="a"), "constraint"),
    "constraint of edit": (lambda m: m.edit("a b", "b", constraint=["a"]), "constraint"),
    "num": (lambda m: m.generate(num="2"), "num"),
    "length": (lambda m: m.generate(length=8.0), "length"),
    "num of many": (lambda m: Order(num="2"), "num"),
    "seed": (lambda m: m.fill("a[MASK]", seed="1"), "seed"),
    "num of edit": (lambda m: m.edit("a b", "b", num=True), "num"),
    "label": (lambda m: m.generate(label=1.5), "label"),
    "prompt": (lambda m: m.generate(prompt=5), "prompt"),
    "text to fill": (lambda m: m.fill(None), "text"),
    "bytes to score": (lambda m: m.score(b"abc"), "texts"),
    "labels as a text": (lambda m: m.score(["a", "b"], labels="01"), "labels"),
    "guidance": (lambda m: m.generate(prompt="a", guidance="2"), "guidance"),
    "draws": (lambda m: m.score("a", num_samples=2.5), "num_samples"),
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_of_the_wrong_kind(model: Model, what: str) -> None:
    call, words = WRONG[what]
    with pytest.raises(UsageError, match=words):
        call(model)


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (samplers.Ancestral, {"steps": 2.5}, "steps"),
        (samplers.Ancestral, {"steps": "8"}, "steps"),
        (samplers.Ancestral, {"noise": "cosine"}, "noise"),
        (samplers.Confidence, {"temperature": "hot"}, "temperature"),
        (samplers.LeftToRight, {"top_k": 2.0}, "top_k"),
        (samplers.ReMDM, {"steps": True}, "steps"),
        (samplers.SemiAR, {"window": "9"}, "window"),
        (samplers.Block, {"size": 4.5}, "size"),
        (samplers.Refine, {"inner": "ancestral"}, "inner"),
        (samplers.Threshold, {"draw": "argmin"}, "'argmax'"),
        (constraints.Length, {"least": "2"}, "least"),
        (constraints.Words, {"forbid": ("a",), "ignore_case": 1}, "ignore_case"),
    ],
)
def test_options_of_the_wrong_kind(cls: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cls(**options)


# --- on the command line ----------------------------------------------------------------------------------------------

MISSPELLED = {
    "generate --stesp 3": "'steps'",
    "generate --wacth": "'--watch'",
    "generate --sampler confidance": "'confidence'",
    "generate --sampler confidence --sampled_share 0.5": "--sampled-share",
    "generate --temperature -1": "temperature",
    "generate --steps 0": "steps",
    "generate --num 0": "--num",
    "generate --regex (a": "(a",
    "generate --constraint {": "JSON",
    "generate --device cud": "'cud'",
    "generate --svg missing/a.svg": "missing",
    "generate --guidance nan": "--guidance",
    "generate --out texts --batch 0": "--batch",
    "fill x[MASK] --wacth y[MASK]": "'watch'",
    "fill x[MASK] --sampler block --sise 3": "'size'",
    "edit --text abc --replace b --temprature 2": "'temperature'",
    "edit --text abc --replace d": "'d'",
    "edit --text abc --replace b --with-length 5..3": "number",
    "refine text --share 3": "share",
    "score text --num-smaples 3": "'--num-samples'",
    "score text --num-samples 0": "--num-samples",
    "eval --estimator tiem": "'time'",
    "eval --max-rwos 3": "'--max-rows'",
    "eval --data missing.csv": "missing.csv",
    "serve --max-batch 0": "--max-batch",
    "serve --prot 80": "'--port'",
    "serve --device cud": "'cud'",
}


@pytest.mark.parametrize("words", MISSPELLED)
def test_what_is_misspelled_is_told_before_the_model_is_read(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *rest = words.split()
    assert run([command, "no-such-model", *rest]) == (1 if "--data" in rest else 2)
    told = capsys.readouterr().err
    assert MISSPELLED[words] in told
    assert "no-such-model" not in told
    assert told.count("\n") == 1
