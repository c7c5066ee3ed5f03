"""Where diffusion passes autoregression on a short text: crossings, their continuation, and the queue of such runs."""

from __future__ import annotations

import dataclasses
import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from unmask.comparison.trial import Trial, write_trial
from unmask.config import load_config
from unmask.corpora.text import Text
from unmask.training.loop import train

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("short_text")


def fall(epochs: float, tokens: int) -> float:
    """A line that passes 3.5 when epochs = tokens / 62,500: the tokens to be read grow as the square of the size."""
    return 3.0 + 0.5 * (epochs / (tokens / 62_500)) ** -0.5


def a_trial(out: Path, tokens: int, epochs: int, system: str, nats: float, **more: Any) -> None:
    named = {"name": f"{system}-s0", "system": system, "seed": 0, "fingerprint": "", "state": "finished"}
    told = {"steps": epochs * 10, "tokens": epochs * tokens, "epochs": float(epochs)}
    trial = Trial(**named, **told, nats=[nats], counts=[1], kind="exact" if "ar" in system else "upper bound", **more)
    write_trial(out / f"{tokens}-{epochs}", trial)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two parts: of the smaller the crossing, at 16 epochs, is measured, of the larger it lies beyond, at 32."""
    for tokens in (1_000_000, 2_000_000):
        for epochs in (4, 8):
            a_trial(tmp_path, tokens, epochs, "ar", 3.7 if epochs == 4 else 3.6)
            a_trial(tmp_path, tokens, epochs, "ar_both", 3.5 if epochs == 4 else 3.8)
        for epochs in (4, 8, 24) if tokens == 1_000_000 else (4, 8, 16):
            a_trial(tmp_path, tokens, epochs, "diffusion", fall(epochs, tokens) + 0.1)
            a_trial(tmp_path, tokens, epochs, "diffusion_both", fall(epochs, tokens))
    failed = Trial(name="diffusion-s1", system="diffusion", seed=1, fingerprint="", state="failed", reason="memory")
    write_trial(tmp_path / "1000000-4", failed)
    return tmp_path


def test_the_best_of_each_budget_counts(bench: Any, folder: Path) -> None:
    first, second = bench.read_parts(folder)
    assert (first.tokens, second.tokens) == (1_000_000, 2_000_000)
    assert first.best_ar == bench.Point(4.0, 3.5, "ar_both")
    assert [(point.read, point.system) for point in first.ar] == [(4.0, "ar_both"), (8.0, "ar")]
    assert [point.system for point in first.diffusion] == ["diffusion_both"] * 3
    assert [point.nats for point in first.diffusion] == [fall(epochs, first.tokens) for epochs in (4, 8, 24)]


def test_a_crossing_is_interpolated_where_it_was_measured_and_continued_where_not(bench: Any, folder: Path) -> None:
    first, second = (bench.crossing(part) for part in bench.read_parts(folder))
    above, below = fall(8, 1_000_000) - 3.5, 3.5 - fall(24, 1_000_000)
    assert first.epochs == pytest.approx(8 * 3 ** (above / (above + below)))
    assert not first.continued
    assert second.epochs == pytest.approx(32)
    assert second.continued
    words = "\n".join(bench.table(bench.read_parts(folder), None))
    assert "1,000,000 tokens: diffusion passes after" in words
    assert (
        "2,000,000 tokens: its line, continued by a power law, would pass after 32 epochs, 64,000,000 tokens" in words
    )


def test_a_line_that_levels_off_above_does_not_pass(bench: Any) -> None:
    line = [bench.Point(e, 3.6 + 1 / e, "d") for e in (4.0, 8.0, 16.0)]
    part = bench.Part(10, [bench.Point(4.0, 3.5, "ar")], line)
    assert bench.power_law(line) == pytest.approx((3.6, 1.0, 1.0))
    assert bench.crossing(part) is None
    assert bench.crossing(dataclasses.replace(part, diffusion=line[:2])) is None  # two points are no law
    assert bench.crossing(dataclasses.replace(part, ar=[])) is None
    rising = [*line[:2], bench.Point(16.0, 4.0, "d")]
    assert bench.power_law(rising) is None
    assert "does not come below" in "\n".join(bench.table([part], 100))


def test_what_is_not_known_is_not_called_a_result(bench: Any) -> None:
    ar, line = [bench.Point(4.0, 3.5, "ar")], [bench.Point(e, 3.6 + 1 / e, "d") for e in (4.0, 8.0)]
    assert bench.outcome(bench.Part(10, [], line)) == "autoregression is not measured yet"
    assert "three budgets" in bench.outcome(bench.Part(10, ar, line))
    words = "\n".join(bench.table([bench.Part(10, ar, line)], None))
    assert "autoregression is best at its longest budget" in words
    ended = bench.Part(10, [*ar, bench.Point(8.0, 3.7, "ar")], line)
    assert "longest" not in "\n".join(bench.table([ended], None))


def test_a_crossing_before_the_shortest_budget_is_no_point_of_the_fit(bench: Any) -> None:
    below = bench.Part(2, [bench.Point(4.0, 3.5, "ar")], [bench.Point(8.0, 3.4, "d")])
    met = bench.crossing(below)
    assert met == bench.Crossing(2, 8.0, continued=False, at_most=True)
    assert "below already after 8 epochs" in bench.outcome(below)
    known = [bench.Crossing(n, 16.0 * n, False) for n in (1, 4)]
    assert bench.at_size([*known, met], 16) == bench.at_size(known, 16)
    assert bench.at_size([known[0], met], 16) is None


def test_the_size_of_a_whole_text_is_reached_by_a_line_in_logarithms(bench: Any) -> None:
    known = [bench.Crossing(n, 16.0 * n, False) for n in (1, 2, 4)]
    tokens, power = bench.at_size(known, 16)
    assert power == pytest.approx(2)
    assert tokens == pytest.approx(16 * 16**2)
    assert bench.at_size(known[:1], 16) is None


def test_the_picture_is_one(bench: Any, folder: Path) -> None:
    svg = ElementTree.fromstring(bench.picture(bench.read_parts(folder)))
    assert len([line for line in svg.iter() if line.tag.endswith("polyline")]) == 4
    assert any("2.0M tokens, diffusion" in (text.text or "") for text in svg.iter())


def _settings(queue: Any) -> dict[str, set[str]]:
    """The settings of each experiment."""
    found: dict[str, set[str]] = {}
    for item in queue.items:
        for name in item.experiments:
            found.setdefault(name, set()).add(item.setting.name)
    return found


def test_the_queue_reads_and_each_recipe_trains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus_file: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    queue = importlib.import_module("experiments").Queue((BENCHMARKS / "short_text.toml").read_text(), tmp_path)
    recipes = {path.stem for path in (BENCHMARKS / "short").glob("*.toml")} - {"common"}
    assert {item.system for item in queue.items} == recipes
    assert all(queue.seconds(item) < 9 * 60 for item in queue.items)
    shares = {item.setting.name: item.setting.options["data.share"] for item in queue.items}
    assert math.isclose(shares["4M-16"], 4 * shares["1M-16"], rel_tol=1e-2)
    by_part = {name: {setting.split("-")[0] for setting in group} for name, group in _settings(queue).items()}
    assert all(parts == {name} for name, parts in by_part.items() if name != "regularisation")
    assert math.isclose(shares["2M-64"], 4 * shares["0.5M-64"], rel_tol=1e-2)
    for setting in queue.settings.values():  # a name tells the text's size and the epochs
        size, epochs = setting.name.split("M-") if "-" in setting.name else (setting.tokens / 1e6, 1)
        assert setting.tokens == float(size) * int(epochs) * 1e6
    regularised = {"ar_both": (0.3, 0.3, 0.0), "diffusion_both": (0.3, 0.1, 0.0), "ar_split": (1.0, 0.3, 0.1)}
    for name, known in regularised.items():
        options = {"out": str(tmp_path / name), "steps": "2", "batch": "4", "data.length": "16", "tokenizer": "bpe:300"}
        options |= {"denoiser.hidden": "32", "denoiser.blocks": "2", "denoiser.heads": "2", "valid_rows": "4"}
        config = load_config(BENCHMARKS / "short" / f"{name}.toml", options)
        assert (config.optim.weight_decay, config.denoiser.dropout, config.data.split_tokens) == known  # type: ignore[attr-defined]
        text = Text(path=str(corpus_file), separator="\n")
        data = dataclasses.replace(config.data, train=text, valid=None, held_out=0.1, share=0.5)
        assert train(dataclasses.replace(config, data=data), device="cpu").length == 16
