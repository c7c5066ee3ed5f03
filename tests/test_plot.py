"""`unmask plot`: what a run wrote down is drawn where it belongs; `unmask recipes`: what comes with the package."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from unmask.cli import run
from unmask.cli._chart import HEIGHT, LEFT, WIDTH, Curve, draw
from unmask.config import RunConfig, from_dict, read_recipe
from unmask.errors import DataError
from unmask.reporting.metrics_file import read_metrics
from unmask.reporting.plotting import smoothed, thinned

Capture = pytest.CaptureFixture[str]
SVG = "{http://www.w3.org/2000/svg}"


def polylines(picture: str, kind: str) -> list[list[tuple[float, float]]]:
    found = [line for line in ET.fromstring(picture).iter(f"{SVG}polyline") if line.get("class") == kind]
    pairs = [[point.split(",") for point in (line.get("points") or "").split()] for line in found]
    return [[(float(x), float(y)) for x, y in line] for line in pairs]


def texts(picture: str) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(picture).iter(f"{SVG}text")]


def write(folder: Path, lines: list[dict[str, Any]], cut: str = "") -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
    return folder


def logged(step: int, loss: float, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens_per_second": 9.0,
        "seconds": seconds,
    } | more


def test_a_run_is_drawn_beside_its_metrics(trained: Any, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "a.svg"
    assert run(["plot", str(trained.folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    picture = out.read_text()
    (loss,), (valid,) = polylines(picture, "loss"), polylines(picture, "valid")
    assert len(loss) == 60
    assert len(valid) == 4  # before the first step, and three more
    assert valid[0][0] == LEFT
    assert loss[-1][0] == valid[-1][0] == LEFT + WIDTH
    assert loss[-1][1] > loss[10][1]  # it fell, and a picture's y points down
    assert any("mdlm" in text and "validation" in text for text in texts(picture))
    assert "steps" in texts(picture)
    assert run(["plot", str(trained.folder / "metrics.jsonl"), "--out", "-", "--x", "tokens"]) == 0
    assert "tokens" in texts(capsys.readouterr().out)


def test_where_the_picture_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write(tmp_path / name, [logged(1, 3.0, 1.0), logged(2, 2.0, 2.0)])
    assert run(["plot", "a"]) == 0
    assert run(["plot", "a", "b"]) == 0
    assert capsys.readouterr().out.split() == ["a/plot.svg", "plot.svg"]
    assert len(polylines(Path("plot.svg").read_text(), "loss")) == 2
    assert run(["plot", "a", "--out", "missing/a.svg"]) == 2


def test_numbers_as_csv_and_json(tmp_path: Path, capsys: Capture) -> None:
    """A run that was killed in the middle of a line and went on: its seconds go on, too."""
    lines = [
        {"step": 0, "valid_nats_per_token": 5.0, "valid_bits_per_byte": 7.0},
        logged(2, 3.0, 10.0, tokens=100),
        logged(4, 2.5, 20.0, tokens=50),
        {"step": 4, "note": "a loss that jumped"},
        logged(6, float("nan"), 5.0, tokens=50),
        {"step": 6, "valid_nats_per_token": 2.0, "valid_bits_per_byte": 3.0},
    ]
    folder = write(tmp_path / "a", lines, cut='{"step": 8, "lo')
    assert run(["plot", str(folder), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["step"], row["tokens"], row["seconds"], row["loss"]) for row in rows] == [
        ("0", "0", "0.0", ""),
        ("2", "200", "10.0", "3.0"),
        ("4", "300", "20.0", "2.5"),
        ("6", "400", "25.0", ""),
        ("6", "400", "25.0", ""),
    ]
    assert [row["valid"] for row in rows] == ["5.0", "", "", "", "2.0"]
    assert run(["plot", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]["a"]
    assert found[-1] == {"step": 6, "tokens": 400, "seconds": 25.0, "valid": 2.0, "valid_bits_per_byte": 3.0}


def test_validations_between_logged_steps_have_their_own_place(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "valid_nats_per_token": 6.0, "train_seconds": 0.0},
        {"step": 3, "valid_nats_per_token": 5.0, "train_seconds": 3.0},
        logged(10, 3.0, 11.0, tokens=100) | {"train_seconds": 10.0},
        {"step": 17, "valid_nats_per_token": 4.0, "train_seconds": 17.0},
        logged(20, 2.5, 22.0, tokens=50) | {"train_seconds": 20.0},
        {"step": 24, "valid_nats_per_token": 3.0, "train_seconds": 24.0},
        logged(30, 2.5, 2.0, tokens=50) | {"train_seconds": 30.0},  # of another process
    ]
    points = read_metrics(write(tmp_path / "a", lines), "a").points
    assert [(p.step, p.tokens, p.seconds) for p in points] == [
        *[(0, 0, 0.0), (3, 300, 3.0), (10, 1000, 11.0), (17, 1350, 18.0)],
        *[(20, 1500, 22.0), (24, 1700, 26.0), (30, 2000, 28.0)],
    ]


def test_what_cannot_be_drawn(tmp_path: Path, capsys: Capture) -> None:
    assert run(["plot", str(tmp_path / "none")]) == 1
    assert "give the folder of a training run" in capsys.readouterr().err
    write(tmp_path / "empty", [{"step": 1, "note": "x"}])
    assert run(["plot", str(tmp_path / "empty")]) == 1
    assert "tells no loss yet" in capsys.readouterr().err
    write(tmp_path / "old", [logged(1, 3.0, 1.0)])
    assert run(["plot", str(tmp_path / "old"), "--x", "tokens"]) == 1
    assert "do not count tokens" in capsys.readouterr().err
    assert run(["plot", str(tmp_path / "old"), "--bits-per-byte"]) == 1
    assert "no validation in bits per byte" in capsys.readouterr().err
    write(tmp_path / "low", [logged(1, 0.0, 1.0), logged(2, 1.0, 1.0)])
    assert run(["plot", str(tmp_path / "low"), "--log", "--out", "-"]) == 1
    assert "leave out --log" in capsys.readouterr().err
    with pytest.raises(DataError, match="cannot read"):
        read_metrics(tmp_path / "nowhere", "x")


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("points", [[(1.0, 2.0)], [(0.0, 5.0)], [(1.0, 9.0), (100.0, 1.0), (200.0, 1.0)]])
def test_every_curve_has_a_place(points: list[tuple[float, float]], log: bool) -> None:
    picture = draw([Curve("<a & b>", points, points)], across="seconds", up="nats per token", log=log)
    (line,) = polylines(picture, "valid")
    assert all(LEFT <= x <= LEFT + WIDTH for x, _ in line)
    field = next(rect for rect in ET.fromstring(picture).iter(f"{SVG}rect") if rect.get("x"))
    begins = float(field.get("y") or 0)
    assert all(begins <= y <= begins + HEIGHT + 4 for x, y in line[1:] or line)  # the first may come in from above
    assert any("<a & b>" in text for text in texts(picture))


def test_curves_are_thinned_and_smoothed_without_moving() -> None:
    line = [(float(i), 100.0 - i / 100) for i in range(5000)]
    assert all(abs(y - (100 - x / 100)) < 1e-6 for x, y in smoothed(line)[:4800])  # no lag on a slope
    thin = thinned(line)
    assert thin[0] == line[0]
    assert thin[-1] == line[-1]
    assert all(abs(y - (100 - x / 100)) < 1e-6 for x, y in thin)
    noisy = [(float(i), float(i % 2)) for i in range(5000)]
    assert all(0.4 < y < 0.6 for _, y in smoothed(noisy)[200:])


def test_recipes_are_listed_and_printed(capsys: Capture) -> None:
    assert run(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    folder = Path(__file__).parents[1] / "src" / "unmask" / "recipes"
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in folder.glob("*.toml"))
    assert all(re.fullmatch(r"\w+ +\S.{20,}\.", line) for line in lines)  # a whole sentence each
    for name in (line.split()[0] for line in lines):
        assert run(["recipes", name]) == 0
        assert capsys.readouterr().out == (folder / f"{name}.toml").read_text()
        from_dict(RunConfig, read_recipe(name))
    assert run(["recipes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipes"]["demo"]["summary"].startswith("A small byte-level model")
    assert run(["recipes", "dmo"]) == 2
    assert "did you mean 'demo'?" in capsys.readouterr().err
