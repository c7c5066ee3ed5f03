"""A process killed or a disk that fails at any point of a save: a whole checkpoint remains, never a part of one."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from injection import Taps

from unmask.distributed.world import World
from unmask.errors import UnmaskError
from unmask.training.checkpoint.files import best_checkpoint, load_checkpoint, save_checkpoint
from unmask.training.checkpoint.sharded import save_sharded

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")


SHARD = "shard-00001-model-00001-of-00001.safetensors"
KINDS = {"whole": ("model.safetensors", "ema.safetensors", "optimizer.safetensors"), "sharded": (SHARD,)}
CASES = [("whole", 2), ("whole", 1), ("sharded", 2), ("sharded", 1)]


def save(run: Path, step: int, value: float, kind: str = "whole", *, keep: int = 1) -> None:
    tensors = {name: {"w": torch.full((8,), value)} for name in ("model", "ema", "optimizer")}
    write: Any = save_checkpoint if kind == "whole" else partial(save_sharded, world=World())
    write(run, step, tensors, {"value": value}, keep=keep, best=True)


def list_points(run: Path, next_step: int, kind: str) -> list[tuple[str, str]]:
    """Every point of a save behind the one of step 1, with "before", "half" or "after"."""
    found: list[tuple[str, str]] = []
    save(run, 1, 1.0, kind)
    with Taps(run, lambda name, when: found.append((name, when))):
        save(run, next_step, 2.0, kind)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_counts_before_it_is_durable(tmp_path: Path, kind: str) -> None:
    """The order decides what a power cut leaves: sync, rename, sync, the pointers likewise, and only then remove."""
    done = [name for name, when in list_points(tmp_path / "run", 2, kind) if when == "after"]

    def last(name: str) -> int:
        return len(done) - 1 - done[::-1].index(name)

    in_place = done.index("rename new step to step")
    for file in (*KINDS[kind], "state.json", "manifest.json"):
        assert last(f"write {file}") < done.index(f"fsync {file}") < in_place
    assert done.index("fsync new step") == in_place - 1
    assert done[in_place + 1] == "fsync checkpoints"
    for pointer in ("latest", "best"):
        moved = done.index(f"replace {pointer}")
        assert in_place + 1 < last(f"write new {pointer}") < done.index(f"fsync new {pointer}") < moved
        assert done[moved + 1] == "fsync checkpoints"
    assert done.index("replace latest") < done.index("replace best") < done.index("rename step to new step")
    assert done[-2:] == ["rename step to new step", "rmtree new step"]


def test_a_new_run_s_folders_are_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.open

    def noted(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags == os.O_RDONLY:
            synced.append(str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", noted)
    save(tmp_path / "runs" / "new", 1, 1.0)
    assert {str(tmp_path), str(tmp_path / "runs"), str(tmp_path / "runs" / "new")} <= set(synced)


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
    """Kill a child at every point of a save and report; runs in a process of its own, which forks."""
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # what a kill leaves does not depend on it, and it takes most of the time
    report = []
    # A new step beside the previous one, and the same step in place of itself.
    for kind, next_step in CASES:
        for number, point in enumerate(list_points(root / f"{kind}-{next_step}-listed", next_step, kind)):
            run = root / f"{kind}-{next_step}-{number}"
            save(run, 1, 1.0, kind)
            pid = os.fork()
            if pid == 0:
                seen = -1

                def die(name: str, when: str, number: int = number) -> None:
                    nonlocal seen
                    seen += 1
                    if seen == number:
                        os.kill(os.getpid(), signal.SIGKILL)

                with Taps(run, die):
                    save(run, next_step, 2.0, kind)
                os._exit(0)
            killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
            wrong = whole(run, {1: {1.0, 2.0}} if next_step == 1 else {1: {1.0}, 2: {2.0}})
            save(run, 3, 3.0, kind)  # the next save works and clears up
            left = sorted(path.name for path in (run / "checkpoints").iterdir())
            if left != ["best", "latest", "step-00000003"]:
                wrong.append(f"left: {left}")
            report.append({"point": point, "case": (kind, next_step), "killed": killed, "wrong": wrong})
    print(json.dumps(report))


def test_a_kill_at_any_point_leaves_a_whole_checkpoint(tmp_path: Path, tally: Any) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [entry for entry in report if entry["wrong"] or not entry["killed"]] == []
    for kind, step in CASES:
        points = {tuple(entry["point"]) for entry in report if entry["case"] == [kind, step]}
        assert len(points) > (60 if kind == "whole" else 45)
        for name in (f"write {KINDS[kind][0]}", "fsync manifest.json", "replace latest", "replace best"):
            assert (name, "before") in points
        assert ("rename new step to step", "after") in points
    tally("killed in a save alone", len(report))


@pytest.mark.parametrize(("kind", "next_step"), CASES)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=lambda code: errno.errorcode[code])
def test_a_failing_call_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, next_step: int, code: int, tally: Any
) -> None:
    """Every call of the save path fails, and every write also when half of it is done."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and wrapped all the same
    points = list_points(tmp_path / "listed", next_step, kind)
    in_place = points.index(("rename new step to step", "after"))
    failures = cases = 0
    for number, (name, when) in enumerate(points):
        if when == "after":
            continue
        run = tmp_path / str(number)
        save(run, 1, 1.0, kind)
        seen = -1

        def fail(name: str, when: str, number: int = number) -> None:
            nonlocal seen
            seen += 1
            if seen == number:
                raise OSError(code, os.strerror(code))

        message = ""
        try:
            with Taps(run, fail):
                save(run, next_step, 2.0, kind)
        except UnmaskError as error:
            message = str(error)
        assert seen >= number
        if message:
            failures += 1
            assert ("disk full" in message) == (code == errno.ENOSPC)
            assert "\n" not in message
            assert ".tmp-" not in message
        else:  # a folder that is there already; an old one that is removed at the next save instead
            assert name == "mkdir checkpoints" or name.startswith(("rmtree", "rename step to new"))
        old, new = {1: {1.0}}, {next_step: {2.0}}
        if message:
            new = old if number < in_place else {1: {1.0, 2.0}, 2: {2.0}}
        assert whole(run, new) == []
        hidden = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
        assert not hidden or name.startswith("rmtree")
        save(run, 3, 3.0, kind)
        left = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert left == ["best", "latest", "step-00000003"]
        cases += 1
    assert failures > (35 if kind == "whole" else 25)
    tally(f"write faults, {errno.errorcode[code]}", cases)


