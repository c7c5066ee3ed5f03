"""benchmarks/stages.py: what is done is not repeated, what is stopped goes on; the tables say what folders hold."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from tiny import Trained
from unmask.config import DataConfig, load_config
from unmask.corpora import Document
from unmask.corpora.concat import Concat
from unmask.corpora.fasta import Fasta
from unmask.corpora.jsonl import Jsonl
from unmask.corpora.memory import Memory
from unmask.corpora.text import Text
from unmask.corpora.tokens import Tokens
from unmask.data.packing import Rows, rows_of
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import UsageError
from unmask.finetuning.config import load_finetune_config

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the scripts import from their folder


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), BENCHMARKS / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


STAGES = """
[settings]
word = "one two"
other = ""

[[stage]]
name = "first"
python = "{here}/say.py {word} {data}"
into = "{out}/said/first.txt"

[[stage]]
name = "left"
python = "{here}/say.py left"
beside = "both"

[[stage]]
name = "right"
python = "{here}/slow.py {out}/right.json"
beside = "both"
makes = ["{out}/right.json"]
"""
SLOW = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
begun = pathlib.Path(sys.argv[1] + ".begun")
if not begun.exists():
    begun.write_text("")
    time.sleep(30)
pathlib.Path(sys.argv[1]).write_text("{}")
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "say.py").write_text("import sys; print(sys.argv[1:])")
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "stages.toml").write_text(STAGES)
    (tmp_path / "a b").mkdir()  # a space in a place stays in one word
    return tmp_path


def test_stopped_it_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stages, out = script("stages"), place / "out"
    monkeypatch.setattr(stages, "GRACE", 5.5)
    words = [str(place / "stages.toml"), "--data", str(place / "a b"), "--out", str(out), "--jobs", "2"]
    back = ["--back", str(place / "small.tar.gz")]
    assert stages.main([*words, "--minutes", "0.15", *back]) == 75
    assert (out / "said" / "first.txt").read_text() == f"['one', 'two', {str(place / 'a b')!r}]\n"
    said = capsys.readouterr().out
    assert "left: done" in said
    assert "right: stopped" in said
    # elsewhere: what is small is put in place, and what is done is not done again
    (place / "say.py").write_text("raise SystemExit('again')")
    words[4], other = str(place / "other"), place / "other"
    assert stages.main([*words, "--finished", str(place / "small.tar.gz"), "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "right: to do"
    (other / "right.json.begun").write_text("")
    assert stages.main([*words, "--minutes", "1"]) == 0
    (other / "right.json").unlink()  # what it makes is gone
    assert stages.main([*words, "--list"]) == 0
    assert capsys.readouterr().out.endswith("right: to do\n")
    with pytest.raises(SystemExit, match=r"first was done as"):
        stages.main([*words, "--set", "word=three", "--list"])
    with pytest.raises(SystemExit, match=r"first was done as"):  # the first of two counts, too
        stages.main([*words, "--set", "word=three", "--set", "other=x", "--list"])
    with pytest.raises(SystemExit, match="no setting 'wrod'; known: other, word"):
        stages.main([*words, "--set", "wrod=three", "--list"])


MODELS = """
[[stage]]
name = "make"
python = "{here}/make.py {out}/model-a"
makes = ["{out}/model-a"]

[[stage]]
name = "other"
python = "{here}/make.py {out}/model-b"
makes = ["{out}/model-b"]

[[stage]]
name = "measure"
python = "{here}/say.py hf:{out}/model-a {out}"
into = "{out}/said.json"

[[stage]]
name = "last"
python = "{here}/say.py {out}"
into = "{out}/last.md"

[[stage]]
name = "tune"
python = "{here}/tune.py {out}/model-b --out {out}/tuned"
"""
TUNE = """
import pathlib, sys
out = pathlib.Path(sys.argv[-1])
out.mkdir(exist_ok=True)
was, now = out / "of.json", (pathlib.Path(sys.argv[1]) / "model.safetensors").read_text()
if was.exists() and was.read_text() != now:
    sys.exit("begun with other weights")
was.write_text(now)
sys.exit(75 if (pathlib.Path(__file__).parent / "stop").exists() else 0)
"""
MAKE = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
(folder / "config.json").write_text("{}")
(folder / "model.safetensors").write_text(folder.parent.name)
(folder.parent / "large.json").write_bytes(b"x" * 2000)
"""


