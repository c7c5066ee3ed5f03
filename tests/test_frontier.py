"""The frontier: which points there are, that a killed one goes on, and that texts that repeat themselves are seen."""

from __future__ import annotations

import csv
import json
import random
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tiny import WORDS, Trained
from unmask.cli import run
from unmask.errors import DataError, UsageError
from unmask.evaluation.judging import frontier as frontiers
from unmask.evaluation.judging.frontier import Frontier, Point, line_of, points_of, read_points
from unmask.evaluation.judging.frontier_chart import draw
from unmask.evaluation.judging.frontier_report import as_csv, table
from unmask.evaluation.judging.generated_text import describe
from unmask.evaluation.judging.judge import OwnJudge
from unmask.evaluation.judging.written_text import write_texts
from unmask.model import Model
from unmask.rng import row_keys
from unmask.samplers import Ancestral, Confidence

REAL = [f"{WORDS[i % 4]}\n" for i in range(8)]


@pytest.fixture
def judge(ar_model: Model) -> OwnJudge:
    return OwnJudge("ours", ar_model)


# --- points -----------------------------------------------------------------------------------------------------------


def test_points_are_all_combinations_that_are_something(model: Model, ar_model: Model) -> None:
    told: list[str] = []
    over = {"sampler": ["ancestral", "confidence"], "noise": ["cosine", "linear"], "temperature": ["0.5", "1.0"]}
    points = points_of({"a": model, "ar": ar_model}, over, told.append)
    assert [len([point for point in points if point.model == name]) for name in ("a", "ar")] == [4 + 2, 2]
    kinds = {type(sampler) for point, sampler in points.items() if point.model == "a"}
    assert kinds == {Ancestral, Confidence}
    cosine = points[Point("a", (("sampler", "ancestral"), ("noise", "cosine"), ("temperature", "0.5")))]
    assert isinstance(cosine, Ancestral)
    assert (type(cosine.noise).__name__, cosine.temperature) == ("Cosine", 0.5)
    assert any("noise" in sentence for sentence in told)
    assert points_of({"a": model}, {"steps": ["inf"]})[Point("a", (("steps", "inf"),))].steps is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("over", [{"stepz": ["1"]}, {"steps": ["many"]}, {"sampler": ["tweedie"]}, {"sampler": ["x"]}])
def test_what_no_point_has_is_refused(model: Model, over: dict[str, list[str]]) -> None:
    with pytest.raises(UsageError):
        points_of({"a": model}, over)


def test_steps_of_an_autoregressive_model_alone_are_refused(ar_model: Model) -> None:
    with pytest.raises(UsageError, match="leave it out"):
        points_of({"ar": ar_model}, {"steps": ["1", "2"]})


def test_names_of_points_are_names_of_files() -> None:
    one, other = Point("runs/a", (("top_p", "0.9"),)), Point("models/a", (("top_p", "0.9"),))
    assert one.name != other.name
    assert "/" not in one.name + Point("a", (("x", "../b"),)).name


def test_texts_have_the_lengths_of_real_ones(model: Model, ar_model: Model) -> None:
    sampler = model.make_sampler(steps=4)
    written = write_texts(model, sampler, REAL, batch=3)
    room = [len(model.tokenizer.encode(text)) for text in REAL]
    assert all(len(model.tokenizer.encode(text)) <= n + 1 for text, n in zip(written.texts, room, strict=True))
    assert written.how["calls"] == 4
    assert written.how["dtype"] == "float32"
    again = write_texts(model, sampler, REAL, batch=3)
    assert again.texts == written.texts
    assert all(len(text) <= 5 for text in write_texts(model, sampler, REAL, length=5).texts)
    own = write_texts(ar_model, ar_model.sampler, REAL[:2])
    assert own.how["calls"] == ar_model.length


