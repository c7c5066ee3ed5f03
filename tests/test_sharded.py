"""Sharded checkpoints: written by two processes, read by two or one, whole or not at all, nothing pickled."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from unmask.config import RunConfig
from unmask.distributed.world import World
from unmask.errors import ConfigError, ModelFolderError, UnmaskError
from unmask.storage.tensor_file import write_tensors
from unmask.training.callbacks import Callback, StepReport
from unmask.training.checkpoint.files import Checkpoint, _sealed, load_checkpoint, newest, verify
from unmask.training.checkpoint.resume import _read_together
from unmask.training.checkpoint.saving import make_saver
from unmask.training.checkpoint.sharded import read_shares, save_sharded
from unmask.training.loop import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts processes that talk by gloo")

ALONE = World()
STATE = {"best": 1.5, "names": ["a", "b"]}


def full(value: float) -> dict[str, dict[str, Tensor]]:
    """Rows that divide among two processes and rows that do not, a scalar, other types, and one row for two."""
    return {
        "model": {
            "even": torch.arange(32.0).reshape(8, 4) + value,
            "odd": torch.arange(35.0).reshape(7, 5).bfloat16() + value,
            "single": torch.full((1, 3), value),
            "copy": torch.full((5,), value, dtype=torch.float64),
        },
        "optimizer": {"step/even": torch.tensor(value), "exp_avg/even": torch.arange(32.0).reshape(8, 4) * value},
    }


def cut(groups: dict[str, dict[str, Tensor]], mesh: Any) -> dict[str, dict[str, Tensor]]:
    """As FSDP would: along the rows, where there are any."""

    def one(name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        return distribute_tensor(tensor, mesh, [Replicate() if name == "copy" else Shard(0)])

    return {group: {name: one(name, t) for name, t in named.items()} for group, named in groups.items()}


def save(run: Path, step: int, value: float, world: World = ALONE, keep: int = 2, best: bool = False) -> Path:
    groups = full(value) if world.size == 1 else cut(full(value), mesh_of(world))
    return save_sharded(run, step, groups, STATE, keep=keep, best=best, world=world)


def mesh_of(world: World) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world.size,))


def read(run: Path, into: dict[str, dict[str, Tensor]], world: World = ALONE) -> Checkpoint | None:
    """The newest whole one, as a run reads it: found by all, then each its share."""
    found = newest(run, lambda folder: _read_together(world, folder))
    if found is not None:
        assert found.sharded
        assert found.tensors == {}
        read_shares(found.path, into, world)
    return found


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, in name, type and shape; of a DTensor all of it."""
    if a.keys() != b.keys() or any(a[group].keys() != b[group].keys() for group in a):
        return False
    pairs = [(a[group][name], b[group][name]) for group in a for name in a[group]]
    pairs = [(x.full_tensor() if isinstance(x, DTensor) else x, y) for x, y in pairs]
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def test_alone(tmp_path: Path) -> None:
    """One process, no group: the same files, read by either reader."""
    for step in (1, 2, 3):
        path = save(tmp_path, step, step, best=step == 2)
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "shard-00001-model-00001-of-00001.safetensors",
        "state.json",
    ]
    folder = tmp_path / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["best", "latest", "step-00000002", "step-00000003"]
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.state) == (3, STATE)
    assert same(found.tensors, full(3))
    into = full(0)
    again = read(tmp_path, into)
    assert again is not None
    assert (again.step, again.skipped) == (3, [])
    assert same(into, full(3))
    assert read(tmp_path / "nowhere", into) is None


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1, 1)
    short, long, other, wide = full(0), full(0), full(0), full(0)
    del short["model"]["odd"]
    long["model"]["evil"] = torch.ones(1)
    other["model"]["even"] = torch.ones(4, 8)
    wide["model"]["even"] = wide["model"]["even"].double()
    for into, said in ((short, "model/odd"), (long, "model/evil"), (other, r"\(8, 4\)"), (wide, "float32")):
        with pytest.raises(ModelFolderError, match=said):
            read_shares(path, into, ALONE)
    shutil.copy(next(path.glob("shard-*")), path / "shard-00009.safetensors")
    with pytest.raises(ModelFolderError, match=r"shard-00009\.safetensors is not in the manifest"):
        verify(path)


