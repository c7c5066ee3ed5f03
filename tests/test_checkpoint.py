"""Checkpoints: bit-exact, verified by name, with fallback; the right ones are kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from unmask.errors import ModelFolderError, UnmaskError, UsageError
from unmask.storage.atomic import atomic_folder, find_folder
from unmask.storage.tensor_file import read_tensors, write_tensors
from unmask.training.checkpoint.files import _sealed, best_checkpoint, load_checkpoint, save_checkpoint
from unmask.training.optim import flatten_optimizer, restore_optimizer


def save(run: Path, step: int, *, keep: int = 10, keep_every: int = 0, best: bool = False) -> Path:
    tensors = {name: {"w": torch.full((4, 3), float(step) + i)} for i, name in enumerate(("model", "ema"))}
    state = {"step": step, "loss": 0.1 * step}
    return save_checkpoint(run, step, tensors, state, keep=keep, keep_every=keep_every, best=best)


def steps(run: Path) -> list[str]:
    """Everything in the checkpoints' folder, save the pointer to the latest."""
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.name != "latest")


def test_round_trip(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None
    path = save(tmp_path, 250)
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.path, found.skipped) == (250, path, [])
    assert found.state == {"step": 250, "loss": 25.0}
    assert set(found.tensors) == {"model", "ema"}
    assert found.tensors["ema"]["w"].equal(torch.full((4, 3), 251.0))
    assert sorted(p.name for p in path.iterdir()) == [
        "ema.safetensors",
        "manifest.json",
        "model.safetensors",
        "state.json",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_tensors_keep_their_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randn(5, 7).to(dtype)
    if dtype.is_floating_point:
        x[0, 0], x[0, 1], x[0, 2] = float("nan"), float("inf"), -0.0
    kept = {"x": x, "row": x[1], "column": x[:, 1], "twin": x, "empty": x[:0], "scalar": x[2, 2]}
    write_tensors(tmp_path / "x.safetensors", kept)
    back = read_tensors(tmp_path / "x.safetensors")
    assert set(back) == set(kept)
    for name, tensor in kept.items():
        assert back[name].dtype == dtype
        assert back[name].shape == tensor.shape
        assert back[name].is_contiguous()
        assert bits(back[name]) == bits(tensor)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


# --- damage -----------------------------------------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)


def flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def lose(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def add(folder: Path) -> None:
    (folder / "extra.safetensors").write_bytes(b"")


def swap(folder: Path) -> None:
    a, b, c = folder / "ema.safetensors", folder / "model.safetensors", folder.parent / "c"
    a.rename(c)
    b.rename(a)
    c.rename(b)


def link(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def break_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def newer_format(folder: Path) -> None:
    edit_manifest(folder, format_version=3)


def other_step(folder: Path) -> None:
    edit_manifest(folder, step=1)


def point_outside(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    edit_manifest(folder, files={**files, "../outside.safetensors": files["model.safetensors"]})


def edit_manifest(folder: Path, **changes: object) -> None:
    """As somebody would who knows how a manifest is sealed."""
    path = folder / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changes}
    del manifest["sha256"]
    path.write_text(_sealed(manifest))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, "model.safetensors is damaged"),
        (flip, "model.safetensors is damaged"),
        (lose, "model.safetensors is missing"),
        (add, "extra.safetensors is not in the manifest"),
        (swap, "ema.safetensors is damaged"),
        (link, "model.safetensors is a symbolic link"),
        (lose_manifest, "manifest.json is missing"),
        (break_manifest, "manifest.json is damaged"),
        (newer_format, "manifest.json has format_version 3"),
        (other_step, "manifest.json is damaged or of another step"),
        (point_outside, "outside its folder"),
    ],
)
def test_damage_is_named_and_the_previous_one_serves(
    tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    damage(newest)
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(found.skipped) == 1
    assert named in found.skipped[0]
    assert "step-00000002" in found.skipped[0]
    assert "\n" not in found.skipped[0]
    with pytest.raises(ModelFolderError, match=r"step-00000002"):
        load_checkpoint(newest)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000001")
    with pytest.raises(ModelFolderError, match="no whole checkpoint"):
        load_checkpoint(tmp_path)


def test_a_manifest_of_the_first_format_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, 2) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    path.write_text(json.dumps(manifest | {"format_version": 1}))
    assert load_checkpoint(path.parent) is not None