def test_texts_beyond_the_window_are_of_the_length_that_is_asked(model: Model, ar_model: Model) -> None:
    """Written window by window: what the sampler gives by itself, with nothing that ends a text before."""
    sampler, length = model.make_sampler(steps=4), 3 * model.length + 5
    written = write_texts(model, sampler, REAL[:3], length=length, full=True, batch=2, seed=4)
    ids = [model.tokenizer.mask_id] * length
    keys = row_keys(4, torch.arange(3))
    canvas = model.canvas([ids] * 3, may_end=False, key_B=keys)
    rows = model.run(canvas, sampler)
    assert [len(row) for row in rows] == [length] * 3
    assert written.texts == [model.tokenizer.decode(row) for row in rows]
    assert written.how["sampler"].startswith("SemiAR(")
    assert written.how["calls"] == model.fit_sampler(sampler, length).max_calls(length) > 4
    assert written.how["lengths"] == f"exactly {length} tokens"
    ended = write_texts(model, sampler, REAL[:3], length=length, seed=4)
    assert ended.how["lengths"] == f"at most {length} tokens"
    with pytest.raises(UsageError, match="--full"):
        write_texts(model, sampler, REAL, full=True)
    # an autoregressive model cannot go beyond its window, nor needs it where it ends by itself
    with pytest.raises(UsageError, match="window"):
        write_texts(ar_model, ar_model.sampler, REAL[:1], length=length, full=True)
    assert write_texts(ar_model, ar_model.sampler, REAL[:1], length=length).how["calls"] == ar_model.length


def test_what_is_timed_is_warm_and_the_sampler_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ran = iter(range(100)), []
    run_it = Model.run

    def counted(self: Model, canvas: Any, sampler: Any) -> Any:
        ran.append(len(canvas.tokens))
        return run_it(self, canvas, sampler)

    monkeypatch.setattr(Model, "run", counted)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr("time.process_time", lambda: 2.0 * len(ran))
    how: dict[str, Any] = {"batch": 3, "length": 4}
    cold = write_texts(model, model.make_sampler(steps=2), REAL, **how)
    assert (ran, cold.how["batch"]) == ([3, 3, 2], 3)
    assert cold.how["seconds_per_text"] == 3 / 8
    assert cold.how["processor_seconds_per_text"] == 2 * 3 / 8
    warm = write_texts(model, model.make_sampler(steps=2), REAL, warm=True, **how)
    assert ran[3:] == [3, 3, 3, 2]
    assert warm.texts == cold.texts
    assert warm.how["seconds_per_text"] == 3 / 8
    assert "first batch" in warm.how["timed"]


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_killed_frontier_goes_on(
    model: Model, judge: OwnJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"a": model}
    points = points_of(models, {"steps": ["1", "2", "4"]})
    calls: list[str] = []
    write, say = frontiers.write_texts, frontiers.describe

    def once(*args: Any, **how: Any) -> Any:
        calls.append("write")
        if len(calls) == 3:
            raise KeyboardInterrupt
        return write(*args, **how)

    monkeypatch.setattr(frontiers, "write_texts", once)
    with pytest.raises(KeyboardInterrupt):
        Frontier(tmp_path / "f", REAL).write(points, models)
    texts = {path.name: path.read_bytes() for path in (tmp_path / "f" / "texts").iterdir()}
    assert len(texts) == 2
    assert Frontier(tmp_path / "f", REAL).write(points, models) == []
    assert len(calls) == 4  # the third again, the first two not
    assert all((tmp_path / "f" / "texts" / name).read_bytes() == was for name, was in texts.items())

    judged: list[int] = []

    def killed(*args: Any, **how: Any) -> Any:
        judged.append(1)
        if len(judged) == 3:  # after the real texts and one point
            raise KeyboardInterrupt
        return say(*args, **how)

    monkeypatch.setattr(frontiers, "describe", killed)
    with pytest.raises(KeyboardInterrupt):
        Frontier(tmp_path / "f", REAL).judge(judge, list(points))
    first = read_points(tmp_path / "f" / "points.jsonl")
    assert [line["name"] for line in first] == ["real", "a-steps=1"]
    again = Frontier(tmp_path / "f", REAL)
    assert again.judge(judge, list(points)) == []
    assert len(judged) == 3 + 3  # the real texts once more, and the two that were missing
    assert again.lines()[:2] == first
    assert [line["name"] for line in again.lines()] == ["real", "a-steps=1", "a-steps=2", "a-steps=4"]
    assert again.judge(judge, list(points)) == []
    assert len(judged) == 6  # nothing is left to do


