"""Suites of written texts: what is asked, what is kept, what the numbers are of, what is refused."""

from __future__ import annotations

import json
import lzma
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiny import TINY
from unmask.cli import run
from unmask.corpora.addition import Addition
from unmask.data.tokenizers import load_tokenizer
from unmask.distributed.world import World
from unmask.errors import NonFiniteError, UsageError
from unmask.evaluation.suites import find_suite
from unmask.evaluation.suites.base import Outcome
from unmask.evaluation.suites.run import SuiteRun
from unmask.evaluation.suites.writing import Writing, in_batches, targets
from unmask.model import Model
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM

Capture = pytest.CaptureFixture[str]
GERMAN = ["ein hund rennt", "die katze schläft", "zwei kinder", "ein mann singt", "eine frau"]
ENGLISH = ["a dog runs", "the cat sleeps", "two children", "a man sings", "a woman"]


def small_model(*, ar: bool = False, packing: Any = "fill", separator: str = "\n", length: int = 48) -> Model:
    torch.manual_seed(0)
    tokenizer = load_tokenizer("bytes")
    config = TINY if not ar else type(TINY)(**{**vars(TINY), "causal": True})
    return Model(
        denoiser=config.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id),
        tokenizer=tokenizer,
        objective=AR() if ar else MDLM(form="count"),
        length=length,
        packing="pad" if ar else packing,
        anchor="none" if ar else "both",
        separator=separator,
    )


def write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two translation sets, one of them compressed, and passages."""
    folder = tmp_path / "data"
    for name in ("test_2016_flickr", "test_2017_flickr"):
        write_lines(folder / f"multi30k/{name}.de", GERMAN)
        write_lines(folder / f"multi30k/{name}.en", ENGLISH)
    plain = folder / "multi30k/test_2016_flickr.de"
    plain.with_name(f"{plain.name}.xz").write_bytes(lzma.compress(plain.read_bytes()))
    plain.unlink()
    passages = ["the cat sat on the mat", "a dog ran to the red hut and then to the other hut", "no"]
    write_lines(folder / "lambada/test.jsonl", [json.dumps({"text": text}) for text in passages])
    return folder


def measure(name: str, model: Model, data: Path | None, sets: list[str], **changes: Any) -> dict[str, Outcome]:
    suite = find_suite(name)
    way = SuiteRun(suite=suite, data_dir=data, **changes)
    return {one.set.name: one for one in way.outcomes(model, suite.chosen(sets, data))}


def numbers(outcome: Outcome) -> dict[str, Any]:
    assert outcome.numbers is not None, outcome.failure
    return outcome.numbers


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def score(found: dict[str, Any], name: str, of: str = "all") -> float:
    return float(next(one["value"] for one in found["scores"] if (one["of"], one["name"]) == (of, name)))


# --- translation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ar", [False, True])
def test_translation_end_to_end(ar: bool, data: Path, tmp_path: Path, capsys: Capture) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    small_model(ar=ar).save(folder)
    sampler = [] if ar else ["--sampler", '{"name": "ancestral", "steps": 4}']
    words = ["eval", str(folder), "--suite", "translation", "--data-dir", str(data), "--device", "cpu", *sampler]
    assert run([*words, "--out", str(out), "--sets", "flickr2016", "flickr2017"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 or str(out) in line for line in shown.splitlines())
    found = json.loads((out / "flickr2016.json").read_text())
    kept = records(out / "flickr2016.jsonl")
    assert [one["prompt"] for one in kept] == GERMAN
    assert [one["reference"] for one in kept] == ENGLISH
    assert all("\n" not in one["output"] for one in kept)
    assert found["texts"] == 5
    protocol = found["protocol"]
    assert "temperature=0.0" in protocol["sampler"]
    assert ("model's own end" if ar else "by padding") in protocol["length of the target"]
    table = (out / "translation.md").read_text()
    assert "| Flickr 2016 | all | BLEU |" in table
    assert "BLEU is sacrebleu's: nrefs:1" in table
    # what sacrebleu's command line says of the kept outputs
    for name in ("output", "reference"):
        write_lines(tmp_path / name, [one[name] for one in kept])
    for name, flag in (("BLEU", "bleu"), ("chrF", "chrf")):
        command = [sys.executable, "-m", "sacrebleu", "reference", "-i", "output", "-m", flag, "-b", "-w", "10"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert score(found, name) == pytest.approx(float(done.stdout), abs=1e-9)


def test_the_batch_size_changes_no_text(data: Path) -> None:
    model = small_model()
    sampler: dict[str, Any] = {"sampler": "ancestral", "options": {"steps": 6, "temperature": 1.0}}
    ways = [targets(model, Writing(batch=batch, **sampler), GERMAN, 5, World()) for batch in (1, 2, 16)]
    assert ways[0] == ways[1] == ways[2]
    assert len(set(ways[0])) == 5
    assert targets(model, Writing(**sampler), GERMAN, 6, World()) != ways[0]


@pytest.mark.parametrize("packing", ["pad", "fill"])
def test_ranking_keeps_the_length_of_the_least_bound(packing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length is written, each bound is asked for given the source, and the least one wins."""
    model = small_model(packing=packing)
    asked: list[tuple[list[str], str]] = []

    class Bound:
        nats_B = torch.tensor([3.0, 1.0, 2.0])

    def score(texts: list[str], *, prompts: str, seed: int, num_samples: int) -> Bound:
        asked.append((texts, prompts))
        assert num_samples == 8
        return Bound()

    monkeypatch.setattr(model, "score", score)
    rows: list[list[list[int]]] = []
    original = model.canvas

    def canvas(some: list[list[int]], *more: Any, **how: Any) -> Any:
        rows.append(some)
        return original(some, *more, **how)

    monkeypatch.setattr(model, "canvas", canvas)
    tokens = {"sampler": "ancestral", "options": {"steps": 4, "temperature": 1.0}}
    made = targets(model, Writing(lengths=3, draws=8, **tokens), ["hund"], 0, World())  # type: ignore[arg-type]
    mask = model.tokenizer.mask_id
    assert [row.count(mask) for row in rows[0]] == [3, 4, 5]
    assert all(row[-1] == row[-2] == model.tokenizer.eot_id for row in rows[0])  # the end of the text, and the anchor
    assert {len(row) for row in rows[0]} == ({48} if packing == "fill" else {11, 12, 13})
    assert asked[0][1] == "hund"
    assert made == [asked[0][0][1]]