def test_a_damaged_tensor_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for data in (b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}" + b"x"):
        path.write_bytes(data)
        with pytest.raises(ModelFolderError, match=r"x\.safetensors is damaged"):
            read_tensors(path)


# --- which are kept ---------------------------------------------------------------------------------------------------


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step, best in ((1, True), (2, True), (3, False), (4, False), (5, False)):
        save(tmp_path, step, keep=2, best=best)
    assert steps(tmp_path) == ["best", "step-00000002", "step-00000004", "step-00000005"]
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00000002"
    save(tmp_path, 6, keep=1, best=True)
    assert steps(tmp_path) == ["best", "step-00000006"]
    with pytest.raises(UsageError):
        save(tmp_path, 7, keep=0)


def test_keeps_milestones(tmp_path: Path) -> None:
    for step in range(1, 9):
        save(tmp_path, step, keep=2, keep_every=3)
    assert steps(tmp_path) == [f"step-0000000{step}" for step in (3, 6, 7, 8)]


def test_latest_is_a_word_for_people_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    pointer = tmp_path / "checkpoints" / "latest"
    assert pointer.read_text() == "step-00000002\n"
    for lie in ("step-00000001", "../elsewhere", "step-99999999", "\xff"):
        pointer.write_text(lie)
        found = load_checkpoint(tmp_path)
        assert found is not None
        assert found.step == 2
    pointer.unlink()
    save(tmp_path, 3)
    assert pointer.read_text() == "step-00000003\n"


