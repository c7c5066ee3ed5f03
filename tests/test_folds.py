"""Cross-validation: which example is in which fold, who stops and who is reported, and what survives a kill."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from made_tasks import QUICK, letters, letters_config, numbers_of, small_model, write_tsv
from unmask.corpora.fasta import other_strand
from unmask.errors import DataError, UsageError
from unmask.finetuning.answers import read_answers
from unmask.finetuning.config import FinetuneConfig, TaskData, load_finetune_config
from unmask.finetuning.examples import Example
from unmask.finetuning.run import finetune
from unmask.finetuning.seed_run import Watch
from unmask.finetuning.splits import Splits, folds_of, make_splits, read_labelled


def examples(classes: dict[str, int], copies: int = 0) -> list[Example]:
    draw = random.Random(0)
    made = [Example(f"{word}{i}", None, word, f"a.tsv, line {i}") for word, n in classes.items() for i in range(n)]
    made += [dataclasses.replace(one, where=f"again {i}") for i, one in enumerate(draw.choices(made, k=copies))]
    draw.shuffle(made)
    return made


# --- which fold -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_have_as_many_of_each_class(folds: int, seed: int) -> None:
    every = examples({"a": 31, "b": 17, "c": 8})
    place = folds_of(every, folds, seed, stratified=True)
    for word in "abc":
        counts = Counter(k for one, k in zip(every, place, strict=True) if one.label == word)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert len(counts) == folds
    sizes = Counter(place)
    assert max(sizes.values()) - min(sizes.values()) <= 1  # what is over of one class goes where another is short


def test_copies_stay_together_and_seeds_differ() -> None:
    every = examples({"a": 60, "b": 60}, copies=40)
    places = [folds_of(every, 5, seed, stratified=True) for seed in range(3)]
    for place in places:
        of_text: dict[str, set[int]] = {}
        for one, k in zip(every, place, strict=True):
            of_text.setdefault(one.text, set()).add(k)
        assert all(len(folds) == 1 for folds in of_text.values())
        sizes = Counter(place)
        assert max(sizes.values()) - min(sizes.values()) <= 3
    assert len({tuple(place) for place in places}) == 3
    assert folds_of(every, 5, 0, stratified=True) == places[0]


def test_both_strands_of_a_sequence_are_copies() -> None:
    """A conjoined network gives them one answer, so one of them in train would be the other's."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("ACGT", k=12)) for _ in range(40)]
    strands = [[text, other_strand(text), text.lower()] for text in texts]
    every = [
        Example(strand, None, "ab"[i % 2], "")
        for k in range(3)
        for i, three in enumerate(strands)
        for strand in three[k : k + 1]
    ]
    place = folds_of(every, 4, 0, stratified=True)
    assert place[:40] == place[40:80] == place[80:]
    assert {*Counter(place[:40]).values()} == {10}
    words = [*every, Example("no DNA", None, "a", "")]  # of words, one that looks like DNA is one
    place = folds_of(words, 4, 0, stratified=True)
    assert place[:40] != place[40:80]


def test_every_pair_of_examples_is_apart_as_often_as_chance_says() -> None:
    """Over seeds two examples of a class share one of three folds of four each with probability 3 / 11."""
    every = [Example(str(i), None, "a", "") for i in range(12)]
    together = [0] * 12
    for seed in range(400):
        place = folds_of(every, 3, seed, stratified=True)
        for other in range(1, 12):
            together[other] += place[0] == place[other]
    # a count of 400 draws: 109 ± 4.5 deviations of 8.9
    assert all(abs(n - 400 * 3 / 11) < 40 for n in together[1:])


def test_a_class_with_too_few_is_told() -> None:
    every = examples({"a": 12, "rare": 2}, copies=6)
    with pytest.raises(DataError, match="the class 'rare' has 2 different texts, too few for 3 folds"):
        folds_of(every, 3, 0, stratified=True)
    with pytest.raises(DataError, match="there are 14 different texts, too few for 15 folds"):
        folds_of(every, 15, 0, stratified=False)


def config(folder: Path, count: int = 60, **options: Any) -> FinetuneConfig:
    data = TaskData(train=write_tsv(folder / "train.tsv", [("text", "label"), *letters(count, 0)]))
    how: dict[str, Any] = {"out": str(folder / "out"), "optim": QUICK, "batch": 16, "epochs": 1, "seeds": 2, "folds": 3}
    return FinetuneConfig(**{"data": data} | how | options)


def wheres(splits: Splits, part: str) -> set[str]:
    return {one.where for one in splits.all[part].examples}


