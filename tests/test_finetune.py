"""Task heads and fine-tuning: rows, learning, seeds that are kept, the folder of a classifier, the commands."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from made_tasks import CAUSAL, QUICK, letters, letters_config, numbers_of, small_model, write_tsv
from tiny import TINY
from unmask.cli import run as command
from unmask.config import OptimConfig
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import ModelFolderError, NonFiniteError, Stopped, UnmaskError, UsageError
from unmask.finetuning.classifier import Classifier, load_classifier
from unmask.finetuning.config import FinetuneConfig, TaskData, load_finetune_config
from unmask.finetuning.examples import Example
from unmask.finetuning.report import repeated
from unmask.finetuning.rows import kept, make_rows
from unmask.finetuning.run import finetune
from unmask.finetuning.seed_run import SeedRun, Watch, start_network
from unmask.finetuning.splits import make_splits
from unmask.heads._pooling import chosen
from unmask.heads.pooled import Pooled
from unmask.heads.task import Task, task_outputs
from unmask.model import Model, load
from unmask.storage.model_folder import unshared

BYTES = Task(labels=("no", "yes"), length=32)
EOT = 256


class Stop(Watch):
    """Fails in a seed, as a kill would."""

    def __init__(self, seed: int) -> None:
        self.fatal, self.seed = seed, -1

    def on_seed(self, start: Any, seed: int, steps: int) -> None:
        self.seed = seed

    def on_step(self, step: int, loss: float) -> None:
        if self.seed == self.fatal:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished fine-tuning of three seeds, from the model and from random weights."""
    folder = tmp_path_factory.mktemp("done")
    finetune(small_model(), letters_config(folder, epochs=8, seeds=2, from_scratch=True), device="cpu")
    return folder / "out"


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_row_is_the_frame_the_text_its_pair_and_the_end() -> None:
    task = dataclasses.replace(BYTES, pairs=True)
    one = Example("ab", "c", None, "")
    assert make_rows([one], task, small_model()).rows == [[97, 98, EOT, 99, EOT]]
    framed = small_model(packing="pad", anchor="both")
    rows = make_rows([one], task, framed)
    assert rows.rows == [[*framed.begin, 97, 98, EOT, 99, EOT, *framed.end]]
    assert framed.begin
    assert framed.end
    batch = rows.batch([0])
    assert batch.text_BL[0].nonzero().flatten().tolist() == list(range(len(framed.begin), len(framed.begin) + 5))
    places = {
        pool: chosen(batch.valid_BL, batch.text_BL, pool)[0].nonzero().flatten().tolist() for pool in ("first", "last")
    }
    assert places == {"first": [0], "last": [len(framed.begin) + 4]}  # the frame's, as [CLS] is; the end-of-text
    own = dataclasses.replace(task, between=" / ")
    assert make_rows([one], own, small_model()).rows == [[97, 98, *b" / ", 99, EOT]]
    assert make_rows([one], BYTES, small_model()).rows == [[97, 98, EOT]]


def test_a_frame_that_ends_as_the_text_does_ends_once(tmp_path: Path) -> None:
    from tiny_encoders import save_encoder

    pytest.importorskip("transformers")
    save_encoder("bert", tmp_path / "bert")
    assert command(["import", f"hf:{tmp_path / 'bert'}", str(tmp_path / "model")]) == 0
    model = load(tmp_path / "model", device="cpu")
    cls, sep = model.begin[0], model.end[0]
    a, b = model.tokenizer.encode("cat"), model.tokenizer.encode("dog")
    pair = Example("cat", "dog", None, "")
    assert make_rows([pair], dataclasses.replace(BYTES, pairs=True), model).rows == [[cls, *a, sep, *b, sep]]
    rows = make_rows([pair], BYTES, model)
    assert rows.rows == [[cls, *a, sep]]
    assert rows.batch([0]).text_BL.tolist() == [[False, *[True] * (len(a) + 1)]]


@pytest.mark.parametrize("first", range(0, 12, 2))
@pytest.mark.parametrize("second", range(0, 12, 3))
@pytest.mark.parametrize("room", [2, 5, 8, 30])
def test_the_longer_text_is_cut(first: int, second: int, room: int) -> None:
    """As if tokens were taken one by one from the end of the longer text, from the second of equal ones."""
    a, b = first, second
    while a + b > room:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    assert kept(first, second, room) == (a, b)


