"""GLUE's tasks as they lie in a folder: which files, columns and metrics; an entry each.

The reported split is never looked at by early stopping: where a task has only one labelled split beside its training
examples, that one is reported, and a keyed tenth of the training examples (`val.tsv` of CoLA, which is such a part)
stops. CoLA, SST-2, MRPC, STS-B and RTE are whole, by their official splits. Of QNLI, QQP and MNLI only a validation
file is read, which is split in three: these are called reduced, and compare with nothing.
"""

from __future__ import annotations

from unmask.finetuning.config import TaskData
from unmask.finetuning.suites.base import SuiteTask, TaskSuite

SYSTEMS = ("AR", "BERT", "BERT+MDLM-FT")


def _quoted(ar: float, bert: float, tuned: float) -> dict[str, float]:
    return dict(zip(SYSTEMS, (ar, bert, tuned), strict=True))


_STS = ("genre", "file", "year", "id", "score", "sentence1", "sentence2")
_COLA = ("source", "label", "author", "sentence")
_ENTAILED = ("not_entailment", "entailment")
_TASKS = (
    SuiteTask(
        name="cola",
        title="CoLA",
        data=TaskData(
            train="CoLA/train.tsv", valid="CoLA/val.tsv", test="CoLA/dev.tsv", columns=_COLA, text="sentence"
        ),
        labels=("0", "1"),
        metrics=("matthews", "accuracy"),
        split="dev; early stopping on val.tsv, a part of the official training split",
        quoted=_quoted(33.43, 54.81, 57.69),
    ),
    SuiteTask(
        name="sst2",
        title="SST-2",
        data=TaskData(train="SST-2/train_full.tsv", test="SST-2/dev.tsv", text="sentence", held_out=0.05),
        labels=("0", "1"),
        metrics=("accuracy",),
        split="dev; early stopping on a keyed twentieth of train",
        quoted=_quoted(90.14, 92.20, 92.20),
    ),
    SuiteTask(
        name="mrpc",
        title="MRPC",
        data=TaskData(
            train="MRPC/msr_paraphrase_train.txt",
            test="MRPC/test.tsv",
            text="#1 String",
            pair="#2 String",
            label="Quality",
        ),
        labels=("0", "1"),
        metrics=("f1", "accuracy"),
        split="test; early stopping on a keyed tenth of train",
        quoted=_quoted(83.88, 89.16, 90.53),
    ),
    SuiteTask(
        name="stsb",
        title="STS-B",
        data=TaskData(
            train="STS-B/sts-train.orig.tsv",
            valid="STS-B/sts-dev.orig.tsv",
            test="STS-B/sts-test.orig.tsv",
            columns=_STS,
            extra_columns=True,
            text="sentence1",
            pair="sentence2",
            label="score",
        ),
        kind="regression",
        metrics=("spearman", "pearson"),
        split="test; early stopping on dev",
        quoted=_quoted(84.32, 88.41, 87.48),
    ),
    SuiteTask(
        name="rte",
        title="RTE",
        data=TaskData(train="RTE/train.tsv", test="RTE/dev.tsv", text="sentence1", pair="sentence2"),
        labels=_ENTAILED,
        metrics=("accuracy",),
        split="dev; early stopping on a keyed tenth of train",
        quoted=_quoted(47.29, 61.37, 62.09),
    ),
    SuiteTask(
        name="qnli",
        title="QNLI (reduced)",
        data=TaskData(train="QNLI/dev.tsv", text="question", pair="sentence", test_share=0.2),
        labels=_ENTAILED,
        metrics=("accuracy",),
        split="a keyed fifth of dev, trained on the rest of it",
        named_only=True,
    ),
    SuiteTask(
        name="qqp",
        title="QQP (reduced)",
        data=TaskData(
            train="QQP/new_dev.tsv",
            columns=("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
            skip_lines=(1,),  # it has lost its last tab
            text="question1",
            pair="question2",
            label="is_duplicate",
            test_share=0.2,
        ),
        labels=("0", "1"),
        metrics=("f1", "accuracy"),
        split="a keyed fifth of the file, trained on the rest of it",
        named_only=True,
    ),
    SuiteTask(
        name="mnli",
        title="MNLI (reduced)",
        data=TaskData(train="MNLI/dev.jsonl", text="premise", pair="hypothesis", test_share=0.2),
        metrics=("accuracy",),
        split="a keyed fifth of dev (matched), trained on the rest of it",
        named_only=True,
    ),
)
SUITE = TaskSuite(
    name="glue",
    title="GLUE",
    tasks={task.name: task for task in _TASKS},
    holds="CoLA, RTE and the others",
    systems=SYSTEMS,
    reference="BERT+MDLM-FT",
    quotation=(
        "Quoted: table 4 of MDLM (arXiv 2406.07524), of models of about 110M parameters, whose caption names F1 for "
        "QQP and MRPC, Spearman for STS-B and accuracy for the rest; levels do not compare with those of smaller "
        "networks on other data, the order and the gaps of systems may."
    ),
    spread="interval",
)