def test_a_source_beyond_the_window_is_counted(data: Path, tmp_path: Path) -> None:
    write_lines(data / "multi30k/test_2017_flickr.de", [*GERMAN[:4], "x" * 60])
    found = numbers(measure("translation", small_model(), data, ["flickr2017"], out=tmp_path / "out")["flickr2017"])
    assert found["left_out"] == "1 sources beyond the window, whose output is empty"
    assert records(tmp_path / "out/flickr2017.jsonl")[-1]["output"] == ""


def test_what_is_wrong_with_the_files(data: Path) -> None:
    write_lines(data / "multi30k/test_2016_flickr.en", ENGLISH[:3])
    write_lines(data / "multi30k/test_2017_flickr.de", [])
    write_lines(data / "multi30k/test_2017_flickr.en", [])
    write_lines(data / "multi30k/test_2018_flickr.de", GERMAN)
    sets = ["flickr2016", "flickr2017", "flickr2018", "mscoco2017"]
    found = measure("translation", small_model(), data, sets)
    assert "de.xz has 5 lines and" in found["flickr2016"].failure
    assert "en has 3" in found["flickr2016"].failure
    assert "is empty" in found["flickr2017"].failure
    assert "multi30k/test_2018_flickr.en is not in" in found["flickr2018"].failure
    assert "multi30k/test_2017_mscoco.de is not in" in found["mscoco2017"].failure


def test_a_model_without_prompts_does_not_translate(model: Model, data: Path) -> None:
    with pytest.raises(UsageError, match="trained without prompts"):
        measure("translation", model, data, ["flickr2016"])
    with pytest.raises(UsageError, match='train it with packing = "fill", or give --lengths'):
        measure("translation", small_model(packing="pad"), data, ["flickr2016"])
    with pytest.raises(UsageError, match="autoregressive model ends its texts itself"):
        measure("translation", small_model(ar=True), data, ["flickr2016"], writing=Writing(lengths=3))


