"""Saving in the background: from a copy, one at a time, told when durable; its errors are the run's."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import unmask.training.checkpoint.saving
from unmask.errors import NonFiniteError, Stopped, UnmaskError
from unmask.training.callbacks import Callback
from unmask.training.checkpoint.files import load_checkpoint, save_checkpoint
from unmask.training.checkpoint.saving import Saver
from unmask.training.loop import Run, train


def tensors(value: float) -> dict[str, dict[str, torch.Tensor]]:
    weight = torch.full((3, 4), value)
    return {"model": {"w": weight, "row": weight[1]}, "ema": {"w": torch.full((2,), value)}}


class Gate:
    """save_checkpoint that waits until it may go on, and counts how many are at work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.at_work = self.most = 0
        monkeypatch.setattr(unmask.training.checkpoint.saving, "save_checkpoint", self.save)

    def save(self, *args: Any, **kwargs: Any) -> Path:
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        self.entered.set()
        assert self.open.wait(30)
        try:
            return save_checkpoint(*args, **kwargs)
        finally:
            self.at_work -= 1


def test_what_is_written_is_the_step_it_was_asked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saver = Saver(tmp_path, keep=3, background=True)
    live, state = tensors(1.0), {"losses": [1.0]}
    saver.save(1, live, state, best=False)
    assert gate.entered.wait(30)
    assert list(saver.finished()) == []  # not durable, not told
    for group in live.values():
        for tensor in group.values():
            tensor.add_(1.0)  # the run goes on
    state["losses"].append(2.0)
    gate.open.set()
    assert list(saver.finished(wait=True)) == [(1, tmp_path / "checkpoints" / "step-00000001")]
    assert list(saver.finished(wait=True)) == []
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found.state == {"losses": [1.0]}
    assert found.tensors["model"]["w"].eq(1.0).all()
    assert found.tensors["model"]["row"].eq(1.0).all()
    assert found.tensors["ema"]["w"].eq(1.0).all()


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saver = Saver(tmp_path, keep=9, background=True)
    saver.save(1, tensors(1.0), {}, best=False)
    assert gate.entered.wait(30)  # one that has not begun would give way
    threading.Timer(0.1, gate.open.set).start()
    for step in (2, 3):
        saver.save(step, tensors(float(step)), {}, best=False)  # waits
    assert [step for step, _ in saver.finished(wait=True)] == [1, 2, 3]
    assert gate.most == 1
    for step in (1, 2, 3):  # the host's copies are used again, not mixed up
        found = load_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}")
        assert found is not None
        assert found.tensors["model"]["w"].eq(float(step)).all()


@pytest.mark.parametrize("surface", ["save", "wait", "finished"])
def test_an_error_surfaces_at_the_next_call_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surface: str
) -> None:
    saver = Saver(tmp_path, keep=1, background=True)
    saver.save(1, tensors(1.0), {}, best=False)
    saver.wait()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        saver.save(2, tensors(2.0), {}, best=False)
        saver._wait_while(lambda: saver._at_work)
    calls = {
        "save": lambda: saver.save(3, tensors(3.0), {}, best=False),
        "wait": saver.wait,
        "finished": lambda: list(saver.finished()),
    }
    with pytest.raises(UnmaskError, match=r"disk full while writing .*step-00000002; free space and run again"):
        calls[surface]()
    saver.wait()
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.skipped) == (1, [])


def test_close_joins_and_leaves_the_first_error_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saver = Saver(tmp_path, keep=1, background=True)
    saver.save(1, tensors(1.0), {}, best=False)
    threading.Timer(0.1, gate.open.set).start()
    assert [step for step, _ in saver.close()] == [1]
    monkeypatch.setattr(unmask.training.checkpoint.saving, "save_checkpoint", lambda *a, **k: 1 / 0)
    saver.save(2, tensors(2.0), {}, best=False)
    assert list(saver.close()) == []


