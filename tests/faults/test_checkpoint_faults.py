"""A process killed or a disk full at any point of a save: a whole checkpoint remains, never a part of one."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask.checkpoint
from unmask.checkpoint import best_checkpoint, load_checkpoint, save_checkpoint
from unmask.errors import UnmaskError

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")

# Every call by which a save changes the disk, as (where it is looked up, its name).
POINTS: list[tuple[Any, str]] = [
    (os, "mkdir"),
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (shutil, "rmtree"),
    (Path, "write_text"),
    (unmask.checkpoint, "save_file"),
]


def save(run: Path, step: int, value: float, *, keep: int = 1) -> None:
    tensors = {name: {"w": torch.full((8,), value)} for name in ("model", "ema", "optimizer")}
    save_checkpoint(run, step, tensors, {"value": value}, keep=keep, best=True)


def on_call(place: Any, name: str, number: int, act: Callable[[], None], *, after: bool) -> Callable[[], int]:
    """Replace a function by one that acts before or after its call of that number; returns how often it was called."""
    real = getattr(place, name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            act()
        result = real(*args, **kwargs)
        if calls == number and after:
            act()
        return result

    setattr(place, name, counted)
    return lambda: calls


def whole(run: Path, values: dict[int, set[float]]) -> list[str]:
    """What is wrong with a run after a fault: empty when a whole checkpoint loads and it is one of those allowed."""
    found = load_checkpoint(run)
    if found is None:
        return ["no checkpoint"]
    value = found.state["value"]
    wrong = [f"skipped: {reason}" for reason in found.skipped]
    if value not in values.get(found.step, set()):
        wrong.append(f"step {found.step} has value {value}")
    wrong += [name for name, group in found.tensors.items() if not group["w"].eq(value).all()]
    best = best_checkpoint(run)
    if best is None or load_checkpoint(best) is None:
        wrong.append("no best")
    return wrong


def drive(root: Path) -> None:
    """Kill a child after each call that changes the disk and report; runs in a process of its own, which forks."""
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # what a kill leaves does not depend on it, and it takes most of the time
    report = []
    # A new step beside the previous one, and the same step in place of itself.
    for next_step in (2, 1):
        for place, name in POINTS:
            number = 0
            reached = True
            while reached:
                number += 1
                run = root / f"{next_step}-{name}-{number}"
                save(run, 1, 1.0)
                pid = os.fork()
                if pid == 0:
                    calls = on_call(place, name, number, lambda: os.kill(os.getpid(), signal.SIGKILL), after=True)
                    save(run, next_step, 2.0)
                    os._exit(0 if calls() < number else 1)  # 1: that call raised, as mkdir does where a folder is
                status = os.waitpid(pid, 0)[1]
                reached, killed = status != 0, os.WIFSIGNALED(status)
                allowed = {1: {1.0, 2.0}, 2: {2.0}} if next_step == 1 else {1: {1.0}, 2: {2.0}}
                wrong = whole(run, allowed)
                save(run, 3, 3.0)  # the next save works and clears up
                left = sorted(path.name for path in (run / "checkpoints").iterdir())
                if left != ["best", "step-00000003"]:
                    wrong.append(f"left: {left}")
                report.append({"point": name, "number": number, "step": next_step, "killed": killed, "wrong": wrong})
    print(json.dumps(report))


def test_a_kill_at_any_point_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [entry for entry in report if entry["wrong"]] == []
    # Each point was really hit, for both kinds of save.
    killed = {(entry["point"], entry["step"]) for entry in report if entry["killed"]}
    assert killed == {(name, step) for _, name in POINTS for step in (1, 2)}


@pytest.mark.parametrize("next_step", [2, 1])
@pytest.mark.parametrize(("place", "name"), [point for point in POINTS if point[1] != "rmtree"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_write_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, next_step: int, code: int
) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    real = getattr(place, name)
    failures = 0
    for number in range(1, 100):
        run = tmp_path / str(number)
        save(run, 1, 1.0)
        with monkeypatch.context() as patch:
            patch.setattr(place, name, real)  # so that it is put back
            calls = on_call(place, name, number, fail, after=False)
            message = ""
            try:
                save(run, next_step, 2.0)
            except UnmaskError as error:
                message = str(error)
        if message:
            failures += 1
            assert ("disk full" in message) == (code == errno.ENOSPC)
            assert "\n" not in message
            assert ".tmp-" not in message
        assert whole(run, {1: {1.0, 2.0}, 2: {2.0}}) == []
        names = {path.name for path in (run / "checkpoints").iterdir()}
        assert not [n for n in names if n.startswith(".")], names
        if calls() < number:
            break
    assert failures > 0


def test_a_real_failure_of_the_tensor_writer(tmp_path: Path) -> None:
    """The limit on a file's size makes the system itself refuse the write, below Python."""
    save(tmp_path, 1, 1.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        with pytest.raises(UnmaskError, match=r"cannot write .*step-00000002: File too large"):
            save_checkpoint(tmp_path, 2, {"model": {"w": torch.zeros(100_000)}}, {}, keep=1, best=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert whole(tmp_path, {1: {1.0}}) == []
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best", "step-00000001"]


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 1.0)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(unmask.checkpoint, "save_file", full)
    with pytest.raises(UnmaskError) as caught:
        save(tmp_path, 1, 2.0)
    final = (tmp_path / "checkpoints" / "step-00000001").resolve()
    assert str(caught.value) == (
        f"disk full while writing {final}; free space and run again; the previous step-00000001 is intact"
    )


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
