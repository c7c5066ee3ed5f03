"""Differences of two fine-tunings: their intervals hold what is true, pairing sees what levels do not."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from made_tasks import letters, letters_config, small_model, write_tsv
from unmask.cli import run as command
from unmask.errors import DataError, UsageError
from unmask.evaluation.bootstrap import resampled_counts
from unmask.evaluation.paired import Interval
from unmask.finetuning.answers import Answers, RunAnswers, read_answers
from unmask.finetuning.differences import differences, score_intervals
from unmask.finetuning.gaps import check_against, gaps, gaps_of_folders
from unmask.finetuning.run import finetune
from unmask.finetuning.scores import SCORES


def made(
    right_SN: np.ndarray,
    target_N: np.ndarray,
    *,
    folds: int = 1,
    classes: int = 2,
    start: str = "model",
    name: str = "a",
) -> Answers:
    """Answers that are right where right_SN says so, and the next class elsewhere."""
    keys: Any = [(str(i), None, str(int(t)), 0) for i, t in enumerate(target_N)]
    place_N = np.arange(len(target_N))
    runs = {}
    for seed, right_N in enumerate(right_SN):
        predicted_N = np.where(right_N, target_N, (target_N + 1) % classes).astype(float)
        parts = [place_N[place_N % folds == fold] for fold in range(folds)]
        runs[seed] = [RunAnswers(at, predicted_N[at], target_N[at].astype(float)) for at in parts]
    labels = tuple(str(k) for k in range(classes))
    return Answers(Path(name), name, "classification", labels, ("accuracy",), keys, {start: runs})


def score_interval(answers: Answers, start: str, metric: str) -> Interval:
    return score_intervals(answers, start, [metric])[metric]


def difference(ours: Answers, theirs: Answers, metric: str) -> Interval:
    return differences(ours, theirs, [metric])[metric]


def test_an_accuracys_interval_is_the_textbooks() -> None:
    """Of one seed the bootstrap's half-width is 1.96 sqrt(p (1 - p) / n), of a difference that of the paired values."""
    draw = np.random.default_rng(0)
    target_N = draw.integers(2, size=800)
    one, other = draw.random((1, 800)) < 0.8, draw.random((1, 800)) < 0.7
    level = score_interval(made(one, target_N), "model", "accuracy")
    p = one.mean()
    assert level.value == pytest.approx(p)
    assert level.texts_half == pytest.approx(1.96 * math.sqrt(p * (1 - p) / 800), rel=0.08)
    gap = difference(made(one, target_N), made(other, target_N, name="b"), "accuracy")
    d_N = one[0].astype(float) - other[0]
    assert gap.value == pytest.approx(d_N.mean())
    assert gap.texts_half == pytest.approx(1.96 * d_N.std() / math.sqrt(800), rel=0.08)
    assert gap.seeds_half is None


def test_seeds_are_paired_by_students_t() -> None:
    target_N = np.zeros(100, dtype=int)
    right = [[i < 80 for i in range(100)], [i < 90 for i in range(100)], [i < 70 for i in range(100)]]
    worse = [[i < 75 for i in range(100)], [i < 83 for i in range(100)], [i < 68 for i in range(100)]]
    gap = difference(made(np.array(right), target_N), made(np.array(worse), target_N, name="b"), "accuracy")
    assert gap.value == pytest.approx((0.05 + 0.07 + 0.02) / 3)
    assert gap.seeds_half == pytest.approx(4.303 * np.std([0.05, 0.07, 0.02], ddof=1) / math.sqrt(3), rel=1e-3)


@pytest.mark.parametrize("metric", ["accuracy", "f1", "macro_f1", "matthews"])
@pytest.mark.parametrize("folds", [1, 4])
def test_a_score_is_that_of_its_answers(metric: str, folds: int) -> None:
    """The value by tallies is the value by the score's own function, over folds by their examples."""
    draw = np.random.default_rng(1)
    classes = 2 if metric == "f1" else 3
    target_N = draw.integers(classes, size=90)
    answers = made(draw.random((2, 90)) < 0.6, target_N, folds=folds, classes=classes)
    want = []
    for runs in answers.runs["model"].values():
        scores = [SCORES["classification"][metric](run.predicted_N, run.target_N) for run in runs]
        want.append(np.average(scores, weights=[len(run.place_N) for run in runs]))
    assert score_interval(answers, "model", metric).value == pytest.approx(np.mean(want))