def test_a_process_that_ends_waits(tmp_path: Path) -> None:
    program = """
import sys, time, torch, unmask.training.checkpoint.saving
real = unmask.training.checkpoint.saving.save_checkpoint
def slow(*args, **options):
    time.sleep(0.5)
    return real(*args, **options)
unmask.training.checkpoint.saving.save_checkpoint = slow
saver = unmask.training.checkpoint.saving.Saver(__import__("pathlib").Path(sys.argv[1]), keep=1, background=True)
saver.save(3, {"model": {"w": torch.ones(2)}}, {}, best=False)
sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == 7
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 3


# --- in a run ---------------------------------------------------------------------------------------------------------


def test_a_run_is_the_same_whichever_way_it_saves(tmp_path: Path, make_config: Any, record: Any) -> None:
    folders = [tmp_path / "sync", tmp_path / "async"]
    for folder, how in zip(folders, ({"save_every": 4}, {"save_every": 8, "async_save": True}), strict=True):
        train(make_config(folder, **how), callbacks=[record], device="cpu")
    saves = [event[1] for event in record.events if event[0] == "save"]
    assert saves[:4] == [4, 6, 8, 12]  # 6 is the best so far
    assert {6, 12} <= set(saves[4:]) <= {4, 6, 8, 12}  # in the background 4 and 8 may give way to newer ones
    names = [{p.relative_to(f) for p in f.rglob("*.safetensors")} for f in folders]
    assert len(names[0]) == len(names[1]) == 7  # two checkpoints of three, and the model
    same = names[0] & names[1]
    assert {name.parts[-2] for name in same} >= {"model", "step-00000012"}
    for name in same:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


@pytest.mark.parametrize("end", ["stop", "error"])
def test_the_end_of_a_run_waits_for_its_save(
    tmp_path: Path, make_config: Any, record: Any, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """However it ends: what was begun is durable and told before the last word."""
    gate = Gate(monkeypatch)
    config = make_config(tmp_path / "run", async_save=True, valid_every=100, save_every=8, steps=100)
    real = Run.forward_backward

    def then(self: Run, *given: Any) -> Any:
        if self.step == 5:
            threading.Timer(0.2, gate.open.set).start()
            if end == "error":
                raise NonFiniteError("loss nan")
            os.kill(os.getpid(), 15)
        return real(self, *given)

    monkeypatch.setattr(Run, "forward_backward", then)
    with pytest.raises(Stopped if end == "stop" else NonFiniteError):
        train(config, callbacks=[record], device="cpu")
    saves = [event for event in record.events if event[0] in ("save", "end")]
    assert saves == [("save", 4), *([("save", 6)] if end == "stop" else []), ("end",)]
    found = load_checkpoint(tmp_path / "run")
    assert found is not None
    assert found.step == (6 if end == "stop" else 4)


def test_a_failing_save_stops_the_run_with_its_line(
    tmp_path: Path, make_config: Any, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = unmask.training.checkpoint.saving.save_checkpoint, 0

    def fails(*args: Any, **kwargs: Any) -> Path:
        nonlocal count
        count += 1
        if count == 2:
            raise UnmaskError("disk full while writing")
        return real(*args, **kwargs)

    monkeypatch.setattr(unmask.training.checkpoint.saving, "save_checkpoint", fails)
    config = make_config(tmp_path / "run", async_save=True, valid_every=100, save_every=8, steps=100)
    with pytest.raises(UnmaskError, match="disk full"):
        train(config, callbacks=[record], device="cpu")
    last = max(event[1] for event in record.events if event[0] == "step")
    assert 8 <= last <= 12  # at the next step or save, not at the end
    found = load_checkpoint(tmp_path / "run")
    assert found is not None
    assert found.step == 4
    monkeypatch.undo()
    train(make_config(tmp_path / "run", steps=12, valid_every=100, save_every=4), resume=True, device="cpu")


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_without_room_stops_the_run_at_that_step(
    tmp_path: Path, make_config: Any, record: Any, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    real = shutil.disk_usage

    def filling(place: Any) -> Any:
        begun = any(event[0] == "step" and event[1] >= 8 for event in record.events)
        return real(place)._replace(free=12_345) if begun else real(place)

    monkeypatch.setattr(shutil, "disk_usage", filling)
    config = make_config(
        tmp_path / "run", async_save=background, valid_every=100, save_every=8 if background else 4, steps=100
    )
    with pytest.raises(
        UnmaskError, match=r"step-00000008 needs [0-9,]+ bytes and 12,345 are free; free space"
    ) as error:
        train(config, callbacks=[record], device="cpu")
    assert "\n" not in str(error.value)
    assert max(event[1] for event in record.events if event[0] == "step") == 8
    assert record.events[-1] == ("end",)
    found = load_checkpoint(tmp_path / "run")
    assert found is not None
    assert (found.step, found.skipped) == (4, [])


def test_a_save_that_fails_behind_an_error_is_told(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own error is raised; that the last save failed too is said before the end."""

    class Notes(Callback):
        said: ClassVar[list[str]] = []

        def on_note(self, step: int, text: str) -> None:
            self.said.append(text)

        def on_step(self, report: Any) -> None:
            if report.step == 4:  # its save begins after this and fails in the background
                monkeypatch.setattr("unmask.training.checkpoint.saving.save_checkpoint", failing)

    over = threading.Event()

    def failing(*_: Any, **__: Any) -> Path:
        assert over.wait(30)
        raise OSError(5, "Input/output error")

    real = Run.forward_backward

    def then(self: Run, *given: Any) -> Any:
        if self.step == 4:
            over.set()
            raise NonFiniteError("loss nan")
        return real(self, *given)

    monkeypatch.setattr(Run, "forward_backward", then)
    config = make_config(tmp_path / "run", async_save=True, valid_every=100, save_every=8, steps=100)
    with pytest.raises(NonFiniteError):
        train(config, callbacks=[Notes()], device="cpu")
    assert Notes.said == ["the last save failed: [Errno 5] Input/output error"]
