"""Many texts in parts: whole, in order, the same whoever writes them; and what several processes evaluate."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from matrix import ALL
from unmask import cli, constraints, samplers
from unmask.errors import Stopped, UnmaskError, UsageError
from unmask.model import Model
from unmask.text.bulk import Order, generate_many

ORDER = Order(num=20, length=12, seed=3, batch=4, part=8)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("part-*")) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def written(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The order, carried out. Shared: do not change it, copy it."""
    folder = tmp_path_factory.mktemp("many") / "texts"
    generate_many(model, ORDER, folder)
    return folder


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "texts")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the processes have that tests start: with more a matrix product may round otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_text_is_there_once(model: Model, written: Path) -> None:
    assert list(contents(written)) == ["generate.json", "part-00000.jsonl", "part-00001.jsonl", "part-00002.jsonl"]
    assert [len((written / f"part-0000{k}.jsonl").read_text().splitlines()) for k in range(3)] == [8, 8, 4]
    found = lines(written)
    assert [line["index"] for line in found] == list(range(20))
    assert [line["text"] for line in found] == model.generate(20, 12, seed=3)
    assert len({line["text"] for line in found}) > 15
    manifest = json.loads((written / "generate.json").read_text())
    assert manifest["complete"] is True
    assert (manifest["num"], manifest["seed"], manifest["length"], manifest["part"]) == (20, 3, 12, 8)
    assert manifest["sampler"]["name"] == "ancestral"
    assert len(manifest["model"]["weights"]) == 64


@pytest.mark.parametrize(("batch", "part"), [(1, 8), (3, 5), (64, 256)])
def test_texts_do_not_depend_on_the_cut(model: Model, written: Path, tmp_path: Path, batch: int, part: int) -> None:
    generate_many(model, dataclasses.replace(ORDER, batch=batch, part=part), tmp_path / "texts")
    assert lines(tmp_path / "texts") == lines(written)


def test_prompts_and_options_go_along(model: Model, tmp_path: Path) -> None:
    words = constraints.Choices(options=("cat", "dog"))
    order = Order(num=3, length=8, prompts=("the ", "a "), constraint=(words,), batch=4, part=4)
    generate_many(model, order, tmp_path / "texts")
    found = lines(tmp_path / "texts")
    assert [line["prompt"] for line in found] == ["the "] * 3 + ["a "] * 3
    assert all(line["text"] in {line["prompt"] + word for word in words.options} for line in found)
    assert [line["text"] for line in found] == model.generate(3, 8, ["the ", "a "], constraint=words)


def test_only_some_of_the_texts(model: Model) -> None:
    texts = model.generate(3, 12, ["the ", "a "], seed=5)
    assert model.generate(3, 12, ["the ", "a "], seed=5, only=[4, 1]) == [texts[4], texts[1]]
    for numbers in ([], [6], [-1]):
        with pytest.raises(UsageError, match="from 0 to 5"):
            model.generate(3, 12, ["the ", "a "], only=numbers)


