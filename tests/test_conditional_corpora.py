"""Corpora of sources and targets: parallel files, sums, sentences of two styles; rows that are filled to the end."""

from __future__ import annotations

import dataclasses
import lzma
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiny import TINY
from unmask.corpora.addition import Addition, longest_chain
from unmask.corpora.parallel import Parallel
from unmask.corpora.restyle import Restyle, letters, without
from unmask.data.packing import build_rows, pack_texts
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import DataError, UsageError
from unmask.evaluation.evaluate import evaluate
from unmask.model import Model
from unmask.objectives.mdlm import MDLM


def write_lines(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


# --- parallel ---------------------------------------------------------------------------------------------------------


def pair(folder: Path, source: list[str], target: list[str]) -> Parallel:
    de, en = write_lines(folder / "a.de", source), write_lines(folder / "a.en", target)
    return Parallel(source=str(de), target=str(en))


def test_lines_belong_together(tmp_path: Path) -> None:
    corpus = pair(tmp_path, ["ein hund", "", "zwei", "drei\r"], ["a dog", "nothing", " ", "three\r"])
    made = list(corpus.documents())
    assert [(one.prompt, one.text) for one in made] == [("ein hund\n", "a dog"), ("drei\n", "three")]
    assert corpus.has_prompts
    assert corpus.prompt_end == "\n"
    packed = tmp_path / "a.de.xz"
    packed.write_bytes(lzma.compress((tmp_path / "a.de").read_bytes()))
    assert list(dataclasses.replace(corpus, source=str(packed)).documents()) == made


def test_a_fingerprint_is_that_of_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = pair(tmp_path, ["a"], ["b"])
    first = corpus.fingerprint()
    assert dataclasses.replace(corpus, separator=" ").fingerprint() != first
    monkeypatch.chdir(tmp_path)
    assert Parallel(source="a.de", target="a.en").absolute() == corpus
    write_lines(tmp_path / "a.en", ["c"])
    assert corpus.fingerprint() != first
    write_lines(tmp_path / "a.en", ["b"])
    write_lines(tmp_path / "a.de", ["c"])
    assert corpus.fingerprint() != first


@pytest.mark.parametrize(("num_source", "num_target"), [(3, 5), (5, 3), (0, 2), (2, 0)])
def test_files_of_different_length(num_source: int, num_target: int, tmp_path: Path) -> None:
    corpus = pair(tmp_path, ["x"] * num_source, ["y"] * num_target)
    with pytest.raises(DataError, match=rf"a\.de has {num_source} lines and .*a\.en has {num_target}: a line of one"):
        list(corpus.documents())


def test_what_is_no_pair_of_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        list(pair(tmp_path, [], []).documents())
    with pytest.raises(DataError, match="no such file"):
        list(Parallel(source=str(tmp_path / "a.de"), target=str(tmp_path / "none")).documents())
    with pytest.raises(UsageError, match="is a folder"):
        list(Parallel(source=str(tmp_path), target=str(tmp_path / "a.en")).documents())


# --- addition ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "reversed"])
@pytest.mark.parametrize(("digits", "terms"), [(1, 2), (6, 3), (17, 10)])
def test_sums_are_right(direction: Any, digits: int, terms: int) -> None:
    corpus = Addition(num=300, digits=digits, terms=terms, direction=direction)
    made = list(corpus.documents())
    assert len(made) == 300
    for one in made:
        step = 1 if direction == "forward" else -1
        numbers = [number[::step] for number in one.prompt.removesuffix(corpus.prompt_end).split("+")]
        assert [len(number) for number in numbers] == [digits] * terms
        assert len(one.text) == digits + 1
        assert int(one.text[::step]) == sum(map(int, numbers))


def test_both_directions_are_the_same_sums() -> None:
    forward, backward = (Addition(num=50, direction=one) for one in ("forward", "reversed"))  # type: ignore[arg-type]
    for one, other in zip(forward.documents(), backward.documents(), strict=True):
        assert one.text == other.text[::-1]
        terms = [term[::-1] for term in other.prompt.removesuffix("=<").split("+")]
        assert one.prompt == "+".join(terms) + "="
    assert forward.fingerprint() != backward.fingerprint()


def test_chains_are_as_often_as_asked() -> None:
    """The share of columns that end in nine: those that are made to, and a tenth of the others."""
    for chains in (0.0, 0.5):
        made = [one.prompt[:-1].split("+") for one in Addition(num=2000, digits=5, chains=chains).documents()]
        columns = [sum(int(number[i]) for number in numbers) for numbers in made for i in range(5)]
        expected = chains + (1 - chains) / 10
        share = sum(column % 10 == 9 for column in columns) / len(columns)
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / len(columns))


@pytest.mark.parametrize(
    ("numbers", "chain"),
    [
        ([1, 2], 0),
        ([5, 5], 1),
        ([95, 5], 2),
        ([999, 1], 3),
        ([199, 901], 2),
        ([8, 8, 8], 1),
        ([98, 98, 1], 1),
        ([98, 98, 9], 2),
    ],
)
def test_how_far_a_carry_runs(numbers: list[int], chain: int) -> None:
    """By hand. 199 + 901: a carry from the ones reaches the hundreds, which make one anyway. 98 + 98 + 1: the tens make
    a carry without the one that they get; + 9: they hand on two, which they would not without."""
    assert longest_chain(numbers) == chain