def test_each_example_is_reported_once_and_never_stops_itself(tmp_path: Path) -> None:
    labelled = read_labelled(config(tmp_path))
    for seed in range(2):
        every = [labelled.splits(seed, fold) for fold in range(3)]
        reported = [where for splits in every for where in wheres(splits, "test")]
        assert len(reported) == len({*reported}) == 60
        for splits in every:
            train, valid, test = (wheres(splits, part) for part in ("train", "valid", "test"))
            assert not (train & valid | train & test | valid & test)
            assert len(train | valid | test) == 60
            assert (len(train), len(valid), len(test)) == (36, 4, 20)
            assert splits.labels == ("with", "without")
    stops = [wheres(labelled.splits(seed, fold), "valid") for seed in range(2) for fold in range(3)]
    assert len({frozenset(one) for one in stops}) == 6


def test_with_a_test_file_each_fold_stops_once(tmp_path: Path) -> None:
    base = config(tmp_path)
    test = write_tsv(tmp_path / "test.tsv", [("text", "label"), *letters(10, 2)])
    labelled = read_labelled(dataclasses.replace(base, data=dataclasses.replace(base.data, test=test)))
    every = [labelled.splits(1, fold) for fold in range(3)]
    stopping = [where for splits in every for where in wheres(splits, "valid")]
    assert len(stopping) == len({*stopping}) == 60
    for splits in every:
        assert len(splits.train) == 40
        assert not wheres(splits, "train") & wheres(splits, "valid")
        assert {where.partition(",")[0] for where in wheres(splits, "test")} == {test}


def test_options_that_do_not_go_with_folds(tmp_path: Path) -> None:
    for options, said in (
        ({"folds": 1}, "folds must lie in"),
        ({"folds": 5, "data.valid": "a.tsv"}, "leave out data.valid"),
        ({"folds": 5, "data.test_share": 0.2}, "leave out data.valid and data.test_share"),
        ({"data.shortest": -1}, "shortest is a number of characters"),
    ):
        with pytest.raises(UsageError, match=said):
            load_finetune_config(None, options)
    assert load_finetune_config(None, {"folds": "5"}).folds == 5
    assert load_finetune_config(None).folds is None


def test_texts_that_are_too_short_are_counted(tmp_path: Path) -> None:
    rows = [*letters(20, 0), ("ab", "with"), ("abc", "without")]
    data = TaskData(train=write_tsv(tmp_path / "a.tsv", [("text", "label"), *rows]), shortest=4)
    labelled = read_labelled(FinetuneConfig(data=data))
    assert labelled.left_out == {"train": 2}
    splits = make_splits(FinetuneConfig(data=data))
    assert min(len(one.text) for part in splits.all.values() for one in part.examples) >= 4
    with pytest.raises(DataError, match="are shorter than 100"):
        read_labelled(FinetuneConfig(data=dataclasses.replace(data, shortest=100)))


# --- runs -------------------------------------------------------------------------------------------------------------


class Kill(Watch):
    """Ends in a fold of a seed, as a kill would; says which were begun."""

    def __init__(self, fatal: tuple[int, int] | None = None) -> None:
        self.fatal, self.begun, self.seed = fatal, list[tuple[str, int, int]](), 0
        self.start = ""

    def on_seed(self, start: Any, seed: int, steps: int) -> None:
        self.start, self.seed = start, seed

    def on_fold(self, fold: int, folds: int) -> None:
        if (self.seed, fold) == self.fatal:
            raise KeyboardInterrupt
        self.begun.append((self.start, self.seed, fold))


def test_it_goes_on_after_a_kill_and_is_the_same(tmp_path: Path) -> None:
    model, base = small_model(), config(tmp_path, from_scratch=True)
    with pytest.raises(KeyboardInterrupt):
        finetune(model, base, device="cpu", watch=Kill((1, 1)))
    out = tmp_path / "out"
    kept = {path: path.read_bytes() for path in (out / "seeds").iterdir()}
    assert len(kept) == 8  # three folds and one, from the model and from random weights
    assert not (out / "report.json").exists()
    watch = Kill()
    report = finetune(model, base, device="cpu", watch=watch).report
    assert watch.begun == [(start, 1, fold) for fold in (1, 2) for start in ("model", "scratch")]
    assert all(path.read_bytes() == before for path, before in kept.items())
    whole = finetune(model, dataclasses.replace(base, out=str(tmp_path / "whole")), device="cpu").report
    assert report["results"] == whole["results"]
    names = ("model", "1-fold-2")
    assert numbers_of(out, *names) == numbers_of(tmp_path / "whole", *names)
    with pytest.raises(UsageError, match=r"another options.folds \(3 there, 4 now\)"):
        finetune(model, dataclasses.replace(base, folds=4), device="cpu")


