"""The best model in the background: the loop does not wait for the disk, and what ends up there belongs together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
import unmask.training.checkpoint.saving as saving
from unmask.config import RunConfig
from unmask.distributed.world import World
from unmask.errors import NonFiniteError, Stopped, UnmaskError
from unmask.model import Model
from unmask.storage.tensor_file import read_tensors
from unmask.training.callbacks import Callback
from unmask.training.checkpoint.files import best_checkpoint, load_checkpoint, save_checkpoint
from unmask.training.checkpoint.host_copy import available_memory, fits
from unmask.training.checkpoint.saving import Saver, make_saver
from unmask.training.loop import Run, train


def tensors(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((3,), value)}}


class Disk:
    """A disk that takes nothing until it is let; what it took, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.busy = threading.Event(), threading.Event()
        self.took: list[tuple[str, int]] = []
        save_model = Model.save

        def save(run_dir: Path, step: int, *args: Any, **options: Any) -> Path:
            self.wait()
            path = save_checkpoint(run_dir, step, *args, **options)
            self.took.append(("checkpoint", step))
            return path

        def model_saved(model: Model, *args: Any, **options: Any) -> None:
            self.wait()
            save_model(model, *args, **options)
            self.took.append(("model", 0))

        monkeypatch.setattr(saving, "save_checkpoint", save)
        monkeypatch.setattr(Model, "save", model_saved)

    def wait(self) -> None:
        self.busy.set()
        assert self.open.wait(60), "the loop waits for the disk"

    @property
    def steps(self) -> list[int]:
        return [step for kind, step in self.took if kind == "checkpoint"]


class At(Callback):
    """Does something once the numbers of a step are told."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def on_step(self, report: Any) -> None:
        if report.step == self.step:
            self.act()


def better_at(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """The validations, counted from 1, that are better than any before."""
    count = 0

    def is_better(*_: Any) -> bool:
        nonlocal count
        count += 1
        return count in numbers

    monkeypatch.setattr("unmask.training.state.is_better", is_better)


def assert_belong_together(run: Path, best: int) -> None:
    """The model's folder is the average of the best checkpoint, and can be read."""
    folder = best_checkpoint(run)
    assert folder is not None
    assert folder.name == f"step-{best:08d}"
    found = load_checkpoint(folder)
    assert found is not None
    kept = read_tensors(run / "model" / "model.safetensors")
    wanted = found.tensors["model"] | found.tensors.get("ema", {})
    assert kept.keys() == wanted.keys()
    assert [name for name in kept if not kept[name].equal(wanted[name])] == []
    unmask.load(run, device="cpu")


# --- in a run ---------------------------------------------------------------------------------------------------------


