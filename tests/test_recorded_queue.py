"""The queue of benchmarks/recorded.toml: what is finished is not repeated, networks are made again, results travel."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tiny import Trained
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
    { seconds = 10, run = ["write", "{out}/nets/{seed}", "{texts}", '{"T": <seed>}', "--out", "{out}/texts/{seed}"] },
    { seconds = 10, prints = "{out}/said/{seed}.json", run = ["say", "{data}"] },
]
[[job]]
name = "second"
steps = [
    { seconds = 100, stays = "{out}/nets/0", run = ["train", "{out}/nets/0", "--seed", "0"] },
    { seconds = 100, stays = "{out}/nets/2", run = ["train", "{out}/nets/2", "--seed", "2"] },
    { seconds = 10, run = ["fail", "x", "{out}/nets/0"] },
]
[[job]]
name = "third"
steps = [{ seconds = 10, run = ["write", "--out", "{out}/texts/third"] }]
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
    folder = Path(words[-1])
    folder.mkdir(parents=True, exist_ok=True)
    if Path(__file__).with_name("half").exists():
        (folder / "half.jsonl").write_text("")
        sys.exit(75)
    assert not (folder / "half.jsonl").exists()
    (folder / "texts.jsonl").write_text(" ".join(words[1:]))
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
    assert done[4][2:5] == ["--num", "7", '{"T": 1}']
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
        ["write", str(tmp_path / "new/nets/1")],
        ["say", "there"],
        ["train", str(tmp_path / "new/nets/0")],  # and not that of which nothing is left
        ["fail", "x"],
        ["write", "--out"],
    ]


def test_archives_are_small_and_come_back_whole(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not shrink is in more archives, each as small; those of an earlier call that had more are gone."""
    monkeypatch.setattr(bench, "MOST", 3000)
    queue, back = bench.Queue(QUEUE, tmp_path / "out", "d"), tmp_path / "back.tar.gz"
    (tmp_path / "out").mkdir()
    for number in range(5):
        (tmp_path / f"out/{number}.txt").write_bytes(random.Random(number).randbytes(1000))
    made = queue.take_back(back)
    assert [path.name for path in made] == ["back.tar.gz", "back-2.tar.gz", "back-3.tar.gz"]
    assert max(path.stat().st_size for path in made) <= 3000
    other = bench.Queue(QUEUE, tmp_path / "new", "d")
    other.bring(back)
    for number in range(5):
        assert (tmp_path / f"new/{number}.txt").read_bytes() == (tmp_path / f"out/{number}.txt").read_bytes()
    (tmp_path / "out/0.txt").unlink()
    (tmp_path / "out/1.txt").unlink()
    assert len(queue.take_back(back)) == 2
    assert not made[2].exists()


def test_what_does_not_fit_waits_and_training_goes_on(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work(bench, tmp_path, "--minutes", "0.1") == 75
    assert begun(tmp_path) == []
    assert "waiting: train" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(bench, "GRACE", 0.5)
    (tmp_path / "slow").touch()
    assert work(bench, tmp_path, "--minutes", "0.05", "--only", "first 0") == 75
    assert "train" in begun(tmp_path)[0]
    assert "it goes on with the next call" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "slow").unlink()
    assert work(bench, tmp_path, "--only", "first 0") == 0
    assert begun(tmp_path)[0] == ["train", str(tmp_path / "out/nets/0"), "--resume"]


def test_a_step_begins_only_where_it_can_end(bench: ModuleType, tmp_path: Path) -> None:
    """Of the minutes those are not its own in which it would be asked to stop."""
    assert work(bench, tmp_path, "--minutes", str(45 / 60), "--only", "third") == 75  # of 10 seconds, 40 to stop
    assert begun(tmp_path) == []
    assert work(bench, tmp_path, "--minutes", str(55 / 60), "--only", "third") == 0
    assert [words[0] for words in begun(tmp_path)] == ["write"]


