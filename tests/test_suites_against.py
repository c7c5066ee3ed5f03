"""Two models in one suite: the differences are those of the same texts, are kept, and are told as what they are."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unmask
from test_suites import TEXTS, measure, numbers
from test_suites import data as data
from test_written_suites import GERMAN, small_model
from test_written_suites import data as pairs  # noqa: F401 - a fixture
from unmask.cli import run
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import UsageError
from unmask.evaluation.bootstrap import Sums, bootstrap_ci95, paired_ci95
from unmask.evaluation.overlap import share
from unmask.evaluation.suites import find_suite, written
from unmask.evaluation.suites.base import Outcome
from unmask.evaluation.suites.differences import difference_of, rows_of, terminal_lines
from unmask.metrics.perplexity import Perplexity
from unmask.model import Model

Capture = pytest.CaptureFixture[str]


def moved(model: Model, scale: float) -> Model:
    """A copy whose weights are a little larger."""
    network = model.denoiser.config.build(num_ids=model.tokenizer.num_ids, mask_id=model.tokenizer.mask_id)  # type: ignore[attr-defined, unused-ignore]
    network.load_state_dict({name: scale * tensor for name, tensor in model.denoiser.state_dict().items()})
    how: dict[str, Any] = {"objective": model.objective, "length": model.length, "packing": model.packing}
    return Model(denoiser=network.eval(), tokenizer=model.tokenizer, anchor=model.anchor, **how)


def test_likelihoods_of_a_suite_are_paired(model: Model, data: Path) -> None:
    other = moved(model, 1.03)
    sets = ["ptb", "ag_news"]
    alone = [measure(one, data, sets) for one in (model, other)]
    both = measure(model, data, sets, against=other)
    for name in sets:
        got = numbers(both[name])
        ours, theirs = (numbers(one[name]) for one in alone)
        assert {key: got[key] for key in ("ppl", "nats", "bits_per_byte")} == {
            key: ours[key] for key in ("ppl", "nats", "bits_per_byte")
        }
        assert got["against"]["ppl"] == theirs["ppl"]
        (apart,) = got["differences"]
        assert apart["value"] == pytest.approx(ours["nats_per_token"] - theirs["nats_per_token"])
        assert (apart["ours"], apart["theirs"]) == (ours["nats_per_token"], theirs["nats_per_token"])
        assert apart["sign"] == "≈"
        if ours["nats_per_token_ci95"] is not None and apart["ci95"] is not None:
            widths = [ends[1] - ends[0] for ends in (apart["ci95"], ours["nats_per_token_ci95"])]
            assert widths[0] < widths[1] / 4  # what makes a text hard is in both
    itself = numbers(measure(model, data, ["ag_news"], against=model)["ag_news"])["differences"][0]
    assert (itself["value"], itself["visible"]) == (0.0, False)


def test_an_estimator_is_of_the_model_that_has_it(model: Model, ar_model: Model, data: Path) -> None:
    asked = Perplexity(num_samples=2, estimator="T=4")
    alone = numbers(measure(model, data, ["ptb"], metric=asked)["ptb"])
    there = numbers(measure(model, data, ["ptb"], metric=asked, against=ar_model)["ptb"])
    back = numbers(measure(ar_model, data, ["ptb"], metric=asked, against=model)["ptb"])
    assert alone["nats"] == there["nats"] == back["against"]["nats"]
    assert there["against"]["nats"] == back["nats"]
    assert there["differences"][0]["value"] == pytest.approx(-back["differences"][0]["value"])
    assert (there["differences"][0]["sign"], back["differences"][0]["sign"]) == ("≤", "≥")


def test_the_precision_of_a_suite_against_is_of_the_difference(model: Model, data: Path) -> None:
    both = measure(model, data, ["ptb"], against=moved(model, 1.03), metric=Perplexity(precision=0.05))
    got = numbers(both["ptb"])
    low, high = got["differences"][0]["ci95_given_texts"]
    assert high - low <= 0.1
    assert got["protocol"]["precision_of"] == "the difference"


def test_other_tokens_are_compared_in_bits_per_byte_or_not_at_all(
    model: Model,
    data: Path,
    corpus_file: Path,
) -> None:
    spells = load_tokenizer("bpe:280", unmask.corpora.Text(path=str(corpus_file)))
    network = unmask.denoisers.DiT(hidden=16, blocks=1, heads=2).build(num_ids=spells.num_ids, mask_id=spells.mask_id)
    other = Model(denoiser=network, tokenizer=spells, objective=model.objective, length=model.length)
    with pytest.raises(UsageError, match="--packing pad"):
        measure(model, data, ["ptb"], against=other)
    found = measure(model, data, ["ptb", "lambada"], against=other, packing="pad")
    (apart,) = numbers(found["ptb"])["differences"]
    assert apart["unit"] == "bits per byte"
    assert apart["value"] == pytest.approx(
        numbers(found["ptb"])["bits_per_byte"] - numbers(found["ptb"])["against"]["bits_per_byte"]
    )
    long = numbers(found["lambada"])  # in two windows of the one model and in three of the other
    assert long["sequences"] != long["against"]["sequences"]
    assert long["differences"][0]["value"] == pytest.approx(long["bits_per_byte"] - long["against"]["bits_per_byte"])
    some = measure(model, data, ["ptb", "ag_news"], against=other, packing="pad", metric=Perplexity(max_rows=1))
    assert {numbers(one)["bytes"] for one in some.values()} == {len(TEXTS[name][0]) for name in ("ptb", "ag_news")}
    whole = measure(model, data, ["lambada"], against=other, packing="pad", metric=Perplexity(max_rows=1))
    assert numbers(whole["lambada"])["bytes"] == long["bytes"]  # one text, however many rows it takes


def test_rows_are_as_long_as_the_smaller_window(model: Model, data: Path) -> None:
    small = Model(denoiser=model.denoiser, tokenizer=model.tokenizer, objective=model.objective, length=8)
    for models in ((model, small), (small, model)):
        got = numbers(measure(models[0], data, ["ptb"], against=models[1])["ptb"])
        assert got["protocol"]["length"] == got["against"]["protocol"]["length"] == 8


def test_a_broken_other_model_costs_its_sets_alone(model: Model, data: Path) -> None:
    other = moved(model, 1.0)
    with torch.no_grad():
        embedding = next(p for p in other.denoiser.parameters() if p.shape[0] == other.tokenizer.num_ids)
        embedding[ord("@")] = math.nan
    found = measure(model, data, ["arxiv", "pubmed"], against=other, metric=Perplexity(num_samples=8))
    assert found["arxiv"].failure.startswith("the other model gives nan nats on arXiv")
    assert math.isfinite(numbers(found["pubmed"])["differences"][0]["value"])


def test_results_of_two_models_are_taken_again(
    model: Model,
    ar_model: Model,
    data: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    mine, exact, out = tmp_path / "mine", tmp_path / "exact", tmp_path / "out"
    model.save(mine)
    ar_model.save(exact)
    words = ["eval", str(mine), "--suite", "zero-shot", "--data-dir", str(data), "--sets", "ptb", "ag_news"]
    words += ["--num-samples", "2", "--device", "cpu", "--out", str(out)]
    against = ["--against", str(exact)]
    assert run([*words, *against]) == 0
    shown = capsys.readouterr().out
    assert "mine − exact, on the same texts" in shown
    assert "PTB, nats per token" in shown
    assert "Differences are of an upper bound and an exact value." in " ".join(shown.split())
    assert all(len(line) <= 80 or str(tmp_path) in line for line in shown.splitlines())
    page = (out / "zero-shot.md").read_text()
    assert f"## Against {exact}" in page
    assert "| PTB | all | nats per token |" in page
    kept = json.loads((out / "ptb.json").read_text())
    assert kept["identity"]["against"]["estimator"] != kept["identity"]["estimator"]
    assert run([*words, *against]) == 0
    again = capsys.readouterr()
    assert "PTB: measured already" in again.err
    assert again.out == shown
    assert run([*words, "--json"]) == 0  # of the one model alone its numbers are there
    found = capsys.readouterr()
    assert "PTB: measured already" in found.err
    assert "differences" not in json.loads(found.out)["sets"]["ptb"]
    model.save(tmp_path / "other")
    assert run([*words, "--against", str(tmp_path / "other")]) == 0
    assert "has changed: against" in capsys.readouterr().err


def test_what_is_written_is_paired_text_by_text(
    pairs: Path,  # noqa: F811
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("unmask.evaluation.bootstrap.FEWEST", 5)
    mine, exact, out = tmp_path / "mine", tmp_path / "exact", tmp_path / "out"
    small_model().save(mine)
    small_model(ar=True).save(exact)
    words = ["eval", str(mine), "--suite", "translation", "--data-dir", str(pairs), "--sets", "flickr2016"]
    words += ["--sampler", '{"name": "ancestral", "steps": 4}', "--device", "cpu", "--out", str(out)]
    assert run([*words, "--against", str(exact)]) == 0
    shown = capsys.readouterr()
    assert "the sampler ancestral is not for the other model" in shown.err
    assert re.search(r"\nFlickr 2016\n  BLEU +[+-]", shown.out)
    kept = json.loads((out / "flickr2016.json").read_text())
    records = [json.loads(line) for line in (out / "flickr2016.jsonl").read_text().splitlines()]
    assert [one["prompt"] for one in records] == GERMAN
    assert all(set(one["against"]) <= {"output"} for one in records)
    assert any(one["against"] for one in records)
    for score, other, apart in zip(kept["scores"], kept["against"]["scores"], kept["differences"], strict=True):
        assert apart["value"] == pytest.approx(score["value"] - other["value"])
        assert apart["name"] == score["name"]
        assert apart["ci95"][0] <= apart["value"] <= apart["ci95"][1]
    assert "ancestral" in kept["identity"]["sampler"].lower()
    assert "ancestral" not in kept["identity"]["against"]["sampler"].lower()


def test_two_samplers_of_one_model(pairs: Path, tmp_path: Path, capsys: Capture) -> None:  # noqa: F811
    mine = str(tmp_path / "mine")
    small_model().save(mine)
    words = [
        "eval",
        mine,
        "--suite",
        "translation",
        "--data-dir",
        str(pairs),
        "--sets",
        "flickr2016",
        "--device",
        "cpu",
    ]
    samplers = [json.dumps({"name": "ancestral", "steps": steps}) for steps in (1, 8)]
    assert run([*words, "--sampler", samplers[0], "--against", mine, "--against-sampler", samplers[1], "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["sets"]["flickr2016"]
    alone = []
    for sampler in samplers:
        assert run([*words, "--sampler", sampler, "--json"]) == 0
        alone.append(json.loads(capsys.readouterr().out)["sets"]["flickr2016"]["scores"])
    assert [both["scores"], both["against"]["scores"]] == alone
    assert all(one["ci95"] is None and not one["visible"] for one in both["differences"])  # of five texts
    assert run([*words, "--against-sampler", samplers[0]]) == 2
    assert "give both" in capsys.readouterr().err


# --- the paired bootstrap ---------------------------------------------------------------------------------------------


def accuracy(right_N: np.ndarray[Any, Any], over: list[int] | None = None) -> Sums:
    stats_N2 = np.stack([right_N, np.ones(len(right_N))], axis=1)
    return Sums.of(stats_N2, lambda total_2: float(100 * total_2[0] / max(total_2[1], 1)), over)


def test_the_paired_bootstrap_covers_and_is_narrow() -> None:
    """Texts are hard or easy for both models; the difference in the mean is 3 points."""
    generator = np.random.default_rng(0)
    num, repeats, covered, widths = 200, 300, 0, list[float]()
    for _ in range(repeats):
        easy_N = generator.uniform(size=num)
        ours, theirs = accuracy(easy_N > 0.40), accuracy(easy_N > 0.43)
        flips_N = generator.uniform(size=num) < 0.1
        ours = accuracy(np.where(flips_N, ~(easy_N > 0.40), easy_N > 0.40))
        truth = 100 * (0.9 * 0.60 + 0.1 * 0.40 - 0.57)
        paired = paired_ci95(ours, theirs, resamples=300)
        assert paired is not None
        covered += paired[0] <= truth <= paired[1]
        apart = [bootstrap_ci95(one.stats_NK, one.number, resamples=300) for one in (ours, theirs)]
        widths.append((paired[1] - paired[0]) / math.hypot(*(ends[1] - ends[0] for ends in apart if ends)))
    assert 0.91 <= covered / repeats <= 0.98, covered
    assert max(widths) < 0.75


def test_scores_of_other_texts_have_no_difference() -> None:
    right = [1.0, 0.0] * 10
    ours, same, others = (share("wrong digits", right, over=range(lo, lo + 20)) for lo in (0, 0, 5))
    assert written._difference(ours, same, 0) is not None
    assert written._difference(ours, others, 0) is None
    assert written._difference(ours, share("wrong digits", right), 0) is None


def test_numbers_of_other_texts_are_not_paired() -> None:
    right_N = np.array([1.0, 0.0, 1.0] * 4)
    assert paired_ci95(accuracy(right_N), accuracy(right_N)) == (0.0, 0.0)
    assert paired_ci95(accuracy(right_N[:9]), accuracy(right_N[:9])) is None
    assert paired_ci95(accuracy(right_N, [0, 1, 2]), accuracy(right_N, [0, 1, 3])) is None
    assert paired_ci95(accuracy(right_N), accuracy(right_N[:2])) is None
    assert not difference_of("BLEU", "points", 2.0, 1.0, None)["visible"]
    assert terminal_lines([]) == []
    found = [difference_of("BLEU", "points", 30.0, 20.0, ends) for ends in (None, (-1.0, 21.0), (1.0, 19.0))]
    outcome = Outcome(set=find_suite("zero-shot").sets["ptb"], numbers={"differences": found})
    assert [row[-1] for row in rows_of([outcome])] == ["too few texts", "not visible", "visible"]
