"""The suite: every task's files in the shape in which GLUE's lie in a folder, made up and small."""

from __future__ import annotations

import dataclasses
import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest

from made_tasks import QUICK, letters, small_model
from unmask.cli import run as command
from unmask.errors import UnmaskError, UsageError
from unmask.finetuning.config import FinetuneConfig
from unmask.finetuning.splits import make_splits
from unmask.finetuning.suites import find_suite
from unmask.finetuning.suites.run import finetune_suite

SUITE = find_suite("glue")
GLUE, QUOTED, chosen = SUITE.tasks, SUITE.systems, SUITE.chosen


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(f"{path}.xz", "wt", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All eight tasks."""
    root = tmp_path_factory.mktemp("glue")
    yes = [(text, int(label == "with")) for text, label in letters(40, 0)]
    entailed = ("not_entailment", "entailment")
    for part in ("train", "val", "dev"):
        write(root / "CoLA" / f"{part}.tsv", [f"gj04\t{y}\t{'' if y else '*'}\t{text}" for text, y in yes])
    for part in ("train_full", "dev"):
        write(root / "SST-2" / f"{part}.tsv", ["sentence\tlabel", *(f"{text} \t{y}" for text, y in yes)])
    head = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    for name in ("msr_paraphrase_train.txt", "test.tsv"):
        write(root / "MRPC" / name, [head, *(f'{y}\t1\t2\t{text}\tan "open {text}' for text, y in yes)])
    for part in ("train", "dev", "test"):
        rows = [f"main\tMSR\t2012\t{i}\t{y + i / 40:.3f}\t{text}\t{text}" for i, (text, y) in enumerate(yes)]
        rows[3] += "\tfrom here\tfrom there"  # as some of them have
        write(root / "STS-B" / f"sts-{part}.orig.tsv", rows)
    pairs = [f"{i}\t{text}\tit is so\t{entailed[y]}" for i, (text, y) in enumerate(yes)]
    for part in ("train", "dev"):
        write(root / "RTE" / f"{part}.tsv", ["index\tsentence1\tsentence2\tlabel", *pairs])
    write(root / "QNLI" / "dev.tsv", ["index\tquestion\tsentence\tlabel", *pairs])
    write(
        root / "QQP" / "new_dev.tsv",
        ["1\t2\t3\ta\tb 0", *(f"{i}\t1\t2\t{t}\t{t}\t{y}" for i, (t, y) in enumerate(yes))],
    )
    three = ("neutral", "entailment", "contradiction")
    lines = [{"premise": t, "hypothesis": t, "label": three[i % 3]} for i, (t, _) in enumerate(yes)]
    write(root / "MNLI" / "dev.jsonl", [json.dumps(line) for line in lines])
    return root


def test_every_task_reads_its_files(folder: Path, tmp_path: Path) -> None:
    for task in GLUE.values():
        splits = make_splits(task.config(FinetuneConfig(), folder, tmp_path))
        assert splits.test is not None
        counts = {"sst2": (38, 2, 40), "mrpc": (36, 4, 40), "rte": (36, 4, 40)}
        reduced = (29, 3, 8)
        want = reduced if task.named_only else counts.get(task.name, (40, 40, 40))
        assert (len(splits.train), len(splits.valid), len(splits.test)) == want, task.name
        assert bool(task.quoted) != task.named_only
        assert ("reduced" in task.title) == task.named_only
    splits = make_splits(GLUE["mrpc"].config(FinetuneConfig(), folder, tmp_path))
    assert splits.train.examples[0].pair == f'an "open {splits.train.examples[0].text}'


def test_folds_go_to_what_has_no_file_of_its_own_that_stops(folder: Path, tmp_path: Path) -> None:
    asked = FinetuneConfig(folds=4)
    folds = {task.name: task.config(asked, folder, tmp_path).folds for task in GLUE.values()}
    assert folds == {name: 4 if name in ("sst2", "mrpc", "rte") else None for name in GLUE}


def test_the_suite_makes_one_table_and_goes_on(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "base"
    small_model().save(model)
    config = FinetuneConfig(out=str(tmp_path / "out"), optim=QUICK, epochs=1, seeds=2, batch=16)
    tasks = ["rte", "stsb", "mnli"]
    result = finetune_suite(model, config, data_dir=folder, tasks=tasks, device="cpu")
    table = (tmp_path / "out" / "glue.md").read_text()
    assert "| RTE | accuracy | fine-tuned |" in table
    assert "| MNLI (reduced) | accuracy |" in table
    head, *systems = [line.split(" | ") for line in table.split("\n\n")[1].splitlines() if "---" not in line]
    assert head == ["| ", "RTE (accuracy)", "STS-B (Spearman)", "MNLI (reduced) (accuracy)", "mean |"]
    assert [line[0] for line in systems][1:] == ["| guess", *(f"| {name} (quoted)" for name in QUOTED)]
    assert dict(zip(head, systems[2], strict=True))["STS-B (Spearman)"] == "84.3"
    assert dict(zip(head, systems[2], strict=True))["MNLI (reduced) (accuracy)"] == ""
    spearman = result.reports["stsb"]["results"]["model"]["test"]["spearman"]
    half = (spearman["ci95"][1] - spearman["ci95"][0]) / 2
    assert (
        dict(zip(head, systems[0], strict=True))["STS-B (Spearman)"]
        == f"{100 * spearman['mean']:.1f} ± {100 * half:.1f}"
    )
    assert "quoted" in table.lower()
    assert json.loads((tmp_path / "out" / "glue.json").read_text())["tasks"] == result.reports
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("seeds/*")}
    assert len(kept) == 6
    words = ["finetune", str(model), "--suite", "glue", "--data-dir", str(folder), "--tasks", *tasks, "--device", "cpu"]
    options = ["--out", str(tmp_path / "out"), "--optim.lr", "0.01", "--optim.schedule", "constant", "--epochs", "1"]
    options += ["--optim.weight_decay", "0", "--optim.betas", "0.9,0.95", "--seeds", "2", "--batch", "16"]
    assert command([*words, *options]) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("seeds/*")} == kept


def test_tasks_of_several_calls_stand_in_one_table(folder: Path, tmp_path: Path) -> None:
    """Where model and options are the same; others of the folder are no part of it."""
    model = tmp_path / "base"
    small_model().save(model)
    config = FinetuneConfig(out=str(tmp_path / "out"), optim=QUICK, epochs=1, seeds=1, batch=16)
    how: dict[str, Any] = {"data_dir": folder, "device": "cpu"}
    finetune_suite(model, config, tasks=["rte"], **how)
    finetune_suite(model, dataclasses.replace(config, batch=8), tasks=["sst2"], **how)
    result = finetune_suite(model, config, tasks=["stsb"], **how)
    assert [*result.reports] == ["stsb", "rte"]
    assert {*result.gaps} == {"stsb", "rte"}
    assert [*json.loads((tmp_path / "out" / "glue.json").read_text())["tasks"]] == ["stsb", "rte"]
    table = (tmp_path / "out" / "glue.md").read_text().split("\n\n")[1]
    assert "STS-B (Spearman) | RTE (accuracy) | mean |" in table


def test_what_is_missing_is_told_before_anything_is_trained(folder: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    shutil.copytree(folder, part)
    (part / "RTE" / "dev.tsv.xz").unlink()
    config = FinetuneConfig(out=str(tmp_path / "out"))
    with pytest.raises(UnmaskError, match=r"no task of glue can be read in .*part: RTE/dev.tsv is not in .*part"):
        finetune_suite("stories", config, data_dir=part, tasks=["rte"])
    with pytest.raises(UsageError, match="did you mean 'rte'"):
        finetune_suite("stories", config, data_dir=part, tasks=["rtee"])
    with pytest.raises(UsageError, match="a suite has its own data"):
        finetune_suite("stories", FinetuneConfig(kind="regression"), data_dir=part)
    assert not (tmp_path / "out").exists()


def test_the_whole_tasks_are_the_papers() -> None:
    assert [task.title for task in chosen(None)] == ["CoLA", "SST-2", "MRPC", "STS-B", "RTE"]
    assert all(tuple(task.quoted) == QUOTED for task in chosen(None))
