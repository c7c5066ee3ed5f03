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
    "sampler": (lambda m: m.generate(sampler="confidence"), r"unmask\.samplers\.Confidence\(\), got 'confidence'"),
    "sampler of fill": (lambda m: m.fill("a[MASK]", sampler="x"), r"unmask\.samplers\.Ancestral\(\), got 'x'"),
    "sampler of edit": (lambda m: m.edit("a b", "b", sampler="block"), r"unmask\.samplers\.Block\(\)"),
    "sampler of refine": (lambda m: m.refine("a b", sampler="margin"), r"unmask\.samplers\.Margin\(\)"),
    "sampler of particles": (lambda m: m.particles(lambda z: z.sum(1), sampler="entropy"), r"Entropy\(\)"),
    "a class": (lambda m: m.generate(sampler=samplers.Confidence), r"such as unmask\.samplers\.Ancestral\(\)"),
    "constraint": (lambda m: m.generate(constraint="[a-z]+"), r"such as unmask\.constraints\.Regex.*got '\[a-z\]\+'"),
    "constraint of fill": (lambda m: m.fill("a[MASK]", constraint="a"), "constraint must be one such as"),
    "constraint of edit": (lambda m: m.edit("a b", "b", constraint=["a"]), "constraint must be one such as"),
    "num": (lambda m: m.generate(num="2"), "num must be a whole number, got '2'"),
    "length": (lambda m: m.generate(length=8.0), r"length must be a whole number, got 8\.0"),
    "num of many": (lambda m: Order(num="2"), "num must be a whole number, got '2'"),
    "seed": (lambda m: m.fill("a[MASK]", seed="1"), "seed must be a whole number, got '1'"),
    "num of edit": (lambda m: m.edit("a b", "b", num=True), "num must be a whole number, got True"),
    "label": (lambda m: m.generate(label=1.5), r"label must be a whole number, got 1\.5"),
    "prompt": (lambda m: m.generate(prompt=5), r"prompt must be a text, or a list of texts, got 5"),
    "text to fill": (lambda m: m.fill(None), r"text must be a text, or a list of texts, got None"),
    "bytes to score": (lambda m: m.score(b"abc"), r"texts must be a text, or a list of texts, got b'abc'"),
    "labels as a text": (lambda m: m.score(["a", "b"], labels="01"), r"as many labels as texts"),
    "guidance": (lambda m: m.generate(prompt="a", guidance="2"), "guidance weight must be a number, got '2'"),
    "draws": (lambda m: m.score("a", num_samples=2.5), r"num_samples must be a whole number, got 2\.5"),
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_of_the_wrong_kind(model: Model, what: str) -> None:
    call, words = WRONG[what]
    with pytest.raises(UsageError, match=words):
        call(model)


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (samplers.Ancestral, {"steps": 2.5}, r"steps must be a whole number or None, got 2\.5"),
        (samplers.Ancestral, {"steps": "8"}, "steps must be a whole number or None, got '8'"),
        (samplers.Ancestral, {"noise": "cosine"}, r"noise must be a noise of unmask\.noise or None, got 'cosine'"),
        (samplers.Confidence, {"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        (samplers.LeftToRight, {"top_k": 2.0}, r"top_k must be a whole number, got 2\.0"),
        (samplers.ReMDM, {"steps": True}, "steps must be a whole number"),
        (samplers.SemiAR, {"window": "9"}, "window must be a whole number, got '9'"),
        (samplers.Block, {"size": 4.5}, r"size must be a whole number, got 4\.5"),
        (samplers.Refine, {"inner": "ancestral"}, r"inner must be a sampler of unmask\.samplers, got 'ancestral'"),
        (samplers.Threshold, {"draw": "argmin"}, "did you mean 'argmax'"),
        (constraints.Length, {"least": "2"}, "least must be a whole number, got '2'"),
        (constraints.Words, {"forbid": ("a",), "ignore_case": 1}, "ignore_case must be True or False, got 1"),
    ],
)
def test_options_of_the_wrong_kind(cls: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cls(**options)


# --- on the command line ----------------------------------------------------------------------------------------------

MISSPELLED = {
    "generate --stesp 3": "did you mean 'steps'?",
    "generate --wacth": "did you mean '--watch'?",
    "generate --sampler confidance": "did you mean 'confidence'?",
    "generate --sampler confidence --sampled_share 0.5": "no option --sampled-share",
    "generate --temperature -1": "temperature must be 0 or more",
    "generate --steps 0": "steps must lie in",
    "generate --num 0": "--num must be at least 1",
    "generate --regex (a": "(a",
    "generate --constraint {": "not valid JSON",
    "generate --device cud": "unknown device 'cud'",
    "generate --svg missing/a.svg": "there is no folder missing",
    "generate --guidance nan": "--guidance must be a finite number",
    "generate --out texts --batch 0": "--batch must be at least 1",
    "fill x[MASK] --wacth y[MASK]": "did you mean 'watch'?",
    "fill x[MASK] --sampler block --sise 3": "did you mean 'size'?",
    "edit --text abc --replace b --temprature 2": "did you mean 'temperature'?",
    "edit --text abc --replace d": "does not contain 'd'",
    "edit --text abc --replace b --with-length 5..3": "the smaller number first",
    "refine text --share 3": "share is how much",
    "score text --num-smaples 3": "did you mean '--num-samples'?",
    "score text --num-samples 0": "--num-samples must be at least 1",
    "eval --estimator tiem": "did you mean 'time'?",
    "eval --max-rwos 3": "did you mean '--max-rows'?",
    "eval --data missing.csv": "no such file or folder: missing.csv",
    "serve --max-batch 0": "--max-batch must be at least 1",
    "serve --prot 80": "did you mean '--port'?",
    "serve --device cud": "unknown device 'cud'",
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