def test_nan_costs_a_sentence(data: Path) -> None:
    broken = small_model()
    with torch.no_grad():
        next(broken.denoiser.parameters()).fill_(math.nan)
    found = measure("translation", broken, data, ["flickr2016"])
    assert "not a number" in found["flickr2016"].failure
    with pytest.raises(NonFiniteError):
        targets(broken, Writing(), ["hund"], 0, World())


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_a_finished_set_is_not_written_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = small_model(), list[str]()
    how: dict[str, Any] = {"out": tmp_path / "out", "say": said.append}
    first = numbers(measure("translation", model, data, ["flickr2016"], **how)["flickr2016"])
    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", None)
        taken = measure("translation", model, data, ["flickr2016"], **how)["flickr2016"]
    assert taken.taken
    assert taken.numbers == first
    (tmp_path / "out/flickr2016.jsonl").write_text("{}\n")
    measure("translation", model, data, ["flickr2016"], **how)
    assert said[-1].endswith("has changed: flickr2016.jsonl, what the model wrote")
    assert records(tmp_path / "out/flickr2016.jsonl")[0]["prompt"] == GERMAN[0]
    measure("translation", model, data, ["flickr2016"], **how, writing=Writing(max_rows=2))
    assert said[-1].endswith("has changed: max_rows")
    assert [one["prompt"] for one in records(tmp_path / "out/flickr2016.jsonl")] == [GERMAN[0], GERMAN[4]]


def test_processes_share_the_batches() -> None:
    """Two worlds of two, played one after the other: each makes its turns, and all get all of it."""

    class Half(World):
        def agree(self, work: Any) -> list[Any]:
            return [work(), ["other"]] if self.first else [["other"], work()]

    made: list[list[int]] = []

    def work(some: list[int]) -> list[Any]:
        made.append(some)
        return [some[0]]

    assert in_batches(Half(rank=0, size=2), [1, 2, 3], 1, work, None) == [1, "other", 3, "other"]
    assert made == [[1], [3]]
    made.clear()
    assert in_batches(Half(rank=1, size=2), [1, 2, 3], 1, work, None) == ["other", 2, "other"]
    assert made == [[2]]


# --- infilling and last words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ar", [False, True])
def test_infilling(ar: bool, model: Model, ar_model: Model, tmp_path: Path) -> None:
    chosen = ar_model if ar else model
    texts = ["the cat sat on the mat", "a dog ran to the red hut in the sun", "short"]
    path = tmp_path / "notes.txt"
    path.write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    suite = find_suite("infilling")
    entry = suite.of_file(str(path))  # type: ignore[attr-defined]
    (outcome,) = SuiteRun(suite=suite, out=tmp_path / "out").outcomes(chosen, [entry])
    found, kept = numbers(outcome), records(tmp_path / "out/notes.jsonl")
    assert "1 texts of fewer than 8 tokens" in found["left_out"]
    assert ("before it alone" if ar else "both sides") in found["protocol"]["asked"]
    assert len(kept) == 2 * 5 * 2
    for one in kept:
        size = len(texts[one["text"]][: chosen.length])
        assert sum(len(reference) for reference, _ in one["ids"]) == round(one["hidden"] * size)
    some = [one for one in kept if (one["hidden"], one["way"]) == (0.3, "spans")]
    pairs = [(a, b) for one in some for gap in one["ids"] for a, b in zip(*gap, strict=True)]
    whole = [gap[0] == gap[1] for one in some for gap in one["ids"]]
    of = "30% hidden, spans"
    assert score(found, "right tokens", of) == pytest.approx(100 * sum(a == b for a, b in pairs) / len(pairs))
    assert score(found, "right gaps", of) == pytest.approx(100 * sum(whole) / len(whole))


