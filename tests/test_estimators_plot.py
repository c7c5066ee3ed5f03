"""The picture of the estimators: what is drawn is what was measured, and can be read without colours."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import estimators  # type: ignore[import-not-found, unused-ignore]

    return estimators  # type: ignore[no-any-return, unused-ignore]


def test_the_interval_of_an_error_covers_it(bench: ModuleType) -> None:
    """Of rows whose variances differ: how often the true standard error is within the interval."""
    sigma_B = torch.tensor([0.5, 1.0, 1.0, 2.0])
    truth = math.sqrt(float(sigma_B.square().sum()) / 12) / 10
    draws_RBS = torch.randn(1000, 4, 12, generator=torch.Generator().manual_seed(0)) * sigma_B[:, None]
    found = [bench.error_of(draws_BS, tokens=10) for draws_BS in draws_RBS]
    covered = sum(one["error_ci95"][0] <= truth <= one["error_ci95"][1] for one in found)
    assert 0.92 <= covered / 1000 <= 0.98, covered
    assert sum(one["error"] ** 2 for one in found) / 1000 == pytest.approx(truth**2, rel=0.03)
    for freedom, low, high in ((8, 2.180, 17.535), (40, 24.433, 59.342)):
        assert [bench.chi_square(freedom, z) for z in (-1.96, 1.96)] == pytest.approx([low, high], rel=0.015)


def test_the_picture_shows_each_estimator_by_its_shape(bench: ModuleType) -> None:
    found = {
        name: {"error": 0.01 * n, "error_ci95": [0.008 * n, 0.013 * n], "calls_of_plain": 1.0 / n}
        for n, name in enumerate(bench.WAYS, 1)
    }
    picture = ET.fromstring(bench.draw(found, "8 <texts> & more"))
    marks = [one for one in picture.iter() if (one.get("class") or "").startswith("mark")]
    assert len(marks) == len(bench.WAYS)
    looks = [(one.tag.removeprefix(SVG), len((one.get("points") or "").split()), one.get("class")) for one in marks]
    assert looks[:4] == [
        ("circle", 0, "mark alone"),
        ("circle", 0, "mark"),
        ("polygon", 4, "mark"),
        ("polygon", 4, "mark alone"),
    ]
    bars = [line for line in picture.iter(f"{SVG}line") if line.get("class") == "bar"]
    assert len(bars) == 3 * len(bench.WAYS)
    width = float(picture.get("width") or 0)
    ends = [float(line.get(name) or 0) for line in bars for name in ("x1", "x2")]
    assert bench.LEFT < min(ends) < max(ends) < width
    centre = float(marks[0].get("cx") or 0)
    assert float(bars[0].get("x1") or 0) < centre < float(bars[0].get("x2") or 0)
    assert {"plain", "count of 16", "1.0", "8 <texts> & more"} <= {text.text for text in picture.iter(f"{SVG}text")}


def test_what_cannot_be_told_is_a_sentence(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for draws_BS in (torch.ones(2, 1), torch.ones(2, 4), torch.tensor([[1.0, 2.0], [1.0, 1.0]])):
        with pytest.raises(SystemExit, match="too few to tell an error"):
            bench.error_of(draws_BS, tokens=2)
    for draws in ("20", "16"):
        with pytest.raises(SystemExit):
            bench.main(["model", "texts", "--draws", draws])
        assert "multiple of 16 from 32 on" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no model folder 'nowhere'"):
        bench.main(["nowhere", "texts"])
