"""Texts with prompts: read, measured, scored and written in one way, with the separator a model was trained with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import TINY, MakeConfig
from unmask.cli import run
from unmask.corpora import Document, room
from unmask.corpora.jsonl import Jsonl
from unmask.corpora.reading import read_like
from unmask.corpora.text import Text
from unmask.data.share import content_place as place
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.errors import DataError, ModelFolderError, UsageError
from unmask.model import Model, load
from unmask.objectives.mdlm import MDLM
from unmask.text.editing import check_fit
from unmask.training.loop import train

Capture = pytest.CaptureFixture[str]
LETTERS = "abcdefgh"


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A conditional run: a text repeats the letter of its prompt, so without the prompt it can only be guessed."""

    folder: Path
    corpus: Jsonl
    model: Model
    held_out: list[Document]
    file: Path  # of what the run has held out, with other fields beside


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, make_config: MakeConfig) -> Pairs:
    folder = tmp_path_factory.mktemp("pairs")
    lines = [{"text": LETTERS[i % 8] * (3 + i % 4), "source": f"{i}{LETTERS[i % 8]}"} for i in range(200)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    corpus = Jsonl(path=str(folder / "pairs.jsonl"), prompt_field="source", separator="=\n")
    config = make_config(
        folder / "run",
        steps=120,
        batch=32,
        valid_every=60,
        save_every=60,
        denoiser=dataclasses.replace(TINY, dropout=0.0),
        data={"train": corpus, "packing": "pad", "length": 16, "held_out": 0.2},
    )
    model = train(config, device="cpu")
    held = [document for document in corpus.documents() if place(document) < 0.2]
    texts = [{"text": one.text, "source": one.prompt.removesuffix("=\n")} for one in held]
    (folder / "held.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts), encoding="utf-8")
    return Pairs(folder / "run", corpus, model, held, folder / "held.jsonl")


def measured(capsys: Capture, *words: str) -> dict[str, Any]:
    assert run(["eval", *words, "--json", "--device", "cpu"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# --- eval -------------------------------------------------------------------------------------------------------------


def test_the_same_texts_measure_the_same_held_out_and_as_a_file(pairs: Pairs, capsys: Capture) -> None:
    here = measured(capsys, str(pairs.folder))
    there = measured(capsys, str(pairs.folder), "--data", str(pairs.file))
    for key in ("nats", "tokens", "bytes", "sequences"):
        assert there[key] == here[key]
    assert here["protocol"]["data"] == "held out by the run"
    for found in (here, there):
        assert found["protocol"]["prompts"] == "given, not scored"
        assert found["protocol"]["separator"] == r"'=\n' between prompt and text"
        assert found["protocol"]["labels"] == "none"
    # Without the prompts, as a file was read before: another measure, and the protocol says so.
    alone = measured(capsys, str(pairs.folder), "--data", str(pairs.file), "--prompt-field", "")
    assert alone["nats_per_token"] > 1.5 * here["nats_per_token"]
    assert alone["protocol"]["prompts"] == "none, unlike the run's"
    assert run(["eval", str(pairs.folder), "--data", str(pairs.file), "--device", "cpu"]) == 0
    assert r"prompts=given, not scored, labels=none, separator='=\n' between prompt and text" in capsys.readouterr().out


def test_flags_of_reading_win(pairs: Pairs, tmp_path: Path, capsys: Capture) -> None:
    """The same rows under other names, from a model that has lost its run: they measure the same."""
    here = measured(capsys, str(pairs.folder), "--data", str(pairs.file))
    lines = [{"answer": one.text, "q": one.prompt.removesuffix("=\n")} for one in pairs.held_out]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    names = ["--data", str(other), "--field", "answer", "--prompt-field", "q"]
    assert measured(capsys, str(pairs.folder), *names)["nats"] == here["nats"]
    lost = measured(capsys, str(pairs.folder / "model"), *names)  # its separator is the folder's
    assert lost["nats"] == here["nats"]
    another = measured(capsys, str(pairs.folder), *names, "--separator", "!!")
    assert another["nats"] != here["nats"]
    assert another["protocol"]["separator"] == "'!!' between prompt and text"
    assert run(["eval", str(pairs.folder), "--data", str(other), "--device", "cpu"]) == 1
    assert "has no field 'source'" in capsys.readouterr().err
    assert run(["eval", str(pairs.folder), "--field", "answer", "--device", "cpu"]) == 2
    assert "leave out --field, or give --data" in capsys.readouterr().err
    (tmp_path / "plain.txt").write_text("aaaa", encoding="utf-8")
    words = ["eval", str(pairs.folder), "--data", str(tmp_path / "plain.txt"), "--device", "cpu"]
    assert run([*words, "--prompt-field", "q"]) == 2
    assert "--prompt-field: " in capsys.readouterr().err
    assert measured(capsys, *words[1:])["protocol"]["prompts"] == "none, unlike the run's"


def test_documents_are_parted_as_the_run_parts_them(make_config: MakeConfig, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("|".join("abcdefgh"[i % 8] * (4 + i % 5) for i in range(60)), encoding="utf-8")
    corpus = Text(path=str(path), separator="|")
    config = make_config(tmp_path / "run", steps=2, data={"train": corpus, "valid": corpus, "packing": "pad"})
    train(config, device="cpu")
    here = measured(capsys, str(tmp_path / "run"))
    there = measured(capsys, str(tmp_path / "run"), "--data", str(path))
    assert (there["nats"], there["sequences"]) == (here["nats"], 60)
    assert there["protocol"]["separator"] == "'|' between documents"
    assert measured(capsys, str(tmp_path / "run"), "--data", str(path), "--separator", "a")["sequences"] != 60


def test_labels_are_read_as_the_run_reads_them(make_config: MakeConfig, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "kinds.jsonl"
    lines = [{"text": "ab"[i % 2] * 6, "kind": i % 2} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    corpus = Jsonl(path=str(path), label_field="kind")
    denoiser = DiT(size="nano", hidden=32, blocks=1, heads=2, dropout=0.0, classes=2)
    data = {"train": corpus, "valid": corpus, "packing": "pad", "length": 16}
    model = train(make_config(tmp_path / "run", steps=40, denoiser=denoiser, data=data), device="cpu")
    here = measured(capsys, str(tmp_path / "run"))
    there = measured(capsys, str(tmp_path / "run"), "--data", str(path))
    assert there["nats"] == here["nats"]
    assert there["protocol"]["labels"] == "given"
    without = measured(capsys, str(tmp_path / "run"), "--data", str(path), "--label-field", "")
    assert without["protocol"]["labels"] == "none, unlike the run's"
    assert without["nats"] > here["nats"]
    # Each text's own label, or one for all.
    texts, labels = [line["text"] for line in lines], [line["kind"] for line in lines]
    assert model.score(texts, labels=labels, num_samples=4).nats == pytest.approx(here["nats"], rel=1e-5)
    ones = model.score(["aaa", "bbb"], labels=[1, 1])
    assert ones.nats_B.tolist() == pytest.approx(model.score(["aaa", "bbb"], label=1).nats_B.tolist(), rel=1e-6)
    assert model.score("aaa", labels=[None]).nats == model.score("aaa").nats
    for wrong in ({"labels": [0]}, {"labels": [0, 1], "label": 1}):
        with pytest.raises(UsageError, match="one label for all texts, or as many labels as texts"):
            model.score(["aaa", "bbb"], **wrong)
    with pytest.raises(UsageError, match="label 2 is not among"):
        model.score(["aaa", "bbb"], labels=[0, 2])
    words = ["score", str(tmp_path / "run"), "aaa", "--label", "1", "--json", "--device", "cpu"]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)["scores"][0]
    assert (found["nats"], found["label"]) == (pytest.approx(model.score("aaa", label=1, num_samples=64).nats), 1)


def test_a_run_whose_data_changed_is_not_measured_on_it(
    make_config: MakeConfig, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": "the cat " * (1 + i % 5)}) + "\n" for i in range(40)))
    config = make_config(tmp_path / "run", steps=2, data={"train": Jsonl(path=str(path)), "held_out": 0.3})
    train(config, device="cpu")
    words = ["eval", str(tmp_path / "run"), "--device", "cpu"]
    assert run(words) == 0
    before = path.read_text()
    path.write_text(before + '{"text": "a new line"}\n')
    capsys.readouterr()
    assert run(words) == DataError.exit_code
    told = capsys.readouterr()
    assert told.out == ""
    assert "the data changed since the run in" in told.err
    assert "restore it, or give --data FILE" in told.err
    assert run([*words, "--data", str(path)]) == 0
    path.write_text(before)
    assert run(words) == 0
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / f"gone-{checkpoint.name}")
    capsys.readouterr()
    assert run(words) == 0
    assert "data=held out by the run, if the data is as it was: no checkpoint tells" in capsys.readouterr().out


def test_a_file_of_another_kind_is_read_by_what_means_the_same_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "a.data").write_text('{"text": "a"}')
    pairs = Jsonl(path="b.jsonl", field="y", prompt_field="x", separator="|")
    assert read_like(str(tmp_path / "a.txt"), pairs) == Text(path=str(tmp_path / "a.txt"))
    parted = Text(path="b.txt", separator="|")
    assert read_like(str(tmp_path / "a.jsonl"), parted) == Jsonl(path=str(tmp_path / "a.jsonl"))
    same = dataclasses.replace(pairs, path=str(tmp_path / "a.jsonl"))
    assert read_like(str(tmp_path / "a.jsonl"), pairs) == same
    odd = dataclasses.replace(pairs, path="b.data")  # an ending that tells nothing
    assert read_like(str(tmp_path / "a.data"), odd) == dataclasses.replace(odd, path=str(tmp_path / "a.data"))
    with pytest.raises(UsageError, match="name the prompt_field"):
        Jsonl(path="b.jsonl", separator="|")
    for kind in map(room.get, room.names()):  # else a run's separator were lost in a file of that kind
        names = {option.name for option in dataclasses.fields(kind)}
        assert "prompt_field" not in names or "separator" in names, kind


# --- score ------------------------------------------------------------------------------------------------------------


def test_score_and_eval_agree_row_by_row(pairs: Pairs, capsys: Capture) -> None:
    """The rows, their draws and so their numbers are the same: prompts are tokenized as packing does it."""
    here = measured(capsys, str(pairs.folder), "--num-samples", "8")
    texts = [one.text for one in pairs.held_out]
    prompts = [one.prompt.removesuffix("=\n") for one in pairs.held_out]
    bound = pairs.model.score(texts, prompts=prompts, num_samples=8)
    assert bound.nats == pytest.approx(here["nats"], rel=1e-5)
    assert (bound.tokens, bound.num_bytes) == (here["tokens"], here["bytes"])
    assert pairs.model.score(texts, num_samples=8).nats_per_token > 1.5 * bound.nats_per_token
    apart = pairs.model.score(texts, prompts=[one.prompt for one in pairs.held_out], separator="", num_samples=8)
    assert apart.nats == bound.nats


def test_score_on_the_command_line_takes_prompts_and_files(pairs: Pairs, capsys: Capture) -> None:
    words = ["score", str(pairs.folder), "--num-samples", "8", "--json", "--device", "cpu"]
    assert run([*words, "--prompt", "7c", "cccc", "dddd"]) == 0
    right, wrong = json.loads(capsys.readouterr().out)["scores"]
    assert right["nats"] == pytest.approx(pairs.model.score("cccc", prompts="7c", num_samples=8).nats)
    assert right["nats"] < wrong["nats"]
    assert (right["prompt"], right["tokens"]) == ("7c=\n", 5)
    assert run([*words, "--prompt", "7c", "--prompt", "8d", "cccc", "dddd"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"][1]["nats"] < wrong["nats"]
    assert run([*words, "--data", str(pairs.file)]) == 0
    found = json.loads(capsys.readouterr().out)["scores"]
    assert [one["text"] for one in found] == [one.text for one in pairs.held_out]
    first = pairs.held_out[0]
    own = pairs.model.score(first.text, prompts=first.prompt, separator="", num_samples=8)
    assert found[0]["nats"] == pytest.approx(own.nats)
    for more, message in (
        (["--prompt", "a", "--prompt", "b", "x", "y", "z"], "2 prompts for 3 texts"),
        (["x", "--field", "text"], "--field is for the texts of a file"),
        (["x", "--separator", "|"], "give --prompt"),
        (["--data", str(pairs.file), "--prompt", "a"], "--data brings its own"),
    ):
        assert run([*words, *more]) == 2
        assert message in capsys.readouterr().err


def test_a_prompt_stands_before_every_window_of_a_long_text(pairs: Pairs) -> None:
    model, text = pairs.model, "abcdefgh" * 3
    head, ids = [*model.begin, *b"7c=\n"], [*text.encode(), model.tokenizer.eot_id]
    rows = [[*head, *ids[lo : lo + 10], *model.end] for lo in range(0, len(ids), 10)]
    canvas = model.canvas(rows, may_end=True)
    scored_BL = (torch.arange(16) >= len(head)) & (torch.arange(16) < canvas.length_B[:, None] - len(model.end))
    parts = model.objective.bound(
        model.denoiser, canvas.tokens, canvas.valid_BL, scored_BL=scored_BL, seed=3, num_samples=8
    )
    found = model.score(text, prompts="7c", seed=3, num_samples=8)
    assert found.nats == pytest.approx(parts.nats, rel=1e-9)
    assert found.tokens == len(ids)
    with pytest.raises(UsageError, match=r"the prompt takes 16 tokens, the model's window holds 16: give a shorter"):
        model.score(text, prompts="x" * 13)
    with pytest.raises(UsageError, match="2 prompts for 1 texts"):
        model.score(text, prompts=["a", "b"])


# --- generate ---------------------------------------------------------------------------------------------------------


def test_a_model_knows_its_separator(pairs: Pairs, tmp_path: Path) -> None:
    assert load(pairs.folder, device="cpu").separator == "=\n"
    pairs.model.save(tmp_path / "model")
    model = load(tmp_path / "model", device="cpu")
    texts = model.generate(8, 12, "9c", seed=1)
    assert all(text.startswith("9c=\n") for text in texts)
    written = model.generate(8, 12, "9c", seed=1, continuation_only=True)
    assert texts == ["9c=\n" + piece for piece in written]
    assert sum(piece.count("c") for piece in written) > 0.6 * sum(map(len, written))
    assert model.generate(1, 12, "9c", separator="", seed=1)[0].startswith("9c")
    assert model.generate(2, 12, "9c=\n", separator="", seed=1) == texts[:2]
    inside = model.generate(2, 12, "9c", "d", seed=1, continuation_only=True)
    assert [f"9c=\n{piece}d" for piece in inside] == model.generate(2, 12, "9c", "d", seed=1)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for wrong in (5, None, "x" * 1001):
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"separator": wrong}))
        with pytest.raises(ModelFolderError, match="separator is no text of at most 1000 characters"):
            load(tmp_path / "model")


def test_continuations_on_the_command_line(pairs: Pairs, tmp_path: Path, capsys: Capture) -> None:
    words = ["generate", str(pairs.folder), "--length", "12", "--prompt", "9c", "--prompt", "8d", "--num", "2"]
    words += ["--device", "cpu", "--seed", "3"]
    assert run([*words, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert run([*words, "--continuation-only", "--json"]) == 0
    apart = json.loads(capsys.readouterr().out)
    assert apart["prompts"] == ["9c", "9c", "8d", "8d"]
    assert apart["separator"] == "=\n"
    assert [f"{p}=\n{text}" for p, text in zip(apart["prompts"], apart["texts"], strict=True)] == whole["texts"]
    assert run([*words, "--continuation-only"]) == 0
    assert capsys.readouterr().out == "\n\n".join(apart["texts"]) + "\n"
    assert run([*words, "--continuation-only", "--out", str(tmp_path / "many")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "many" / "part-00000.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["text"]) for line in lines] == list(
        zip(apart["prompts"], apart["texts"], strict=True)
    )
    capsys.readouterr()
    assert run([*words, "--out", str(tmp_path / "many")]) == 2
    assert "was begun with another continuation_only" in capsys.readouterr().err


# --- what was typed stays ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "naive", "the", "cat", "sat", "##s", "on"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer = load_tokenizer(str(folder))
    network = TINY.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    return Model(denoiser=network, tokenizer=tokenizer, objective=MDLM(), length=16)


def test_what_was_given_comes_back_letter_by_letter(bert: Model) -> None:
    for seed in range(8):
        for text in ("Naïve ☃ [MASK:2] The  Cat.", "☃\t[MASK:1..3]"):
            before, after = text.split("[MASK")[0], text.split("]")[-1]
            filled = bert.fill(text, seed=seed)[0]
            assert filled.startswith(before)
            assert filled.endswith(after)
            assert len(filled) > len(before) + len(after)
        text = bert.generate(1, 10, "Naïve ☃", " The  Cat.", seed=seed)[0]
        assert text.startswith("Naïve ☃")
        assert text.endswith(" The  Cat.")


def test_a_constraint_of_the_whole_text_is_asked_of_what_comes_back(bert: Model) -> None:
    """The ids of Naïve spell naive: a pattern that holds for them would not hold for what was given."""
    from unmask.constraints.words import Words

    held = Words(allow=("naive", "the", "cat", "sat", "on"), over="text")
    assert set(bert.fill("naive [MASK:2]", constraint=held)[0].split()) <= {"naive", "the", "cat", "sat", "on"}
    with pytest.raises(UsageError, match="this vocabulary spells otherwise than it was given"):
        check_fit(bert, "Naïve [MASK:2]", held)
    for call in (
        lambda: bert.fill("Naïve [MASK:2]", constraint=held),
        lambda: bert.generate(1, 6, "Naïve", constraint=held),
    ):
        with pytest.raises(UsageError, match="this vocabulary spells otherwise than it was given"):
            call()


def test_labels_of_a_file_are_the_model_s_or_refused(make_config: MakeConfig, tmp_path: Path, capsys: Capture) -> None:
    lines = [{"text": "ab"[i % 2] * 6, "mood": ("neg", "pos")[i % 2]} for i in range(40)]
    path, strange = tmp_path / "moods.jsonl", tmp_path / "strange.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    strange.write_text(json.dumps({"text": "aaa", "mood": "1"}) + "\n", encoding="utf-8")
    corpus = Jsonl(path=str(path), label_field="mood")
    for classes in (0, 2):
        denoiser = DiT(size="nano", hidden=32, blocks=1, heads=2, dropout=0.0, classes=classes)
        given = corpus if classes else dataclasses.replace(corpus, label_field=None)
        data = {"train": given, "valid": given, "packing": "pad", "length": 16}
        train(make_config(tmp_path / f"run{classes}", steps=2, denoiser=denoiser, data=data), device="cpu")
    for command in ("eval", "score"):  # of a model that knows no classes
        words = [command, str(tmp_path / "run0"), "--data", str(path), "--device", "cpu"]
        assert run([*words, "--label-field", "mood"]) == 2
        assert "this model knows no classes: leave out --label-field" in capsys.readouterr().err
    for command, code in (("eval", 1), ("score", 2)):  # of one whose classes are words: numbers are none of them
        assert run([command, str(tmp_path / "run2"), "--data", str(strange), "--device", "cpu"]) == code
        assert "known: neg, pos" in capsys.readouterr().err
    without = measured(capsys, str(tmp_path / "run2"), "--data", str(path), "--label-field", "")
    assert without["protocol"]["labels"] == "none, unlike the run's"


def test_a_separator_that_no_folder_would_keep_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="1001 characters, 1000 are allowed"):
        Jsonl(path="a.jsonl", prompt_field="q", separator="=" * 1001)
