"""The suite genomic-benchmarks on made-up sequences in the shape of its files: folds, filters, gaps, missing files."""

from __future__ import annotations

import importlib
import json
import lzma
import math
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from made_tasks import QUICK, small_model
from tiny import TINY
from unmask.cli import run as command
from unmask.corpora.fasta import other_strand
from unmask.data.complement import complement_of
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers import Denoiser
from unmask.denoisers.caduceus import Caduceus
from unmask.denoisers.mamba import Mamba
from unmask.errors import UnmaskError
from unmask.finetuning.config import FinetuneConfig, load_finetune_config
from unmask.finetuning.seed_run import Watch
from unmask.finetuning.splits import make_splits
from unmask.finetuning.suites import find_suite
from unmask.finetuning.suites.page import invisible, resolution
from unmask.finetuning.suites.run import SuiteResult, finetune_suite

SUITE = find_suite("genomic-benchmarks")
DNA = load_tokenizer("dna")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PS = Caduceus(hidden=16, blocks=1, states=4, equivariance="ps", complement=complement_of(DNA))


def sequences(count: int, seed: int, classes: int = 2) -> list[tuple[str, str]]:
    """The class says which of a few letters are frequent."""
    draw = random.Random(seed)
    weights = ([4, 1, 1, 4], [1, 4, 4, 1], [1, 1, 1, 1])
    rows = []
    for i in range(count):
        label = i % classes
        rows.append(("".join(draw.choices("ACGT", weights[label], k=draw.randint(10, 24))), str(label)))
    return rows