@pytest.mark.parametrize(("kind", "next_step"), CASES)
def test_a_short_write_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, next_step: int, tally: Any
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    points = list_points(tmp_path / "listed", next_step, kind)
    halves = [number for number, (_, when) in enumerate(points) if when == "half"]
    for number in halves:
        run = tmp_path / str(number)
        save(run, 1, 1.0, kind)
        seen = -1

        def shorten(name: str, when: str, number: int = number) -> str | None:
            nonlocal seen
            seen += 1
            return "short" if seen == number else None

        with Taps(run, shorten):
            save(run, next_step, 2.0, kind)
        assert seen > number
        assert whole(run, {next_step: {2.0}}) == []
    assert len(halves) >= (10 if kind == "whole" else 6)
    tally("write faults, short write", len(halves))


def test_a_write_that_takes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: 0)
        with pytest.raises(UnmaskError, match=r"cannot write .*step-00000002: Input/output error"):
            save(tmp_path, 2, 2.0)
    assert whole(tmp_path, {1: {1.0}}) == []


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
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best", "latest", "step-00000001"]


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 1.0)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UnmaskError) as caught:
        save(tmp_path, 1, 2.0)
    final = (tmp_path / "checkpoints" / "step-00000001").resolve()
    assert str(caught.value) == (
        f"disk full while writing {final}; free space and run again; the previous step-00000001 is intact"
    )


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