def test_another_frontier_is_not_gone_on_with(model: Model, ar_model: Model, judge: OwnJudge, tmp_path: Path) -> None:
    points = points_of({"a": model}, {"steps": ["1"]})
    Frontier(tmp_path / "f", REAL).write(points, {"a": model})
    with pytest.raises(UsageError, match="real texts"):
        Frontier(tmp_path / "f", [*REAL[1:], REAL[0]])
    with pytest.raises(UsageError, match="seed"):
        Frontier(tmp_path / "f", REAL, seed=1)
    with pytest.raises(UsageError, match="another model a"):
        Frontier(tmp_path / "f", REAL).write(points_of({"a": ar_model}, {}), {"a": ar_model})
    assert Frontier(tmp_path / "f", REAL).write(points_of({"b": model}, {"steps": ["1"]}), {"b": model}) == []
    (tmp_path / "f" / "texts" / "b-steps=1.jsonl").unlink()
    other = points_of({"b": ar_model}, {})  # of which nothing is written may be another model by now
    assert Frontier(tmp_path / "f", REAL).write(other, {"b": ar_model}) == []
    old = json.loads((tmp_path / "f" / "frontier.json").read_text())
    (tmp_path / "f" / "frontier.json").write_text(json.dumps({k: v for k, v in old.items() if k != "points"}))
    with pytest.raises(UsageError, match="another model b"):
        Frontier(tmp_path / "f", REAL).write(points_of({"b": model}, {}), {"b": model})
    (tmp_path / "f" / "frontier.json").write_text(json.dumps(old | {"points": {"b": {"model": "b"}}}))
    with pytest.raises(DataError, match=r"frontier\.json is damaged"):
        Frontier(tmp_path / "f", REAL).points()
    (tmp_path / "f" / "frontier.json").write_text(json.dumps(old))
    Frontier(tmp_path / "f", REAL).judge(judge, list(points))
    judge.features = "mean"
    with pytest.raises(UsageError, match="another judge"):
        Frontier(tmp_path / "f", REAL).judge(judge, list(points))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear", encoding="utf-8")
    with pytest.raises(UsageError, match="of its own"):
        Frontier(tmp_path / "mine", REAL)
    with pytest.raises(DataError, match="no real text"):
        Frontier(tmp_path / "g", [])


# --- what a picture must show -----------------------------------------------------------------------------------------


def test_a_degenerate_sampler_is_caught(judge: OwnJudge, tmp_path: Path) -> None:
    """One sentence over and over has a better perplexity than real texts, a soup of their letters their entropy."""
    draw_ = random.Random(0)
    real = ["\n".join(draw_.sample(WORDS, 2))[:31] for _ in range(24)]
    sets = {
        "repeated": [(WORDS[0] + "\n" + WORDS[0])[:31]] * 24,
        "soup": ["".join(draw_.sample(text, len(text))) for text in real],
        "honest": ["\n".join(draw_.sample(WORDS, 2))[:31] for _ in range(24)],
    }
    known = describe(judge, real)
    lines: list[dict[str, Any]] = [line_of("real", known)]
    for name, texts in sets.items():
        lines.append(line_of(name, describe(judge, texts, known), known) | {"model": name, "options": {}})
    found = {line["name"]: line for line in lines}

    def interval(name: str, number: str) -> list[float]:
        ends: list[float] = found[name]["numbers"][number]["ci95"]
        return ends

    assert interval("repeated", "judge_ppl")[1] < interval("real", "judge_ppl")[0]  # the judge alone is taken in
    assert {"entropy", "distinct_1", "distinct_4", "repeated_4"} <= set(found["repeated"]["less_varied"])
    assert found["repeated"]["numbers"]["mauve"]["value"] < 0.5 * found["honest"]["numbers"]["mauve"]["value"]
    assert interval("soup", "judge_ppl")[0] > 2 * interval("real", "judge_ppl")[1]
    assert found["soup"]["less_varied"] == []
    assert found["honest"]["less_varied"] == []
    picture = ElementTree.fromstring(draw(lines))
    marks = [part for part in picture.iter() if part.get("class") in ("hollow", "mark")]
    hollow = [part for part in marks if part.get("class") == "hollow"]
    assert len(hollow) == 1  # beside three in the legend and two in the field that are not
    assert len(marks) == 6
    assert "*" in next(line for line in table(lines).splitlines() if line.startswith("| repeated"))
    rows = list(csv.DictReader(as_csv(lines).splitlines()))
    assert [bool(row["less_varied"]) for row in rows] == [False, True, False, False]