def test_few_and_many_classes_are_resampled_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(2)
    target_N = draw.integers(3, size=60)
    one, other = (made(draw.random((2, 60)) < p, target_N, classes=3, folds=2) for p in (0.7, 0.6))
    by_tallies = difference(one, other, "matthews")
    monkeypatch.setattr("unmask.finetuning.differences.FEW_CLASSES", 1)
    one_by_one = difference(one, other, "matthews")
    assert by_tallies.value == pytest.approx(one_by_one.value)
    assert by_tallies.half == pytest.approx(one_by_one.half, rel=1e-5)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Examples of different difficulty, both systems with the same chances: 95 of 100 intervals hold 0, or more."""
    draw = np.random.default_rng(3)
    held = 0
    for _ in range(60):
        hard_N = draw.random(200)
        target_N = draw.integers(2, size=200)
        one, other = (made(draw.random((3, 200)) < hard_N, target_N) for _ in range(2))
        gap = difference(one, other, "accuracy")
        assert gap.ci95 is not None
        held += gap.ci95[0] <= 0 <= gap.ci95[1]
    assert held >= 54  # 57 are expected at least; 54 or fewer of a true 95% come once in fourteen


def test_pairing_sees_what_levels_do_not() -> None:
    """One system is right where the other is, and on twelve more: levels overlap, the difference is visible."""
    draw = np.random.default_rng(4)
    target_N = draw.integers(2, size=400)
    worse = np.repeat(draw.random((1, 400)) < 0.7, 3, axis=0)
    better = worse.copy()
    better[:, np.flatnonzero(~worse[0])[:12]] = True
    one, other = made(better, target_N), made(worse, target_N, name="b")
    levels = [score_interval(answers, "model", "accuracy") for answers in (one, other)]
    assert levels[0].ci95 is not None
    assert levels[1].ci95 is not None
    assert levels[1].ci95[1] > levels[0].ci95[0]
    gap = difference(one, other, "accuracy")
    assert gap.value == pytest.approx(0.03)
    assert gap.verdict == "visible"
    shuffled = made(worse[:, draw.permutation(400)], target_N, name="b")  # as many right ones, elsewhere
    assert difference(one, shuffled, "accuracy").verdict == "not visible"


def test_resamples_are_drawn_once_for_all_seeds_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large sets they are not kept, and drawing them takes longer than scoring."""
    draw, drawn = np.random.default_rng(8), list[int]()

    def counted(num: int) -> Any:
        drawn.append(num)
        return resampled_counts(num)

    monkeypatch.setattr("unmask.finetuning.differences.resampled_counts", counted)
    target_N = draw.integers(2, size=40)
    one, other = (made(draw.random((3, 40)) < 0.7, target_N) for _ in range(2))
    metrics = ["accuracy", "f1", "matthews"]
    both, levels = differences(one, other, metrics), score_intervals(one, "model", metrics, seeds=2)
    assert drawn == [40, 40]
    for metric in metrics:
        assert both[metric] == difference(one, other, metric)
        assert levels[metric] == score_intervals(one, "model", [metric], seeds=2)[metric]
    assert len({both[metric].value for metric in metrics}) == 3