def offsets(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        held = json.loads(text)
        change(held)
        return json.dumps(held)

    return changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: "{", "is damaged"),
        (lambda text: "[]", "is damaged"),
        (offsets(lambda held: held.pop("model/even")), "is damaged"),
        (offsets(lambda held: held["model/even"].update(saved_offsets=[4, 0])), "do not make up the whole"),
        (offsets(lambda held: held["model/even"].update(saved_offsets=[1 << 40, 0])), "do not make up the whole"),
        (offsets(lambda held: held["model/even"].update(saved_offsets="evil")), "is damaged"),
        (offsets(lambda held: held["model/even"].update(saved_offsets=[0, 1])), "do not make up the whole"),
    ],
)
def test_a_share_that_lies(tmp_path: Path, change: Callable[[str], str], said: str) -> None:
    """With a manifest that is true to it: where a share says it belongs is a stranger's word."""
    path = save(tmp_path, 1, 1)
    shard = next(path.glob("shard-*"))
    with safe_open(shard, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    key = "DCP_SHARDING_INFO"
    shard.unlink()
    size, digest = write_tensors(shard, tensors, metadata | {key: change(metadata[key])})
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"][shard.name] = {"size": size, "sha256": digest}
    (path / "manifest.json").write_text(_sealed(manifest))
    for read in (lambda: load_checkpoint(path), lambda: read_shares(path, full(0), ALONE)):
        with pytest.raises(ModelFolderError, match=said) as caught:
            read()
        assert str(caught.value).isprintable()


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=10))
    with pytest.raises(UnmaskError, match=r"disk full: .* are free"):
        save(tmp_path, 2, 2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name != "latest"] == ["step-00000001"]


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "sharded"),
    [
        ("fsdp", {}, True),
        ("fsdp", {"async_save": True}, False),
        ("fsdp", {"save_as": "whole"}, False),
        ("ddp", {}, False),
        ("alone", {}, False),
        ("alone", {"save_as": "sharded"}, True),
    ],
)
def test_who_saves(kind: str, changes: dict[str, Any], sharded: bool) -> None:
    assert (make_saver(RunConfig(**changes), ALONE, kind).sharers is ALONE) == sharded


def test_sharded_in_the_background_is_refused() -> None:
    with pytest.raises(ConfigError, match="sharded checkpoints are not written in the background: set save_as"):
        RunConfig(save_as="sharded", async_save=True)


class Crash(Callback):
    def on_step(self, report: StepReport) -> None:
        if report.step == 8:
            raise RuntimeError("crash")


def test_a_run_may_change_how_it_saves(tmp_path: Path, make_config: Any) -> None:
    """Shares, then whole: bit for bit the run that was never interrupted, and retention counts both kinds."""
    how = {"steps": 13, "save_every": 3, "keep": 1, "keep_every": 6, "valid_every": 13}
    straight = make_config(tmp_path / "straight", **how)
    train(straight, device="cpu")
    config = make_config(tmp_path / "run", save_as="sharded", **how)
    with pytest.raises(RuntimeError, match="crash"):
        train(config, callbacks=[Crash()], device="cpu")
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-00000006"]
    train(dataclasses.replace(config, save_as="whole"), resume=True, device="cpu")
    assert sorted(p.name for p in folder.iterdir()) == [
        "best",
        "latest",
        "step-00000006",
        "step-00000012",
        "step-00000013",
    ]
    kinds = [load_checkpoint(folder / f"step-{step:08d}") for step in (6, 13)]
    assert [kind.sharded for kind in kinds if kind] == [True, False]
    for step in (6, 12, 13):
        ours, theirs = (load_checkpoint(tmp_path / n / "checkpoints" / f"step-{step:08d}") for n in ("run", "straight"))
        assert ours is not None
        assert theirs is not None
        assert same(ours.tensors, theirs.tensors)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, make_config: Any) -> None:
    config = make_config(tmp_path / "run", steps=4, save_every=2, keep=2, valid_every=4, save_as="sharded")
    train(config, device="cpu")
    found = load_checkpoint(tmp_path / "run")
    assert found is not None
    found.tensors["model"]["embed.weight"][3, 1] = float("nan")
    save_sharded(tmp_path / "run", 4, found.tensors, found.state, keep=2, best=False, world=ALONE)
    with pytest.raises(ModelFolderError, match=r"step-00000004: model/embed\.weight holds numbers that are not finite"):
        train(dataclasses.replace(config, steps=5), resume=True, device="cpu")
    found.tensors["optimizer"].pop("exp_avg/embed.weight")
    save_sharded(tmp_path / "run", 4, found.tensors, found.state, keep=2, best=False, world=ALONE)
    with pytest.raises(ModelFolderError, match=r"optimizer/exp_avg/embed\.weight is missing or unexpected"):
        train(dataclasses.replace(config, steps=5), resume=True, device="cpu")