def test_frontier_on_the_command_line(
    trained: Trained, trained_ar: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in REAL), encoding="utf-8")
    words = ["frontier", str(trained.folder), str(trained_ar.folder), "--real", str(tmp_path / "real.jsonl")]
    words += ["--over", "steps=1,4", "--over", "temperature=0.5,1.0", "--out", str(tmp_path / "f"), "--device", "cpu"]
    assert run([*words, "--write-only"]) == 0
    assert len(list((tmp_path / "f" / "texts").iterdir())) == 4 + 2
    assert run([*words, "--judge", str(trained_ar.folder)]) == 0
    told = capsys.readouterr()
    assert "without steps" in told.err
    assert [told.err.count(f"; {n} of 6 points") for n in (1, 5, 6, 7)] == [2, 2, 2, 0]  # once written, once judged
    assert told.out.count("| ") > 7
    points = read_points(tmp_path / "f" / "points.jsonl")
    assert len(points) == 7
    rows = list(csv.DictReader((tmp_path / "f" / "frontier.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["calls"] for row in rows] == ["", "1", "1", "4", "4", "32", "32"]
    assert {row["dtype"] for row in rows[1:]} == {"float32"}
    picture = ElementTree.fromstring((tmp_path / "f" / "frontier.svg").read_text(encoding="utf-8"))
    shown = " ".join(part.text or "" for part in picture.iter())
    assert "network calls at most" in shown
    assert "seconds a text" in shown
    assert "unigram entropy of a text, nats" in shown
    # A point whose texts are spoilt is told; the others stand.
    spoilt = tmp_path / "f" / "texts" / f"{points[1]['name']}.jsonl"
    spoilt.write_text('{"text": 1}\n', encoding="utf-8")
    (tmp_path / "f" / "points.jsonl").unlink()
    assert run([*words, "--judge", str(trained_ar.folder)]) == 1
    assert spoilt.name in capsys.readouterr().err
    assert len(read_points(tmp_path / "f" / "points.jsonl")) == 6


def test_texts_are_judged_where_the_models_are_not(
    trained: Trained, trained_ar: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in REAL), encoding="utf-8")
    given = ["--real", str(tmp_path / "real.jsonl"), "--num", "6", "--device", "cpu"]
    words = ["frontier", str(trained.folder), str(trained_ar.folder), *given, "--over", "steps=1,4"]
    judge = ["--judge", str(trained_ar.folder)]
    for folder in ("here", "there"):
        assert run([*words, "--out", str(tmp_path / folder), "--write-only"]) == 0
    assert run([*words, "--out", str(tmp_path / "here"), *judge]) == 0
    assert run(["frontier", *given, "--out", str(tmp_path / "there"), *judge]) == 0
    here, there = (read_points(tmp_path / folder / "points.jsonl") for folder in ("here", "there"))
    for one in (*here, *there):
        for key in ("seconds_per_text", "processor_seconds_per_text"):
            one.get("protocol", {}).pop(key, None)
    assert here == there
    capsys.readouterr()
    for file in (tmp_path / "there" / "texts").glob(
        "*.jsonl"
    ):  # of which none can be read: no picture, and no traceback
        file.write_text("{}\n")
    (tmp_path / "there" / "points.jsonl").unlink()
    assert run(["frontier", *given, "--out", str(tmp_path / "there"), *judge]) == 1
    assert len(read_points(tmp_path / "there" / "points.jsonl")) == 1
    file.unlink()
    capsys.readouterr()
    assert run(["frontier", *given, "--out", str(tmp_path / "there"), *judge]) == 1
    assert f"{file.stem} is not written" in capsys.readouterr().err
    for wrong, said in (
        (["--out", str(tmp_path / "none"), *judge], "holds no texts of a frontier"),
        (["--out", str(tmp_path / "there"), "--write-only"], "say who writes"),
        (["--out", str(tmp_path / "there"), "--over", "steps=8", *judge], "say who writes"),
    ):
        assert run(["frontier", *given, *wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_second_judge_reads_the_same_texts(
    trained: Trained, trained_ar: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in REAL), encoding="utf-8")
    words = ["frontier", "--real", str(tmp_path / "real.jsonl"), "--num", "6", "--device", "cpu"]
    judge = ["--judge", str(trained_ar.folder)]
    first, second = tmp_path / "first", tmp_path / "second"
    assert run([*words, str(trained.folder), "--over", "steps=1", "--out", str(first), *judge]) == 0
    assert run([*words, "--out", str(first), *judge, "--context", "16"]) == 2
    assert f"--written {first}" in capsys.readouterr().err
    for more in ([], ["--over", "steps=4"]):  # what is written later is judged later
        if more:
            assert run([*words, str(trained.folder), *more, "--out", str(first), "--write-only"]) == 0
        before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
        assert run([*words, "--written", str(first), "--out", str(second), *judge, "--context", "16"]) == 0
        assert before == {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
        for path in first.glob("texts/*"):
            assert (second / "texts" / path.name).read_bytes() == path.read_bytes()
    assert [len(read_points(folder / "points.jsonl")) for folder in (first, second)] == [2, 3]
    assert read_points(second / "points.jsonl")[2]["protocol"]["context"] == 16
    capsys.readouterr()
    for wrong, said in (
        ([str(trained.folder), "--written", str(first), *judge], "leave out the models"),
        (["--written", str(first), "--write-only"], "leave out the models"),
        (["--written", str(tmp_path / "none"), *judge], "holds no texts of a frontier"),
        (["--written", str(first), "--seed", "1", *judge], "another seed"),
    ):
        assert run([*words, "--out", str(tmp_path / "third"), *wrong]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "third").exists()


def test_table_5_in_one_command(
    trained: Trained, trained_ar: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two systems beyond their windows, one that cannot: it costs a sentence; the paper's figures are marked."""
    real = tmp_path / "real.txt"
    real.write_text("".join(REAL), encoding="utf-8")
    one, ar = str(trained.folder), str(trained_ar.folder)
    words = [
        "frontier",
        one,
        ar,
        "--real",
        str(real),
        "--length",
        "70",
        "--full",
        "--warm",
        "--steps",
        "3",
        "--batch",
        "1",
    ]
    words += ["--device", "cpu", "--out", str(tmp_path / "t5")]
    assert run([*words, "--write-only"]) == 1
    assert "length 70 is beyond" in capsys.readouterr().err
    before = {path.name: path.read_bytes() for path in (tmp_path / "t5" / "texts").iterdir()}
    assert run([*words, "--judge", ar, "--quote", "table-5"]) == 1
    out = capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (tmp_path / "t5" / "texts").iterdir()} == before
    page = (tmp_path / "t5" / "frontier.md").read_text(encoding="utf-8")
    assert out.startswith(page.partition("\n\nCommand:")[0])
    for asked in ([*words, "--write-only"], [*words, "--judge", ar, "--quote", "table-5"]):
        assert page.count(f"Command: `{shlex.join(['unmask', *asked])}`\n") == 1
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")]
    assert rows[0][-1] == "seconds a text |"
    assert [row[0] for row in rows[-2:]] == ["| SSD-LM (quoted)", "| MDLM, semi-autoregressive (quoted)"]
    assert [(row[1], row[-1]) for row in rows[-2:]] == [("35.43", "2,473.9 |"), ("27.18", "89.3 |")]
    assert float(rows[-3][-1].strip(" |")) > 0
    assert "1 at a time on cpu in float32" in out
    assert "Quoted from MDLM" in out
    words.remove("--full")
    assert run([*words, "--judge", ar]) == 2
    assert "another answer to --full" in capsys.readouterr().err
    assert run(["frontier", one, "--real", str(real), "--full", "--write-only", "--out", str(tmp_path / "x")]) == 2
    assert "give --length" in capsys.readouterr().err


def test_an_ablation_is_one_command(trained: Trained, trained_ar: Trained, tmp_path: Path) -> None:
    """steps × order × schedule × draw × dtype: every combination that is something, each in the table once."""
    real = tmp_path / "real.txt"
    real.write_text("".join(REAL[:4]), encoding="utf-8")
    words = ["frontier", str(trained.folder), "--judge", str(trained_ar.folder), "--real", str(real), "--device", "cpu"]
    words += [f"--over={over}" for over in ("steps=1,3", "sampler=ancestral,confidence", "noise=log_linear,cosine")]
    words += [f"--over={over}" for over in ("draw=sample,argmax", "dtype=fp32,bf16")]
    assert run([*words, "--out", str(tmp_path / "a")]) == 0
    rows = list(csv.DictReader((tmp_path / "a" / "frontier.csv").read_text(encoding="utf-8").splitlines()))[1:]
    keys = ("steps", "sampler", "noise", "draw", "dtype")
    found = {tuple(row[key] for key in keys) for row in rows}
    assert len(found) == len(rows) == (2 * 2 * 2 + 2 * 2) * 2
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}  # what they were written in, not what was asked
    assert run([*words, "--out", str(tmp_path / "a"), "--dtype", "fp32"]) == 2
    assert run([*words[:-1], "--over=dtype=fp3", "--out", str(tmp_path / "b")]) == 2


def test_texts_of_one_word_are_in_the_picture() -> None:
    def line(name: str, entropy: float) -> dict[str, Any]:
        numbers = {
            key: {"value": value, "ci95": None, "n": 4} for key, value in (("judge_ppl", 9.0), ("entropy", entropy))
        }
        own = {} if name == "real" else {"model": name, "options": {"steps": "4"}}
        return {"name": name, "less_varied": [], "numbers": numbers} | own

    picture = draw([line("real", 3.0), line("varied", 2.9), line("dull", 0.0)])
    marks = [e for e in ElementTree.fromstring(picture).iter() if e.attrib.get("class") == "mark"]
    assert len(marks) == 2 + 2  # in the legend, and in the field


def test_names_in_the_picture_hide_no_mark_and_no_other_name() -> None:
    draw_ = random.Random(0)

    def line(name: str, options: dict[str, str]) -> dict[str, Any]:
        values = {"judge_ppl": draw_.uniform(8, 12), "entropy": draw_.uniform(4, 4.1)}
        numbers = {key: {"value": value, "ci95": [0.97 * value, 1.03 * value], "n": 4} for key, value in values.items()}
        own = {} if name == "real" else {"model": name, "options": options, "protocol": {"calls": 2, "seconds": 1.0}}
        return {"name": name, "less_varied": [], "numbers": numbers} | own

    over = [{"steps": str(steps), "temperature": f"{t}"} for steps in (16, 64) for t in (0.5, 0.75, 1.0)]
    found = [line("real", {}), *(line(name, options) for name in "abc" for options in over)]
    picture = ElementTree.fromstring(draw(found))
    bands = [float(part.get("height") or 0) for part in picture.iter() if part.get("class") == "band"]
    assert len([height for height in bands if height > 0]) == 3  # of perplexity in both fields, of entropy in one
    names = [part for part in picture.iter() if "over" in (part.get("class") or "")]
    assert 10 < len(names) < 2 * 18
    boxes = [(float(one.get("x") or 0), float(one.get("y") or 0), 6.5 * len(one.text or "")) for one in names]
    circles = [part for part in picture.iter() if part.tag.endswith("circle")][1:]  # the first stands in the legend
    assert len(circles) == 2 * 6
    marks = [(float(one.get("cx") or 0) - 5, float(one.get("cy") or 0) + 5, 10.0) for one in circles]
    for i, (left, bottom, width) in enumerate(boxes):
        for other in [*boxes[i + 1 :], *marks]:
            apart = left + width <= other[0] or other[0] + other[2] <= left
            assert apart or abs(bottom - other[1]) >= 11