def test_the_report_is_of_all_folds(tmp_path: Path) -> None:
    done = finetune(small_model(), config(tmp_path, count=61), device="cpu")
    report, out = done.report, tmp_path / "out"
    assert report["examples"]["test"] == 61
    found = report["results"]["model"]["test"]["accuracy"]
    runs = [json.loads(path.read_text()) for path in sorted((out / "seeds").iterdir())]
    assert len(runs) == 6
    for seed, mean in enumerate(found["seeds"]):
        paths = (out / "predictions").glob(f"model-{seed}-fold-*-test.jsonl")
        answers = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        assert len(answers) == 61  # each example has been answered once, by a model that has not read it
        assert mean == pytest.approx(sum(one["label"] == one["predicted"] for one in answers) / 61)
        assert [one["scores"]["test"]["accuracy"] for one in runs if one["seed"] == seed] == found["folds"][seed]
    page = (out / "report.md").read_text()
    assert "Cross-validation of 3 folds, drawn anew for each seed: each fold is once reported" in page
    assert "## Test: 61 examples" in page
    best = max(runs, key=lambda one: (one["best"]["score"], -one["best"]["loss"]))
    tuned = done.classifier("cpu")
    lines = (out / "predictions" / f"model-{best['seed']}-fold-{best['fold']}-test.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    want = [json.loads(line)["predicted"] for line in lines]
    assert [one.label for one in tuned.classify(texts)] == want


def test_numbers_have_the_unit_of_their_own_folds(tmp_path: Path) -> None:
    rows = [(text, 100 + 10 * len(text)) for text, _ in letters(60, 0)]
    data = TaskData(train=write_tsv(tmp_path / "a.tsv", [("text", "label"), *rows]))
    base = config(tmp_path, data=data, kind="regression", seeds=1)
    done = finetune(small_model(), base, device="cpu")
    assert done.report["examples"]["test"] == 60
    runs = [json.loads(path.read_text()) for path in sorted((tmp_path / "out" / "seeds").iterdir())]
    best = max(runs, key=lambda one: (one["best"]["score"], -one["best"]["loss"]))
    means = [sum(one.train.targets) / len(one.train) for one in map(read_labelled(base).splits, [0] * 3, range(3))]
    assert len({*means}) == 3
    assert done.classifier("cpu").task.mean == pytest.approx(means[best["fold"]])


def test_without_folds_nothing_is_another_thing(tmp_path: Path) -> None:
    """The names of files, and what a folder that was begun before knew of its options."""
    base = letters_config(tmp_path, train=32, epochs=1)
    finetune(small_model(), base, device="cpu")
    about = json.loads((tmp_path / "out" / "finetune.json").read_text())
    for name in ("folds", "conjoin"):
        del about["identity"]["options"][name]
    (tmp_path / "out" / "finetune.json").write_text(json.dumps(about))
    begun = Kill()
    finetune(small_model(), base, device="cpu", watch=begun)
    assert begun.begun == []
    assert [path.name for path in (tmp_path / "out" / "seeds").iterdir()] == ["model-0.json"]


def test_the_model_is_the_best_of_those_that_began_from_it(tmp_path: Path) -> None:
    """Random weights that did better do not keep a later seed's model out."""
    base = config(tmp_path, folds=None, from_scratch=True, seeds=1)
    done = finetune(small_model(), base, device="cpu")
    for start, score in (("model", -1.0), ("scratch", 2.0)):
        path = done.folder / "seeds" / f"{start}-0.json"
        numbers = json.loads(path.read_text())
        path.write_text(json.dumps(numbers | {"best": numbers["best"] | {"score": score}}))
    before = (done.folder / "model" / "model.safetensors").read_bytes()
    finetune(small_model(), dataclasses.replace(base, seeds=2), device="cpu")
    assert (done.folder / "model" / "model.safetensors").read_bytes() != before


def test_a_seed_whose_folds_are_not_all_there_is_not_compared(tmp_path: Path) -> None:
    done = finetune(small_model(), config(tmp_path, seeds=2), device="cpu")
    assert {*read_answers(done.folder).runs["model"]} == {0, 1}
    (done.folder / "seeds" / "model-1-fold-2.json").unlink()
    answers = read_answers(done.folder)
    assert {*answers.runs["model"]} == {0}
    assert len(answers.keys) == 60