def test_no_more_than_a_batch_at_once(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    plain = Model.run
    monkeypatch.setattr(Model, "run", lambda self, c, *a, **k: (rows.append(len(c.tokens)), plain(self, c, *a, **k))[1])
    told: list[tuple[int, int]] = []
    generate_many(model, ORDER, tmp_path / "texts", progress=lambda *now: told.append(now))
    assert rows == [4] * 5
    assert told == [(done, 20) for done in (4, 8, 12, 16, 20)]


def test_what_is_there_is_not_written_again(model: Model, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in copy.iterdir()}
    monkeypatch.setattr(Model, "run", None)
    generate_many(model, ORDER, copy)
    assert {path.name: path.stat().st_mtime_ns for path in copy.iterdir()} == before


def _flipped(data: bytes) -> bytes:
    at = data.index(b'"text": "') + 9
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


TORN: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "empty": lambda rows: [],
    "half": lambda rows: [b"".join(rows)[: len(b"".join(rows)) // 2]],
    "no newline at the end": lambda rows: [b"".join(rows)[:-1]],
    "last line missing": lambda rows: rows[:-1],
    "a line twice": lambda rows: [rows[0], *rows],
    "a line too many": lambda rows: [*rows, rows[-1]],
    "two lines changed places": lambda rows: [rows[1], rows[0], *rows[2:]],
    "a letter changed": lambda rows: [*rows[:3], _flipped(rows[3]), *rows[4:]],
    "another seed": lambda rows: [rows[0].replace(b'"seed": 3', b'"seed": 4'), *rows[1:]],
    "zeros": lambda rows: [bytes(len(b"".join(rows)))],
    "no object": lambda rows: [b"[1]\n", *rows[1:]],
    "no text": lambda rows: [b'{"text": 1}\n', *rows[1:]],
    "no UTF-8": lambda rows: [b'{"text": "\xff"}\n', *rows[1:]],
}


@pytest.mark.parametrize("how", TORN)
def test_a_torn_part_is_noticed_and_written_anew(model: Model, written: Path, copy: Path, how: str) -> None:
    path = copy / "part-00001.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(TORN[how](whole.splitlines(keepends=True))))
    assert path.read_bytes() != whole
    notes: list[str] = []
    generate_many(model, ORDER, copy, note=notes.append)
    assert contents(copy) == contents(written)
    assert len(notes) == 1
    assert str(path) in notes[0]


def test_parts_that_are_missing_or_swapped(model: Model, written: Path, copy: Path) -> None:
    (copy / "part-00000.jsonl").unlink()
    (copy / "part-00001.jsonl").rename(copy / "part-00000.jsonl")
    (copy / ".part-00001.jsonl.tmp-999999999-0123abcd").write_text("left by a process that was killed")
    notes: list[str] = []
    generate_many(model, ORDER, copy, note=notes.append)
    assert contents(copy) == contents(written)
    assert len(notes) == 1


OTHER: dict[str, dict[str, Any]] = {
    "num": {"num": 21},
    "length": {"length": 13},
    "prompts": {"prompts": ("a",)},
    "suffix": {"suffix": "."},
    "sampler": {"sampler": samplers.Ancestral(steps=3)},
    "seed": {"seed": 4},
    "guidance": {"guidance": 1.0},
    "batch": {"batch": 5},
    "part": {"part": 4},
    "constraint": {"constraint": (constraints.Length(least=1),)},
}


@pytest.mark.parametrize("key", OTHER)
def test_other_options_are_refused(model: Model, written: Path, copy: Path, key: str) -> None:
    with pytest.raises(UsageError, match=f"begun with another {key}"):
        generate_many(model, dataclasses.replace(ORDER, **OTHER[key]), copy)
    assert contents(copy) == contents(written)


def test_another_model_is_refused(fresh_model: Model, written: Path, copy: Path) -> None:
    with torch.no_grad():
        next(fresh_model.denoiser.parameters()).view(-1)[0] += 1e-3
    with pytest.raises(UsageError, match="begun with another model"):
        generate_many(fresh_model, ORDER, copy)
    assert contents(copy) == contents(written)


def test_folders_that_hold_something_else_are_left_alone(model: Model, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    for name in ("file", "notes"):
        with pytest.raises(UsageError, match=r"no generate\.json"):
            generate_many(model, ORDER, tmp_path / name)
    (copy / "generate.json").write_text('{"complete": tr')
    with pytest.raises(UnmaskError, match=r"generate\.json is damaged"):
        generate_many(model, ORDER, copy)
    assert (tmp_path / "file").read_text() == (tmp_path / "notes" / "notes.txt").read_text() == "mine"


def test_a_call_that_failed_before_its_first_part_binds_nobody(model: Model, written: Path, copy: Path) -> None:
    for path in copy.glob("part-*"):
        path.unlink()
    generate_many(model, dataclasses.replace(ORDER, seed=4), copy)
    assert lines(copy) != lines(written)
    assert [line["seed"] for line in lines(copy)] == [4] * 20


def test_what_cannot_be_is_refused_before_anything_is_written(model: Model, tmp_path: Path) -> None:
    for changes, message in (
        ({"prompts": ("a", "b" * 12)}, "leaves nothing of length"),
        ({"label": 1}, "label 1"),
    ):
        with pytest.raises(UsageError, match=message):
            generate_many(model, dataclasses.replace(ORDER, **changes), tmp_path / "texts")
    for name in ("num", "batch", "part"):
        with pytest.raises(UsageError, match=f"{name} must be at least 1"):
            dataclasses.replace(ORDER, **{name: 0})
    assert not (tmp_path / "texts").exists()


@pytest.mark.parametrize(("batches", "texts"), [(1, 0), (2, 8), (3, 8), (5, 20)])
def test_a_stop_is_orderly(model: Model, written: Path, tmp_path: Path, batches: int, texts: int) -> None:
    """Parts that are whole stay, the part in work is dropped; nothing is half-written."""
    calls = 0

    def ask(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == batches:
            os.kill(os.getpid(), signal.SIGTERM)

    order = dataclasses.replace(ORDER)
    if texts < order.total:  # asked behind a batch, seen behind the next
        with pytest.raises(Stopped, match="of 20 texts"):
            generate_many(model, order, tmp_path / "texts", progress=ask)
        assert json.loads((tmp_path / "texts" / "generate.json").read_text())["complete"] is False
    else:
        generate_many(model, order, tmp_path / "texts", progress=ask)
    found = contents(tmp_path / "texts")
    assert all(found[name] == contents(written)[name] for name in found if name.startswith("part-"))
    generate_many(model, order, tmp_path / "texts")
    assert contents(tmp_path / "texts") == contents(written)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "2"], "--nproc is for texts that go to a folder"),
        (["--batch", "2"], "--batch is for texts that go to a folder"),
        (["--out", "texts", "--watch"], "--watch is for texts that are printed"),
        (["--out", "texts", "--trace", "x"], "--trace is for texts that are printed"),
        (["--out", ""], "--out needs the name of a folder"),
        (["--out", "texts", "--num", "0"], "num must be at least 1"),
        (["--out", "texts", "--nproc", "0"], "--nproc must be at least 1"),
    ],
)
def test_wrong_use(
    trained: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str], in_folder: Path
) -> None:
    assert cli.run(["generate", str(trained.folder), "--device", "cpu", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not list(in_folder.iterdir())


def test_several_processes_need_a_folder(
    trained: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run(["generate", str(trained.folder), "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "unmask: several processes write to a folder: give --out DIR\n"


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- killed, and several processes ------------------------------------------------------------------------------------


def command_lines(trained: Any, corpus_file: Path, out: Path) -> list[list[str]]:
    head = [str(trained.folder), "--device", "cpu", "--json"]
    measure = ["eval", *head, "--data", str(corpus_file), "--max-rows", "50", "--batch", "8"]
    write = ["generate", *head, "--num", "21", "--length", "12", "--out", str(out), "--seed", "7"]
    return [measure, [*write, "--batch", "3", "--part-size", "4"]]


@pytest.fixture(scope="module")
def forked(trained: Any, corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """What the program in faults/many_texts.py left and reports."""
    if sys.platform != "linux":
        pytest.skip("forks a process that has loaded torch")
    folder = tmp_path_factory.mktemp("forked")
    program = Path(__file__).parent / "faults" / "many_texts.py"
    words = json.dumps(command_lines(trained, corpus_file, folder / "two"))
    done = subprocess.run(
        [sys.executable, str(program), str(folder), str(trained.folder), "0" if ALL else "6", words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr, file=sys.stderr)
    return folder, json.loads(done.stdout)


def test_a_killed_call_goes_on(forked: tuple[Path, Any], tally: Any) -> None:
    """SIGKILL where the folder changes and behind batches: no part is torn, and the end is the undisturbed one."""
    _, report = forked
    assert report["wrong"] == []
    assert report["points"] > 40
    assert len(set(report["reached"])) == (report["points"] + 6 if ALL else 9)
    tally("killed while writing many texts", len(report["reached"]))


def test_two_processes_give_what_one_gives(
    forked: tuple[Path, Any],
    trained: Any,
    corpus_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    one_thread: None,
) -> None:
    """Numbers and texts, to the last bit; only the first process prints."""
    folder, report = forked
    (code, said), (other_code, other_said) = report["two"]
    assert (code, other_code, other_said) == (0, 0, "")
    for words in command_lines(trained, corpus_file, tmp_path / "alone"):
        assert cli.run(words) == 0
    numbers, summary = capsys.readouterr().out.splitlines()
    assert said.splitlines()[0] == numbers
    assert json.loads(numbers)["protocol"]["rows"] == 50
    assert json.loads(said.splitlines()[1]) == json.loads(summary) | {"out": str(folder / "two")}
    assert contents(folder / "two") == contents(tmp_path / "alone")
    assert len(lines(folder / "two")) == 21


def test_stopped_in_two_processes_and_gone_on_with_in_one(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    out = tmp_path / "two"
    words = ["generate", str(trained.folder), "--device", "cpu", "--num", "240", "--length", "12", "--seed", "2"]
    words += ["--batch", "4", "--part-size", "4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "unmask", *words, "--out", str(out), "--nproc", "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 120
    while not (out / "part-00000.jsonl").exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said, wrong = process.communicate(timeout=120)
    assert process.returncode == 75, wrong
    assert said == ""
    assert wrong.count("\n") == 1
    assert f"go on with: unmask {' '.join(words[:2])}" in wrong
    names = list(contents(out))
    assert names[:2] == ["generate.json", "part-00000.jsonl"]
    assert f"stopped with {4 * (len(names) - 1)} of 240 texts" in wrong
    assert cli.run([*words, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert [line["index"] for line in lines(out)] == list(range(240))
    assert [line["text"] for line in lines(out)] == trained.model.generate(240, 12, seed=2)


# --- Parquet ---

TABLE = dataclasses.replace(ORDER, format="parquet")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    parquet = pytest.importorskip("pyarrow.parquet")
    return [row for path in sorted(folder.glob("part-*.parquet")) for row in parquet.read_table(path).to_pylist()]


@pytest.fixture(scope="module")
def table(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The order in Parquet. Shared: do not change it, copy it."""
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("many") / "table"
    generate_many(model, TABLE, folder)
    return folder


def test_parquet_holds_what_the_lines_hold(model: Model, written: Path, table: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert [path.name for path in sorted(table.iterdir())][:2] == ["generate.json", "part-00000.parquet"]
    assert rows_of(table) == lines(written)
    manifest = json.loads((table / "generate.json").read_text())
    assert (manifest["complete"], manifest["format"]) == (True, "parquet")
    about = json.loads(parquet.read_schema(table / "part-00001.parquet").metadata[b"unmask"])
    assert about == {key: value for key, value in manifest.items() if key != "complete"}
    before = contents(table)
    generate_many(model, TABLE, table)
    assert contents(table) == before
    with pytest.raises(UsageError, match='begun with another format, "parquet" and not null'):
        generate_many(model, ORDER, table)
    texts = [document.text for document in unmask.corpora.Parquet(path=str(table)).documents()]
    assert texts == [line["text"] for line in lines(written)]  # as a corpus


def test_others_read_the_parquet(table: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    files = str(table / "*.parquet")
    read = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path))
    assert [dict(row) for row in read] == rows_of(table)


PARQUET_TORN: dict[str, Callable[[Any, Path], None]] = {
    "half": lambda table, path: _cut(path),
    "a row too few": lambda table, path: _write(table.slice(0, 7), path),
    "a row too many": lambda table, path: _write(table.take([*range(8), 7]), path),
    "two changed places": lambda table, path: _write(table.take([1, 0, *range(2, 8)]), path),
    "another column": lambda table, path: _write(table.append_column("more", table.column("seed")), path),
    "another text": lambda table, path: _write(table.set_column(3, "text", [["x"] * 8]).cast(table.schema), path),
}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def _write(table: Any, path: Path) -> None:
    pytest.importorskip("pyarrow.parquet").write_table(table, path)


@pytest.mark.parametrize("how", PARQUET_TORN)
def test_torn_parquet_is_written_anew(model: Model, table: Path, tmp_path: Path, how: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    copy = shutil.copytree(table, tmp_path / "table")
    path = copy / "part-00001.parquet"
    PARQUET_TORN[how](parquet.read_table(path), path)
    (copy / "part-00002.parquet").unlink()
    (copy / ".part-00002.parquet.tmp-999999999-0123abcd").write_text("left by a process that was killed")
    notes: list[str] = []
    generate_many(model, TABLE, copy, note=notes.append)
    assert contents(copy) == contents(table)
    assert len(notes) == 1
    assert f"{path} is damaged at row" in notes[0]


def test_parquet_is_whole_or_not_there(
    model: Model, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the middle of the second file."""
    parquet = pytest.importorskip("pyarrow.parquet")
    plain, calls = parquet.write_table, list[Path]()

    def write(rows: Any, path: Path) -> None:
        plain(rows, path)
        calls.append(path)
        if len(calls) == 2:
            _cut(path)
            raise KeyboardInterrupt

    monkeypatch.setattr(parquet, "write_table", write)
    with pytest.raises(KeyboardInterrupt):
        generate_many(model, TABLE, tmp_path / "table")
    assert sorted(contents(tmp_path / "table")) == ["generate.json", "part-00000.parquet"]
    generate_many(model, TABLE, tmp_path / "table")
    assert contents(tmp_path / "table") == contents(table)
    assert len(calls) == 4


def test_parquet_from_the_command_line(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(trained.folder), "--device", "cpu", "--num", "3", "--length", "8", "--format", "parquet"]
    assert cli.run(words) == 2
    assert "--format is for texts that go to a folder" in capsys.readouterr().err
    assert cli.run([*words, "--out", str(tmp_path / "texts")]) == 0
    assert len(rows_of(tmp_path / "texts")) == 3
    with pytest.raises(UsageError, match="format must be one of jsonl, parquet"):
        Order(num=1, format="csv")  # type: ignore[arg-type]
