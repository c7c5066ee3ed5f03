"""One writer for a run's folder: a second one is refused by name, and any death lets go."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unmask import cli
from unmask.config import RunConfig, to_dict
from unmask.distributed.world import World
from unmask.errors import UsageError
from unmask.training import run_lock
from unmask.training.loop import train
from unmask.training.run_lock import LOCK, one_writer

ALONE = World()
HERE = rf"process {os.getpid()} on {socket.gethostname()}, since \d{{4}}-\d\d-\d\d "


def files(folder: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file() and p.name != LOCK}
    return {name: path.read_bytes() for name, path in found.items()}


@pytest.fixture
def copied(trained: Any, tmp_path: Path) -> RunConfig:
    """A run that can go on, in a folder of its own."""
    folder = tmp_path / "run"
    shutil.copytree(trained.folder, folder)
    (folder / "recipe.json").write_text(json.dumps(to_dict(trained.config) | {"out": str(folder), "steps": 63}))
    return RunConfig(**(vars(trained.config) | {"out": str(folder), "steps": 63}))


def test_a_second_writer_is_refused_before_it_writes(copied: RunConfig) -> None:
    folder = Path(copied.out)
    before = files(folder)
    for resume in (False, True):
        with (
            one_writer(folder, ALONE),
            pytest.raises(UsageError, match=rf"^{folder} is being written by {HERE}.*; wait for it, stop it, or give"),
        ):
            train(copied, resume=resume, device="cpu")
    assert files(folder) == before
    assert not (folder / LOCK).exists()
    train(copied, resume=True, device="cpu")  # who was refused holds nothing
    assert not (folder / LOCK).exists()


def test_what_reads_a_run_does_not_wait_for_its_writer(copied: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    with one_writer(Path(copied.out), ALONE):
        assert cli.run(["eval", copied.out, "--max-rows", "2", "--json"]) == 0
        assert cli.run(["generate", copied.out, "--length", "8"]) == 0
    assert capsys.readouterr().err == ""


def test_a_refused_command_leaves_no_folder(tmp_path: Path, make_config: Any) -> None:
    out = tmp_path / "new" / "run"
    with pytest.raises(UsageError, match="give --resume or --init"):
        train(make_config(out), resume=True, init="x", device="cpu")
    assert not (tmp_path / "new").exists()


HOLD = """
import os, sys, time
from pathlib import Path
from unmask.distributed.world import World
from unmask.training.run_lock import one_writer
with one_writer(Path(sys.argv[1]), World()):
    child = os.fork() if sys.argv[2] == "fork" else 0
    if sys.argv[2] == "fork" and child == 0:
        print(os.getppid(), os.getpid(), flush=True)  # by now the child has let go
        time.sleep(60)
        os._exit(0)
    if not child:
        print(os.getpid(), child, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_kill_lets_go_also_when_a_child_lives_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), "fork"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pid, child = map(int, process.stdout.readline().split())
        try:
            with (
                pytest.raises(UsageError, match=f"is being written by process {pid} on "),
                one_writer(folder, ALONE),
            ):
                pass
            process.kill()
            process.wait()
            assert (folder / LOCK).exists()
            os.kill(child, 0)  # it lives
            with one_writer(folder, ALONE) as note:
                assert note == ""
                assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_lock_on_a_file_that_was_removed_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before removes the file and lets go while we have it open: a third would lock a new file."""
    real, calls = run_lock._lock, []

    def lock(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()
        real(descriptor)

    monkeypatch.setattr(run_lock, "_lock", lock)
    with one_writer(tmp_path, ALONE), pytest.raises(UsageError, match="is being written"), one_writer(tmp_path, ALONE):
        pass
    assert len(calls) == 3


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, make_config: Any, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(descriptor: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(run_lock, "_lock", lock)
    notes: list[str] = []
    monkeypatch.setattr(record, "on_note", lambda step, text: notes.append(text))
    train(make_config(tmp_path / "run", steps=1), callbacks=[record], device="cpu")
    assert notes == [f"the file system of {tmp_path / 'run'} has no locks: see to it that no second run writes there"]


def test_an_empty_or_odd_lock_file_still_refuses(tmp_path: Path) -> None:
    for text in ("", "{}", '{"pid": "x"}', "\\xff"):
        with one_writer(tmp_path, ALONE):
            (tmp_path / LOCK).write_text(text)
            with pytest.raises(UsageError, match="is being written by another process; "), one_writer(tmp_path, ALONE):
                pass
