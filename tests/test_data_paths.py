"""A run knows its data by whole paths: it is measured and goes on from any working directory."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from unmask import cli
from unmask.config import DataConfig, RunConfig, load_config
from unmask.corpora.hub import Hub
from unmask.corpora.jsonl import Jsonl
from unmask.corpora.sources import from_path
from unmask.corpora.stdlib import Stdlib
from unmask.corpora.text import Text
from unmask.training.loop import train


@pytest.fixture
def here(tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the text, and another beside it."""
    folder = tmp_path / "here"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "lines.txt").write_bytes(corpus_file.read_bytes())
    monkeypatch.chdir(folder)
    return folder


def begin(make_config: Any) -> RunConfig:
    """Six steps of a run that is given everything from the current folder."""
    config: RunConfig = make_config(Path("run"), steps=6, data={"train": Text(path="lines.txt"), "cache": "cache"})
    train(config, device="cpu")
    return config


def test_a_run_is_read_from_another_folder(
    here: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(make_config)
    data = json.loads(Path("run/recipe.json").read_text())["data"]
    assert (data["train"]["path"], data["cache"]) == (str(here / "lines.txt"), str(here / "cache"))
    monkeypatch.chdir(here.parent / "elsewhere")
    assert cli.run(["eval", str(here / "run"), "--max-rows", "2", "--json"]) == 0
    assert cli.run(["train", "../here/run", "--resume", "--steps", "8", "--device", "cpu"]) == 0
    assert [path.name for path in Path().iterdir()] == []
    capsys.readouterr()


def test_moved_data_is_told_in_a_line_and_found_where_it_is(
    here: Path, make_config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(make_config)
    moved = here / "moved.txt"
    (here / "lines.txt").rename(moved)
    for command in (["eval", "run"], ["train", "run", "--resume", "--steps", "8"]):
        assert cli.run(command) == 1
        said = capsys.readouterr().err.splitlines()
        assert said == [f"unmask: no such file or folder: {here / 'lines.txt'}; check the path: was it moved?"]
    go_on = ["train", "run", "--resume", "--steps", "8", "--device", "cpu", "--data.train.path", "moved.txt"]
    moved.write_text(moved.read_text() + "more\n")
    assert cli.run(go_on) == 1
    assert "the data changed since the run" in capsys.readouterr().err
    moved.write_text(moved.read_text().removesuffix("more\n"))
    assert cli.run(go_on) == 0
    assert load_config("run").data.train == Text(path=str(moved))


def test_a_run_that_was_begun_with_relative_paths_goes_on(
    here: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(DataConfig, "absolute", lambda self: self)
        config = begin(make_config)
    assert load_config("run").data.train == Text(path="lines.txt")
    train(dataclasses.replace(config, steps=7), resume=True, device="cpu")
    train(dataclasses.replace(load_config("run"), steps=8), resume=True, device="cpu")
    assert load_config("run").data.train == Text(path=str(here / "lines.txt"))


def test_only_files_have_places(here: Path) -> None:
    for corpus in (Stdlib(), Hub(dataset="org/set")):
        assert corpus.absolute() == corpus
    home = Jsonl(path="~/a.jsonl", field="body").absolute()
    assert home == Jsonl(path=str(Path.home() / "a.jsonl"), field="body")
    both = DataConfig(train=Stdlib(), valid=Text(path="v.txt")).absolute()
    assert both == DataConfig(train=Stdlib(), valid=Text(path=str(here / "v.txt")))


@pytest.mark.parametrize("row_group", [50, 1000])
def test_a_parquet_file_is_never_whole_in_memory(row_group: int, tmp_path: Path) -> None:
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [random.Random(i).randbytes(6000).hex() for i in range(1000)]  # 12 MB
    path = tmp_path / "a.parquet"
    how = {"row_group_size": row_group, "use_dictionary": False, "write_batch_size": 50}
    tables.write_table(arrow.table({"text": texts}), path, **how)
    before = arrow.total_allocated_bytes()
    held = [arrow.total_allocated_bytes() - before for _ in from_path(str(path)).documents()]
    assert len(held) == 1000
    assert max(held) < 2 * path.stat().st_size / 3
