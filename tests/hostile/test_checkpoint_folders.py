"""Runs by somebody who means harm, whose manifests are sealed as ours are: --resume refuses each with one line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from watching import watched

from matrix import sample
from unmask.config import RunConfig
from unmask.errors import UnmaskError
from unmask.storage.tensor_file import read_tensors, write_tensors
from unmask.training.checkpoint.files import _sealed, load_checkpoint
from unmask.training.loop import train

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX files")

STEP = "step-00000004"
Attack = Callable[[Path], Any]
ATTACKS: dict[str, Attack] = {}


def seal(folder: Path, **changes: Any) -> None:
    """A manifest that is true to the files, but for the changes."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    for name in [p.name for p in folder.iterdir() if p.is_file() and p.name != "manifest.json"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"] = {k: v for k, v in manifest["files"].items() if (folder / k).is_file()}
    manifest["files"] |= changes.pop("files", {})
    (folder / "manifest.json").write_text(_sealed({**manifest, **changes}))


def state(change: Callable[[dict[str, Any]], Any]) -> Attack:
    def attack(folder: Path) -> None:
        held = json.loads((folder / "state.json").read_text())
        change(held)
        (folder / "state.json").write_text(json.dumps(held))
        seal(folder)

    return attack


def tensors(group: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Attack:
    def attack(folder: Path) -> None:
        path = folder / f"{group}.safetensors"
        held = read_tensors(path)
        change(held)
        path.unlink()
        write_tensors(path, held)
        seal(folder)

    return attack


def content(name: str, data: bytes) -> Attack:
    def attack(folder: Path) -> None:
        (folder / name).write_bytes(data)
        seal(folder)

    return attack


def replaced(name: str, make: Callable[[Path], Any]) -> Attack:
    def attack(folder: Path) -> None:
        (folder / name).rename(folder.parents[2] / name)
        make(folder / name)

    return attack


def without(name: str) -> Attack:
    def attack(folder: Path) -> None:
        (folder / name).unlink()
        seal(folder)

    return attack


def outside(name: str) -> Attack:
    entry = {"size": 1, "sha256": "0" * 64}
    return lambda folder: seal(folder, files={name: entry})


for key in ("config", "best", "ema_updates", "optimizer", "data"):
    ATTACKS[f"state without {key}"] = state(lambda held, k=key: held.pop(k))  # type: ignore[misc]
    for value in ("text", [1], {"a": 1}, True, None, -1):
        if (key, value) not in (
            ("best", None),
            ("best", -1),
            ("best", True),
            ("ema_updates", True),
            ("ema_updates", -1),
        ):
            ATTACKS[f"state with {key} = {value}"] = state(lambda held, k=key, v=value: held.update({k: v}))  # type: ignore[misc]
for key in ("groups", "values", "tensors"):
    ATTACKS[f"optimizer without {key}"] = state(lambda held, k=key: held["optimizer"].pop(k))  # type: ignore[misc]
    ATTACKS[f"optimizer with {key} = 3"] = state(lambda held, k=key: held["optimizer"].update({k: 3}))  # type: ignore[misc]


def group_option(name: str, value: Any) -> Attack:
    return state(lambda held: held["optimizer"]["groups"][0].update({name: value}))


ATTACKS |= {
    "an epsilon of text": group_option("eps", "__import__('os')"),
    "one beta": group_option("betas", [0.9]),
    "betas of text": group_option("betas", ["a", "b"]),
    "parameters of another": group_option("params", ["evil"]),
    "state of another config": state(lambda held: held["config"].update(seed=99)),
    "state of another corpus": state(lambda held: held["data"][0].update(key="other")),
    "state no object": content("state.json", b"[]"),
    "state no JSON": content("state.json", b"import os"),
    "state deep": content("state.json", b"[" * 100_000),
    "state not UTF-8": content("state.json", b'{"best": "\xff"}'),
    "state with a key twice": content("state.json", b'{"best": 1, "best": 2}'),
    "no model": without("model.safetensors"),
    "no average": without("ema.safetensors"),
    "no optimizer": without("optimizer.safetensors"),
    "a pickle as model": content("model.safetensors", b"\x80\x04cos\nmkdir\n(S'executed'\ntR."),
    "a pickle as average": content("ema.safetensors", b"\x80\x04cos\nmkdir\n(S'executed'\ntR."),
    "weights that are no numbers": tensors("model", lambda held: held["norm.weight"].fill_(float("nan"))),
    "weights of another shape": tensors("model", lambda held: held.update({"norm.weight": torch.ones(3)})),
    "weights of whole numbers": tensors("model", lambda held: held.update({"norm.weight": torch.ones(32).long()})),
    "weights one short": tensors("model", lambda held: held.pop("norm.weight")),
    "weights one too many": tensors("model", lambda held: held.update(evil=torch.ones(1))),
    "an average that would spread": tensors("ema", lambda held: held.update({"norm.weight": torch.ones(1)})),
    "an average one short": tensors("ema", lambda held: held.pop("norm.weight")),
    "an average one too many": tensors("ema", lambda held: held.update(evil=torch.ones(1))),
    "an optimizer that would spread": tensors(
        "optimizer", lambda held: held.update({"exp_avg/norm.weight": torch.ones(1)})
    ),
    "an optimizer of another rank": tensors(
        "optimizer", lambda held: held.update({"exp_avg/norm.weight": torch.ones(())})
    ),
    "a step count that is a list": tensors("optimizer", lambda held: held.update({"step/norm.weight": torch.ones(32)})),
    "an optimizer one short": tensors("optimizer", lambda held: held.pop("exp_avg/norm.weight")),
    "a file by ..": outside("../../../secret"),
    "a file by an absolute path": outside("/etc/passwd"),
    "a file without a name": outside(""),
    "a file named .": outside("."),
    "a file named ..": outside(".."),
    "a file with a null": outside("a\0b"),
    "a file of a thousand letters": outside("a" * 1000),
    "a file with lines": outside("a\nb"),
    "an entry that is a list": lambda folder: seal(folder, files={"state.json": [1, 2]}),
    "a size that is text": lambda folder: seal(folder, files={"state.json": {"size": "1", "sha256": "0"}}),
    "another step": lambda folder: seal(folder, step=5),
    "a step of 2^70": lambda folder: seal(folder, step=1 << 70),
    "a negative step": lambda folder: seal(folder, step=-4),
    "a step that is true": lambda folder: seal(folder, step=True),
    "files that are a list": lambda folder: (folder / "manifest.json").write_text(
        _sealed({"format_version": 2, "step": 4, "best": False, "files": []})
    ),
    "a manifest that is deep": lambda folder: (folder / "manifest.json").write_text('{"a":' * 100_000),
    "a manifest of a terabyte": lambda folder: os.truncate(folder / "manifest.json", 1 << 40),
    "a manifest that is a pipe": replaced("manifest.json", os.mkfifo),
    "a state that is a pipe": replaced("state.json", os.mkfifo),
    "weights that are a pipe": replaced("model.safetensors", os.mkfifo),
    "weights that are a link": replaced("model.safetensors", lambda p: p.symlink_to(p.parents[3] / p.name)),
    "a manifest that is a link": replaced("manifest.json", lambda p: p.symlink_to(p.parents[3] / p.name)),
    "a state that is a folder": replaced("state.json", Path.mkdir),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, make_config: Any) -> RunConfig:
    config: RunConfig = make_config(tmp_path_factory.mktemp("good") / "run", steps=4, save_every=4, valid_every=4)
    train(config, device="cpu")
    return config


@pytest.fixture
def config(good: RunConfig, tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    shutil.copytree(good.out, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    longer: RunConfig = make_config(tmp_path / "run", steps=6, save_every=4, valid_every=4)
    return longer


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except UnmaskError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", sample(ATTACKS, 25))
def test_refused(config: RunConfig, name: str, tally: Any) -> None:
    run = Path(config.out)
    ATTACKS[name](run / "checkpoints" / STEP)
    before = {p: p.lstat().st_mtime_ns for p in run.rglob("*")}
    with watched(run):
        message = refusal(lambda: load_checkpoint(run))
    # Or its bytes are as promised: what they say is looked at by the run.
    message = message or refusal(lambda: train(config, resume=True, device="cpu"))
    assert message.isprintable(), message
    assert 0 < len(message) < 700
    assert {p: p.lstat().st_mtime_ns for p in run.rglob("*")} == before  # nothing was begun
    assert not Path("executed").exists()
    tally("hostile checkpoints refused")


def test_a_good_one_passes(config: RunConfig) -> None:
    state(lambda held: None)(Path(config.out) / "checkpoints" / STEP)  # sealed again by the same means
    with watched(Path(config.out)):
        assert load_checkpoint(Path(config.out)) is not None
    assert train(config, resume=True, device="cpu")


@pytest.mark.parametrize("name", ["tokenizer.json", "metrics.jsonl"])
def test_a_pipe_in_the_run_does_not_hang(config: RunConfig, name: str) -> None:
    path = Path(config.out) / name
    path.unlink()
    os.mkfifo(path)
    if name == "metrics.jsonl":
        assert train(config, resume=True, device="cpu")
        assert path.is_file()
    else:
        with pytest.raises(UnmaskError, match=r"tokenizer\.json is no plain file"):
            train(config, resume=True, device="cpu")