def write(path: Path, rows: list[tuple[str, str]], more: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head, tail = ("seq\tlabel\tclass\tchrom", f"\tsome\t{more}") if more else ("seq\tlabel", "")
    with lzma.open(f"{path}.xz", "wt", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in (head, *(f"{text}\t{label}{tail}" for text, label in rows))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("genomic")
    for number, name in enumerate(("enhancers_cohn", "promoters_nontata")):
        write(root / "genomic_benchmarks" / name / "test.tsv", sequences(40, number))
    for name in ("human_enhancers_ensembl", "human_ensembl_regulatory", "human_ocr_ensembl"):
        classes = 3 if "regulatory" in name else 2
        short = [("CAT", "0"), ("AG", "0")] if "enhancers" in name else []
        train, test = sequences(36, 2, classes), sequences(18, 3, classes)
        again = train[:3] if short else []
        write(root / "gb_lifted_chr20_chrX" / f"{name}.train.tsv", [*train, *short], "chr20")
        write(root / "gb_lifted_chr20_chrX" / f"{name}.test.tsv", [*test, *again, *short[:1]], "chrX")
    return root


def config(out: Path, **options: Any) -> FinetuneConfig:
    how: dict[str, Any] = {"optim": QUICK, "epochs": 1, "seeds": 2, "batch": 16, "folds": 2}
    return FinetuneConfig(out=str(out), **how | options)


def model(path: Path, denoiser: Denoiser = TINY) -> Path:
    small_model(denoiser, tokenizer=DNA).save(path)
    return path


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[SuiteResult, Path]:
    """Two tasks, from the model and from random weights, beside another folder of one of them."""
    root = tmp_path_factory.mktemp("runs")
    base = model(root / "base")
    finetune_suite(
        base, config(root / "other", epochs=2), suite=SUITE, data_dir=folder, tasks=["ensembl"], device="cpu"
    )
    result = finetune_suite(
        base,
        config(root / "out", from_scratch=True),
        suite="genomic-benchmarks",
        data_dir=folder,
        tasks=["cohn", "ensembl"],
        against=[root / "other"],
        device="cpu",
    )
    return result, root


# --- the sets ---------------------------------------------------------------------------------------------------------


def test_the_sets_are_five_of_table_7() -> None:
    assert [task.name for task in SUITE.chosen(None)] == ["cohn", "ensembl", "regulatory", "ocr", "nontata"]
    for task in SUITE.tasks.values():
        assert tuple(task.quoted) == tuple(task.quoted_ranges) == SUITE.systems
        assert task.metrics[0] == "accuracy"
        assert task.crossed == (task.data.test is None)
    assert SUITE.reference in SUITE.systems
    # two of the paper's figures, read there
    assert (SUITE.tasks["nontata"].quoted["Caduceus MDLM"], SUITE.tasks["nontata"].quoted_ranges["Mamba AR"]) == (
        94.0,
        0.8,
    )
    assert (
        SUITE.tasks["regulatory"].quoted["Caduceus SEDD"],
        SUITE.tasks["regulatory"].quoted_ranges["Caduceus SEDD"],
    ) == (82.8, 3.7)


def test_every_set_reads_its_files(folder: Path, tmp_path: Path) -> None:
    for task in SUITE.tasks.values():
        crossed = task.config(FinetuneConfig(), folder, tmp_path)
        assert crossed.folds == (5 if task.crossed else None)  # Cohn and the promoters in any case
        assert task.config(FinetuneConfig(folds=3), folder, tmp_path).folds == 3
        splits = make_splits(crossed, fold=0 if task.crossed else None)
        assert splits.test is not None
        assert splits.labels == (("0", "1", "2") if task.name == "regulatory" else ("0", "1"))
        counts = {"ensembl": (32, 4, 21), "regulatory": (32, 4, 18), "ocr": (32, 4, 18)}
        found = (len(splits.train), len(splits.valid), len(splits.test))
        assert found == counts.get(task.name, (29, 3, 8)), task.name


# --- what comes of it -------------------------------------------------------------------------------------------------


def test_the_page_says_what_is_ours_and_what_is_quoted(done: tuple[SuiteResult, Path]) -> None:
    result, root = done
    page = (root / "out" / "genomic-benchmarks.md").read_text()
    _, *systems = [line.split(" | ") for line in page.split("\n\n")[1].splitlines() if "---" not in line]
    names = [line[0].removeprefix("| ") for line in systems]
    base = str(root / "base")
    want = [
        f"{base} in {root / 'out'}, fine-tuned",
        f"{base} in {root / 'out'}, from random weights",
        "guess",
        *(f"{one} (quoted)" for one in SUITE.systems),
    ]
    assert names == [*want[:2], f"{base} in {root / 'other'}, fine-tuned", *want[2:]]
    mine = result.reports["cohn"]["results"]["model"]["test"]["accuracy"]
    spread = 100 * (mine["most"] - mine["least"])
    assert systems[0][1] == f"{100 * mine['mean']:.1f} ± {spread:.1f}"  # mean ± range, as in the paper
    assert systems[-1][1:3] == ["74.3 ± 1.6", "89.9 ± 0.4"]
    assert "Quoted: table 7 of MDLM (arXiv 2406.07524)" in page
    assert "too short, so left out: 2 of train, 1 of test" in page
    assert "3 of the 21 reported stand in train, too, word for word" in page
    new = json.loads((root / "out" / "ensembl" / "report.json").read_text())["results"]["model"]["test"]["accuracy"][
        "new"
    ]
    assert f"On the 18 reported that are not in that file: fine-tuned accuracy {100 * new:.1f}" in page
    lines = [
        json.loads(line)
        for path in (root / "out" / "ensembl" / "predictions").glob("model-*-test.jsonl")
        for line in path.read_text().splitlines()
    ]
    trained = {text for text, _ in sequences(36, 2)}
    right = [one["label"] == one["predicted"] for one in lines if one["text"] not in trained]
    assert len(right) == 18 * 4
    assert new == pytest.approx(sum(right) / len(right))
    [crossed, lifted] = [line for line in page.splitlines() if "2 folds, drawn anew for each seed" in line]
    assert crossed.startswith("- Enhancers Cohn: ")
    assert "early stopping" not in crossed
    assert "early stopping on a part of train; 2 folds, drawn anew for each seed, each used once for early" in lifted
    report = json.loads((root / "out" / "ensembl" / "report.json").read_text())
    assert report["left_out"] == {"train": 2, "test": 1}
    assert report["task"]["complement"] == list(complement_of(DNA))
    majority = {0.0: 11 / 21, 1.0: 10 / 21}  # of a fold, in which the classes are as many or nearly so
    assert min(majority.values()) <= report["guess"]["test"]["accuracy"] <= max(majority.values())


def test_gaps_are_told_with_what_is_visible(done: tuple[SuiteResult, Path]) -> None:
    result, root = done
    assert {name: len(gaps) for name, gaps in result.gaps.items()} == {"ensembl": 4, "cohn": 2}
    page = (root / "out" / "genomic-benchmarks.md").read_text()
    told = json.loads((root / "out" / "genomic-benchmarks.json").read_text())["gaps"]["ensembl"]
    assert {gap["theirs"].rpartition(", ")[2] for gap in told} == {"fine-tuned", "from random weights"}
    assert all(gap["verdict"] in ("visible", "not visible") for gap in told)
    assert "## Gaps" in page
    assert "is invisible here (by the gaps above)" in page


def test_a_gap_below_the_resolution_is_called_invisible(done: tuple[SuiteResult, Path]) -> None:
    """Of quoted gaps those that are smaller than half the interval, and no others."""
    import dataclasses

    from unmask.evaluation.paired import Interval
    from unmask.finetuning.gaps import Gap

    result, _ = done
    small = Gap("accuracy", "a", "b", Interval(0.0, 0.003, 0.004, "paired seeds"))  # half an interval of 0.5
    sharp = dataclasses.replace(result, gaps={"cohn": [small]})
    said = invisible(sharp, SUITE.tasks["cohn"])
    assert "less than about 0.5 is invisible" in said
    assert said.endswith("of the quoted ones to Caduceus MDLM: Caduceus Plaid +0.0, Caduceus SEDD +0.3.")
    wide = dataclasses.replace(small, interval=Interval(0.0, 0.03, 0.04, "paired seeds"))
    assert invisible(dataclasses.replace(result, gaps={"cohn": [wide, small]}), SUITE.tasks["cohn"]) == said
    blunt = dataclasses.replace(result, gaps={})
    level = result.reports["cohn"]["results"]["model"]["test"]["accuracy"]
    seeds_half = (level["ci95"][1] - level["ci95"][0]) / 2
    assert resolution(blunt, SUITE.tasks["cohn"]) == pytest.approx(
        math.sqrt(2 * (level["examples_half"] ** 2 + seeds_half**2))
    )
    assert "of two such lines, not paired" in invisible(blunt, SUITE.tasks["cohn"])
    assert "Mamba AR -0.9" in invisible(blunt, SUITE.tasks["cohn"])
    same = Gap("accuracy", "a", "b", Interval(0.0, 0.0, 0.0, "paired seeds"))  # both answer one class to everything
    assert invisible(dataclasses.replace(result, gaps={"cohn": [same]}), SUITE.tasks["cohn"]) == ""


def test_what_is_missing_or_bad_does_not_stop_the_others(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tmp_path / "part"
    shutil.copytree(folder, part)
    (part / "gb_lifted_chr20_chrX" / "human_ocr_ensembl.test.tsv.xz").unlink()
    write(
        part / "genomic_benchmarks" / "enhancers_cohn" / "test.tsv",
        [*sequences(9, 0), ("ACGXT", "0"), *sequences(9, 1)],
    )
    lifted = part / "gb_lifted_chr20_chrX"
    write(lifted / "human_ensembl_regulatory.train.tsv", [*sequences(12, 0, 3), ("ACGT", "7")], "chr20")
    base = model(tmp_path / "base")
    words = ["finetune", str(base), "--suite", "genomic-benchmarks", "--data-dir", str(part), "--device", "cpu"]
    words += ["--out", str(tmp_path / "out"), "--folds", "2", "--seeds", "1", "--epochs", "1", "--batch", "16"]
    words += ["--tasks", "cohn", "regulatory", "ocr", "nontata"]
    assert command(words) == 1
    said = capsys.readouterr()
    assert "OCR Ensembl is left out: gb_lifted_chr20_chrX/human_ocr_ensembl.test.tsv is not in" in said.err
    assert "human_ensembl_regulatory.train.tsv.xz, line 14: the label '7' is not among the 3 classes" in said.err
    assert "enhancers_cohn/test.tsv.xz, line 11: the tokenizer dna knows only A C G T N, the text has 'X'" in said.err
    assert "Traceback" not in said.err
    assert "NonTATA Promoters" in said.out
    page = (tmp_path / "out" / "genomic-benchmarks.md").read_text()
    assert "OCR Ensembl is not here: gb_lifted" in page
    assert "Enhancers Cohn is not here" in page
    failures = json.loads((tmp_path / "out" / "genomic-benchmarks.json").read_text())["failures"]
    assert sorted(failures) == ["cohn", "ocr", "regulatory"]
    assert not (tmp_path / "out" / "ocr").exists()
    with pytest.raises(UnmaskError, match="no task of genomic-benchmarks can be read"):
        finetune_suite(base, config(tmp_path / "no"), suite=SUITE, data_dir=tmp_path / "base", device="cpu")
    assert command(words[:4]) == 2
    assert (
        "needs --data-dir DIR, the folder that holds genomic_benchmarks and gb_lifted_chr20_chrX"
        in capsys.readouterr().err
    )


def test_what_was_trained_on_is_counted_beside_all_of_train_and_both_strands(folder: Path, tmp_path: Path) -> None:
    """Also what of train's file stops, and without folds as with them."""
    part = tmp_path / "part"
    shutil.copytree(folder, part)
    train, test = sequences(36, 2), sequences(15, 3)
    again = [*train[:20], (other_strand(train[20][0]), train[20][1])]
    write(part / "gb_lifted_chr20_chrX" / "human_enhancers_ensembl.test.tsv", [*test, *again], "chrX")
    for folds in (None, 2):
        how = config(tmp_path / f"out-{folds}", seeds=1, folds=folds)
        result = finetune_suite(
            model(tmp_path / "base"), how, suite=SUITE, data_dir=part, tasks=["ensembl"], device="cpu"
        )
        report = result.reports["ensembl"]
        assert (report["repeated"]["test"], report["new"], report["examples"]["test"]) == (21, 15, 36)


def test_a_set_of_one_class_does_not_stop_the_others(folder: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    shutil.copytree(folder, part)
    rows = [row for row in sequences(40, 0) if row[1] == "0"]
    write(part / "genomic_benchmarks" / "enhancers_cohn" / "test.tsv", rows)
    how: dict[str, Any] = {"suite": SUITE, "data_dir": part, "tasks": ["cohn", "nontata"], "device": "cpu"}
    result = finetune_suite(model(tmp_path / "base"), config(tmp_path / "out", seeds=1), **how)
    assert [*result.reports] == ["nontata"]
    assert "the class '1' has no example in" in result.failures["cohn"]


def test_a_folder_of_other_examples_has_no_gap_and_stops_nothing(folder: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    shutil.copytree(folder, part)
    write(part / "genomic_benchmarks" / "enhancers_cohn" / "test.tsv", sequences(38, 7))
    base = model(tmp_path / "base")
    how: dict[str, Any] = {"suite": SUITE, "tasks": ["cohn", "nontata"], "device": "cpu"}
    finetune_suite(base, config(tmp_path / "other", seeds=1), data_dir=folder, **how)
    told: list[str] = []

    class Notes(Watch):
        def on_note(self, sentence: str) -> None:
            told.append(sentence)

    how |= {"data_dir": part, "against": [tmp_path / "other"], "watch": Notes()}
    result = finetune_suite(base, config(tmp_path / "out", seeds=1), **how)
    assert result.ok
    assert {name: len(gaps) for name, gaps in result.gaps.items()} == {"cohn": 0, "nontata": 2}
    assert {name: [*reports] for name, reports in result.others.items()} == {str(tmp_path / "other"): ["nontata"]}
    [said] = [sentence for sentence in told if "no gap" in sentence]
    assert said.startswith(f"{tmp_path / 'other' / 'cohn'} reports other examples than {tmp_path / 'out' / 'cohn'}")


# --- the queue --------------------------------------------------------------------------------------------------------


def test_the_recipe_is_the_papers() -> None:
    recipe = load_finetune_config(BENCHMARKS / "dna" / "classify.toml")
    assert (recipe.folds, recipe.seeds, recipe.conjoin) == (5, 5, True)
    assert recipe.head.pool == "mean"  # type: ignore[attr-defined]


def test_one_command_runs_all_models(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_model(Mamba(hidden=16, blocks=1, states=4), tokenizer=DNA).save(tmp_path / "models" / "ar")
    model(tmp_path / "models" / "mdlm", PS)
    monkeypatch.syspath_prepend(str(BENCHMARKS / "dna"))
    table7 = importlib.import_module("table7")
    (tmp_path / "models" / "broken").mkdir()
    models = [str(tmp_path / "models" / name) for name in ("ar", "broken", "mdlm")]
    words = [
        *models,
        "--data-dir",
        str(folder),
        "--out",
        str(tmp_path / "out"),
        "--tasks",
        "nontata",
        "--device",
        "cpu",
    ]
    words += ["--folds", "2", "--seeds", "2", "--epochs", "1", "--batch", "16"]
    monkeypatch.setattr(sys, "argv", ["table7.py", *words])
    with pytest.raises(SystemExit, match="not whole: broken"):
        table7.main()
    page = (tmp_path / "out" / "table7.md").read_text()
    assert f"{models[0]}, fine-tuned" in page
    assert f"{models[2]}, fine-tuned" in page
    assert "| NonTATA Promoters | accuracy | " in page.partition("## Gaps")[2]
    assert "unmask: broken is left out" in capsys.readouterr().err