def test_weights_are_made_again_only_where_a_stage_that_is_left_reads_them(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = script("stages")
    monkeypatch.setattr(stages, "MOST", 1000)
    (place / "stages.toml").write_text(MODELS)
    (place / "make.py").write_text(MAKE)
    (place / "tune.py").write_text(TUNE)
    small = str(place / "small.tar.gz")

    def go(out: str, *words: str) -> list[str]:
        assert stages.main([str(place / "stages.toml"), "--out", str(place / out), *words]) == 0
        said = capsys.readouterr()
        assert ("large.json has more than" in said.err) == (small in words and "--back" in words)
        return [line.removesuffix(": begun") for line in said.out.splitlines() if ": begun" in line]

    assert go("here", "--minutes", "1", "--back", small) == ["make", "other", "measure", "last", "tune"]
    with tarfile.open(small) as archive:
        assert sorted(archive.getnames()) == [
            "last.md",
            "said.json",
            *(f"stages/{n}.json" for n in NAMES),
            "tuned/of.json",
        ]
    (place / "here" / "said.json").unlink()
    assert go("here", "--minutes", "1") == ["measure: begun, again: its output is not here"]
    assert go("there", "--minutes", "1", "--finished", small) == []
    (place / "there" / "stages" / "measure.json").unlink()
    assert stages.main([str(place / "stages.toml"), "--out", str(place / "there"), "--list"]) == 0
    assert [line.split(": ")[1][:10] for line in capsys.readouterr().out.splitlines()] == [
        "to do",
        "done elsew",
        "to do",
        "done, 0 s",
        "done, 0 s",
    ]
    begun = go("there", "--minutes", "1")
    assert begun == [
        "make: begun, again: its weights are not here, and what was measured of those before stays",
        "measure",
    ]
    with pytest.raises(SystemExit, match=r"cannot put .*none\.tar\.gz in place"):
        go("else", "--finished", str(place / "none.tar.gz"))


NAMES = ("last", "make", "measure", "other", "tune")


def test_what_a_stage_has_only_begun_does_not_travel_to_other_weights(place: Path) -> None:
    stages, small = script("stages"), str(place / "small.tar.gz")
    (place / "stages.toml").write_text(MODELS)
    for name, text in (("make.py", MAKE), ("tune.py", TUNE), ("stop", "")):
        (place / name).write_text(text)
    words = [str(place / "stages.toml"), "--minutes", "1", "--out"]
    assert stages.main([*words, str(place / "here"), "--back", small]) == 75
    assert (place / "here" / "tuned" / "of.json").read_text() == "here"
    (place / "stop").unlink()
    assert stages.main([*words, str(place / "there"), "--finished", small]) == 0
    assert (place / "there" / "tuned" / "of.json").read_text() == "there"


def test_a_run_that_was_stopped_at_its_end_is_done(place: Path, trained: Trained) -> None:
    """Killed between its last save and the word that it is done: train --resume has nothing to go on with."""
    stages, out = script("stages"), place / "out"
    stage = 'name = "run"\nresume = "{out}/run"\nmakes = ["{out}/run/model"]\n'
    (place / "stages.toml").write_text(f'[settings]\nmore = ""\n[[stage]]\n{stage}python = "{{here}}/no.py {{more}}"\n')
    (place / "no.py").write_text("raise SystemExit(2)")
    words = [str(place / "stages.toml"), "--out", str(out), "--minutes", "1"]
    with pytest.raises(SystemExit, match="exit code 2"):
        stages.main(words)
    shutil.copytree(trained.folder, out / "run")
    assert stages.main(words) == 0
    words[2] = str(place / "other")
    with pytest.raises(SystemExit, match="exit code 2"):
        stages.main([*words, "--set", "more=x"])
    shutil.copytree(trained.folder, place / "other" / "run")
    with pytest.raises(SystemExit, match="exit code 2"):  # another command began it
        stages.main(words)


def test_a_stage_that_fails_says_so(place: Path) -> None:
    (place / "say.py").write_text("raise SystemExit('no such thing')")
    with pytest.raises(SystemExit, match=r"first failed with exit code 1:\nno such thing"):
        script("stages").main([str(place / "stages.toml"), "--out", str(place / "out"), "--minutes", "2"])
    assert not (place / "out" / "said").exists()


# --- Table 4 ----------------------------------------------------------------------------------------------------------


def test_the_recipes_of_table_4() -> None:
    read = {name: load_config(BENCHMARKS / "glue" / f"{name}.toml") for name in ("mlm", "ar", "mdlm_ft")}
    assert {type(config.objective).__name__ for config in read.values()} == {"MLM", "AR", "MDLM"}
    assert len({repr(config.data) for config in read.values()}) == 1
    assert read["mlm"].denoiser == read["mdlm_ft"].denoiser
    assert (read["mlm"].steps, read["ar"].steps, read["mdlm_ft"].steps) == (10_000, 10_000, 5_000)
    assert load_finetune_config(BENCHMARKS / "glue" / "finetune.toml").length == 128
    stages = script("stages").Stages(BENCHMARKS / "glue" / "table4.toml", "data", Path("out"), {})
    assert len(stages.stages) == 9


def seeds(out: Path, model: str, values: dict[str, list[float]]) -> None:
    metric = {"cola": "matthews", "rte": "accuracy"}
    for task, scores in values.items():
        folder = out / "glue" / model / task / "seeds"
        folder.mkdir(parents=True)
        for seed, score in enumerate(scores):
            said = {"seed": seed, "scores": {"test": {metric[task]: score}}}
            (folder / f"model-{seed}.json").write_text(json.dumps(said))


def test_what_the_table_says(tmp_path: Path) -> None:
    table = script("glue/table")
    seeds(tmp_path, "ar", {"cola": [0.20, 0.22, 0.24], "rte": [0.50, 0.52, 0.54]})
    seeds(tmp_path, "mlm", {"cola": [0.400, 0.402, 0.404], "rte": [0.600, 0.602, 0.604]})
    seeds(tmp_path, "mdlm_ft", {"cola": [0.400, 0.401, 0.402], "rte": [0.600, 0.601, 0.602]})
    page = table.page(tmp_path)
    assert "| AR | 22.0 ± 5.0 (3) | 52.0 ± 5.0 (3) | 37.0 ± 5.0 (3) |" in page  # t of 2: 4.303 · 2 / √3
    assert "AR is behind: yes; the difference to MLM is -13.20" in page
    assert "MLM + MDLM-FT is within 1.5 points: yes; the difference to MLM is -0.10" in page
    gap, half = table.welch([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert gap == 0
    assert half == pytest.approx(2.776 * (2 / 3) ** 0.5, rel=5e-3)  # t of 4
    seeds(tmp_path / "few", "mlm", {"cola": [0.4]})
    assert "fewer than two seeds" in table.page(tmp_path / "few")


# --- adapting ---------------------------------------------------------------------------------------------------------


def test_a_file_in_parts_comes_back_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, file, folder, back = script("parts"), tmp_path / "a.gguf", tmp_path / "parts", tmp_path / "back.gguf"
    file.write_bytes(bytes(range(256)) * 20)
    assert parts.main(["split", str(file), str(folder), "--most", str(2000 / (1 << 20))]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["a.gguf.001", "a.gguf.002", "a.gguf.003", "a.gguf.json"]
    (folder / "a.gguf.002").rename(tmp_path / "late")
    assert parts.main(["join", str(folder), str(back)]) == 75
    assert capsys.readouterr().err == "missing or not whole: a.gguf.002\n"
    (folder / "a.gguf.002").write_bytes(b"x" * 2000)
    assert parts.join(folder, back) == ["a.gguf.002"]
    assert not back.exists()
    (tmp_path / "late").replace(folder / "a.gguf.002")
    assert parts.main(["join", str(folder), str(back)]) == 0
    assert back.read_bytes() == file.read_bytes()
    assert parts.main(["join", str(file), str(tmp_path / "copy")]) == 0
    with pytest.raises(SystemExit, match="holds 0 lists of parts"):
        parts.join(tmp_path / "parts" / "..", back)


def test_a_seed_of_several_folds_is_their_mean_by_examples(tmp_path: Path) -> None:
    table = script("glue/table")
    seeds = tmp_path / "rte" / "seeds"
    seeds.mkdir(parents=True)
    for seed, fold, score, size in ((0, 0, 0.5, 30), (0, 1, 0.8, 10), (1, 0, 0.9, 30)):
        numbers = {"seed": seed, "fold": fold, "scores": {"test": {"accuracy": score}}, "examples": {"test": size}}
        (seeds / f"model-{seed}-fold-{fold}.json").write_text(json.dumps(numbers))
    assert table.scores(tmp_path) == {"rte": {0: pytest.approx(0.575)}}  # of the second seed a fold is missing


def test_what_the_table_of_adapting_says(tmp_path: Path) -> None:
    table = script("adapt/table")
    for when, value in (("before", 1.25), ("after", 1.5)):
        (tmp_path / when).mkdir()
        found = {"bits_per_byte": value, "bits_per_byte_ci95": [value - 0.1, value + 0.1]}
        sets = {"sets": {"ptb": {"title": "PTB", **found}}}
        scores = [{"of": "15% hidden, spans", "name": "right tokens", "value": 100 * value, "ci95": [0.0, 2.0], "n": 2}]
        for name, said in (("wiki", found), ("sets", sets), ("infilling", {"sets": {"v": {"scores": scores}}})):
            (tmp_path / when / f"{name}.json").write_text(json.dumps(said))
    (tmp_path / "run").mkdir()
    lines = [{"step": step, "valid_nats_per_token": nats} for step, nats in ((0, 4.0), (10, 3.0), (20, 3.5))]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = table.page(tmp_path)
    assert "4.000 nats per token at step 0, and 3.000 at step 10" in page
    assert "| PTB | 1.2500 ± 0.1000 | 1.5000 ± 0.1000 |" in page
    assert "| 15% hidden, spans, right tokens | 125.0 ± 1.0 | 150.0 ± 1.0 |" in page
    assert "judged" not in page  # nothing of it is there
    stages = script("stages").Stages(BENCHMARKS / "adapt" / "stages" / "smollm2.toml", "data", Path("out"), {})
    assert [stage.name for stage in stages.stages][:2] == ["join", "import"]


# --- the corpus concat ------------------------------------------------------------------------------------------------


def test_several_corpora_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    (tmp_path / "b.txt").write_text("three")
    lines, text = Jsonl(path=str(tmp_path / "a.jsonl"), field="body"), Text(path=str(tmp_path / "b.txt"))
    both = Concat(of=(lines, text))
    assert [document.text for document in both.documents()] == ["one", "two", "three"]
    assert [document.text for document in both.documents()] == ["one", "two", "three"]
    other = Concat(of=(text, lines))
    assert len({both.fingerprint(), other.fingerprint(), Concat(of=(lines,)).fingerprint()}) == 3
    (tmp_path / "b.txt").write_text("four")
    assert both.fingerprint() != Concat(of=(lines, Memory(texts=("three",)))).fingerprint()
    assert both.absolute() == both
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'data = { train = { name = "concat", of = [{ name = "jsonl", path = "a.jsonl" }, { name = "stdlib" }] } }'
    )
    train = load_config(recipe).data.train
    assert isinstance(train, Concat)
    assert train.absolute().of[0].path == str(Path("a.jsonl").absolute())  # type: ignore[attr-defined]


def test_what_does_not_go_together(tmp_path: Path) -> None:
    asked = Memory(texts=(Document("b", "a"),))
    for parts, said in (
        ((), "needs corpora"),
        ((Memory(texts=("a",)), asked), "some have prompts"),
        ((Tokens(path="ids/"),), "shards of tokens"),
    ):
        with pytest.raises(UsageError, match=said):
            Concat(of=parts)
    assert Concat(of=(asked,)).has_prompts
    genome = tmp_path / "g.fa"
    genome.write_text(">one\nACGT\n")
    with pytest.raises(UsageError):  # each is asked what is held out beside it
        Concat(of=(Fasta(path=str(genome)),)).check_beside(Fasta(path=str(genome)))


@pytest.mark.parametrize("joined", ["train", "valid", "both"])
def test_what_is_joined_is_not_learned_and_held_out(joined: str, tmp_path: Path) -> None:
    genome = tmp_path / "g.fa"
    genome.write_text(">one\nACGT\n>two\nTTTT\n")
    dna, other = load_tokenizer("dna"), Memory(texts=("ACGT",))

    def rows(held_out: str) -> Rows:
        train, valid = (Fasta(path=str(genome), records=(record,)) for record in ("one", held_out))
        train_too, valid_too = Concat(of=(other, train)), Concat(of=(Concat(of=(valid,)), other))
        data = DataConfig(
            train=train if joined == "valid" else train_too,
            valid=valid if joined == "train" else valid_too,
            length=4,
            cache=str(tmp_path / "cache"),
        )
        return rows_of(data, dna, "valid")

    assert len(rows("two")) > 0
    with pytest.raises(UsageError, match="one from 0 to its end is in data"):
        rows("one")