def test_what_is_cut_is_counted() -> None:
    task = dataclasses.replace(BYTES, pairs=True, length=10)
    rows = make_rows([Example("a" * 9, "bbb", None, ""), Example("a", "b", None, "")], task, small_model())
    assert rows.rows[0] == [*b"aaaaa", EOT, *b"bbb", EOT]
    assert (rows.cut, rows.cut_texts) == ([4, 0], 1)
    with pytest.raises(UsageError, match="leaves no room for a text: give at least 4"):
        make_rows([Example("a", "b", None, "")], dataclasses.replace(task, length=3), small_model())


@pytest.mark.parametrize(
    "denoiser",
    [TINY, CAUSAL, dataclasses.replace(TINY, conditioning="level", classes=3)],
    ids=["both sides", "causal", "conditioned"],
)
@pytest.mark.parametrize("pool", ["auto", "mean", "last"])
def test_padding_and_neighbours_change_nothing(denoiser: Any, pool: Any) -> None:
    model = small_model(denoiser)
    task = dataclasses.replace(BYTES, head=Pooled(pool=pool))
    task.attach(model.denoiser)
    model.denoiser.eval()
    rows = make_rows([Example(text, None, None, "") for text in ("abc", "a", "abcdefgh")], task, model)

    def answers(indices: list[int]) -> torch.Tensor:
        part = rows.batch(indices)
        return task_outputs(task, model.denoiser, *part)

    with torch.no_grad():
        together = answers([0, 1, 2])
        torch.testing.assert_close(together, torch.cat([answers([i]) for i in range(3)]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pool", ["auto", "mean"])
def test_a_causal_network_reads_the_whole_text(pool: Any) -> None:
    """Its vector at a position knows what stands before it; the row's last position is an end-of-text."""
    model = small_model(CAUSAL)
    task = dataclasses.replace(BYTES, head=Pooled(pool=pool))
    task.attach(model.denoiser)
    answers = Classifier(model, task).classify(["abcd", "abcx", "xbcd"])
    assert len({one.probabilities["yes"] for one in answers}) == 3
    with pytest.raises(UsageError, match="first position of a causal network has read nothing"):
        dataclasses.replace(BYTES, head=Pooled(pool="first")).attach(small_model(CAUSAL).denoiser)


# --- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("denoiser", "options"),
    [
        (TINY, {}),
        (CAUSAL, {}),
        (TINY, {"optim": OptimConfig(lr=1e-2, muon=True, warmup=0, schedule="constant", ema=0.8)}),
    ],
    ids=["adamw", "causal", "muon and average"],
)
def test_it_learns_and_beats_the_majority(denoiser: Any, options: Any, tmp_path: Path) -> None:
    config = letters_config(tmp_path, train=256, epochs=10, patience=10, **options)
    report = finetune(small_model(denoiser), config, device="cpu").report
    assert report["guess"]["test"]["accuracy"] == 0.5
    assert report["results"]["model"]["test"]["accuracy"]["mean"] >= 0.85


def test_a_number_is_learned_in_its_own_unit(tmp_path: Path) -> None:
    rows = [(text, 100 + 10 * len(text)) for text, _ in letters(160, 0)]
    data = TaskData(train=write_tsv(tmp_path / "a.tsv", [("text", "label"), *rows]))
    # A rate that falls: at a constant one the end depends on how sums are rounded.
    how: dict[str, Any] = {"epochs": 12, "patience": 12, "optim": dataclasses.replace(QUICK, schedule="cosine")}
    config = letters_config(tmp_path, data=data, kind="regression", metrics=("pearson", "r2"), **how)
    done = finetune(small_model(), config, device="cpu")
    assert done.report["results"]["model"]["valid"]["r2"]["mean"] > 0.5
    assert done.report["guess"]["valid"]["pearson"] == 0
    [short, long] = done.classifier("cpu").classify(["abcd", "abcdefabc"])
    assert short.label is None
    assert short.value is not None
    assert long.value is not None
    assert 130 < short.value < long.value < 200
    line = json.loads((done.folder / "predictions" / "model-0-valid.jsonl").read_text().splitlines()[0])
    assert set(line) == {"text", "target", "predicted"}


def test_pairs_are_read_together(tmp_path: Path) -> None:
    rows = [(a, b, str(int(a == b))) for a in "abcdef" for b in "abcdef" for _ in range(1 + 4 * (a == b))]
    data = TaskData(train=write_tsv(tmp_path / "a.tsv", [("one", "two", "same"), *rows]), text="one", pair="two")
    data = dataclasses.replace(data, label="same", valid=data.train)
    config = letters_config(tmp_path, data=data, epochs=30, patience=30, metrics=("f1", "matthews"))
    done = finetune(small_model(), config, device="cpu")
    assert done.report["results"]["model"]["valid"]["matthews"]["mean"] > 0.7
    classifier = done.classifier("cpu")
    assert classifier.task.pairs
    answers = classifier.classify(["a", "b"], ["a", "b"])
    assert [one.plain()["pair"] for one in answers] == ["a", "b"]
    assert len(classifier.classify(["a", "b"], "a")) == 2
    for pairs, said in ((None, "give each text its pair"), (["a", "b", "c"], "2 texts need as many pairs")):
        with pytest.raises(UsageError, match=said):
            classifier.classify(["a", "b"], pairs)


def test_frozen_leaves_the_trunk_alone(tmp_path: Path) -> None:
    model = small_model()
    done = finetune(model, letters_config(tmp_path, freeze=True, epochs=1), device="cpu")
    tuned = unshared(done.classifier("cpu").model.denoiser)
    own = unshared(model.denoiser)
    assert all(torch.equal(tuned[name], own[name]) for name in own)
    fresh = start_network(model, done.classifier("cpu").task, seed=0, pretrained=True)
    assert not torch.equal(tuned["task.output.weight"], unshared(fresh)["task.output.weight"])


def test_random_weights_are_no_models(tmp_path: Path) -> None:
    model = small_model()
    before = {name: tensor.clone() for name, tensor in unshared(model.denoiser).items()}
    starts = [start_network(model, BYTES, seed=seed, pretrained=p) for seed, p in ((0, True), (0, False), (1, False))]
    weights = [unshared(network)["blocks.0.qkv.weight"] for network in starts]
    assert torch.equal(weights[0], before["blocks.0.qkv.weight"])
    assert not torch.equal(weights[1], weights[0])
    assert not torch.equal(weights[1], weights[2])
    finetune(model, letters_config(tmp_path, epochs=1), device="cpu")
    assert all(torch.equal(tensor, before[name]) for name, tensor in unshared(model.denoiser).items())
    assert model.denoiser.task is None


def test_the_best_weights_are_kept_and_patience_ends_a_seed(done: Path, tmp_path: Path) -> None:
    for start in ("model", "scratch"):
        for seed in range(2):
            numbers = numbers_of(done, start, seed)
            best = max(numbers["validations"], key=lambda one: (one["accuracy"], -one["loss"]))
            assert (best["step"], best["accuracy"]) == (numbers["best"]["step"], numbers["best"]["score"])
            assert numbers["scores"]["valid"]["accuracy"] == best["accuracy"]
    config = letters_config(tmp_path, epochs=30, patience=2, out=str(tmp_path / "a"))
    for name, seed in (("train", 0), ("valid", 1)):  # nothing to learn, so that the validation soon gets worse
        rows = [(text, random.Random(text).choice(["with", "without"])) for text, _ in letters(64, seed)]
        write_tsv(tmp_path / f"{name}.tsv", [("text", "label"), *rows])
    made = finetune(small_model(), config, device="cpu")
    numbers = numbers_of(made.folder, "model", 0)
    assert numbers["best"]["step"] == numbers["steps"] - 8 > 0  # two epochs of 4 steps before it ended
    answers = made.classifier("cpu").classify([text for text, _ in rows])
    loss = -sum(math.log(one.probabilities[label]) for one, (_, label) in zip(answers, rows, strict=True)) / 64
    assert loss == pytest.approx(numbers["best"]["loss"], rel=1e-4)
    assert abs(loss - numbers["validations"][-1]["loss"]) > 1e-2
    still = OptimConfig(lr=0.0, muon=False, ema=0.0)  # nothing ever gets better
    finetune(small_model(), letters_config(tmp_path, optim=still, epochs=9, patience=2), device="cpu")
    assert [one["step"] for one in numbers_of(tmp_path / "out", "model", 0)["validations"]] == [6, 12, 18]


def test_a_rate_that_is_far_too_high_is_said(tmp_path: Path) -> None:
    wild = OptimConfig(lr=1e30, muon=False, warmup=0, clip=0.0, ema=0.0)
    with pytest.raises(NonFiniteError, match=r"lower optim.lr"):
        finetune(small_model(), letters_config(tmp_path, optim=wild), device="cpu")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["finetune.json"]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_what_is_finished_stays_and_what_is_repeated_is_the_same(tmp_path: Path) -> None:
    model, config = small_model(), letters_config(tmp_path, seeds=2, epochs=1)
    with pytest.raises(KeyboardInterrupt):
        finetune(model, config, device="cpu", watch=Stop(1))
    out = tmp_path / "out"
    assert [path.name for path in (out / "seeds").iterdir()] == ["model-0.json"]
    assert not list(out.rglob("*.tmp-*"))
    first = (out / "seeds" / "model-0.json").read_bytes()

    begun: list[int] = []

    class Seeds(Watch):
        def on_seed(self, start: Any, seed: int, steps: int) -> None:
            begun.append(seed)

    report = finetune(model, config, device="cpu", watch=Seeds()).report
    assert begun == [1]
    assert (out / "seeds" / "model-0.json").read_bytes() == first
    whole = finetune(model, dataclasses.replace(config, out=str(tmp_path / "whole")), device="cpu").report
    assert numbers_of(out, "model", 1) == numbers_of(tmp_path / "whole", "model", 1)
    assert report["results"] == whole["results"]
    lines = [(folder / "predictions" / "model-1-test.jsonl").read_text() for folder in (out, tmp_path / "whole")]
    assert lines[0] == lines[1]
    more = finetune(model, dataclasses.replace(config, seeds=3), device="cpu", watch=Seeds()).report
    assert begun == [1, 2]
    assert len(more["results"]["model"]["test"]["accuracy"]["seeds"]) == 3


def test_a_request_to_stop_ends_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import contextlib

    monkeypatch.setattr("unmask.finetuning.run.stop_requests", lambda: contextlib.nullcontext(lambda: True))
    with pytest.raises(Stopped, match="stopped at step 0 of seed 0; finished seeds are kept: run it again"):
        finetune(small_model(), letters_config(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 3}, r"another options.epochs \(2 there, 3 now\)"),
        ({"labels": ("without", "with")}, "another options.labels"),
    ],
)
def test_another_fine_tuning_is_refused_in_the_same_folder(change: Any, said: str, tmp_path: Path) -> None:
    config = letters_config(tmp_path, train=32)
    finetune(small_model(), config, device="cpu")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=said):
        finetune(small_model(), dataclasses.replace(config, **change), device="cpu")
    write_tsv(tmp_path / "train.tsv", [("text", "label"), *letters(34, 0)])
    with pytest.raises(UsageError, match=r"another data.train"):
        finetune(small_model(), config, device="cpu")
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "recipe.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds recipe.json, which is no part of a fine-tuning"):
        finetune(small_model(), letters_config(tmp_path), device="cpu")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["recipe.json"]


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_classifier_loads_without_its_origin(done: Path, tmp_path: Path) -> None:
    classifier = load_classifier(done, device="cpu")
    assert classifier.labels == ("with", "without")
    shutil.copytree(done / "model", tmp_path / "alone")
    texts = [text for text, _ in letters(20, 5)]
    answers = classifier.classify(texts, batch=3)
    assert unmask.load_classifier(tmp_path / "alone", device="cpu").classify(texts) == [
        dataclasses.replace(one, probabilities=pytest.approx(one.probabilities, abs=1e-5)) for one in answers
    ]
    classifier.save(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (done / "model" / "config.json").read_bytes()
    lines = [json.loads(line) for line in (done / "predictions" / "model-0-test.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == [label for _, label in letters(32, 2)]
    assert all(sum(line["probabilities"].values()) == pytest.approx(1, abs=1e-4) for line in lines)
    assert "2 classes of texts of up to 32 tokens" in repr(classifier)


def test_a_classifier_writes_no_text_and_a_model_classifies_none(done: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fine-tuned for a classification and writes no text"):
        load(done, device="cpu")
    small_model().save(tmp_path / "plain")
    with pytest.raises(UsageError, match="is no classifier but a model that writes text"):
        load_classifier(tmp_path / "plain", device="cpu")
    with pytest.raises(UsageError, match="make a Classifier of both"):
        load_classifier(done, device="cpu").model.save(tmp_path / "without")
    with pytest.raises(UsageError, match="has no task head"):
        Classifier(small_model(), BYTES)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"labels": ["a", "b", "c"]}, "task.output"),
        ({"labels": ["a", "a"]}, "not all different"),
        ({"labels": ["a"]}, "at least 2 classes"),
        ({"labels": [1, 2]}, "expected str"),
        ({"length": 1 << 19}, "beyond the model's"),
        ({"length": -1}, "length must be at least 2"),
        ({"scale": 0}, "scale must be above 0"),
        ({"head": {"name": "pooled", "layers": 2}}, r"task.hidden.1.*missing"),
        ({"head": {"name": "pooled", "layers": 1 << 40}}, "layers must lie in"),
        ({"head": {"name": "os.system"}}, "unknown head"),
        ({"code": "import os"}, "unknown key 'task.code'"),
        ({"kind": "generation"}, "is not a choice"),
    ],
)
def test_a_task_that_lies_is_refused(task: dict[str, Any], said: str, done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(done / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    config["task"] |= task
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=said) as error:
        load_classifier(folder, device="cpu")
    assert "\n" not in str(error.value)


def test_head_and_network_belong_together(done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(done / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    for task, said in ((None, r"task\.\S+ is unexpected"), ([], "task is not dict")):
        changed = {key: value for key, value in config.items() if key != "task"} | (
            {} if task is None else {"task": task}
        )
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelFolderError, match=said):
            load_classifier(folder, device="cpu")


def test_a_classifier_is_fine_tuned_further(done: Path, tmp_path: Path) -> None:
    report = finetune(done, letters_config(tmp_path, epochs=1), device="cpu").report
    assert report["model"] == str(done)
    inner = load_classifier(done, device="cpu").model
    again = finetune(inner, letters_config(tmp_path, epochs=1, out=str(tmp_path / "again")), device="cpu").report
    assert again["results"] == report["results"]


# --- bad input --------------------------------------------------------------------------------------------------------

HEAD = "text\tlabel\n"
FILES = {
    "a ragged row": (HEAD + "a\tyes\nb\tno\tmore\n", r"train.tsv, line 3 has 3 columns, the first line of .* 2"),
    "an empty class": (HEAD + "a\tyes\nb\t\n", r"train.tsv, line 3 has an empty label"),
    "one class": (HEAD + "a\tyes\nb\tyes\nc\tyes\n", "is of one class, 'yes'"),
    "no such column": ("sentence\tlabel\na\tyes\n", "names no column 'text'"),
    "two such columns": ("text\ttext\tlabel\na\tb\tyes\n", "names 2 columns 'text'"),
    "nothing": ("", "is empty"),
    "a class a row": (HEAD + "".join(f"a\t{n / 7}\n" for n in range(200)), "set kind = regression if they are numbers"),
    "one example": (HEAD + "a\tyes\n", "are too few"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    text, said = FILES[name]
    path = tmp_path / "train.tsv"
    path.write_text(text, encoding="utf-8")
    config = FinetuneConfig(data=TaskData(train=str(path)), out=str(tmp_path / "out"))
    with pytest.raises(UnmaskError, match=said) as error:
        finetune(small_model(), config, device="cpu")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_several_splits_is_no_training_set(tmp_path: Path) -> None:
    letters_config(tmp_path)
    write_tsv(tmp_path / "test.tsv", [("text", "label"), ("a", "with")])
    config = FinetuneConfig(data=TaskData(train=str(tmp_path)), out=str(tmp_path / "out"))
    with pytest.raises(UnmaskError, match=r"holds several splits \(.*test.*\): name the files of one"):
        make_splits(config)


def test_labels_outside_the_classes_are_named_with_file_and_line(tmp_path: Path) -> None:
    config = letters_config(tmp_path)
    write_tsv(tmp_path / "test.tsv", [("text", "label"), ("a", "with"), ("b", "withot")])
    with pytest.raises(
        UnmaskError, match=r"test.tsv, line 3: the label 'withot' is not among the 2 classes; did you mean"
    ):
        make_splits(config)
    with pytest.raises(UsageError, match=r"the class 'maybe' has no example in .*train.tsv"):
        make_splits(letters_config(tmp_path, labels=("with", "without", "maybe")))
    with pytest.raises(UnmaskError, match=r"train.tsv, line 2: the label 'without' is not among the 2 classes"):
        make_splits(letters_config(tmp_path, labels=("with", "maybe")))
    with pytest.raises(UnmaskError, match=r"line 2: the label 'without' is no number"):
        make_splits(letters_config(tmp_path, kind="regression"))


def test_what_is_kept_from_training_is_the_same_for_every_seed(tmp_path: Path) -> None:
    config = letters_config(tmp_path)
    config = dataclasses.replace(config, data=TaskData(train=config.data.train, held_out=0.25, test_share=0.25))
    splits = make_splits(config)
    assert splits.test is not None
    assert (len(splits.train), len(splits.valid), len(splits.test)) == (54, 18, 24)
    known = {one.text for one in splits.train.examples}
    assert repeated(splits.train.examples, splits.train.examples) == 54
    assert repeated(splits.test.examples, splits.train.examples) == sum(
        one.text in known for one in splits.test.examples
    )
    parts = [{one.where for one in split.examples} for split in (splits.train, splits.valid, splits.test)]
    assert not (parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2])
    again = make_splits(dataclasses.replace(config, seeds=9))
    assert [one.where for one in again.valid.examples] == [one.where for one in splits.valid.examples]


def test_files_of_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,label\n"a, b",1\n"he said ""c""",0\n')
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "label": 10}\n\n{"text": "b", "label": 9}\n{"text": "c", "label": 9}\n'
    )
    (tmp_path / "b.tsv").write_text('x\t1\tan "open quote\ny\t0\tb\textra\n')
    (tmp_path / "bad.jsonl").write_text('{"text": 5, "label": "a"}\n')

    def read(name: str, **how: Any) -> tuple[list[str], tuple[str, ...]]:
        data = TaskData(train=str(tmp_path / name), valid=str(tmp_path / name), **how)
        splits = make_splits(FinetuneConfig(data=data))
        return [one.text for one in splits.train.examples], splits.labels

    assert read("a.csv") == (["a, b", 'he said "c"'], ("0", "1"))
    assert read("a.jsonl") == (["a", "b", "c"], ("9", "10"))  # in the order of numbers
    named: dict[str, Any] = {"columns": ("author", "label", "text")}
    assert read("b.tsv", **named, extra_columns=True) == (['an "open quote', "b"], ("0", "1"))
    with pytest.raises(UnmaskError, match=r"b.tsv, line 2 has 4 columns, data.columns 3"):
        read("b.tsv", **named)
    with pytest.raises(UnmaskError, match=r"bad.jsonl, line 1: the field 'text' is no text but int"):
        read("bad.jsonl")


def test_networks_without_a_width_and_other_arguments_are_refused(tmp_path: Path) -> None:
    model = small_model()
    with pytest.raises(UsageError, match="does not say how wide its vectors are"):
        BYTES.attach(unmask.as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2))
    with pytest.raises(UsageError, match="beyond the model's window of 32 tokens"):
        finetune(model, letters_config(tmp_path, length=64), device="cpu")
    with pytest.raises(UsageError, match="finetune takes a FinetuneConfig"):
        finetune(model, {"epochs": 3})  # type: ignore[arg-type]
    rows = [(text, text) for text in "abcabcabc"]
    data = TaskData(train=write_tsv(tmp_path / "c.tsv", [("text", "label"), *rows]))
    with pytest.raises(UsageError, match="f1 is of two classes"):
        finetune(model, FinetuneConfig(data=data, metrics=("f1",), out=str(tmp_path / "o")), device="cpu")
    for options, said in (
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"labels": "yes", "kind": "regression"}, "a regression has no labels"),
        ({"head.dropout": 1.0}, "dropout must lie in"),
        ({"optim.lrr": 1}, "did you mean 'lr'"),
        ({"data.held_out": 1.5}, "held_out lies between"),
    ):
        with pytest.raises(UsageError, match=said):
            load_finetune_config(None, options)


