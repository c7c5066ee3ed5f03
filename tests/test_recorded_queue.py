"""The queue of benchmarks/recorded.toml: what is finished is not repeated, networks are made again, results travel."""

from __future__ import annotations

import importlib
import json
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unmask.cli import run

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
QUEUE = """
[size.full]
texts = ["--num", "7"]
[size.toy]
texts = ["--num", "1"]
[[job]]
name = "first {seed}"
each = { seed = [0, 1] }
data = ["a/*"]
steps = [
    { seconds = 100, stays = "{out}/nets/{seed}", run = ["train", "{out}/nets/{seed}", "--seed", "{seed}"] },
    { seconds = 10, run = ["write", "{out}/texts/{seed}", "{texts}", '{"T": <seed>}'] },
    { seconds = 10, prints = "{out}/said/{seed}.json", run = ["say", "{data}"] },
]
[[job]]
name = "second"
steps = [
    { seconds = 100, stays = "{out}/nets/0", run = ["train", "{out}/nets/0", "--seed", "0"] },
    { seconds = 10, run = ["fail", "x"] },
]
[[job]]
name = "third"
steps = [{ seconds = 10, run = ["write", "{out}/texts/third"] }]
"""
FAKE = """
import json, signal, sys, time
from pathlib import Path
words = sys.argv[1:]
with open(Path(__file__).with_name("log"), "a") as log:
    log.write(json.dumps(words) + "\\n")
if words[0] == "train":
    folder = Path(words[1])
    (folder / "checkpoints/step-1").mkdir(parents=True, exist_ok=True)
    (folder / "big").write_text("x" * 1000)
    if Path(__file__).with_name("slow").exists():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        time.sleep(60)
if words[0] == "write":
    Path(words[1]).mkdir(parents=True)
    (Path(words[1]) / "texts.jsonl").write_text(" ".join(words[2:]))
if words[0] == "say":
    print('{"said": true}')
sys.exit(3 if words[0] == "fail" else 0)
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("recorded")
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "queue.toml").write_text(QUEUE)
    monkeypatch.setattr(module, "UNMASK", [sys.executable, str(tmp_path / "fake.py")])
    return module


def begun(tmp_path: Path) -> list[list[str]]:
    log = tmp_path / "log"
    found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    log.unlink(missing_ok=True)
    return found


def work(bench: ModuleType, tmp_path: Path, *words: str, out: str = "out") -> int:
    where = ["--file", str(tmp_path / "queue.toml"), "--out", str(tmp_path / out)]
    code: int = bench.main([*where, *(["--data", "d"] if "--data" not in words else []), *words])
    return code


def test_a_finished_step_is_not_repeated_and_a_failure_costs_its_job(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work(bench, tmp_path) == 1
    done = begun(tmp_path)
    assert [words[0] for words in done] == [*2 * ["train", "write", "say"], "fail", "write"]
    assert done[4][2:] == ["--num", "7", '{"T": 1}']
    assert json.loads((tmp_path / "out/said/0.json").read_text()) == {"said": True}
    said = capsys.readouterr().out
    assert "fail x failed with exit code 3" in " ".join(said.split())
    assert work(bench, tmp_path) == 1
    assert [words[0] for words in begun(tmp_path)] == ["fail"]
    assert work(bench, tmp_path, "--only", "first") == 0
    assert work(bench, tmp_path, "--list") == 0
    assert begun(tmp_path) == []
    with pytest.raises(SystemExit):
        work(bench, tmp_path, "--only", "fourth")


def test_results_travel_and_networks_are_made_again_where_they_are_wanted(bench: ModuleType, tmp_path: Path) -> None:
    back = tmp_path / "back.tar.gz"
    assert work(bench, tmp_path, "--only", "first 0", "--back", str(back), "--data", "here") == 0
    with tarfile.open(back) as archive:
        names = archive.getnames()
    assert {"texts/0/texts.jsonl", "said/0.json"} < set(names)
    assert not any(name.startswith("nets/") for name in names)
    begun(tmp_path)
    # on another machine, with the data elsewhere: the first job is finished, the second one wants the network again
    assert work(bench, tmp_path, "--finished", str(back), "--data", "there", out="new") == 1
    assert [words[:2] for words in begun(tmp_path)] == [
        ["train", str(tmp_path / "new/nets/1")],
        ["write", str(tmp_path / "new/texts/1")],
        ["say", "there"],
        ["train", str(tmp_path / "new/nets/0")],
        ["fail", "x"],
        ["write", str(tmp_path / "new/texts/third")],
    ]


def test_archives_are_small_and_come_back_whole(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MOST", 400)
    queue = bench.Queue(QUEUE, tmp_path / "out", "d")
    for number in range(5):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / f"out/{number}.txt").write_text(str(number) * 500)
    made = queue.take_back(tmp_path / "back.tar.gz")
    assert [path.name for path in made] == ["back.tar.gz", "back-2.tar.gz", "back-3.tar.gz"]
    other = bench.Queue(QUEUE, tmp_path / "new", "d")
    other.out.mkdir()
    other.bring(tmp_path / "back.tar.gz")
    assert [path.read_text() for path in sorted(other.out.iterdir())] == [str(n) * 500 for n in range(5)]


def test_what_does_not_fit_waits_and_training_goes_on(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work(bench, tmp_path, "--minutes", "0.1") == 0
    assert begun(tmp_path) == []
    assert "waiting: train" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(bench, "GRACE", 0.5)
    (tmp_path / "slow").touch()
    assert work(bench, tmp_path, "--minutes", "0.05", "--only", "first 0") == 0
    assert "train" in begun(tmp_path)[0]
    assert "it goes on with the next call" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "slow").unlink()
    assert work(bench, tmp_path, "--only", "first 0") == 0
    assert begun(tmp_path)[0] == ["train", str(tmp_path / "out/nets/0"), "--resume"]


@pytest.mark.parametrize("toy", [False, True])
def test_the_commands_of_the_queue_are_commands(bench: ModuleType, tmp_path: Path, toy: bool) -> None:
    """As far as can be told without a model: recipes and options are read, files of the queue are named once."""
    queue = bench.Queue((BENCHMARKS / "recorded.toml").read_text(), tmp_path, "data", toy=toy)
    names = [job.name for job in queue.jobs]
    assert len(set(names)) == len(names) == 14
    steps = {step.key: step for job in queue.jobs for step in job.steps}
    for step in steps.values():
        words = list(step.words)
        assert not any("{" in word and not word.startswith('{"') for word in words), words
        if words[0] == "train":
            assert Path(words[1]).is_file()
            assert run([*words, "--options"]) == 0
        if "--sampler" in words:
            assert json.loads(words[words.index("--sampler") + 1])["name"] == "ancestral"
    outs: list[Any] = [
        step.words[step.words.index("--out") + 1]
        for step in steps.values()
        if step.words[0] == "eval" and "--out" in step.words
    ]
    assert len(set(outs)) == len(outs)


def test_windows_are_as_long_as_asked(bench: ModuleType, tmp_path: Path) -> None:
    made = importlib.import_module("windows")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": letter * 25}) + "\n" for letter in "abc"))
    assert made.windows(str(tmp_path / "a.jsonl"), "bytes", 10, 3) == ["a" * 10, "b" * 10, "c" * 10]
    with pytest.raises(SystemExit, match="has 6 windows"):
        made.windows(str(tmp_path / "a.jsonl"), "bytes", 10, 7)
