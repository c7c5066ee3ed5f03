"""Plug-ins: a file dropped into a room's folder is all it takes, and what is not there is named with the closest."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import unmask
from unmask.cli import run
from unmask.config import from_dict, load_config, to_dict
from unmask.errors import UsageError

HEAD = '"""Zigzag {room}: made for a test."""\n\nfrom dataclasses import dataclass\n\n'
END = '    """Not the first line of the file."""\n\n    twist: float = 0.5\n'


@dataclass(frozen=True)
class Dropped:
    """A room, the body of a plug-in for it, and where a recipe may name it."""

    room: str
    source: str
    key: str | None  # None: recipes name no such plug-in

    @property
    def package(self) -> ModuleType:
        return importlib.import_module(f"unmask.{self.room}")

    @property
    def base(self) -> Any:
        return self.package.room.base


def derived(module: str, cls: str, more: str = "") -> str:
    return f"from {module} import {cls}\n\n\n@dataclass(frozen=True, kw_only=True)\nclass Zigzag({cls}):\n{END}{more}"


DROPPED = [
    Dropped("noise", derived("unmask.noise.log_linear", "LogLinear"), "objective.noise"),
    Dropped("objectives", derived("unmask.objectives.mdlm", "MDLM"), "objective"),
    Dropped("denoisers", derived("unmask.denoisers.dit", "DiT"), "denoiser"),
    Dropped("constraints", derived("unmask.constraints.length", "Length"), None),
    Dropped("samplers", derived("unmask.samplers.left_to_right", "LeftToRight"), None),
    Dropped(
        "corpora",
        "from unmask.corpora import Document\n"
        + derived(
            "unmask.corpora",
            "Corpus",
            "\n    def documents(self):\n        yield Document(f'twisted {self.twist}')\n"
            "\n    def fingerprint(self):\n        return str(self.twist)\n",
        ),
        "data.train",
    ),
]


@pytest.fixture(params=DROPPED, ids=lambda d: d.room)
def dropped(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dropped]:
    """A plug-in file zigzag.py in one room, gone again afterwards."""
    drop: Dropped = request.param
    folder = tmp_path / drop.room
    folder.mkdir()
    (folder / "zigzag.py").write_text(HEAD.format(room=drop.room) + drop.source, encoding="utf-8")
    (folder / "_helper.py").write_text("raise AssertionError('private files are no plug-ins')\n", encoding="utf-8")
    monkeypatch.setattr(drop.package, "__path__", [*drop.package.__path__, str(folder)])
    yield drop
    sys.modules.pop(f"unmask.{drop.room}.zigzag", None)
    vars(drop.package).pop("zigzag", None)


RECIPES = {
    "objective.noise": 'objective = { name = "mdlm", noise = { name = "zigzag", twist = 0.25 } }',
    "objective": 'objective = { name = "zigzag", twist = 0.25 }',
    "denoiser": '[denoiser]\nname = "zigzag"\ntwist = 0.25',
    "data.train": '[data]\ntrain = { name = "zigzag", twist = 0.25 }',
}


def at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_a_dropped_file_is_found_by_name(dropped: Dropped) -> None:
    room = dropped.package.room
    before = [name for name in room.names() if name != "zigzag"]
    assert room.names() == sorted([*before, "zigzag"])
    assert not any(name.startswith("_") for name in before)
    assert f"unmask.{dropped.room}.zigzag" not in sys.modules  # names come from the files, nothing is imported for them
    assert room.summary("zigzag") == f"Zigzag {dropped.room}: made for a test."
    assert f"unmask.{dropped.room}.zigzag" not in sys.modules
    cls = room.get("zigzag")
    assert issubclass(cls, dropped.base)
    assert cls is dropped.package.Zigzag  # as an attribute of the room too
    assert room.name_of(cls(twist=0.1)) == "zigzag"


def test_a_dropped_file_is_in_the_config(dropped: Dropped, tmp_path: Path) -> None:
    plugin = from_dict(dropped.base, {"name": "zigzag", "twist": 0.25})
    assert type(plugin).__name__ == "Zigzag"
    assert plugin.twist == 0.25
    assert to_dict(plugin)["name"] == "zigzag"
    assert from_dict(dropped.base, to_dict(plugin)) == plugin
    with pytest.raises(UsageError, match=r"unknown key 'here\.twits'; did you mean 'twist'"):
        from_dict(dropped.base, {"name": "zigzag", "twits": 1.0}, "here")
    if dropped.key is None:
        return
    (tmp_path / "recipe.toml").write_text(RECIPES[dropped.key], encoding="utf-8")
    config = load_config(tmp_path / "recipe.toml")
    assert at(config, dropped.key) == from_dict(dropped.base, {"name": "zigzag", "twist": 0.25})
    (tmp_path / "empty.toml").write_text("", encoding="utf-8")
    typed = load_config(tmp_path / "empty.toml", {dropped.key: "zigzag", f"{dropped.key}.twist": "0.75"})
    assert at(typed, dropped.key).twist == 0.75


def test_a_dropped_file_is_where_the_help_points(dropped: Dropped, capsys: pytest.CaptureFixture[str]) -> None:
    if dropped.key is None:
        assert run(["plugins", dropped.room]) == 0
        assert "zigzag" in capsys.readouterr().out
        if dropped.room != "samplers":
            return
        assert run(["generate", "nowhere", "--sampler", "zigzagg"]) == 2
        assert "did you mean 'zigzag'?" in capsys.readouterr().err
        return
    assert run(["train", "--options"]) == 0
    lines = capsys.readouterr().out.splitlines()
    choices = [line for line in lines if "zigzag" in line]
    assert f"--{dropped.key}" in [line.split()[0] for line in choices]
    assert all("zigzag" not in line.partition("(")[0] for line in choices)  # offered, not the default


def test_a_dropped_file_is_in_the_table_of_plugins(dropped: Dropped, capsys: pytest.CaptureFixture[str]) -> None:
    summary = f"Zigzag {dropped.room}: made for a test."
    assert run(["plugins", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)[dropped.room]}
    assert entries["zigzag"]["summary"] == summary
    assert {"name": "twist", "type": "float", "required": False, "default": 0.5} in entries["zigzag"]["options"]
    assert run(["plugins", dropped.room]) == 0
    text = capsys.readouterr().out
    assert summary in text
    assert "twist = 0.5" in text
    assert run(["plugins", "--markdown"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| `zigzag`"))
    assert summary in row
    assert "`twist = 0.5`" in row


def test_a_dropped_sampler_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = HEAD.format(room="samplers") + derived("unmask.samplers.left_to_right", "LeftToRight")
    (tmp_path / "zagzig.py").write_text(source.replace("Zigzag", "Zagzig"), encoding="utf-8")
    monkeypatch.setattr(unmask.samplers, "__path__", [*unmask.samplers.__path__, str(tmp_path)])
    assert run(["generate", str(trained.folder), "--sampler", "zagzig", "--length", "9", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip()
    sys.modules.pop("unmask.samplers.zagzig", None)
    vars(unmask.samplers).pop("zagzig", None)


def test_third_parties_add_theirs_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = HEAD.format(room="noise") + derived("unmask.noise.log_linear", "LogLinear")
    (tmp_path / "third_party_noise.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = importlib.metadata.EntryPoint("zigzag", "third_party_noise:Zigzag", "unmask.noise")
    real = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: (point,) if group == "unmask.noise" else real(group=group)
    )
    room = unmask.noise.room
    assert "zigzag" in room.names()
    assert room.get("zigzag").__module__ == "third_party_noise"
    assert room.name_of(room.get("zigzag")()) == "zigzag"
    assert unmask.noise.Zigzag is room.get("zigzag")
    assert "zigzag" not in unmask.samplers.room.names()
    sys.modules.pop("third_party_noise", None)


@pytest.mark.parametrize(
    ("room", "typo", "meant"),
    [
        ("noise", "cosin", "cosine"),
        ("objectives", "mdml", "mdlm"),
        ("denoisers", "ditt", "dit"),
        ("samplers", "ancestal", "ancestral"),
        ("corpora", "json", "jsonl"),
        ("constraints", "regexp", "regex"),
    ],
)
def test_a_wrong_name_gets_the_closest(room: str, typo: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"unknown .* '{typo}'; did you mean '{meant}'\\?"):
        importlib.import_module(f"unmask.{room}").room.get(typo)
    with pytest.raises(UsageError, match=f"known: .*{meant}"):
        importlib.import_module(f"unmask.{room}").room.get("qqqqqq")


def test_every_plugin_is_reachable_by_its_class_name() -> None:
    for room in unmask._ROOMS:
        package = importlib.import_module(f"unmask.{room}")
        for name in package.room.names():
            cls = package.room.get(name)
            assert getattr(package, cls.__name__) is cls, (room, name)
            assert package.room.summary(name).endswith("."), (room, name)
    with pytest.raises(AttributeError, match="LogLiner"):
        unmask.noise.LogLiner  # noqa: B018


def test_a_file_without_a_plugin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hollow.py").write_text('"""Nothing."""\n', encoding="utf-8")
    monkeypatch.setattr(unmask.noise, "__path__", [*unmask.noise.__path__, str(tmp_path)])
    with pytest.raises(UsageError, match="holds no Noise"):
        unmask.noise.room.get("hollow")
    sys.modules.pop("unmask.noise.hollow", None)
    vars(unmask.noise).pop("hollow", None)


def test_what_is_no_plugin_cannot_be_written() -> None:
    class Local(unmask.noise.LogLinear):
        pass

    with pytest.raises(UsageError, match=r"Local is not a plug-in of unmask\.noise"):
        to_dict(unmask.objectives.MDLM(noise=Local()))
