"""benchmarks/adapt/cut.py: real texts as long as those that models write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from test_stages import script
from tiny import Trained


def test_real_texts_are_cut_to_the_length_of_those_written(trained: Trained, tmp_path: Path) -> None:
    cut = script("adapt/cut")
    texts = ["shorter", "a text that is cut", "exactly", "x" * 9 + "é and more"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = [str(trained.folder), str(tmp_path / "texts.jsonl"), str(tmp_path / "out.jsonl"), "--length", "10"]
    assert trained.model.tokenizer.encode("é") == [195, 169]  # a token is a byte
    assert cut.main([*words, "--num", "2", "--full"]) == 0
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["a text tha", "x" * 9]  # no half of a letter
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"texts.jsonl holds 2 texts of 10 tokens, not 3"):
        cut.main([*words, "--num", "3"])
    assert not (tmp_path / "out.jsonl").exists()