def test_examples_are_matched_by_what_they_are() -> None:
    draw = np.random.default_rng(5)
    target_N = draw.integers(2, size=50)
    one, other = (made(draw.random((2, 50)) < 0.7, target_N) for _ in range(2))
    order = draw.permutation(50)
    moved = dataclasses.replace(
        other,
        keys=[other.keys[i] for i in order],
        runs={
            "model": {
                seed: [RunAnswers(np.argsort(order)[run.place_N], run.predicted_N, run.target_N) for run in runs]
                for seed, runs in other.runs["model"].items()
            }
        },
    )
    assert difference(one, moved, "accuracy") == difference(one, other, "accuracy")
    with pytest.raises(UsageError, match="reports other examples than a: fine-tune both on the same files"):
        difference(one, made(np.ones((2, 51), dtype=bool), draw.integers(2, size=51)), "accuracy")
    with pytest.raises(UsageError, match="has other classes"):
        difference(one, made(np.ones((2, 50), dtype=bool), target_N, classes=3), "accuracy")


def test_without_a_common_seed_no_seed_is_known() -> None:
    target_N = np.zeros(40, dtype=int)
    one = made(np.array([[True] * 40]), target_N)
    other = made(np.array([[i < 20 for i in range(40)]]), target_N, name="b")
    other = dataclasses.replace(other, runs={"model": {7: other.runs["model"][0]}})
    gap = difference(one, other, "accuracy")
    assert (gap.value, gap.seeds_half, gap.verdict) == (0.5, None, "one seed")


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two fine-tunings on the same files, one of which has learned; a third of other files."""
    root = tmp_path_factory.mktemp("folders")
    config = letters_config(root, train=128, epochs=8, seeds=2, from_scratch=True)
    found = {"learned": finetune(small_model(), config, device="cpu").folder}
    lazy = dataclasses.replace(config, out=str(root / "lazy"), epochs=1, from_scratch=False)
    lazy = dataclasses.replace(lazy, optim=dataclasses.replace(config.optim, lr=1e-7))
    found["lazy"] = finetune(small_model(), lazy, device="cpu").folder
    (root / "other").mkdir()
    other = letters_config(root / "other", train=32, epochs=1)
    found["other"] = finetune(
        small_model(), dataclasses.replace(other, data=dataclasses.replace(other.data, test=None)), device="cpu"
    ).folder
    return found


def test_folders_are_read_as_they_were_reported(folders: dict[str, Path]) -> None:
    report = json.loads((folders["learned"] / "report.json").read_text())
    answers = read_answers(folders["learned"])
    assert len(answers.keys) == 32
    for start in ("model", "scratch"):
        found = report["results"][start]["test"]["accuracy"]
        level = score_interval(answers, start, "accuracy")
        assert level.value == pytest.approx(found["mean"])
        assert found["examples_half"] == pytest.approx(level.texts_half)
    [scratch, lazy] = gaps(folders["learned"], [folders["lazy"]])
    assert "from random weights" in scratch.theirs
    means = [
        json.loads((folders[name] / "report.json").read_text())["results"]["model"] for name in ("learned", "lazy")
    ]
    want = means[0]["test"]["accuracy"]["mean"] - means[1]["test"]["accuracy"]["mean"]
    assert lazy.interval.value == pytest.approx(want)
    assert lazy.interval.value > 0.2
    assert len(gaps_of_folders(folders["learned"], [folders["lazy"]] * 2)[""]) == 2  # the second is the first
    assert lazy.within is not None
    assert lazy.within >= want


def test_the_command_compares_without_training(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    learned, lazy, other = (str(folders[name]) for name in ("learned", "lazy", "other"))
    before = {path: path.stat().st_mtime_ns for path in folders["learned"].rglob("*")}
    assert command(["finetune", learned, "--against", lazy]) == 0
    said = capsys.readouterr().out
    assert "gap to" in said
    assert "of twenty gaps that are none" in said
    assert command(["finetune", learned, "--against", lazy, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["gaps"][""]
    assert {gap["metric"] for gap in told} == {"accuracy"}
    assert {path: path.stat().st_mtime_ns for path in folders["learned"].rglob("*")} == before
    for words, hint in (
        ([learned, "--against", other], "reports other examples"),
        ([learned, "--against", learned], "cannot be compared with itself"),
        ([learned, "--against", str(folders["lazy"].parent / "nothing")], "nothing to compare with"),
        (["stories", "--against", learned], "stories is no folder of a fine-tuning"),
    ):
        assert command(["finetune", *words]) == 2
        err = capsys.readouterr().err
        assert hint in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("how", ["test", "valid", "share", "folds"])
def test_other_examples_are_refused_before_anything_is_trained(
    how: str, kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the same ones are not, whichever part it is that is reported."""
    small_model().save(tmp_path / "base")
    rows = letters(40, 0)
    rows = [*rows, rows[0]] if kind == "classification" else [(text, str(len(text))) for text, _ in rows]
    for name, some in (("train", rows), ("test", rows[:20]), ("less", rows[2:])):
        write_tsv(tmp_path / f"{name}.tsv", [("text", "label"), *some])
    options = {"test": ["--data.test", str(tmp_path / "test.tsv")], "share": ["--data.test_share", "0.2"]}
    words = ["finetune", str(tmp_path / "base"), "--device", "cpu", "--epochs", "1", "--seeds", "1", "--kind", kind]
    words += [*options.get(how, []), *(["--folds", "2"] if how == "folds" else [])]
    train = ["--data.train", str(tmp_path / "train.tsv")]
    assert command([*words, *train, "--out", str(tmp_path / "a")]) == 0
    same = [*words, *train, "--out", str(tmp_path / "b"), "--against", str(tmp_path / "a")]
    assert command([*same, "--optim.lr", "1e-3"]) == 0
    assert "gap to" in capsys.readouterr().out
    other = ["--data.test", str(tmp_path / "less.tsv")] if how == "test" else []
    less = ["--data.train", str(tmp_path / "less.tsv")]
    assert command([*words, *less, *other, "--out", str(tmp_path / "c"), *same[-2:]]) == 2
    assert f"{tmp_path / 'a'} reports other examples than {tmp_path / 'c'} will" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_each_copy_of_an_example_is_one_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folders["lazy"], copy)
    for path in (copy / "predictions").glob("*-test.jsonl"):
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines, lines[0], lines[0]]) + "\n")
    answers = read_answers(copy)
    assert len(answers.keys) == 34
    assert sorted(key[3] for key in answers.keys if key[:3] == answers.keys[0][:3]) == [0, 1, 2]
    for runs in answers.runs["model"].values():
        assert sorted(runs[0].place_N.tolist()) == list(range(34))