# --- two processes ----------------------------------------------------------------------------------------------------


def work(rank: int, root: Path) -> list[str]:
    """What one of two processes does; the names of what held."""
    world = World(rank, 2)
    mesh = mesh_of(world)
    held = []

    def check(name: str, good: bool) -> None:
        held.append(name if good else f"NOT {name}")

    def refused(name: str, *words: str) -> None:
        try:
            _read_together(world, root / name)
            check(f"{name} refused", False)
        except UnmaskError as error:
            check(f"{name} refused", all(word in str(error) for word in words) and "\n" not in str(error))

    for step in (1, 2):
        save(root / "two", step, step, world)
    into = cut(full(0), mesh)
    found = read(root / "two", into, world)
    check("2 → 2", found is not None and found.step == 2 and same(into, full(2)) and found.state == STATE)
    whole = full(0)
    read(root / "two", whole, world)
    check("fsdp → ddp", same(whole, full(2)))

    dist.barrier()
    if rank == 0:
        save_alone = load_checkpoint(root / "two")  # one process reads all, while others are about
        check("2 → 1", save_alone is not None and same(save_alone.tensors, full(2)))
        for name in ("fallback", "named"):
            shutil.copytree(root / "two", root / name)
            shard = root / name / "checkpoints" / "step-00000002" / "shard-00002-model-00001-of-00001.safetensors"
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
    dist.barrier()
    into = cut(full(0), mesh)
    found = read(root / "fallback", into, world)
    check("fallback", found is not None and found.step == 1 and same(into, full(1)))
    check("fallback says why", found is not None and "shard-00002" in found.skipped[0])
    refused("named/checkpoints/step-00000002", "shard-00002", "damaged")

    # One process cannot write: both learn it, and what was there is intact.
    real = os.write

    def full_disk(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    for failing in (1, 0):
        if rank == failing:
            os.write = full_disk
        try:
            save(root / "two", 3, 3, world, keep=1)
            check(f"a full disk of {failing} is told", False)
        except UnmaskError as error:
            said = "No space left" in str(error) or "disk full" in str(error)
            check(f"a full disk of {failing} is told", said and "\n" not in str(error))
        os.write = real
    dist.barrier()
    names = sorted(p.name for p in (root / "two" / "checkpoints").iterdir())
    check("nothing is left of it", names == ["latest", "step-00000001", "step-00000002"])

    # What one process saved, two go on with.
    found = read(root / "one", into, world)
    check("1 → 2", found is not None and found.step == 7 and same(into, full(7)))
    try:
        columns = {"model": {"w": distribute_tensor(torch.ones(2, 4), mesh, [Shard(1)])}}
        save_sharded(root / "columns", 1, columns, STATE, keep=1, best=False, world=world)
        check("columns refused", False)
    except UnmaskError as error:
        check("columns refused", "not cut along its rows" in str(error) and not isinstance(error, ModelFolderError))
    return held


def test_two_processes(tmp_path: Path) -> None:
    save(tmp_path / "one", 7, 7)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    store = tmp_path / "store"
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path), str(store), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in (0, 1)
    ]
    ends = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], ends
    held = [json.loads(out.splitlines()[-1]) for out, _ in ends]
    assert [name for names in held for name in names if name.startswith("NOT")] == []
    assert len(held[0]) == 11
    assert len(held[1]) == 10
    # Here one process reads what two wrote, and nothing in it is a pickle.
    found = load_checkpoint(tmp_path / "two")
    assert found is not None
    assert same(found.tensors, full(2))
    names = {p.name for p in found.path.iterdir()}
    assert names == {"manifest.json", "state.json"} | {
        f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)
    }


def main() -> None:
    root, store, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    print(json.dumps(work(rank, root)))
    dist.barrier()  # who leaves first would close the other's connections while it still works
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a mesh holds its group in a cycle, whose threads may abort Python's end; `join_world` sees to that


if __name__ == "__main__":
    main()
