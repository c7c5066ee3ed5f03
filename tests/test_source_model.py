"""A model of llama2.c as one of ours: the same tokens, the same texts, the same probabilities."""

from __future__ import annotations

import importlib
import random
import struct
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from unmask.cli import run
from unmask.model import load

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
DIM, HIDDEN, LAYERS, HEADS, LENGTH = 16, 24, 2, 2, 24
WORDS = ["he", "re", "the", " t", " th", " the", "cat", " c", " cat", "at", " a", "a ", "  ", "é", "in", "ing"]
LETTERS = [" ", *"abcdefghijklmnopqrstuvwxyzT.,"]


def pieces() -> list[tuple[float, bytes]]:
    """As llama2.c writes them: two marks, a byte each, words by their rank, letters."""
    special = [(0.0, b"<unk>"), (0.0, b"\n<s>\n"), (0.0, b"\n</s>\n"), *((0.0, chr(b).encode()) for b in range(256))]
    words = [(-1e9 if word == "  " else -float(n), word.encode()) for n, word in enumerate(WORDS)]
    return [*special, *words, *((-100.0 - n, letter.encode()) for n, letter in enumerate(LETTERS))]


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("source_model")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Random weights and a small tokenizer in llama2.c's first format."""
    found, rng = pieces(), np.random.default_rng(0)
    per_layer = 4 * DIM * DIM + 3 * HIDDEN * DIM
    weights = rng.normal(0, 0.3, len(found) * DIM + LAYERS * (2 * DIM + per_layer) + DIM).astype(np.float32)
    sizes = struct.pack("7i", DIM, HIDDEN, LAYERS, HEADS, HEADS, len(found), LENGTH)
    model, tokenizer = tmp_path / "model.bin", tmp_path / "tokenizer.bin"
    model.write_bytes(sizes + weights.tobytes())
    parts = [struct.pack("<fi", score, len(piece)) + piece for score, piece in found]
    tokenizer.write_bytes(struct.pack("<i", max(len(piece) for _, piece in found)) + b"".join(parts))
    return model, tokenizer


def test_a_source_is_the_same_model_here(
    source: ModuleType,
    files: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng = random.Random(0)
    texts = ["The cat is in there.\nThe  end", " é ж \t", "a"]
    texts += ["".join(rng.choices([*WORDS, *LETTERS, "\n", "→"], k=9)) for _ in range(50)]
    theirs = source.Llama(files[0], "cpu")
    words = source.Pieces(files[1], len(theirs.embedding))
    source.write(theirs, words, tmp_path / "hf")
    assert run(["import", f"hf:{tmp_path / 'hf'}", str(tmp_path / "ours")]) == 0
    model = load(tmp_path / "ours", device="cpu", dtype="fp32")
    assert (model.process, model.length, model.tokenizer.eot_id) == (None, LENGTH, 1)
    assert source.check(theirs, words, model, texts) == []
    said = capsys.readouterr().out
    assert float(said.split("differ by ")[1].split()[0]) < 1e-4
    assert f"{len(texts)} texts" in said
    for weight in model.denoiser.parameters():
        weight.data.neg_()
    assert any("goes on with" in sentence for sentence in source.check(theirs, words, model, texts[:8]))


def test_the_command_writes_it_and_says_what_differs(
    source: ModuleType, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts.txt").write_text("the cat\n<|endoftext|>\nthere\n")
    monkeypatch.setattr(sys, "argv", ["source_model.py", *map(str, files), str(tmp_path / "hf")])
    source.main()
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
