"""The catalogue of what goes wrong: one line on stderr, the exit code, an empty stdout, nothing half-written."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask.errors
import unmask.storage.model_folder
import unmask.training.checkpoint.files
from unmask.cli import run
from unmask.config import to_dict
from unmask.data.rows import RowWriter
from unmask.errors import MissingExtraError, UnmaskError, UsageError, did_you_mean
from unmask.model import Model, load
from unmask.training.callbacks import MetricsFile
from unmask.training.checkpoint.files import load_checkpoint
from unmask.training.loop import train

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: Any,
    trained_ar: Any,
    make_config: Any,
    corpus_file: Path,
) -> Path:
    """A folder with models, a recipe and a number of wrong files; the working folder of the command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(trained.model_folder)
    (tmp_path / "ar").symlink_to(trained_ar.model_folder)
    (tmp_path / "lines.txt").symlink_to(corpus_file)
    (tmp_path / "r.json").write_text(json.dumps(to_dict(make_config(Path("run"), steps=2))), encoding="utf-8")
    (tmp_path / "half").symlink_to(trained.folder)
    (tmp_path / "wrong-key.toml").write_text("stepz = 3\n", encoding="utf-8")
    (tmp_path / "wrong-value.toml").write_text('steps = "many"\n', encoding="utf-8")
    (tmp_path / "no.toml").write_text("steps = = 3\n", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    (tmp_path / "blank.txt").write_text(" \n \n", encoding="utf-8")
    (tmp_path / "short.txt").write_text("a few words", encoding="utf-8")
    (tmp_path / "upper.txt").write_text("Some Words With Capitals " * 40, encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 40)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")
    (tmp_path / "field.jsonl").write_text('{"txt": "a"}\n', encoding="utf-8")
    (tmp_path / "cut.txt.gz").write_bytes(b"\x1f\x8b\x08\x00 not a gzip file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "cut-model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        data = (trained.model_folder / name).read_bytes()
        (tmp_path / "cut-model" / name).write_bytes(data[:-100] if name.endswith("tensors") else data)
    return tmp_path


CASES: list[tuple[str, int, str]] = [
    # --- the command line itself
    ("trian demo", 2, "'train'"),
    ("generate model --lenght 3", 2, "'length'"),
    ("eval model", 2, "--data"),
    ("generate model --num two", 2, "--num"),
    ("generate model --num", 2, "--num"),
    ("fill model", 2, "text"),
    ("generate model --num 1 --num", 2, "--num"),
    ("plugins noises", 2, "'noise'"),
    ("plugins --json --markdown", 2, "argument"),
    # --- recipes
    ("train gone.toml", 2, "gone.toml"),
    ("train dmo", 2, "'demo'"),
    ("train wrong-key.toml", 2, "'steps'"),
    ("train wrong-value.toml", 2, "steps"),
    ("train no.toml", 2, "no.toml"),
    ("train folder", 2, "no run has begun there"),
    ("train r.json --optim.learning-rate 3", 2, "'optim.learning_rate'"),
    ("train r.json --optm.lr 3", 2, "'optim'"),
    ("train r.json --steps many", 2, "steps"),
    ("train r.json --steps", 2, "--steps"),
    ("train r.json --steps --json", 2, "--steps"),
    ("train r.json extra", 2, "extra"),
    ("train r.json --steps 0", 2, "steps"),
    ("train r.json --optim.lr -1", 2, "lr"),
    ("train r.json --objective.noise cosin", 2, "'cosine'"),
    ("train r.json --objective ar", 2, "causal"),
    ("train r.json --denoiser.conditioning level", 2, "count"),
    ("train r.json --objective.steps 8", 2, "count"),
    # --- runs
    ("train r.json --resume", 1, "--resume"),
    ("train r.json --out half", 2, "--resume"),
    ("train half --resume", 2, "--steps"),
    ("train half --resume --steps 70 --seed 1", 2, "seed"),
    ("train r.json --init gone", 1, "'gone'"),
    ("train r.json --out cut-model", 2, "folder"),
    ("train half --resume --steps 70 --init model", 2, "--resume"),
    ("train r.json --out short.txt", 1, "short.txt"),
    ("train r.json --out short.txt/run", 1, "short.txt/run"),
    # --- corpora and tokenizers
    ("train r.json --data.train.path gone.txt", 1, "/gone.txt"),
    ("train r.json --data.train.path empty.txt", 1, "empty.txt"),
    ("train r.json --data.train.path blank.txt", 1, "document"),
    ("train r.json --data.train.path short.txt", 1, "corpus"),
    ("train r.json --data.train.path latin.txt", 1, "latin.txt"),
    ("train r.json --data.train.path folder", 1, "folder"),
    ("train r.json --tokenizer chars --data.train.path upper.txt", 1, "'S'"),
    ("train r.json --tokenizer bpe:9", 2, "'bpe:9'"),
    ("train r.json --tokenizer gone/tokenizer.json", 1, "gone/tokenizer.json"),
    ("train r.json --tokenizer folder", 1, "tokenizer.json"),
    ("eval model --data gone.txt", 1, "gone.txt"),
    ("eval model --data empty.txt", 1, "empty.txt"),
    ("eval model --data latin.txt", 1, "latin.txt"),
    ("eval model --data bad.jsonl", 1, "bad.jsonl"),
    ("eval model --data field.jsonl", 1, "'txt'"),
    ("eval model --data cut.txt.gz", 1, "cut.txt.gz"),
    ("eval model --data lines.txt --length 33", 2, "--length"),
    ("eval model --data lines.txt --length 1", 2, "tokens"),
    ("eval model --data lines.txt --batch 0", 2, "--batch"),
    ("eval model --data lines.txt --num-samples -1", 2, "--num-samples"),
    ("eval model --data lines.txt --max-rows 0", 2, "--max-rows"),
    ("eval model --data lines.txt --estimator cuont", 2, "'cuont'"),
    ("eval model --data lines.txt --packing wrapp", 2, "'wrap'"),
    ("eval ar --data lines.txt --estimator count", 2, "estimator"),
    # --- models
    ("generate gone", 1, "'gone'"),
    ("generate folder", 1, "folder/config.json"),
    ("generate short.txt", 1, "short.txt"),
    ("fill gone a[MASK]", 1, "'gone'"),
    ("eval gone --data lines.txt", 1, "'gone'"),
    ("generate cut-model", 1, "model.safetensors"),
    ("export gone out", 1, "'gone'"),
    ("export model out", 2, "conditioning"),
    ("export ar out", 2, "mdlm"),
    ("import gone out --tokenizer bytes", 1, "gone"),
    ("import gone folder/new --tokenizer gone.json", 1, "gone.json"),
    # --- sampling
    (f"generate model --prompt {'x' * 40}", 2, "prompt"),
    ("generate model --prompt [MASK]", 2, "prompt"),
    ("generate model --suffix [MASK:4]", 2, "suffix"),
    ("generate model --length 0", 2, "--length"),
    ("generate model --num 0", 2, "num"),
    ("generate model --temperature -1", 2, "temperature"),
    ("generate model --temperature nan", 2, "temperature"),
    ("generate model --top-p 0", 2, "top_p"),
    ("generate model --top-k -2", 2, "top_k"),
    ("generate model --steps 0", 2, "steps"),
    ("generate model --steps few", 2, "'few'"),
    ("generate model --sampler ancestal", 2, "'ancestral'"),
    ("generate model --sampler left_to_right --gamma 5", 2, "--gamma"),
    ("generate model --window 5", 2, "--window"),
    ("generate model --sampler semi_ar --window 1", 2, "window"),
    ("generate model --sampler semi_ar --window 33", 2, "window"),
    ("generate ar --sampler ancestral", 2, "left_to_right"),
    ("generate ar --suffix end", 2, "gap"),
    ("generate ar --length 33", 2, "length"),
    ("generate model --dtype fp8", 2, "--dtype"),
    ("fill model nothing", 2, "gap"),
    ("fill model [MASK:0]", 2, "gap"),
    ("fill ar [MASK]x", 2, "gap"),
    # --- devices
    ("generate model --device gpu", 2, "'gpu'"),
    ("generate model --device meta", 2, "'meta'"),
    ("generate model --device cuda:99", 2, "cuda:99"),
    ("train r.json --device cuda:99", 2, "cuda:99"),
    ("eval model --data lines.txt --device cuda:99", 2, "cuda:99"),
    ("demo --model gone", 1, "'gone'"),
]


def snapshot(folder: Path) -> dict[str, int]:
    """Every file and folder but Python's and the tests' own."""
    return {str(p.relative_to(folder)): p.lstat().st_mtime_ns for p in sorted(folder.rglob("*")) if not p.is_dir()}


def one_line(capsys: Capture, code: int, expected: int, message: str) -> None:
    out, err = capsys.readouterr()
    assert (code, out) == (expected, ""), err
    assert err.startswith("unmask: "), err
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("words", "code", "message"), CASES, ids=[case[0][:60] for case in CASES])
def test_one_line_and_an_exit_code(place: Path, capsys: Capture, words: str, code: int, message: str) -> None:
    before = snapshot(place)
    one_line(capsys, run(words.split()), code, message)
    assert snapshot(place) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "words", ["generate model", "fill model a[MASK]", "train r.json", "eval model --data lines.txt"]
)
def test_no_gpu_when_one_is_asked_for(place: Path, capsys: Capture, words: str) -> None:
    code = run([*words.split(), "--device", "cuda"])
    one_line(capsys, code, 2, "cuda was asked for, but this machine has 0 CUDA GPUs; use cpu")
    assert not (place / "run").exists()


