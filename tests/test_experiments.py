"""The queue of benchmarks/experiments.toml: what fits is run, what is finished is not, small files travel."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import shutil
import tarfile
import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from older_plan import write_as_older_version
from unmask.comparison import work
from unmask.comparison.compare import Watcher
from unmask.comparison.processes import run_apart
from unmask.comparison.trial import read_trial, write_trial
from unmask.errors import Stopped

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RECIPES = [path for path in (BENCHMARKS / "systems").glob("*.toml") if path.stem != "common"]
QUEUE = """
[setting.tiny]
tokens = "128"
draws = 1
valid_rows = 3
tokens_per_second = 1000
prepare_seconds = 2
reference = "ar"
[setting.tiny.options]
"data.train" = "text"
"data.train.path" = "{data}/lines.txt"
"data.held_out" = 0.1
"data.length" = 16
"batch" = 4
"denoiser.hidden" = 16
"denoiser.blocks" = 1
"denoiser.heads" = 2
"valid_rows" = 4

[setting.long]
like = "tiny"
tokens = "1M"

[rates]
d3pm = 0.5

[[experiment]]
name = "noise"
setting = "tiny"
systems = { mdlm = 2 }

[[experiment]]
name = "table"
setting = "tiny"
systems = { ar = 1, mdlm = 1, d3pm = 1, absent = 1, wrong = 1 }

[[experiment]]
name = "long"
setting = "long"
systems = { mdlm = 1 }
"""
SYSTEMS = {
    "ar": 'objective = "ar"\ndenoiser = { causal = true }\n',
    "mdlm": 'objective = "mdlm"\n',
    "d3pm": 'objective = { name = "d3pm", steps = 4 }\n',
    "wrong": 'objective = "ar"\n',
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("unmask.comparison.compare.run_apart", lambda job, tell, asked: work.run_trial(job, tell))
    module = importlib.import_module("experiments")
    monkeypatch.setattr(module, "OVERHEAD", 1.0)
    return module


@pytest.fixture
def words(tmp_path: Path, corpus_file: Path) -> list[str]:
    (tmp_path / "queue.toml").write_text(QUEUE)
    (tmp_path / "systems").mkdir()
    for name, text in SYSTEMS.items():
        (tmp_path / "systems" / f"{name}.toml").write_text(text)
    (tmp_path / "data").mkdir()
    shutil.copy(corpus_file, tmp_path / "data" / "lines.txt")
    return [
        "--file", str(tmp_path / "queue.toml"), "--systems", str(tmp_path / "systems"),
        "--data", str(tmp_path / "data"), "--device", "cpu",
    ]  # fmt: skip


def test_what_fits_is_run_and_the_rest_says_why_not(
    bench: Any, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "out"
    assert bench.main([*words, "--out", str(out), "--list"]) == 0
    assert capsys.readouterr().out.count("waiting") == 6
    assert not out.exists()
    assert bench.main([*words, "--out", str(out), "--minutes", "3", "--back", str(tmp_path / "small.tar.gz")]) == 1
    said = capsys.readouterr().out
    assert said.count("nats/token") == 4
    assert "no recipe" in said
    assert "refused: " in said
    assert "autoregression needs a causal denoiser" in " ".join(said.split())
    assert "skipped: takes 16.7 minutes" in said
    assert sorted(path.stem for path in (out / "tiny" / "trials").iterdir()) == [
        "ar-s0",
        "d3pm-s0",
        "mdlm-s0",
        "mdlm-s1",
    ]
    page = (out / "tiny" / "results.md").read_text()
    assert "gap to ar" in page
    assert "| mdlm | 2 |" in page
    assert "3 rows" in page


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "No such file"),
        ("a = [", "Invalid value"),
        ('[setting.a]\ndraws = 1\n[[experiment]]\nname = "b"', "does not say 'tokens'"),
    ],
    ids=["none", "toml", "key"],
)
def test_a_queue_that_cannot_be_read_is_one_sentence(
    bench: Any, text: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as error:
        bench.main(["--file", str(file), "--out", str(tmp_path / "out"), "--list"])
    assert error.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_small_files_put_in_place_are_not_repeated(
    bench: Any, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another machine: other folders, the data elsewhere, and of the first machine's work the small files alone."""
    small = tmp_path / "small.tar.gz"
    run = [*words, "--minutes", "3", "--only", "noise"]
    assert bench.main([*run, "--out", str(tmp_path / "first"), "--back", str(small)]) == 0
    (tmp_path / "moved").mkdir()
    shutil.copy(tmp_path / "data" / "lines.txt", tmp_path / "moved" / "lines.txt")
    with tarfile.open(small) as archive:
        assert {"tiny/trials/mdlm-s0.json", "tiny/results.md"} <= set(archive.getnames())
        archive.extractall(tmp_path / "open", filter="data")
    (tmp_path / "open" / "tiny" / "trials" / "mdlm-s1.json").unlink()
    with tarfile.open(small, "w:gz") as archive:
        archive.add(tmp_path / "open" / "tiny", "tiny")
        archive.add(tmp_path / "queue.toml", "../queue.toml")  # what is no trial of the queue is left alone
    capsys.readouterr()
    run += ["--data", str(tmp_path / "moved"), "--out", str(tmp_path / "second"), "--finished", str(small)]
    assert bench.main(run) == 0
    assert "1 finished trials were put in place" in capsys.readouterr().err
    second = tmp_path / "second" / "tiny"
    curve = "runs/mdlm-s0/metrics.jsonl"
    assert [path.name for path in (second / "runs" / "mdlm-s0").iterdir()] == ["metrics.jsonl"]
    assert (second / curve).read_bytes() == (tmp_path / "first" / "tiny" / curve).read_bytes()
    assert (second / "runs" / "mdlm-s1" / "model").exists()
    ours, theirs = (read_trial(folder / "tiny", "mdlm-s1") for folder in (tmp_path / "first", tmp_path / "second"))
    assert ours is not None
    assert theirs is not None
    assert (ours.fingerprint, ours.nats) == (theirs.fingerprint, theirs.nats)
    assert "| mdlm | 2 |" in (second / "results.md").read_text()


