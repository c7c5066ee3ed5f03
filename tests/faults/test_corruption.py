"""Damage to any file of a checkpoint is told by the file's name before a tensor is read; the previous one serves."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask.training.checkpoint.files
import unmask.training.checkpoint.sharded
from unmask.cli import run as unmask_command
from unmask.config import to_dict
from unmask.distributed.world import World
from unmask.errors import ModelFolderError
from unmask.training.checkpoint.files import _sealed, load_checkpoint, save_checkpoint
from unmask.training.checkpoint.sharded import save_sharded
from unmask.training.loop import train

SHARD = "shard-00001-model-00001-of-00001.safetensors"
FILES = ("ema.safetensors", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json")
PREVIOUS, NEWEST = "step-00000001", "step-00000002"

Damage = Callable[[Path, Path], None]  # the file, and one like it from elsewhere


def cut(keep: Callable[[int], int]) -> Damage:
    return lambda path, other: os.truncate(path, keep(path.stat().st_size))


def flip(where: Callable[[int], int], bit: int) -> Damage:
    def damage(path: Path, other: Path) -> None:
        data = bytearray(path.read_bytes())
        data[where(len(data))] ^= 1 << bit
        path.write_bytes(data)

    return damage


def append(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def zero(path: Path, other: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def duplicate(path: Path, other: Path) -> None:
    shutil.copy(path, path.with_name(f"{path.stem} copy{path.suffix}"))


def link(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other)


def folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Damage] = {
    "truncated to nothing": cut(lambda size: 0),
    "truncated by half": cut(lambda size: size // 2),
    "truncated by a byte": cut(lambda size: size - 1),
    "grown by a byte": append,
    "flipped bit in the first byte": flip(lambda size: 0, 0),
    "flipped bit in the middle": flip(lambda size: size // 2, 3),
    "flipped bit in the last byte": flip(lambda size: size - 1, 7),
    "zeroed": zero,
    "missing": lambda path, other: path.unlink(),
    "stale": lambda path, other: shutil.copy(path.parent.with_name(PREVIOUS) / path.name, path) and None,
    "of another run": lambda path, other: shutil.copy(other, path) and None,
    "duplicated": duplicate,
    "a link": link,
    "a folder": folder,
    "a pipe": pipe,
}


def write(run: Path, value: float, save: Any = save_checkpoint) -> None:
    """Two checkpoints; optimizer and average have one shape, so that only their bytes tell them apart."""
    for step in (1, 2):
        groups = {
            name: {"w": torch.full((16,), value + step + i)} for i, name in enumerate(("model", "ema", "optimizer"))
        }
        save(run, step, groups, {"value": value + step}, keep=2, best=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("runs")
    write(root / "run", 0.0)
    write(root / "other", 10.0)
    return root / "run", root / "other"


@pytest.fixture
def run(runs: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs[0], tmp_path / "run"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The tensor files that were opened."""
    opened: list[Path] = []
    real = unmask.training.checkpoint.files.read_tensors

    def noted(path: Path) -> Any:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(unmask.training.checkpoint.files, "read_tensors", noted)
    return opened


def check_fallback(run: Path, named: str, read: list[Path]) -> None:
    found = load_checkpoint(run)
    assert found is not None
    assert found.path.name == PREVIOUS
    assert found.state == {"value": 1.0}
    assert [float(found.tensors[name]["w"][0]) for name in ("model", "ema", "optimizer")] == [1.0, 2.0, 3.0]
    assert len(found.skipped) == 1
    assert f"{NEWEST}/{named}" in found.skipped[0]
    assert "\n" not in found.skipped[0]
    assert {path.parent.name for path in read} == {PREVIOUS}
    with pytest.raises(ModelFolderError):
        load_checkpoint(run / "checkpoints" / NEWEST)
    assert {path.parent.name for path in read} == {PREVIOUS}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file(
    runs: tuple[Path, Path], run: Path, read: list[Path], file: str, damage: str, tally: Any
) -> None:
    DAMAGES[damage](run / "checkpoints" / NEWEST / file, runs[1] / "checkpoints" / NEWEST / file)
    # A manifest of another run says nothing of these files: the first one that differs is named.
    named = "ema.safetensors" if (file, damage) == ("manifest.json", "of another run") else file.partition(".")[0]
    check_fallback(run, named, read)
    tally("corruptions refused by name")


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("sharded")
    for name, value in (("run", 0.0), ("other", 10.0)):
        write(root / name, value, partial(save_sharded, world=World()))
    return root / "run", root / "other"