def test_ar_is_asked_from_the_left_alone(ar_model: Model) -> None:
    """The likeliest next token in each gap, step by step; what stands after a gap changes nothing in it."""
    from unmask.evaluation.suites.infilling import _from_the_left

    tokenizer = ar_model.tokenizer
    texts = [tokenizer.encode(text) for text in ("the cat sat on the mat", "the cat xxx xx the xxx")]
    mask = np.zeros(len(texts[0]), dtype=bool)
    mask[[4, 5, 15]] = True
    how = {"sampler": ar_model.make_sampler(temperature=0.0), "constraint": None}
    made = _from_the_left(ar_model, texts, [mask, mask], torch.arange(2), how)
    for ids, row in zip(texts, made, strict=True):
        expected = list(ids)
        for position in np.flatnonzero(mask):
            with torch.no_grad():
                logits = _next(ar_model, expected, int(position), ar=True)
            logits[[tokenizer.mask_id, tokenizer.eot_id, *tokenizer.never_ids()]] = -math.inf
            expected[position] = int(logits.argmax())
        assert row == expected
    assert made[0][4:6] == made[1][4:6]


@pytest.mark.parametrize("ar", [False, True])
def test_the_last_word_is_the_greedy_one(ar: bool, model: Model, ar_model: Model, data: Path, tmp_path: Path) -> None:
    """Against the model's own logits, position by position."""
    chosen = ar_model if ar else model
    sampler = {} if ar else {"writing": Writing(sampler="left_to_right")}
    found = numbers(measure("last-word", chosen, data, ["lambada"], out=tmp_path / "out", **sampler)["lambada"])  # type: ignore[arg-type]
    kept = records(tmp_path / "out/lambada.jsonl")
    assert [one["reference"] for one in kept] == [" mat", " hut"]
    tokenizer = chosen.tokenizer
    for one in kept:
        row, word = tokenizer.encode(one["context"]), tokenizer.encode(one["reference"])
        row = row[max(0, len(row) + len(word) - chosen.length) :]
        start = len(row)
        row += [tokenizer.mask_id] * len(word)
        for position in range(start, len(row)):
            forbidden = [tokenizer.mask_id, tokenizer.eot_id, *tokenizer.never_ids()]
            with torch.no_grad():
                logits = _next(chosen, row, position, ar=ar)
            logits[forbidden] = -math.inf
            row[position] = int(logits.argmax())
        assert one["output"] == tokenizer.decode(row[start:])
        assert one["right"] == (row[start:] == word)
    assert score(found, "greedy match") == 50 * sum(one["right"] for one in kept)


def _next(model: Model, row: list[int], position: int, *, ar: bool) -> torch.Tensor:
    z_BL = torch.tensor([[*row[:position], model.tokenizer.mask_id] if ar else row])
    h_BLD = model.denoiser.trunk(z_BL, None)
    return model.denoiser.head(h_BLD[0, position][None])[0]


# --- style ------------------------------------------------------------------------------------------------------------


def yelp(folder: Path) -> None:
    """600 sentences of each sentiment, of which the references' are a part."""
    rng = random.Random(0)
    things, marks = ["food", "place", "staff", "soup", "bar"], (["awful", "rude"], ["great", "kind"])
    for style in (0, 1):
        lines = [f"the {rng.choice(things)} n{i} was {rng.choice(marks[style])} ." for i in range(600)]
        write_lines(folder / f"style_transfer/yelp/sentiment.dev.{style}", lines[:300])
        write_lines(folder / f"style_transfer/yelp/sentiment.test.{style}", lines[300:])
        other = marks[1 - style][0]
        pairs = [f"{line}\tThe {line.split()[1]} was {other}!" for line in (lines[0], lines[300])]
        write_lines(folder / f"style_transfer/lijuncen/yelp_reference.{style}", pairs)


def test_style(tmp_path: Path) -> None:
    yelp(tmp_path)
    model = small_model()
    way: dict[str, Any] = {"writing": Writing(sampler="ancestral", options={"steps": 4}), "out": tmp_path / "out"}
    found = numbers(measure("style", model, tmp_path, ["yelp"], **way)["yelp"])
    kept = records(tmp_path / "out/yelp.jsonl")
    assert [one["wanted"] for one in kept] == ["positive", "positive", "negative", "negative"]
    assert all(not {"awful", "rude", "great", "kind"} & set(one["prompt"].split()) for one in kept)
    assert kept[0]["prompt"].startswith("positive: the ")
    assert kept[0]["source"].endswith((" was awful.", " was rude."))
    assert kept[0]["reference"].endswith(" was great!")
    assert score(found, "style accuracy", "rewrites by people") == 100
    assert score(found, "style accuracy", "sources unchanged") == 0
    told = " ".join(found["protocol"]["notes"])
    held_out = re.search(r"(\d+\.\d\d)% right .* of (\d+) sentences", told)
    assert held_out is not None
    assert float(held_out[1]) > 80
    assert "of 1,200 sentences are among the references" in told
    assert int(told.split(" of 1,200")[0].split()[-1]) >= 4