def test_what_an_older_version_finished_stays_in_the_table_of_another_machine(
    bench: Any, words: list[str], tmp_path: Path
) -> None:
    small, first, second = tmp_path / "small.tar.gz", tmp_path / "first", tmp_path / "second"
    run = [*words, "--minutes", "3", "--only"]
    assert bench.main([*run, "noise", "--out", str(first)]) == 0
    write_as_older_version(first / "tiny", "data.packing", "data.split_tokens")
    bench.Queue(QUEUE, first).take_back(small)
    queue = bench.Queue(QUEUE, second)
    assert queue.bring(small) == 2
    assert queue.seconds(queue.items[0]) > 2  # nothing is packed there yet
    bench.main([*run, "table", "--out", str(second)])
    assert [path.name for path in (second / "tiny" / "runs" / "mdlm-s0").iterdir()] == ["metrics.jsonl"]
    results = (second / "tiny" / "results.md").read_text()
    assert "| ar | 1 |" in results
    assert "| mdlm | 2 |" in results


def test_what_is_measured_estimates_what_comes(bench: Any, words: list[str], tmp_path: Path) -> None:
    queue = bench.Queue(QUEUE, tmp_path / "out", tmp_path / "systems")
    by_name = {(item.setting.name, item.name): item for item in queue.items}
    assert len(queue.items) == len(by_name) == 7  # mdlm-s0 is wanted twice and done once
    assert by_name["tiny", "mdlm-s0"].experiments == ["noise", "table"]
    assert queue.seconds(by_name["tiny", "mdlm-s0"]) == pytest.approx(1 + 2 + 0.128)  # a new machine packs first
    assert queue.seconds(by_name["tiny", "d3pm-s0"]) == pytest.approx(1 + 2 + 0.256)
    queue.run([by_name["tiny", "mdlm-s0"]], str(tmp_path / "data"), "cpu", Watcher())
    trial = queue.trial(by_name["tiny", "mdlm-s0"])
    assert queue.seconds(by_name["tiny", "mdlm-s1"]) == pytest.approx(1 + 128 / trial.tokens_per_second)
    for tokens, options, known in ((512, "", True), (513, "", False), (512, '"data.length" = 32', False)):
        more = f'[setting.more]\nlike = "tiny"\ntokens = "{tokens}"\n'
        more += f'[setting.more.options]\n"data.share" = 0.5\n{options}\n'
        more += '[[experiment]]\nname = "more"\nsetting = "more"\nsystems = { mdlm = 1 }\n'
        wider = bench.Queue(QUEUE + more, queue.out, queue.systems)
        (item,) = [item for item in wider.items if item.setting.name == "more"]
        rate = trial.tokens_per_second if known else 1000
        assert wider.seconds(item) == pytest.approx(1 + 2 + tokens / rate)
    queue.jobs = 2  # until two at once are measured, each is taken to be half as fast
    assert queue.seconds(by_name["tiny", "mdlm-s1"]) == pytest.approx(1 + 256 / trial.tokens_per_second)
    assert queue.seconds(by_name["tiny", "d3pm-s0"]) == pytest.approx(1 + 0.512)
    write_trial(tmp_path / "out" / "tiny", dataclasses.replace(trial, at_once=2, tokens_per_second=10.0))
    assert queue.seconds(by_name["tiny", "mdlm-s1"]) == pytest.approx(1 + 12.8)
    assert queue.seconds(by_name["tiny", "d3pm-s0"]) == pytest.approx(1 + 25.6)  # a hundredth of what is stated, too