@pytest.mark.parametrize("wrong", [{"digits": 0}, {"digits": 18}, {"terms": 1}, {"terms": 11}, {"chains": 1.0}])
def test_sums_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(UsageError):
        Addition(**wrong)


# --- two styles -------------------------------------------------------------------------------------------------------


def styles(folder: Path) -> Restyle:
    for style, mark in ((0, "awful"), (1, "great")):
        lines = [f"the food was {mark} ." for _ in range(30)] + [f"soup {i % 3}" for i in range(10)]
        write_lines(folder / f"yelp/sentiment.dev.{style}", lines)
        write_lines(folder / f"yelp/sentiment.test.{style}", [f"it 's {mark} , really !", "Rewritten by you ?"])
        pairs = [f"It's {mark}, really!\trewritten by ME"] if style == 0 else ["nothing like it\tRewritten, by you"]
        write_lines(folder / f"lijuncen/yelp_reference.{style}", pairs)
    return Restyle(path=str(folder))


def test_references_are_taken_out_by_their_text(tmp_path: Path) -> None:
    """The sentence itself however it is spelled, and a rewrite; not a sentence that shares its words."""
    sentences, taken_out = styles(tmp_path).sentences()
    texts = [text for text, _ in sentences]
    assert taken_out == 3
    assert "it 's awful , really !" not in texts
    assert "Rewritten by you ?" not in texts
    assert "it 's great , really !" in texts
    assert len(texts) == 2 * 42 - 3


def test_a_sentence_is_written_from_what_does_not_mark_its_style(tmp_path: Path) -> None:
    corpus = styles(tmp_path)
    made = list(corpus.documents())
    assert made[0].prompt == "negative: the food was .\n"  # not all of "was awful .", of which one word tells the style
    assert made[0].text == "the food was awful ."
    assert made[-1].prompt.startswith("positive: ")
    neutral = next(one for one in made if one.text == "soup 0")
    assert neutral.prompt == "negative: soup 0\n"
    negative, positive = corpus.markers(corpus.sentences()[0])
    assert ("awful",) in negative
    assert ("great",) in positive
    assert not negative & positive
    assert ("soup",) not in negative | positive


def test_the_longest_run_goes_first() -> None:
    markers = frozenset({("not", "good"), ("good",), ("bad",)})
    assert without("not good but bad", markers) == "but"
    assert without("bad", markers) == "bad"  # something must be left
    assert letters("It 's _num_ !") == letters("its")


def test_files_that_are_missing(tmp_path: Path) -> None:
    corpus = styles(tmp_path)
    write_lines(tmp_path / "lijuncen/yelp_reference.1", ["no tab here"])
    with pytest.raises(DataError, match="line 1 has no tab"):
        list(corpus.documents())
    (tmp_path / "yelp/sentiment.test.1").unlink()
    with pytest.raises(DataError, match=r"yelp/sentiment.test.1 is not in"):
        corpus.fingerprint()


# --- rows that are filled ---------------------------------------------------------------------------------------------


def test_a_row_is_filled_up_and_all_of_it_scored(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    corpus = pair(tmp_path, ["ab", "a"], ["xyz", "0123456789"])
    rows = build_rows(corpus, tokenizer, policy="fill", length=12, anchor="both")
    batch = rows.take(np.array([0, 1]))
    eot = tokenizer.eot_id
    assert batch.x[0].tolist() == [eot, *b"ab\nxyz", eot, eot, eot, eot, eot]
    assert batch.x[1].tolist() == [eot, *b"a\n01234567", eot]
    assert batch.valid_len.tolist() == [12, 12]
    assert batch.prefix_len.tolist() == [4, 3]
    assert rows.report.tokens == (12 - 4 - 1) + (12 - 3 - 1)
    assert rows.report.bytes == 3 + 8
    assert rows.report.cut_tokens == 3  # 8, 9 and the end
    assert rows.typical_length() == 12


def test_a_score_is_of_a_row_as_it_was_trained_on() -> None:
    """The filling is scored: the number is that of the packed row."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer("bytes")
    network = TINY.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    how: dict[str, Any] = {"denoiser": network, "tokenizer": tokenizer, "objective": MDLM(form="count")}
    model = Model(**how, length=16, packing="fill", anchor="both", separator="=")
    rows = pack_texts(["abc", "defgh"], tokenizer, "fill", 16, "both")
    bound = model.score(["abc", "defgh"], num_samples=32)
    assert bound.tokens_B.tolist() == [14, 14]
    measured = evaluate(model, rows, num_samples=32)
    assert measured.protocol["given"] == "nothing"
    assert measured.bound is not None
    assert bound.nats == pytest.approx(measured.bound.nats, rel=1e-5)
    with_prompt = model.score("abc", prompts="xy", num_samples=4)
    assert int(with_prompt.tokens_B[0]) == 16 - 2 - len("xy=")
