"""`unmask train --nproc`: stops, deaths, restarts and hangs of real processes, each told in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import make_config, write_text

from matrix import ALL
from unmask.config import to_dict
from unmask.distributed.launch import NOTES, _ending, launch
from unmask.distributed.world import World
from unmask.training.run_lock import one_writer

LONG = 120.0  # seconds that anything may take on a busy machine


class Started:
    """A run on two processes that would go on for a very long time."""

    def __init__(self, folder: Path, *words: str) -> None:
        config = make_config(folder, "run", steps=1_000_000, valid_every=1_000_000, save_every=20)
        recipe = folder / "recipe.json"
        recipe.write_text(json.dumps(to_dict(config)))
        command = [sys.executable, "-m", "unmask", "train", str(recipe), "--nproc", "2", "--device", "cpu", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        environment.pop("RANK", None)
        self.errors = (folder / "stderr").open("w+")
        self.run = Path(config.out)
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=self.errors)

    def said(self) -> str:
        return Path(self.errors.name).read_text()

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG
        while not true():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.05)

    def until_saved(self, step: int = 20) -> None:
        self.until(lambda: any(int(p.name[5:]) >= step for p in self.run.glob("checkpoints/step-*")))

    def rank(self, rank: int) -> int:
        """The process with this rank, by its environment."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            mine = any(
                str(self.run.parent).encode() in word for word in path.with_name("cmdline").read_bytes().split(b"\0")
            )
            if mine and f"RANK={rank}".encode() in words:
                return int(path.parent.name)
        raise AssertionError(f"rank {rank} is not there: {self.said()}")

    def end(self) -> tuple[int, list[str]]:
        """Exit code, and what the launcher said last."""
        code = self.process.wait(timeout=LONG)
        return code, [line for line in self.said().splitlines() if line.startswith("unmask: ")]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    if not Path("/proc/self/environ").exists():
        pytest.skip("processes are found through /proc")
    write_text(tmp_path)
    begun: list[Started] = []

    def starting(*words: str) -> Started:
        begun.append(Started(tmp_path, *words))
        return begun[-1]

    yield starting
    for one in begun:
        for rank in (0, 1):
            try:
                os.kill(one.rank(rank), signal.SIGKILL)
            except (AssertionError, ProcessLookupError):
                continue
        one.process.kill()
        one.process.wait()
        assert one.process.stdout is not None
        one.process.stdout.close()
        one.errors.close()


@pytest.mark.parametrize("asked", ["launcher", "rank"] if ALL else ["launcher"])
def test_a_request_stops_all(start: Any, asked: str) -> None:
    """To the launcher or to one process, though torchrun would begin again."""
    run = start("--max-restarts", "2")
    run.until_saved()
    if asked == "rank":
        os.kill(run.rank(1), signal.SIGUSR1)
    else:
        run.process.send_signal(signal.SIGTERM)
    code, lines = run.end()
    assert code == 75
    assert len(lines) == 1
    assert "all is saved; go on with: unmask train" in lines[0]
    step = int(lines[0].split("stopped at step ")[1].split()[0])
    assert (run.run / "checkpoints" / f"step-{step:08d}").is_dir()


@pytest.mark.parametrize("first", ["dies", "hangs"] if ALL else ["hangs"])
def test_a_restart_goes_on_and_who_is_missing_when_there_is_none_left_is_told_by_name(start: Any, first: str) -> None:
    run = start("--max-restarts", "1", "--timeout", "4")
    run.until_saved()
    missing = run.rank(1)
    if first == "hangs":
        os.kill(missing, signal.SIGSTOP)
        run.until(lambda: "no progress" in run.said())
        assert "unmask: rank 0: no progress for 4 s; rank 1 is missing and gives no sign of life" in run.said()
    os.kill(missing, signal.SIGKILL)  # a stopped process does not hear torchrun's request to end
    run.until(lambda: "going on from step" in run.said())
    began = int(run.said().split("going on from step ")[1].split()[0])
    assert began >= 20
    run.until_saved(began + 20)
    os.kill(run.rank(1), signal.SIGKILL)
    killed = time.monotonic()
    code, lines = run.end()
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in lines[-1]
    assert time.monotonic() - killed < 60


@pytest.mark.skipif(not ALL, reason="the test above gives more of the same: make faults")
def test_who_hangs_is_told_by_name(start: Any) -> None:
    run = start("--timeout", "3")
    run.until_saved()
    hung = run.rank(1)
    os.kill(hung, signal.SIGSTOP)
    run.until(lambda: "no progress" in run.said())
    os.kill(hung, signal.SIGKILL)
    code, lines = run.end()
    assert code == 1
    assert lines[0].startswith("unmask: rank 0: no progress for 3 s; rank 1 is missing and gives no sign of life")


def test_what_the_processes_said_is_said_once(tmp_path: Path) -> None:
    def ending(codes: dict[int, int], **notes: tuple[int, str]) -> str:
        for path in tmp_path.iterdir():
            path.unlink()
        for rank, note in notes.items():
            (tmp_path / rank.removeprefix("r")).write_text(json.dumps(note))
        error = _ending(tmp_path, codes)
        return f"{type(error).__name__}: {error}"

    stopped = (75, "stopped at step 3")
    assert ending({0: 75, 1: 75}, r0=stopped, r1=stopped) == "Stopped: stopped at step 3"
    assert ending({}, r0=stopped, r1=stopped) == "Stopped: stopped at step 3"
    assert ending({1: -9, 0: 1}, r0=(1, "rank 0: another process is gone")).startswith("PeerError: rank 1 was killed")
    gone = (1, "rank 1: another process is gone, see its own message")
    assert ending({0: 1, 1: 1}, r0=(1, "no space left"), r1=gone) == "PeerError: rank 0: no space left"
    assert ending({0: 1, 1: 1}, r1=(1, "no space left"), r0=gone) == "PeerError: rank 1: no space left"
    assert ending({0: 2, 1: 2}, r0=(2, "bad batch"), r1=(2, "bad batch")) == "UsageError: bad batch"
    assert ending({1: 3}) == "PeerError: rank 1 ended with exit code 3; see its own message"
    lost = (1, "rank 0: another process is gone, see its own message")
    assert ending({0: 1, 1: 1}, r0=lost) == "PeerError: rank 1 ended with exit code 1; see its own message"
    assert ending({0: -15}) == "PeerError: rank 0 ended with exit code -15"
    assert NOTES not in os.environ


def test_processes_start_where_cores_are_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch", lambda *_: lambda *words: started.append(words)
    )
    launch(["train", "demo"], nproc=1)
    assert started == [("-m", "unmask", "train", "demo")]
    assert int(os.environ["OMP_NUM_THREADS"]) == os.cpu_count()


@pytest.mark.skipif(not ALL, reason="test_parallel.py has the refusal, a test above its one line: make faults")
def test_a_second_writer_is_refused_for_all_its_processes(start: Any, tmp_path: Path) -> None:
    with one_writer(tmp_path / "run", World()):
        run = start()
        code, lines = run.end()
    assert code == 2
    assert len(lines) == 1
    assert f"is being written by process {os.getpid()} on " in lines[0]
    assert not run.run.exists()