def test_the_loop_does_not_wait_for_the_disk(
    tmp_path: Path, make_config: Any, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first of five best models is being written the run goes on; the newest of the others follows it."""
    disk = Disk(monkeypatch)
    better_at(monkeypatch, 1, 2, 3, 4, 5)

    def let() -> None:
        assert disk.busy.wait(30)
        assert disk.took == []
        disk.open.set()

    config = make_config(tmp_path / "run", async_save=True, valid_every=2, save_every=40, steps=12)
    better = [2, 4, 6, 8, 10]
    train(config, callbacks=[record, At(11, let)], device="cpu")
    assert disk.steps == [better[0], better[-1], 12]
    assert disk.took == [("model", 0), ("checkpoint", 2), ("model", 0), ("checkpoint", 10), ("checkpoint", 12)]
    assert [event[1] for event in record.events if event[0] == "save"] == disk.steps
    assert_belong_together(tmp_path / "run", best=10)


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("background", [False, True])
def test_what_is_kept_is_the_average_of_that_step(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch, background: bool, ema: float
) -> None:
    better_at(monkeypatch, 2)
    at_once: list[dict[str, torch.Tensor]] = []

    class Look(Callback):
        def on_run(self, run: Any) -> None:
            self.run = run

        def on_step(self, report: Any) -> None:
            assert self.run._run.network.training  # also after a model was kept

        def on_valid(self, step: int, bound: Any) -> None:
            if step == 6:
                at_once.append(dict(self.run.averaged().denoiser.state_dict()))

    config = make_config(tmp_path / "run", async_save=background, valid_every=3, save_every=4, optim={"ema": ema})
    train(config, callbacks=[Look()], device="cpu")
    assert_belong_together(tmp_path / "run", best=6)
    for name, tensor in read_tensors(tmp_path / "run" / "model" / "model.safetensors").items():
        assert tensor.equal(at_once[0][name])


@pytest.mark.parametrize("end", ["stop", "error"])
def test_however_a_run_ends_what_was_pending_is_written(
    tmp_path: Path, make_config: Any, record: Any, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    disk = Disk(monkeypatch)
    better_at(monkeypatch, 1, 2)
    real = Run.forward_backward

    def then(self: Run, *given: Any) -> Any:
        if self.step == 5:
            threading.Timer(0.2, disk.open.set).start()
            if end == "error":
                raise NonFiniteError("loss nan")
            self.stopping = True
        return real(self, *given)

    monkeypatch.setattr(Run, "forward_backward", then)
    config = make_config(tmp_path / "run", async_save=True, valid_every=2, save_every=40, steps=12)
    with pytest.raises(NonFiniteError if end == "error" else Stopped):
        train(config, callbacks=[record], device="cpu")
    assert disk.steps == [2, 4, *([] if end == "error" else [6])]
    assert [event for event in record.events if event[0] in ("save", "end")][-1] == ("end",)
    assert_belong_together(tmp_path / "run", best=4)


def test_a_model_that_cannot_be_written_stops_the_run_and_has_no_checkpoint(
    tmp_path: Path, make_config: Any, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that knew of the better bound would keep a resumed run from ever writing its model."""
    disk = Disk(monkeypatch)
    better_at(monkeypatch, 1)

    def full(*_: Any, **__: Any) -> None:
        disk.wait()
        raise UnmaskError("disk full while writing model")

    monkeypatch.setattr(Model, "save", full)
    config = make_config(tmp_path / "run", async_save=True, valid_every=2, save_every=8, steps=100)
    # The checkpoint of step 4 waits behind the model of step 2 when that fails.
    with pytest.raises(UnmaskError, match="disk full while writing model"):
        train(config, callbacks=[record, At(5, disk.open.set)], device="cpu")
    assert max(event[1] for event in record.events if event[0] == "step") <= 8
    assert disk.took == []
    assert load_checkpoint(tmp_path / "run") is None


# --- what gives way ---------------------------------------------------------------------------------------------------


class Watched(Saver):
    """Says when a call begins to wait."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, background=True, **options)
        self.waits = threading.Event()

    def _wait_while(self, condition: Callable[[], bool]) -> None:
        if condition():
            self.waits.set()
        super()._wait_while(condition)


def saved_behind(saver: Watched, disk: Disk, *saves: tuple[int, bool]) -> tuple[bool, list[int]]:
    """Begin one save, and the others while it is being written: whether one of them had to wait, and what was kept."""
    (step, best), *others = saves
    saver.save(step, tensors(float(step)), {}, best=best)
    assert disk.busy.wait(30)

    def rest() -> None:
        for step, best in others:
            saver.save(step, tensors(float(step)), {}, best=best)

    loop = threading.Thread(target=rest)
    loop.start()
    while loop.is_alive() and not saver.waits.is_set():
        loop.join(0.01)
    waited = saver.waits.is_set()
    assert disk.took == []
    disk.open.set()
    loop.join()
    steps = [step for step, _ in saver.finished(wait=True)]
    for step in steps:  # whichever memory it was copied to
        found = load_checkpoint(saver.run_dir / "checkpoints" / f"step-{step:08d}")
        assert found is not None
        assert found.tensors["model"]["w"].eq(float(step)).all()
    return waited, steps


GIVES_WAY = {
    "an older one": ([(10, False), (20, False), (30, False)], False, [10, 30]),
    "an older one, to the best": ([(10, False), (20, False), (30, True)], False, [10, 30]),
    "the best, to a better one": ([(10, True), (20, True), (30, True)], False, [10, 30]),
    "the best, to no other": ([(10, False), (20, True), (30, False)], True, [10, 20, 30]),
    "no milestone": ([(10, False), (50, False), (60, True)], True, [10, 50, 60]),
}


@pytest.mark.parametrize("case", GIVES_WAY)
def test_what_has_not_begun_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    saves, waits, kept = GIVES_WAY[case]
    disk = Disk(monkeypatch)
    saver = Watched(tmp_path, keep=9, keep_every=50, every=100)
    assert saved_behind(saver, disk, *saves) == (waits, kept)


@pytest.mark.parametrize(("last", "waits"), [(150, False), (199, False), (200, True), (250, True)])
def test_a_kill_costs_two_intervals_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, waits: bool
) -> None:
    """From step 200 to the next save at 300 a kill may cost 200, so that something as new as step 100 must be there."""
    disk = Disk(monkeypatch)
    assert saved_behind(Watched(tmp_path, keep=9, every=100), disk, (50, False), (last, False)) == (waits, [50, last])


def test_without_memory_for_a_second_copy_the_first_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    rooms = iter([True, False])
    monkeypatch.setattr(saving, "fits", lambda _: next(rooms))
    saver = Watched(tmp_path, keep=9, every=100)
    assert saved_behind(saver, disk, (10, False), (20, False)) == (True, [10, 20])
    assert len(saver._places) == 1


def test_without_memory_for_a_copy_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "fits", lambda _: False)
    saver = Saver(tmp_path, keep=9, every=100, background=True)
    live = tensors(1.0)
    saver.save(10, live, {}, best=False)
    assert [step for step, _ in saver.finished()] == [10]
    assert saver._places == []


def test_memory_is_taken_beforehand(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=9, background=True)
    thread = saver.prepare(tensors(1.0))
    assert thread is not None
    thread.join()
    (place,) = saver._places
    reserved = place.tensors["model", "w"]
    saver.save(1, tensors(1.0), {}, best=False)
    saver.wait()
    assert saver._places == [place]
    assert place.tensors["model", "w"] is reserved
    assert reserved.eq(1.0).all()
    assert Saver(tmp_path, keep=9).prepare(tensors(1.0)) is None  # at once: from where they are


def test_available_memory(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == float("inf")  # another system
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  4000 kB\n")
    assert available_memory(tmp_path) == 4000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("3000\n")
    assert available_memory(tmp_path) == 4000 * 1024
    (group / "memory.max").write_text("5000\n")
    assert available_memory(tmp_path) == 2000
    (group / "memory.stat").write_text("anon 1\ninactive_file 700\n")
    assert available_memory(tmp_path) == 2700


def test_a_copy_takes_half_of_the_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    for room, wanted in ((24, True), (23, False)):  # three float32 are 12 bytes
        monkeypatch.setattr("unmask.training.checkpoint.host_copy.available_memory", lambda room=room: room)
        assert fits(tensors(1.0)) == wanted


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("kind", "changes", "background"),
    [
        ("alone", {}, None),
        ("alone", {"async_save": True}, True),
        ("alone", {"async_save": False}, False),
        ("ddp", {}, None),
        ("ddp", {"save_as": "sharded"}, False),
        ("fsdp", {}, False),
        ("fsdp", {"async_save": True}, True),
        ("fsdp", {"save_as": "whole"}, None),
    ],
)
def test_where_saves_are_in_the_background(
    kind: str, changes: dict[str, Any], background: bool | None, device: str
) -> None:
    """None: on a GPU."""
    saver = make_saver(RunConfig(save_every=100, **changes), World(device=torch.device(device)), kind)
    wanted = device == "cuda" if background is None else background
    assert (saver.background, saver.every) == (wanted, 50 if wanted else 100)
