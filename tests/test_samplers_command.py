"""`unmask samplers`: every sampler of the room with options, cost and law, also those added later."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unmask
from unmask.cli import run
from unmask.samplers import Sampler, room

Capture = pytest.CaptureFixture[str]


def listed(capsys: Capture, *words: str) -> dict[str, dict[str, Any]]:
    assert run(["samplers", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return {sampler["name"]: sampler for sampler in json.loads(out)["samplers"]}


def test_every_sampler_is_listed_with_what_it_costs_and_follows(capsys: Capture) -> None:
    found = listed(capsys)
    assert sorted(found) == room.names()
    for name, sampler in found.items():
        assert sampler["class"] == room.get(name).__name__
        assert sampler["summary"]
        assert sampler["law"]
        assert sampler["calls"] is None or sampler["calls"].keys() == {"128", "1024"}
    for name in ("ancestral", "left_to_right", "posterior", "semi_ar"):
        assert found[name]["law"] != Sampler.law
        assert found[name]["cost"]
    assert found["left_to_right"]["calls"] == {"128": 128, "1024": 1024}
    assert {"name": "steps", "type": "int | None", "required": False, "default": 128} in found["ancestral"]["options"]


def test_the_calls_are_those_of_the_sampler_with_these_options(capsys: Capture) -> None:
    found = listed(capsys, "ancestral", "semi_ar", "posterior", "--length", "100", "--steps", "16", "--window", "64")
    inner = unmask.samplers.Ancestral(steps=16)
    assert found["ancestral"]["calls"] == {"100": 16}
    assert found["posterior"]["calls"] == {"100": 17}
    assert found["semi_ar"]["calls"] == {"100": unmask.samplers.SemiAR(window=64, inner=inner).max_calls(100)}
    assert len(found) == 3
    found = listed(capsys, "--steps", "inf", "--length", "50")
    assert found["ancestral"]["calls"] == {"50": 50}
    assert found["posterior"]["calls"] is None  # it needs a number of steps; the others are listed all the same
    assert "steps" in found["posterior"]["calls_unknown"]


def test_as_text_and_as_a_table(capsys: Capture) -> None:
    assert run(["samplers"]) == 0
    text = capsys.readouterr().out
    assert run(["samplers", "--markdown"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(room.names())
    cells = {line.replace("\\|", "").count("|") for line in table}
    assert len(cells) == 1  # a bar inside a cell would shift the rest
    for name in room.names():
        assert f"\n{name}  " in "\n" + text
        assert f"| `{name}` |" in "\n".join(table)
    assert max(map(len, text.splitlines())) <= 100


LATER = '''"""Opens as somebody else does, but claims nothing."""

from dataclasses import dataclass

from unmask.samplers.left_to_right import LeftToRight


@dataclass(frozen=True, kw_only=True)
class Later(LeftToRight):
    """A sampler of another package."""

    twist: float{default}
'''


@pytest.fixture(params=["", " = 0.5"])
def later(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "later.py").write_text(LATER.format(default=request.param), encoding="utf-8")
    monkeypatch.setattr(unmask.samplers, "__path__", [*unmask.samplers.__path__, str(tmp_path)])
    yield request.param
    sys.modules.pop("unmask.samplers.later", None)
    vars(unmask.samplers).pop("later", None)


def test_one_added_later_is_listed_and_inherits_no_claim(later: str, capsys: Capture) -> None:
    found = listed(capsys)["later"]
    assert (found["law"], found["cost"]) == ("no law claimed", "")
    assert found["summary"] == "Opens as somebody else does, but claims nothing."
    if later:
        assert found["calls"] == {"128": 128, "1024": 1024}
    else:  # an option without default
        assert found["calls"] is None
        assert "twist" in found["calls_unknown"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ancestrl"], "did you mean 'ancestral'?"),
        (["--length", "0"], "--length must be at least 1"),
        (["--steps", "many"], "neither a number of steps nor inf"),
        (["--json", "--markdown"], "not allowed with argument"),
    ],
)
def test_wrong_use_is_one_line(words: list[str], message: str, capsys: Capture) -> None:
    assert run(["samplers", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
