"""Genomic Benchmarks as five of their sets lie in a folder, beside the MDLM paper's table 7; an entry each.

Of Cohn's enhancers and the promoters without TATA only the official test file is there: each is divided into folds, so
that all of it is reported. Of the other three the intervals of chromosomes 20 and X are there, with their official
split: train is trained on, test is reported. The paper's sets Coding vs. Intergenomic and Human vs. Worm have one class
in these files, Mouse Enhancers is not there.
"""

from __future__ import annotations

from unmask.finetuning.config import TaskData
from unmask.finetuning.suites.base import SuiteTask, TaskSuite

SYSTEMS = ("Mamba AR", "Caduceus MLM", "Caduceus Plaid", "Caduceus SEDD", "Caduceus MDLM")
SHORTEST = 4  # bases: some of Ensembl's enhancers have only two or three, which are not meaningful sequences


def _crossed(name: str, title: str, path: str, *quoted: tuple[float, float]) -> SuiteTask:
    return SuiteTask(
        name=name,
        title=title,
        data=TaskData(train=path, text="seq"),
        labels=("0", "1"),
        metrics=("accuracy", "matthews"),
        split="the official test file by cross-validation, for the official train is not there",
        crossed=True,
        quoted=dict(zip(SYSTEMS, (value for value, _ in quoted), strict=True)),
        quoted_ranges=dict(zip(SYSTEMS, (spread for _, spread in quoted), strict=True)),
    )


def _lifted(
    name: str, title: str, file: str, *quoted: tuple[float, float], labels: tuple[str, ...] = ("0", "1")
) -> SuiteTask:
    folder = "gb_lifted_chr20_chrX"
    return SuiteTask(
        name=name,
        title=title,
        data=TaskData(
            train=f"{folder}/{file}.train.tsv",
            test=f"{folder}/{file}.test.tsv",
            text="seq",
            shortest=SHORTEST,
        ),
        labels=labels,
        metrics=("accuracy", "matthews"),
        split="the official test on chromosomes 20 and X, trained on the official train there; early stopping on a "
        "part of train",
        quoted=dict(zip(SYSTEMS, (value for value, _ in quoted), strict=True)),
        quoted_ranges=dict(zip(SYSTEMS, (spread for _, spread in quoted), strict=True)),
    )


_TASKS = (
    _crossed(
        "cohn",
        "Enhancers Cohn",
        "genomic_benchmarks/enhancers_cohn/test.tsv",
        *((73.4, 2.7), (73.7, 1.1), (74.3, 1.0), (74.6, 1.5), (74.3, 1.6)),
    ),
    _lifted(
        "ensembl",
        "Enhancers Ensembl",
        "human_enhancers_ensembl",
        *((85.6, 0.3), (90.7, 0.0), (88.5, 0.3), (90.5, 0.6), (89.9, 0.4)),
    ),
    _lifted(
        "regulatory",
        "Regulatory",
        "human_ensembl_regulatory",
        *((86.1, 0.8), (87.4, 0.3), (86.8, 1.0), (82.8, 3.7), (86.8, 0.4)),
        labels=("0", "1", "2"),
    ),
    _lifted(
        "ocr",
        "OCR Ensembl",
        "human_ocr_ensembl",
        *((80.6, 0.5), (82.1, 0.4), (82.0, 0.4), (81.6, 0.8), (82.3, 0.8)),
    ),
    _crossed(
        "nontata",
        "NonTATA Promoters",
        "genomic_benchmarks/promoters_nontata/test.tsv",
        *((92.6, 0.8), (93.5, 1.4), (93.5, 0.7), (93.5, 1.4), (94.0, 0.7)),
    ),
)
SUITE = TaskSuite(
    name="genomic-benchmarks",
    title="Genomic Benchmarks",
    tasks={task.name: task for task in _TASKS},
    holds="genomic_benchmarks and gb_lifted_chr20_chrX",
    systems=SYSTEMS,
    reference="Caduceus MDLM",
    quotation=(
        "Quoted: table 7 of MDLM (arXiv 2406.07524), accuracy of networks of 465,000 to 507,000 parameters that were "
        "trained on the whole human genome and fine-tuned on the whole sets. Its caption says 5-fold cross-validation "
        "and five seeds, with the range over seeds as error bars. Ours differ: parts of the sets, another split of "
        "Cohn's enhancers and the promoters, networks that have read less; levels do not compare, the order and the "
        "gaps of systems may."
    ),
    spread="range",
)