def test_a_message_stays_one_line_whatever_was_given(place: Path, capsys: Capture) -> None:
    one_line(capsys, run(["generate", "no\nsuch\r\nfolder"]), 1, "no model folder")
    one_line(capsys, run(["fill", "model", "a\nb\n"]), 2, "no gap in")
    one_line(capsys, run(["train", "no\nsuch\n.toml"]), 2, "cannot read the recipe no such .toml")
    one_line(capsys, run(["train", "r.json", "--tokenizer", "bpe:\n9"]), 2, "write bpe:SIZE")


def test_a_folder_in_which_no_run_has_begun(place: Path, capsys: Capture) -> None:
    (place / "stopped").mkdir()  # while its texts were read
    one_line(capsys, run(["train", "stopped", "--resume"]), 2, "stopped is a folder without recipe.json: no run has")
    one_line(capsys, run(["train", "runs/none", "--resume"]), 2, "there is no run folder or recipe file runs/none")


def test_standard_input_that_is_no_text(place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 [MASK]"), encoding="utf-8"))
    one_line(capsys, run(["fill", "model", "-"]), 2, "standard input is not UTF-8 text at byte 3")


def test_half_a_character_in_an_argument(place: Path, capsys: Capture) -> None:
    """What Python makes of bytes on the command line that are no text."""
    one_line(capsys, run(["generate", "model", "--prompt", os.fsdecode(b"caf\xe9")]), 1, "half a character")


# --- a full disk ------------------------------------------------------------------------------------------------------


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_while_saving_a_model(tmp_path: Path, fresh_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_model.save(tmp_path / "m")
    before = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    for place, name in ((unmask.storage.model_folder, "write_tensors"), (os, "write"), (os, "fsync"), (os, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            with pytest.raises(UnmaskError, match=r"disk full while writing .*; the previous m is intact") as error:
                fresh_model.save(tmp_path / "m")
            with pytest.raises(UnmaskError, match=r"disk full while writing .*; nothing was left behind"):
                fresh_model.save(tmp_path / "new")
        assert error.value.exit_code == 1
        assert {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()} == before
        assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert load(tmp_path / "m", device="cpu")


@pytest.mark.parametrize("calls", [1, 3, 4])
def test_full_while_saving_a_checkpoint(
    place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, make_config: Any, calls: int
) -> None:
    """From the n-th weights file on, after two good checkpoints: the run stops with a line, and goes on with space."""
    real = unmask.training.checkpoint.files.write_tensors
    config = make_config(place / "run", steps=6, valid_every=6, save_every=2)
    (place / "r.json").write_text(json.dumps(to_dict(config)), encoding="utf-8")
    count = 0

    def fills_up(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count >= 6 + calls:  # model, optimizer and average make three files a checkpoint
            full()
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(unmask.training.checkpoint.files, "write_tensors", fills_up)
        patch.setattr(unmask.storage.model_folder, "write_tensors", fills_up)
        assert run(["train", "r.json", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("unmask: disk full while writing ")
    assert "free space and run again" in last
    assert "Traceback" not in err
    assert sorted(p.name for p in (place / "run" / "checkpoints").iterdir() if p.name not in ("best", "latest")) == [
        "step-00000002",
        "step-00000004",
    ]
    found = load_checkpoint(place / "run")
    assert found is not None
    assert (found.step, found.skipped) == (4, [])
    assert run(["train", "run", "--resume", "--device", "cpu"]) == 0
    assert load(place / "run", device="cpu")


def test_full_while_writing_the_token_cache(
    place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, corpus_file: Path
) -> None:
    words = ["eval", "model", "--data", "own.txt", "--max-rows", "2", "--device", "cpu"]
    monkeypatch.setenv("UNMASK_CACHE", str(place / "cache"))
    shutil.copy(corpus_file, place / "own.txt")
    with monkeypatch.context() as patch:
        patch.setattr(RowWriter, "flush", full)
        one_line(capsys, run(words), 1, "cannot write the token cache in")
    assert list((place / "cache").iterdir()) == []
    assert run(words) == 0


def test_full_while_writing_metrics(
    place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, make_config: Any
) -> None:
    config = make_config(place / "run", steps=6, valid_every=6, save_every=2)
    (place / "r.json").write_text(json.dumps(to_dict(config)), encoding="utf-8")
    real = MetricsFile._write

    def fills_up(self: Any, line: dict[str, Any]) -> None:
        if line["step"] == 3:
            full()
        real(self, line)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "_write", fills_up)
        assert run(["train", "r.json", "--device", "cpu"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "unmask: No space left on device; free some space and run it again"
    assert run(["train", "run", "--resume", "--device", "cpu"]) == 0
    steps = [json.loads(line)["step"] for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4, 5, 6, 6]


def test_full_at_the_very_start_leaves_no_run(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(UnmaskError, match=r"disk full while writing"):
            train(config, device="cpu")
    assert [p for p in (tmp_path / "run").rglob("*") if p.is_file()] == []
    assert train(config, device="cpu")


# --- the tree ---------------------------------------------------------------------------------------------------------


def test_every_error_is_in_one_tree() -> None:
    """Callers catch UnmaskError; wrong use is also a ValueError; the exit codes are those of the command line."""
    classes = [v for v in vars(unmask.errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(classes) >= 8
    for cls in classes:
        assert issubclass(cls, UnmaskError)
        assert cls.exit_code in (1, 2, 75)
        assert issubclass(cls, ValueError) == (cls.exit_code == 2)
    assert issubclass(UsageError, ValueError)
    message = str(MissingExtraError("pyarrow", "data", "reading x.parquet"))
    assert message == "reading x.parquet needs the package pyarrow; install it with: pip install 'unmask[data]'"


@pytest.mark.parametrize(
    ("word", "known", "hint"),
    [
        ("cosin", ["cosine", "linear"], "did you mean 'cosine'?"),
        ("zzz", ["cosine", "linear"], "known: cosine, linear"),
        ("zzz", [], "known: none"),
    ],
)
def test_hints(word: str, known: list[str], hint: str) -> None:
    assert did_you_mean(word, known) == hint


def test_a_bug_is_not_dressed_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is foreseen becomes a line: anything else keeps its traceback, which is what a report needs."""
    call: Callable[..., Any] = lambda *a, **k: (_ for _ in ()).throw(RuntimeError("a bug"))  # noqa: E731
    monkeypatch.setattr(unmask.model.Model, "generate", call)
    with pytest.raises(RuntimeError, match="a bug"):
        run(["generate", "model", "--device", "cpu"])
