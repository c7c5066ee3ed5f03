"""Labels that are words: the same classes whatever the order and the format, kept with the model, known by name."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny import TINY, MakeConfig
from unmask.cli import run
from unmask.corpora import Corpus, Document
from unmask.corpora.csv import Csv
from unmask.corpora.jsonl import Jsonl
from unmask.corpora.labels import MAX_WORDS
from unmask.corpora.parquet import Parquet
from unmask.data.packing import build_rows, pack_texts
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import DataError, ModelFolderError, UsageError
from unmask.model import Model, load
from unmask.text.bulk import Order
from unmask.training.loop import train

BYTES = load_tokenizer("bytes")
LETTERS, DIGITS = "letters", "digits"


def write_csv(path: Path, rows: list[tuple[str, Any]]) -> Corpus:
    with path.with_suffix(".csv").open("w", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "kind"), *rows])
    return Csv(path=str(path.with_suffix(".csv")), label_field="kind")


def write_jsonl(path: Path, rows: list[tuple[str, Any]]) -> Corpus:
    lines = [json.dumps({"text": text, "kind": kind}) for text, kind in rows]
    path.with_suffix(".jsonl").write_text("\n".join(lines), encoding="utf-8")
    return Jsonl(path=str(path.with_suffix(".jsonl")), label_field="kind")


def write_parquet(path: Path, rows: list[tuple[str, Any]]) -> Corpus:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"text": [text for text, _ in rows], "kind": [kind for _, kind in rows]}
    parquet.write_table(arrow.table(columns), path.with_suffix(".parquet"))
    return Parquet(path=str(path.with_suffix(".parquet")), label_field="kind")


FORMATS = pytest.mark.parametrize("write", [write_csv, write_jsonl, write_parquet])
Write = Callable[[Path, list[tuple[str, Any]]], Corpus]


@FORMATS
def test_words_become_classes_by_the_alphabet_whatever_their_order(tmp_path: Path, write: Write) -> None:
    rows: list[tuple[str, Any]] = [("ab", "zebra"), ("cd", None), ("ef", "ant"), ("gh", "zebra")]
    for name, given in (("a", rows), ("b", rows[::-1])):
        corpus = write(tmp_path / name, given)
        for _ in range(2):  # built, then read
            packed = build_rows(corpus, BYTES, policy="pad", length=4, cache_dir=tmp_path / "cache")
            assert packed.class_words == ("ant", "zebra")
            found = packed.classed(packed.class_words).labels_of(np.arange(4))
            assert found is not None
            assert found.tolist() == [{"zebra": 1, "ant": 0}.get(kind or "", -1) for _, kind in given]
    corpus = write(tmp_path / "n", [("ab", "1"), ("cd", "0")])  # numbers written as words stay what they are
    packed = build_rows(corpus, BYTES, policy="pad", length=4, cache_dir=tmp_path / "cache")
    found = packed.classed(packed.class_words).labels_of(np.arange(2))
    assert packed.class_words == ()
    assert found is not None
    assert found.tolist() == [1, 0]


def test_both_parts_of_a_corpus_know_all_words(tmp_path: Path) -> None:
    corpus = write_csv(tmp_path / "a", [(f"text {i}", f"kind{i % 30:02}") for i in range(60)])
    options: dict[str, Any] = {"policy": "pad", "length": 12, "cache_dir": tmp_path / "cache", "held_out": 0.2}
    train_rows, valid_rows = (build_rows(corpus, BYTES, part=part, **options) for part in ("train", "valid"))
    assert train_rows.class_words == valid_rows.class_words == tuple(f"kind{i:02}" for i in range(30))


def test_words_that_cannot_be_classes() -> None:
    rows = pack_texts([Document("ab", label="good"), Document("cd", label="bad")], BYTES, "pad", 6)
    with pytest.raises(UsageError, match="words such as 'good'"):
        rows.labels_of(np.array([0]))
    with pytest.raises(DataError, match=r"2 labels that are words: set denoiser.classes = 2"):
        rows.classed(rows.class_words).check_labels(1)
    with pytest.raises(DataError, match="label 'good', which the model does not know; did you mean 'goods'"):
        rows.classed(("goods", "bad"))
    with pytest.raises(DataError, match="the model's classes are numbers"):
        rows.classed(())
    with pytest.raises(DataError, match="some labels are numbers, others words such as 'good'"):
        pack_texts([Document("ab", label="good"), Document("cd", label=1)], BYTES, "pad", 6)
    with pytest.raises(DataError, match="different words"):
        pack_texts((Document("ab", label=f"w{i}") for i in range(MAX_WORDS + 1)), BYTES, "pad", 6)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory, make_config: MakeConfig) -> tuple[Path, Model]:
    """A run on texts of letters and of digits, labelled so; the first word to come is the second class."""
    folder = tmp_path_factory.mktemp("words")
    rows = [(("abba", "1221")[i % 2] * 3, (LETTERS, DIGITS)[i % 2]) for i in range(40)]
    corpus = write_csv(folder / "kinds", rows)
    denoiser = dataclasses.replace(TINY, dropout=0.0, classes=2, label_dropout=0.2)
    data = {"train": corpus, "valid": corpus, "packing": "pad", "length": 13}
    config = make_config(folder / "run", steps=80, batch=16, denoiser=denoiser, data=data, sample_every=40)
    return folder, train(config, device="cpu")


def test_a_model_is_asked_by_the_word(kinds: tuple[Path, Model], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = kinds
    model = load(folder / "run", device="cpu")
    assert model.labels == (DIGITS, LETTERS)
    assert json.loads((folder / "run" / "model" / "config.json").read_text())["labels"] == [DIGITS, LETTERS]
    for label, letters in ((DIGITS, "12"), (LETTERS, "ab")):
        texts = model.generate(20, 12, label=label, guidance=1.0)
        assert texts == model.generate(20, 12, label=model.labels.index(label), guidance=1.0)
        assert sum(letter in letters for text in texts for letter in text) > 0.9 * sum(map(len, texts))
    assert model.score("abba" * 3, label=LETTERS).nats < model.score("abba" * 3, label=DIGITS).nats
    assert Order(num=1, label=LETTERS).manifest(model)["label"] == 1
    call = ["generate", str(folder / "run"), "--length", "12", "--device", "cpu", "--label"]
    assert run([*call, LETTERS]) == 0
    assert run([*call, "1"]) == 0
    by_word, by_number = capsys.readouterr().out.strip().splitlines()
    assert by_word == by_number
    assert run([*call, "leters"]) == 2
    assert "did you mean 'letters'?" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"it knows 0 to 1 \(digits, letters\)"):
        model.generate(label=2)


def test_eval_reads_the_words_of_the_model(kinds: tuple[Path, Model], capsys: pytest.CaptureFixture[str]) -> None:
    """In other rows the same words come in another order, or only one of them does."""
    from unmask.evaluation.evaluate import evaluate_rows

    folder, model = kinds
    assert run(["eval", str(folder / "run"), "--max-rows", "4", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nats_per_token"] < 2
    good, bad = (
        pack_texts([Document("abba" * 3, label=label)], BYTES, "pad", 13).classed(model.labels)
        for label in (LETTERS, DIGITS)
    )
    nats = [evaluate_rows(model.denoiser, model.objective, rows, num_samples=8).nats for rows in (good, bad)]
    assert nats[0] < nats[1]


def test_a_run_of_other_labels_does_not_go_on_from_these_weights(
    kinds: tuple[Path, Model], make_config: MakeConfig, tmp_path: Path
) -> None:
    folder, _ = kinds
    corpus = write_csv(tmp_path / "other", [("abba" * 3, "x"), ("1221" * 3, "y")] * 4)
    denoiser = dataclasses.replace(TINY, dropout=0.0, classes=2, label_dropout=0.2)
    config = make_config(tmp_path / "run", denoiser=denoiser, data={"train": corpus, "valid": corpus, "packing": "pad"})
    with pytest.raises(UsageError, match="other labels than this run"):
        train(config, init=folder / "run", device="cpu")


@pytest.mark.parametrize("labels", [["a", "a"], "ab", [1, 2], ["a", "b", "c"], {"a": 0}])
def test_labels_of_a_folder_are_checked(kinds: tuple[Path, Model], tmp_path: Path, labels: Any) -> None:
    kinds[1].save(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"labels": labels}))
    with pytest.raises(ModelFolderError, match="labels"):
        load(tmp_path / "model")