# --- planning ---------------------------------------------------------------------------------------------------------


def test_planning_measures_the_direction_that_the_model_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = find_suite("planning")
    forward, backward = small_model(separator="="), small_model(separator="=<")
    assert [one.name for one in suite.usual(forward, suite.chosen(None, None))] == ["forward"]
    assert [one.name for one in suite.usual(backward, suite.chosen(None, None))] == ["reversed"]
    with pytest.raises(UsageError, match="this model's prompts end in"):
        measure("planning", small_model(), None, ["forward"])

    assert "the other direction" in measure("planning", forward, None, ["reversed"])["reversed"].failure

    def answers(model: Any, num: int, length: int, prompts: Any, *, only: list[int], **how: Any) -> list[str]:
        """Right, but for the first digit of every fourth sum."""
        made = [f"{sum(map(int, prompts[i].split('+'))):09d}" for i in only]
        return [text if i % 4 else f"{9 - int(text[0])}{text[1:]}" for i, text in zip(only, made, strict=True)]

    monkeypatch.setattr(Model, "generate", answers)
    found = numbers(measure("planning", forward, None, ["forward"])["forward"])
    assert score(found, "exact match") == 75
    assert score(found, "right digits") == pytest.approx(100 * (1 - 1 / 36))
    assert score(found, "wrong digits", "wrong answers") == pytest.approx(100 / 9)
    chains = [one for one in found["scores"] if one["of"].startswith("carries over")]
    assert sum(one["n"] for one in chains) == found["texts"] == 1000
    assert min(one["n"] for one in chains) > 50


def test_the_sums_of_training_are_never_those_of_the_suite() -> None:
    train = {one.prompt for one in Addition(num=5000).documents()}
    test = {one.prompt for one in Addition(num=1000, part="test", seed=2).documents()}
    assert not train & test
    small = [
        {one.prompt for one in Addition(num=500, digits=1, terms=2, part=part).documents()}
        for part in ("train", "test")
    ]  # type: ignore[arg-type]
    assert small[1]
    assert not small[0] & small[1]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--suite", "translation", "--estimator", "count"], "the suite translation has no option --estimator"),
        (["--suite", "translation", "--packing", "pad"], "the suite translation has no option --packing"),
        (["--suite", "translation", "--data", "a.txt"], "leave out --data"),
        (["--suite", "infilling", "--lengths", "3"], "the suite infilling has no option --lengths"),
        (["--suite", "infilling", "--data", "a.txt", "--sets", "ptb"], "--data is a set by itself"),
        (["--suite", "zero-shot", "--guidance", "1"], "the suite zero-shot has no option --guidance"),
        (["--suite", "last-word", "--sampler", "{"], "--sampler is not valid JSON"),
        (["--suite", "last-word", "--sampler", "ancestra"], "did you mean 'ancestral'"),
        (["--suite", "last-word", "--sampler", '{"name": "ancestral", "stps": 3}'], "did you mean 'steps'"),
        (["--suite", "last-word", "--max-rows", "0"], "must be at least 1"),
        (["--suite", "translation"], "trained without prompts"),
        (["--guidance", "1"], "--guidance belongs to a suite"),
    ],
)
def test_wrong_use(
    words: list[str], sentence: str, trained: Any, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["eval", str(trained.folder), *words, "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_the_package(data: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model().save(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    words = ["eval", str(tmp_path / "model"), "--suite", "translation", "--data-dir", str(data), "--device", "cpu"]
    assert run(words) == 1
    assert "pip install 'unmask[eval]'" in capsys.readouterr().err