def test_a_recipe_keeps_what_it_does_not_say(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('labels = ["no", "yes"]\noptim = { lr = 3e-5 }\nhead = { pool = "first" }\n')
    config = load_finetune_config(tmp_path / "mine.toml", {"epochs": "4"})
    assert (config.optim.lr, config.optim.schedule, config.optim.muon, config.epochs) == (3e-5, "cosine", False, 4)
    assert config.head == Pooled(pool="first")
    assert config.labels == ("no", "yes")


# --- the commands -----------------------------------------------------------------------------------------------------


def test_the_commands(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_model().save(tmp_path / "base")
    config = letters_config(tmp_path)
    words = ["finetune", str(tmp_path / "base"), "--data.train", config.data.train, "--out", str(tmp_path / "new")]
    assert command([*words, "--epochs", "1", "--seeds", "1", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert "use it: unmask classify" in said.out
    assert "seed 0: step 3 of 3, validation accuracy" in said.err
    assert command([*words, "--epochs", "1", "--seeds", "1", "--device", "cpu", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["examples"] == {"train": 86, "valid": 10}
    assert said.err == ""  # nothing is done again
    assert command(["classify", str(done), "abxd", "a" * 50, "--device", "cpu", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [one["text"] for one in answers] == ["abxd", "a" * 50]
    assert answers[0]["label"] == "with"
    assert answers[1]["cut_tokens"] == 19
    file = ["--data", str(tmp_path / "test.tsv"), "--label-field", "label"]
    assert command(["classify", str(done), *file, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 33
    accuracy = json.loads((done / "report.json").read_text())["results"]["model"]["test"]["accuracy"]["most"]
    assert lines[-1].startswith(f"32 examples: accuracy {100 * accuracy:.1f}, F1")
    (tmp_path / "lines.txt").write_text("abc\n\nabx\n")
    assert command(["classify", str(done), "--data", str(tmp_path / "lines.txt"), "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    for bad, hint in (
        (["classify", str(done)], "nothing to classify"),
        (["classify", str(done), "a", "--field", "text"], "--field says how --data is read"),
        (["classify", str(done), "a", *file], "--data brings its own texts"),
        (["classify", str(tmp_path / "base"), "a"], "is no classifier"),
        (["finetune", "mine.toml"], "the model comes first"),
        (["finetune", "--tasks", "rte"], "--tasks belongs to a suite"),
        (["finetune", "--suite", "glue"], "needs --data-dir"),
    ):
        assert command(bad) == 2
        assert hint in capsys.readouterr().err


@pytest.mark.parametrize("name", ["more.tsv", "more.txt"])
def test_a_text_of_a_file_that_cannot_be_read_is_told_by_its_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, task = small_model(tokenizer=load_tokenizer("dna")), Task(labels=("no", "yes"), length=16)
    task.attach(model.denoiser)
    Classifier(model, task).save(tmp_path / "model")
    (tmp_path / name).write_text(("text\n" if name.endswith("tsv") else "TT\n") + "ACGT\nACXT\n")
    assert command(["classify", str(tmp_path / "model"), "--data", str(tmp_path / name), "--device", "cpu"]) == 1
    assert f"{name}, line 3: the tokenizer dna knows only A C G T N, the text has 'X'" in capsys.readouterr().err


def test_one_seed_of_a_run(tmp_path: Path) -> None:
    """The order of the examples: each once an epoch, another order in the next and with another seed."""
    config = letters_config(tmp_path, train=50)
    splits = make_splits(config)
    model: Model = small_model()
    task = Task(labels=splits.labels, length=32)
    from unmask.finetuning.seed_run import Work

    rows = {"train": make_rows(splits.train.examples, task, model)}
    work = Work(model, task, config, splits, rows, Watch(), lambda: False)
    runs = [SeedRun(work, "model", seed) for seed in (0, 1)]
    orders = [[i for step in steps for i in run._indices(step)] for run in runs for steps in (range(4), range(4, 8))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert [len(runs[0]._indices(step)) for step in range(4)] == [16, 16, 16, 2]
