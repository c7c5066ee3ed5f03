"""The card of a built-in model: every figure from a file, every sample from its seed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unmask.model import Model, load
from unmask.storage import built_in
from unmask.storage.weight_parts import weight_files

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
BOUND = {"bits_per_byte": 0.3511, "bits_per_byte_ci95": [0.35, 0.3522], "ppl": 2.75, "ppl_ci95": [2.7, 2.8]}
REAL = {"judge_ppl": {"value": 8.0, "ci95": [7.5, 8.5], "n": 2}, "entropy": {"value": 4.0, "ci95": None, "n": 2}}


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("card")
    monkeypatch.setattr(module, "MODELS", tmp_path / "models")
    monkeypatch.setattr(module, "MOST", 20_000)
    monkeypatch.setattr(built_in, "MODELS", tmp_path / "models")
    return module


def write(path: Path, value: Any) -> str:
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")
    return str(path)


def test_a_card_holds_what_was_measured(
    card: ModuleType, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save(tmp_path / "trained")
    counts = {"sequences": 2, "tokens": 99}
    evaluated = write(tmp_path / "eval.json", BOUND | counts)
    opponent = write(tmp_path / "ar.json", BOUND | counts | {"bits_per_byte": 0.3077})
    base = {"name": "real", "numbers": REAL, "less_varied": [], "protocol": {"judge": "someone", "texts": 2}}

    def judged_as(file: str, **options: str) -> str:
        ppl = {"judge_ppl": {"value": 10.0, "ci95": [9.0, 11.0], "n": 2}}
        points = [base | {"numbers": REAL | ppl, "options": {"steps": t, **options}} for t in ("64", "128")]
        (tmp_path / file).write_text("".join(json.dumps(line) + "\n" for line in (base, *points)), encoding="utf-8")
        return str(tmp_path / file)

    judged = [judged_as("a.jsonl", top_p="1.0"), judged_as("b.jsonl", top_p="0.75")]
    judged.append(judged_as("c.jsonl", top_p="0.75", sampler="remdm"))
    steps = [{"step": 10 * i, "valid_bits_per_byte": 3.0 - i / 10} for i in range(25)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps), encoding="utf-8")
    words = ["card.py", "stories", "--model", str(tmp_path / "trained"), "--recipe", "demo", "--eval", evaluated]
    words += ["--opponent", opponent, "--judge", *judged, "--metrics", *[str(tmp_path / "metrics.jsonl")] * 2]
    monkeypatch.setattr(sys, "argv", words)
    assert card.main() == 0

    folder = tmp_path / "models" / "stories"
    assert len(weight_files(folder)) > 1
    text = built_in.card("stories")
    for said in (
        "≤ 0.3511 (0.3500–0.3522)",
        "= 0.3077",
        "| T = 64 | 10.00",
        "| 1.25 |",
        "nothing cut. Judge: someone",
        "With top_p 0.75. Judge: someone",
        "With the sampler remdm and top_p 0.75. Judge: someone",
        "480 steps of 32 texts",  # two runs, the second begun with the weights of the first
        "| 0 |",
    ):
        assert said in text, said
    own = load("stories", device="cpu")
    for seed in card.SEEDS:  # none is picked by hand: each is what anyone gets
        first = own.generate(sampler=card.Ancestral(steps=card.STEPS), seed=seed)[0].strip().splitlines()[0].strip()
        assert f"> {first}" in text

    monkeypatch.setattr(sys, "argv", ["card.py", "stories", "--card-only"])
    assert card.main() == 0
    assert "## Bound" not in built_in.card("stories")  # what is not measured is not said