def clock(now: Callable[[], float]) -> Any:
    """In place of the script's `time`: the real one also drives a server that other tests have left running here."""
    return types.SimpleNamespace(monotonic=now)


def test_what_a_trial_takes_beside_its_steps_is_learned(
    bench: Any, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest of the last few counts; one that went on from a checkpoint tells nothing."""
    monkeypatch.setattr(bench, "OVERHEAD", 60.0)
    queue = bench.Queue(QUEUE, tmp_path / "out", tmp_path / "systems")
    watch = bench.Minutes(queue, argparse.Namespace(jobs=1, back=None, minutes=3, begin=False), {})
    now = 100.0
    monkeypatch.setattr(bench, "time", clock(lambda: now))
    monkeypatch.setattr(bench.Lines, "on_begin", lambda *args: None)
    monkeypatch.setattr(bench.Lines, "on_end", lambda *args: None)
    (tmp_path / "there").mkdir()
    told = []
    for name, took, trained in [
        ("new", 70, 60),
        ("new", 28, 20),
        ("there", 99, 0),
        ("new", 17, 10),
        *[("new", 5, 1)] * 4,
    ]:
        planned = types.SimpleNamespace(name=name, config=types.SimpleNamespace(out=str(tmp_path / name)))
        watch.on_begin(planned)
        now += took
        watch.on_end(planned, types.SimpleNamespace(finished=True, seconds=trained))
        told.append(queue.overhead)
    assert told == [10, 10, 10, 10, 10, 8, 7, 4]


def test_several_experiments_may_be_named_and_a_wrong_name_is_refused(
    bench: Any, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    queue = bench.Queue(QUEUE, tmp_path / "out", tmp_path / "systems")
    for only, count in (["table"], 4), (["noise", "long"], 3), (None, 6):
        args = argparse.Namespace(only=only, again=False)
        assert sum(map(len, bench.waiting(queue, args, {}))) == count
    for wrong in (["--only", "noise", "--only", "nois"], ["--file", str(tmp_path / "none.toml")]):
        with pytest.raises(SystemExit) as e:
            bench.main([*words, *out, *wrong])
        assert e.value.code == 2
    assert "cannot read" in capsys.readouterr().err


def test_seeds_of_the_same_systems_can_share_the_device(bench: Any, words: list[str], tmp_path: Path) -> None:
    queue = bench.Queue(QUEUE.replace("d3pm = 1", "d3pm = 2"), tmp_path / "out", tmp_path / "systems")
    args = argparse.Namespace(only=None, again=False)
    groups = [[item.name for item in group] for group in bench.waiting(queue, args, {})]
    assert groups == [["mdlm-s0", "mdlm-s1"], ["ar-s0", "d3pm-s0", "wrong-s0"], ["d3pm-s1"], ["mdlm-s0"]]


def test_at_the_end_of_the_minutes_all_is_saved_and_the_next_call_goes_on(
    bench: Any, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as on a machine: the others of this file run their trials in this one."""
    monkeypatch.setattr("unmask.comparison.compare.run_apart", run_apart)
    out, now = tmp_path / "out", [0.0]
    monkeypatch.setattr(bench, "time", clock(lambda: now[0]))

    def time_is_over(self: Any, trial: Any, news: Any) -> None:
        now[0] = 99.0 if news["step"] > 0 else 0.0

    monkeypatch.setattr(bench.Minutes, "on_news", time_is_over)
    run = [*words, "--minutes", "1", "--only", "long", "--out", str(out)]
    assert bench.main(run) == 0
    assert "skipped: takes 16.7 minutes" in " ".join(capsys.readouterr().out.split())
    assert bench.main([*run, "--begin"]) == 0
    assert "begun, " in capsys.readouterr().out
    queue = bench.Queue(QUEUE, out, tmp_path / "systems")
    (item,) = (item for item in queue.items if item.setting.name == "long")
    step = int(newest_step(out / "long" / "runs" / "mdlm-s0"))
    assert queue.begun(item) == pytest.approx(step * 4 * 16 / 10**6)
    assert queue.seconds(item) == pytest.approx(1 + 1000 - step * 64 / 1000)
    assert queue.trial(item) is None
    begun: list[str] = []
    monkeypatch.setattr(bench.Minutes, "on_news", lambda self, trial, news: begun.append(news["step"]))
    now[0] = 0.0
    monkeypatch.setattr(bench.Minutes, "stops", lambda self: len(begun) > 0)
    assert bench.main([*run, "--begin"]) == 0
    assert begun[0] == step


def newest_step(run: Path) -> str:
    (path,) = (run / "checkpoints").glob("step-*")
    return path.name.removeprefix("step-")


def test_a_request_to_stop_is_a_sentence_and_keeps_what_is_small(
    bench: Any, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any) -> None:
        raise Stopped("stopped in mdlm-s0; the same command goes on there")

    monkeypatch.setattr(bench.Queue, "run", stop)
    small = tmp_path / "small.tar.gz"
    assert bench.main([*words, "--out", str(tmp_path / "out"), "--minutes", "3", "--back", str(small)]) == 75
    assert capsys.readouterr().err == "stopped in mdlm-s0; the same command goes on there\n"
    assert small.exists()


def test_the_queue_that_is_there_reads(bench: Any, tmp_path: Path) -> None:
    queue = bench.Queue((BENCHMARKS / "experiments.toml").read_text(), tmp_path)
    assert len(queue.items) > 30
    assert all(queue.seconds(item) < 9 * 60 for item in queue.items)
    smoke = bench.Queue((BENCHMARKS / "smoke.toml").read_text(), tmp_path)
    wiki = {item.system for item in queue.items if item.setting.name == "wiki"}
    assert {item.system for item in smoke.items} == wiki == {path.stem for path in RECIPES}
    assert set(queue.rates) <= {item.system for item in queue.items}