def test_what_was_only_begun_does_not_travel_to_other_networks(bench: ModuleType, tmp_path: Path) -> None:
    back = tmp_path / "back.tar.gz"
    (tmp_path / "half").touch()
    assert work(bench, tmp_path, "--only", "first 0", "--back", str(back)) == 75
    assert (tmp_path / "out/texts/0/half.jsonl").exists()
    (tmp_path / "half").unlink()
    assert work(bench, tmp_path, "--only", "first 0", "--finished", str(back), out="new") == 0
    (tmp_path / "new/said/0.json").write_text("newer")
    assert work(bench, tmp_path, "--list", "--finished", str(back), out="new") == 0
    assert (tmp_path / "new/said/0.json").read_text() == "newer"
    for wrong in (tmp_path / "none.tar.gz", tmp_path / "queue.toml"):
        with pytest.raises(SystemExit, match=f"cannot put {wrong.name.split('.')[0]}|cannot put .*{wrong.name}"):
            work(bench, tmp_path, "--list", "--finished", str(wrong))


def test_a_training_run_that_was_stopped_at_its_end_is_finished(
    bench: ModuleType, tmp_path: Path, trained: Trained
) -> None:
    """Killed between its last save and the word that it is finished: train --resume has nothing to go on with."""
    assert work(bench, tmp_path, "--only", "first 0") == 0
    run = tmp_path / "out/nets/0"
    (mark,) = run.glob("*.finished.json")
    shutil.rmtree(run)
    shutil.copytree(trained.folder, run)
    begun(tmp_path)
    (tmp_path / "out/steps").rename(tmp_path / "elsewhere")
    assert work(bench, tmp_path, "--only", "first 0") == 0
    assert [words[0] for words in begun(tmp_path)] == ["write", "say"]
    assert mark.exists()


def test_a_network_of_another_step_is_neither_gone_on_with_nor_lost(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert work(bench, tmp_path, "--only", "first 0") == 0
    (tmp_path / "queue.toml").write_text(QUEUE.replace('"--seed", "{seed}"', '"--seed", "{seed}", "--more"'))
    (tmp_path / "out/steps").rename(tmp_path / "elsewhere")
    begun(tmp_path)
    assert work(bench, tmp_path, "--only", "first 0") == 1
    assert begun(tmp_path) == []
    assert (tmp_path / "out/nets/0/big").exists()
    assert "was begun by another command (--toy" in " ".join(capsys.readouterr().out.split())


def test_another_recipe_makes_other_networks_and_what_reads_them_other(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise results of the old recipe would be taken for those of the new one."""
    monkeypatch.setattr(bench, "HERE", tmp_path)
    (tmp_path / "base.toml").write_text("steps = 3\n")
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text('base = "base.toml"\n[data]\nlength = 8\n')
    train = '{ seconds = 1, stays = "{out}/NAME", run = ["train", "{here}/NAME.toml", "--out", "{out}/NAME"] }'
    steps = [train.replace("NAME", "a"), train.replace("NAME", "b")]
    steps += ['{ seconds = 1, run = ["eval", "{out}/a"] }', '{ seconds = 1, run = ["eval", "{out}/b", "--x"] }']
    text = f'[size.full]\n[[job]]\nname = "one"\nsteps = [{", ".join(steps)}]\n'

    def keys(out: str = "out") -> list[str]:
        return [step.key for step in bench.Queue(text, tmp_path / out, "data").jobs[0].steps]

    before = keys()
    assert len(set(before)) == 4
    assert keys("elsewhere") == before
    (tmp_path / "a.toml").write_text('# a remark\nbase = "base.toml"\n[data]\nlength = 8\n')
    assert keys() == before
    (tmp_path / "a.toml").write_text('base = "base.toml"\n[data]\nlength = 9\n')
    assert [one == other for one, other in zip(keys(), before, strict=True)] == [False, True, False, True]
    (tmp_path / "base.toml").write_text("steps = 4\n")
    assert not set(keys()) & set(before)


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
    with pytest.raises(SystemExit, match="of at least 1, got 0 and 7"):
        made.windows(str(tmp_path / "a.jsonl"), "bytes", 0, 7)
    with pytest.raises(SystemExit, match="no such file or folder"):
        made.main([str(tmp_path / "b.jsonl"), "bytes", "10", "3", str(tmp_path / "out.jsonl")])
