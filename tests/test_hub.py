"""Onto the hub and back, against a hub that is a folder here."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unmask
from tiny import Trained
from unmask.cli import run as unmask_command
from unmask.errors import DataError, ModelFolderError, UsageError
from unmask.model import Model
from unmask.pretrained import read_pretrained
from unmask.pretrained.card import card_of
from unmask.text.bulk import identity

huggingface_hub = pytest.importorskip("huggingface_hub")


class Hub:
    """What the client's functions do, in a folder: a repository a folder, and a cache of links as the client's own."""

    def __init__(self, place: Path) -> None:
        self.place, self.made = place, list[tuple[str, Any]]()
        self.fetched: list[str] = []

    def create_repo(self, repo: str, *, repo_type: str, private: bool | None, exist_ok: bool) -> Any:
        name = repo if "/" in repo else f"me/{repo}"
        assert (repo_type, exist_ok) == ("model", True)
        (self.place / "repos" / name).mkdir(parents=True, exist_ok=True)
        self.made.append((name, private))

        class Url(str):
            repo_id = name

        return Url(f"https://huggingface.co/{name}")

    def repo_info(self, repo_id: str, *, repo_type: str) -> Any:
        return SimpleNamespace(private=self.made[0] == (repo_id, True))  # as it was made first

    def file_exists(self, repo_id: str, filename: str) -> bool:
        return (self.place / "repos" / repo_id / filename).exists()

    def upload_folder(self, *, repo_id: str, folder_path: str, repo_type: str, commit_message: str) -> None:
        assert repo_type == "model"
        assert commit_message
        shutil.copytree(folder_path, self.place / "repos" / repo_id, dirs_exist_ok=True)

    def snapshot_download(self, repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        if not (self.place / "repos" / repo).is_dir():
            raise OSError(f"404: no repository {repo}\nand more")
        snapshot = self.place / "cache" / repo / (revision or "main")
        shutil.rmtree(snapshot, ignore_errors=True)
        snapshot.mkdir(parents=True)
        for path in sorted((self.place / "repos" / repo).iterdir()):
            if any(path.match(pattern) for pattern in allow_patterns):
                self.fetched.append(path.name)
                os.symlink(path, snapshot / path.name)
        return str(snapshot)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", type("HfApi", (), {"__new__": lambda cls: made}))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    return made


def metadata(card: str) -> dict[str, Any]:
    data: dict[str, Any] = huggingface_hub.ModelCard(card).data.to_dict()
    return data


def test_there_and_back(hub: Hub, model: Model, trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert unmask_command(["push", str(trained.folder), "demo", "--private", "--license", "apache-2.0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"repo": "demo", "url": "https://huggingface.co/me/demo"}
    assert hub.made == [("me/demo", True)]
    (hub.place / "repos/me/demo/evil.bin").write_bytes(b"x")
    again = unmask.load("hf:me/demo", device="cpu")
    assert sorted(hub.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert identity(again) == identity(model)
    assert again.generate(2, 12, seed=1) == model.generate(2, 12, seed=1)
    assert unmask_command(["generate", "hf:me/demo", "--num", "1", "--length", "8", "--device", "cpu"]) == 0
    assert read_pretrained("hf:me/demo").denoiser == model.denoiser.config  # as --init hf: reads it
    card = (hub.place / "repos/me/demo/README.md").read_text()
    said = metadata(card)
    assert (said["library_name"], said["license"], said["pipeline_tag"]) == ("unmask", "apache-2.0", "text-generation")
    assert {"unmask", "masked-diffusion", "mdlm", "dit"} == {*said["tags"]}
    assert 'unmask.load("hf:me/demo")' in card


def test_in_the_layout_of_transformers(hub: Hub, model: Model, trained: Trained) -> None:
    pytest.importorskip("transformers")
    assert unmask_command(["push", str(trained.folder), "me/theirs", "--format", "hf"]) == 0
    assert hub.made == [("me/theirs", None)]
    assert identity(unmask.load("hf:me/theirs", device="cpu")) == identity(model)
    said = metadata((hub.place / "repos/me/theirs/README.md").read_text())
    assert (said["library_name"], said["pipeline_tag"], said.get("license")) == ("transformers", "fill-mask", None)


def test_a_card_that_is_there_stays(hub: Hub, trained: Trained) -> None:
    for _ in range(2):
        assert unmask_command(["push", str(trained.folder), "me/demo"]) == 0
        (hub.place / "repos/me/demo/README.md").write_text("mine")
    assert (hub.place / "repos/me/demo/README.md").read_text() == "mine"


def test_a_card_says_only_what_is_known(model: Model, trained: Trained, tmp_path: Path, hub: Hub) -> None:
    card = card_of(model, "me/demo")
    assert "## Measured" not in card
    assert "What this card does not know" in card
    assert f"{model.num_parameters:,}" in card
    run = _run(trained, tmp_path)
    assert unmask_command(["push", str(run), "me/run"]) == 0
    card = (hub.place / "repos/me/run/README.md").read_text()
    assert "| perplexity of a token | ≤ 12.5 |" in card
    results = huggingface_hub.ModelCard(card).data.eval_results
    assert [(one.metric_type, one.metric_value) for one in results] == [("perplexity", 12.5), ("nats_per_token", 2.5)]
    (run / "recipe.json").write_text("{")  # then nobody knows whether it is a bound
    assert unmask_command(["push", str(run), "me/other"]) == 0
    assert "12.5" not in (hub.place / "repos/me/other/README.md").read_text()


def _run(trained: Trained, place: Path) -> Path:
    """A run's folder whose best validation is known."""
    run = place / "run"
    shutil.copytree(trained.folder / "model", run / "model")
    shutil.copy(trained.folder / "recipe.json", run)
    lines = [{"step": 2, "valid_nats_per_token": 2.5, "valid_ppl": 12.5}, {"step": 4, "valid_nats_per_token": 2.6}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_nothing_private_goes_to_a_public_place(hub: Hub, trained: Trained, capsys: Any) -> None:
    hub.create_repo("me/demo", repo_type="model", private=None, exist_ok=True)
    assert unmask_command(["push", str(trained.folder), "me/demo", "--private"]) == 2
    assert "is there already and public" in capsys.readouterr().err
    assert list((hub.place / "repos/me/demo").iterdir()) == []


WRONG: dict[str, tuple[list[str], int, str]] = {
    "a name": (["a b"], 2, "is no name of a repository"),
    "a licence": (["me/demo", "--license", "MY OWN"], 2, "the hub's word for it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case: str, hub: Hub, trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    words, code, said = WRONG[case]
    assert unmask_command(["push", str(trained.folder), *words]) == code
    assert said in capsys.readouterr().err
    assert hub.made == []


def test_a_hub_that_says_no(
    hub: Hub, trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **how: Any) -> None:
        raise RuntimeError("401 Unauthorized\nlong story")

    monkeypatch.setattr(hub, "create_repo", refuse)
    assert unmask_command(["push", str(trained.folder), "me/demo"]) == 1
    said = capsys.readouterr().err
    assert "401 Unauthorized" in said
    assert "hf auth login" in said
    assert said.count("\n") == 1
    with pytest.raises(DataError, match="404: no repository me/nowhere"):
        unmask.load("hf:me/nowhere")


def _foreign(config: dict[str, Any], _: Path) -> dict[str, Any]:
    return {"model_type": "bert"}


def _newer(config: dict[str, Any], _: Path) -> dict[str, Any]:
    return config | {"format_version": 99}


def _huge(config: dict[str, Any], _: Path) -> dict[str, Any]:
    return config | {"denoiser": config["denoiser"] | {"hidden": 1 << 40}}


def _pickled(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return config


STRANGE: dict[Callable[[dict[str, Any], Path], dict[str, Any]], tuple[type[Exception], str]] = {
    _foreign: (UsageError, "is a bert of transformers': turn it into a model of ours with unmask import hf:me/demo"),
    _newer: (ModelFolderError, "format_version is 99"),
    _huge: (ModelFolderError, "far more than"),
    _pickled: (ModelFolderError, "model.safetensors is missing"),
}


@pytest.mark.parametrize("change", STRANGE, ids=lambda change: change.__name__)
def test_what_comes_from_there_is_checked(change: Any, hub: Hub, trained: Trained) -> None:
    assert unmask_command(["push", str(trained.folder), "me/demo"]) == 0
    folder = hub.place / "repos/me/demo"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config, folder)))
    error, said = STRANGE[change]
    with pytest.raises(error, match=said):
        unmask.load("hf:me/demo")


def test_links_of_others_stay_refused(trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    for path in (trained.folder / "model").iterdir():
        os.symlink(path, folder / path.name)
    for name in (str(folder), f"hf:{folder}"):
        with pytest.raises(ModelFolderError, match="is a symbolic link"):
            unmask.load(name)


def test_without_the_package(trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    assert unmask_command(["push", str(trained.folder), "me/demo"]) == 1
    assert "pip install 'unmask[hf]'" in capsys.readouterr().err