def test_seeds_of_an_unfinished_fine_tuning_are_compared(folders: dict[str, Path], tmp_path: Path) -> None:
    """Before its report is written a folder knows its metrics, too: those of its options."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folders["learned"], copy)
    for name in ("report.json", "report.md", "seeds/model-1.json", "seeds/scratch-1.json"):
        (copy / name).unlink()
    found = gaps(copy, [folders["lazy"]])
    assert [gap.metric for gap in found] == ["accuracy"] * 2
    assert [gap.interval.seeds_half for gap in found] == [None, None]


def test_damaged_and_unfinished_folders_are_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folders["lazy"], copy)
    path = copy / "predictions" / "model-1-test.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{}", *lines[2:]]))
    with pytest.raises(DataError, match=r"model-1-test.jsonl, line 2 is not what unmask finetune writes"):
        read_answers(copy)
    path.unlink()
    with pytest.raises(DataError, match=r"model-1-test.jsonl is missing"):
        read_answers(copy)
    for file in (copy / "seeds").iterdir():
        file.unlink()
    with pytest.raises(UsageError, match="has no finished seed"):
        read_answers(copy)
    with pytest.raises(UsageError, match=r"it has no finetune.json"):
        read_answers(tmp_path)
    with pytest.raises(UsageError, match="nothing to compare with"):
        check_against(tmp_path / "nowhere")
    (tmp_path / "one").mkdir()
    shutil.copytree(folders["lazy"], tmp_path / "one" / "cola")
    (tmp_path / "two").mkdir()
    shutil.copytree(folders["lazy"], tmp_path / "two" / "rte")
    with pytest.raises(UsageError, match="no fine-tuning of the same name"):
        gaps_of_folders(tmp_path / "one", [tmp_path / "two"])
