"""Refining finished texts through Model and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unmask import samplers
from unmask.cli import run
from unmask.errors import UsageError
from unmask.model import Model, load

TEXTS = ["the cat sat on the mat", "a dog rqn to the rxd hut", "no"]


def test_a_round_writes_its_share_anew_and_no_more(model: Model) -> None:
    refined = model.refine(TEXTS, share=0.2, rounds=1, seed=1)
    assert [len(r) for r in refined] == [len(t) for t in TEXTS]  # bytes: a token is a letter
    for before, after in zip(TEXTS, refined, strict=True):
        changed = sum(a != b for a, b in zip(before, after, strict=True))
        assert changed <= -(-len(before) // 5)
    assert refined != TEXTS
    assert model.refine(TEXTS, rounds=0) == TEXTS
    assert (
        model.refine(TEXTS[1], share=0.2, rounds=1, seed=1)[0]
        == model.refine([TEXTS[1], TEXTS[0]], share=0.2, rounds=1, seed=1)[0]
    )  # a row is its own affair


def test_any_order_writes_what_is_refined(model: Model) -> None:
    for sampler in (samplers.Confidence(), samplers.LeftToRight(), samplers.Ancestral(steps=None, temperature=0.0)):
        assert len(model.refine(TEXTS[0], share=0.5, rounds=2, sampler=sampler)[0]) == len(TEXTS[0])


def test_the_command(trained: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["refine", str(trained.folder), *TEXTS[:2], "--share", "0.3", "--device", "cpu", "--json"]
    assert run([*words, "--trace", str(tmp_path / "t.jsonl")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["given"] == TEXTS[:2]
    assert [len(t) for t in answer["texts"]] == [len(t) for t in TEXTS[:2]]
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any(line["remasked"] for line in lines)  # what was masked again is told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": ""}, "nothing to refine"),
        ({"text": []}, "nothing to refine"),
        ({"text": "x" * 100}, "more than the model's window of 32"),
        ({"text": "the cat", "share": 0.0}, "share is how much"),
        ({"text": "the cat", "rounds": -1}, "rounds must lie in"),
    ],
)
def test_bad_wishes(model: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model.refine(**options)


def test_what_cannot_be_refined_is_refused(trained: Any, trained_ar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="left to right"):
        load(trained_ar.folder, device="cpu").refine("the cat")
    assert run(["refine", str(trained.folder), "the cat", "--guidance", "1", "--device", "cpu"]) == 2
    assert "takes no constraint, guidance or label" in capsys.readouterr().err