@pytest.mark.parametrize("file", [SHARD, "manifest.json", "state.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_among_shares(
    shared_runs: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    damage: str,
    tally: Any,
) -> None:
    read: list[Path] = []
    real = unmask.training.checkpoint.sharded.read_whole
    monkeypatch.setattr(
        unmask.training.checkpoint.sharded, "read_whole", lambda folder: (read.append(folder / file), real(folder))[1]
    )
    run = Path(shutil.copytree(shared_runs[0], tmp_path / "run"))
    DAMAGES[damage](run / "checkpoints" / NEWEST / file, shared_runs[1] / "checkpoints" / NEWEST / file)
    named = "shard-" if (file, damage) == ("manifest.json", "of another run") else file.partition(".")[0]
    check_fallback(run, named, read)
    tally("corruptions refused by name")


@pytest.mark.parametrize("pair", list(itertools.combinations(FILES, 2)), ids=lambda pair: " and ".join(pair))
def test_swapped_files(run: Path, read: list[Path], pair: tuple[str, str], tally: Any) -> None:
    a, b = (run / "checkpoints" / NEWEST / name for name in pair)
    spare = run / "spare"
    a.rename(spare), b.rename(a), spare.rename(b)
    named = "manifest" if "manifest.json" in pair else pair[0].partition(".")[0]
    check_fallback(run, named, read)
    tally("corruptions refused by name")


@pytest.mark.parametrize("file", FILES)
def test_a_file_lost_from_the_disk_and_from_the_manifest(run: Path, read: list[Path], file: str, tally: Any) -> None:
    """The manifest is the only witness: it may not forget the state, nor be rewritten by half."""
    place = run / "checkpoints" / NEWEST
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"].pop(file, None)
    manifest["files"].pop("state.json", None)
    manifest.pop("sha256")
    (place / "manifest.json").write_text(_sealed(manifest))
    (place / file).unlink()
    found = load_checkpoint(run)
    assert found is not None
    assert found.path.name == PREVIOUS
    assert NEWEST in found.skipped[0]
    assert {path.parent.name for path in read} == {PREVIOUS}
    tally("corruptions refused by name")


def bits(text: bytes) -> Iterator[bytes]:
    for i in range(len(text)):
        for bit in range(8):
            yield text[:i] + bytes((text[i] ^ 1 << bit,)) + text[i + 1 :]


def test_every_single_bit_of_the_manifest_counts(run: Path, read: list[Path], tally: Any) -> None:
    newest = run / "checkpoints" / NEWEST
    whole = (newest / "manifest.json").read_bytes()
    count = 0
    for text in itertools.islice(bits(whole), 0, None, 1 if os.environ.get("UNMASK_FAULTS") == "all" else 7):
        (newest / "manifest.json").write_bytes(text)
        with pytest.raises(ModelFolderError, match=rf"{NEWEST}/manifest\.json (is damaged|has format_version)"):
            load_checkpoint(newest)
        count += 1
    assert read == []
    (newest / "manifest.json").write_bytes(whole)
    assert load_checkpoint(newest) is not None
    tally("flipped bits of a manifest", count)


# --- folders ----------------------------------------------------------------------------------------------------------


def copied_forward(folder: Path) -> None:
    shutil.copytree(folder / NEWEST, folder / "step-00000003")


def emptied(folder: Path) -> None:
    (folder / "step-00000003").mkdir()


def a_file_in_its_place(folder: Path) -> None:
    (folder / "step-00000003").write_text("")


def linked(folder: Path) -> None:
    (folder / "step-00000003").symlink_to(folder / NEWEST)


def linked_to_itself(folder: Path) -> None:
    (folder / "step-00000003").symlink_to("step-00000003")


@pytest.mark.parametrize("damage", [copied_forward, emptied, a_file_in_its_place, linked, linked_to_itself])
def test_a_folder_that_is_no_checkpoint(run: Path, damage: Callable[[Path], None], tally: Any) -> None:
    damage(run / "checkpoints")
    found = load_checkpoint(run)
    assert found is not None
    assert found.path.name == NEWEST
    assert len(found.skipped) == 1
    assert "step-00000003" in found.skipped[0]
    tally("corruptions refused by name")


def test_swapped_folders(run: Path) -> None:
    a, b, c = (run / "checkpoints" / name for name in (PREVIOUS, NEWEST, "spare"))
    a.rename(c), b.rename(a), c.rename(b)
    with pytest.raises(ModelFolderError, match=r"no whole checkpoint in .*of another step \(and 1 more\)"):
        load_checkpoint(run)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_resume_falls_back_and_says_so(
    tmp_path: Path, make_config: Any, file: str, capsys: pytest.CaptureFixture[str], tally: Any
) -> None:
    config = make_config(tmp_path / "run", steps=8, valid_every=4, save_every=4)
    (tmp_path / "r.json").write_text(json.dumps(to_dict(config)), encoding="utf-8")
    train(config, device="cpu")
    newest = tmp_path / "run" / "checkpoints" / "step-00000008"
    before = {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
    flip(lambda size: size // 2, 2)(newest / file, newest)
    assert unmask_command(["train", str(tmp_path / "run"), "--resume", "--device", "cpu"]) == 0
    err = capsys.readouterr().err
    assert f"{newest / file} is damaged" in err
    assert "step 4" in err
    assert {path.name: path.read_bytes() for path in newest.glob("*.safetensors")} == before
    tally("fallbacks of --resume")