def test_a_disk_that_is_too_small_is_noticed_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save(tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1000))
    with pytest.raises(UnmaskError, match=r"disk full: .*step-00000002 needs 1,[0-9,]+ bytes and 1,000 are free") as e:
        save(tmp_path, 2)
    assert "\n" not in str(e.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert load_checkpoint(first) is not None


def test_best_is_known_before_its_pointer_moves(tmp_path: Path) -> None:
    save(tmp_path, 1, best=True)
    pointer = (tmp_path / "checkpoints" / "best").read_text()
    save(tmp_path, 2, best=True)
    (tmp_path / "checkpoints" / "best").write_text(pointer)  # as after a kill between the two
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00000002"


def test_going_back_a_step_keeps_what_is_written(tmp_path: Path) -> None:
    save(tmp_path, 1)
    flip(save(tmp_path, 9))
    save(tmp_path, 2, keep=1)
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 2
    save(tmp_path, 9, keep=1)  # the same step again takes the damaged one's place
    assert steps(tmp_path) == ["step-00000009"]
    assert load_checkpoint(tmp_path) is not None


def test_cleans_what_dead_processes_left(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    dead, live = 2**22 + 1, os.getppid()  # above the largest process id, and a process that runs
    (folder / f".step-00000002.tmp-{dead}-0123abcd").mkdir()
    (folder / f".step-00000003.tmp-{os.getpid()}-0123abcd").mkdir()  # ours by id, but not by us
    (folder / f".best.tmp-{dead}-0123abcd").write_text("")
    (folder / f".step-00000004.tmp-{live}-0123abcd").mkdir()
    (folder / ".mine").mkdir()
    save(tmp_path, 5)
    assert steps(tmp_path) == [".mine", f".step-00000004.tmp-{live}-0123abcd", "step-00000001", "step-00000005"]


# --- folders ----------------------------------------------------------------------------------------------------------


def test_atomic_folder_replaces_or_leaves_alone(tmp_path: Path) -> None:
    final = tmp_path / "model"
    for text in ("old", "new"):
        with atomic_folder(final) as folder:
            (folder / "a").write_text(text)
            assert folder.parent == final.parent
    assert (final / "a").read_text() == "new"
    with pytest.raises(KeyError), atomic_folder(final) as folder:
        raise KeyError((folder / "a").write_text("broken"))
    assert (final / "a").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_atomic_folder_follows_a_link_and_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with atomic_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "a").read_text() == "x"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"), atomic_folder(tmp_path / "file"):
        pass


def test_a_folder_moved_aside_is_found_and_put_back(tmp_path: Path) -> None:
    final = tmp_path / "model"
    with atomic_folder(final) as folder:
        (folder / "a").write_text("old")
    aside = tmp_path / f".model.old-{2**22 + 1}-0123abcd"
    final.rename(aside)
    assert find_folder(final) == aside
    with pytest.raises(UnmaskError, match="Permission denied"), atomic_folder(final):
        raise PermissionError(13, "Permission denied")
    assert find_folder(final) == final
    assert (final / "a").read_text() == "old"


# --- optimizers -------------------------------------------------------------------------------------------------------


def trained(seed: int, num_steps: int, lr: float | Tensor = 1e-2) -> tuple[nn.Module, torch.optim.AdamW, list[str]]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 2, bias=False))
    named = dict(net.named_parameters())
    named["3.weight"].requires_grad_(False)  # in a group, never stepped: no state
    matrices = [n for n in named if n.endswith("weight")]
    vectors = [n for n in named if n.endswith("bias")]
    groups = [
        {"params": [named[n] for n in matrices], "weight_decay": 0.1},
        {"params": [named[n] for n in vectors], "weight_decay": 0.0, "betas": (0.8, 0.99)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, amsgrad=True)
    go(net, optimizer, num_steps)
    return net, optimizer, matrices + vectors


def go(net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 12).view(4, 3) * (step + 1)
        net(x).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_adamw_goes_on_bit_by_bit(tmp_path: Path, tensor_lr: bool) -> None:
    net, optimizer, names = trained(0, 5, torch.tensor(1e-2) if tensor_lr else 1e-2)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.003) if tensor_lr else 0.003  # as a schedule would
    tensors, state = flatten_optimizer(optimizer, names)
    assert "exp_avg/0.weight" in tensors
    assert "step/2.bias" in tensors
    save_checkpoint(
        tmp_path, 5, {"model": net.state_dict(), "optimizer": tensors}, {"optimizer": state}, keep=1, best=False
    )
    go(net, optimizer, 3)

    found = load_checkpoint(tmp_path)
    assert found is not None
    net2, optimizer2, _ = trained(1, 2, torch.tensor(1e-2) if tensor_lr else 1e-2)
    net2.load_state_dict(found.tensors["model"])
    restore_optimizer(optimizer2, names, found.tensors["optimizer"], found.state["optimizer"])
    assert optimizer2.param_groups[1]["betas"] == (0.8, 0.99)
    again, state_again = flatten_optimizer(optimizer2, names)
    assert json.dumps(state_again, sort_keys=True) == json.dumps(state, sort_keys=True)
    assert {k: (v.dtype, bits(v)) for k, v in again.items()} == {
        k: (v.dtype, bits(v)) for k, v in found.tensors["optimizer"].items()
    }
    go(net2, optimizer2, 3)
    for a, b in zip(net.parameters(), net2.parameters(), strict=True):
        assert bits(a) == bits(b)
    assert bits(found.tensors["optimizer"]["exp_avg/0.weight"]) == bits(tensors_of(tmp_path)["exp_avg/0.weight"])


def tensors_of(run: Path) -> dict[str, Tensor]:
    found = load_checkpoint(run)
    assert found is not None
    return found.tensors["optimizer"]


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    _, optimizer, names = trained(0, 2)
    tensors, state = flatten_optimizer(optimizer, names)
    with pytest.raises(UsageError, match="5 parameters"):
        flatten_optimizer(optimizer, names[1:])
    with pytest.raises(ModelFolderError, match=r"groups: 0\.weight"):
        restore_optimizer(optimizer, ["renamed", *names[1:]], tensors, state)
    with pytest.raises(ModelFolderError, match="their order"):
        restore_optimizer(optimizer, names[::-1], tensors, state)
    less = {k: v for k, v in tensors.items() if k != "exp_avg/0.weight"}
    with pytest.raises(ModelFolderError, match=r"exp_avg/0\.weight"):
        restore_optimizer(optimizer, names, less, state)
    with pytest.raises(ModelFolderError, match=r"exp_avg/0\.weight has shape"):
        restore_optimizer(optimizer, names, {**tensors, "exp_avg/0.weight": torch.zeros(1, 1)}, state)
