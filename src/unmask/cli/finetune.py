"""Fine-tune a model to predict classes or a number.

The inputs are texts or pairs of texts. The examples are a TSV, CSV or JSON lines file with a text and a label;
--data.text, --data.pair and --data.label name its columns. RECIPE is a TOML or JSON file with options; --options lists
them. Several seeds are trained, and each is stored when it finishes: after a stop the same command resumes.

--suite glue and --suite genomic-benchmarks train for the tasks in --data-dir and write one table of them. --folds 5
cross-validates. --against reports the gaps to finished fine-tunings on the same examples; if no examples are given,
MODEL is a finished fine-tuning, too, and nothing is trained.

Examples:
  unmask finetune stories --data.train reviews.tsv --data.label sentiment --out runs/reviews
  unmask finetune runs/mine --data.train pairs.jsonl --data.pair second --seeds 5 --from-scratch --out runs/pairs
  unmask finetune runs/mine --data.train rated.csv --data.label stars --kind regression --out runs/rated
  unmask finetune runs/mine --suite glue --data-dir glue --tasks cola rte --out runs/glue
  unmask finetune runs/dna --suite genomic-benchmarks --data-dir dna --folds 5 --seeds 5 --out runs/genomic
  unmask finetune runs/reviews --against runs/other-reviews
  unmask classify runs/reviews "a charming journey"
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from unmask.cli import _naming
from unmask.cli._options import print_options
from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.finetuning.config import FinetuneConfig
    from unmask.finetuning.gaps import Gap
    from unmask.finetuning.results import Start
    from unmask.finetuning.run import Finetuned
    from unmask.finetuning.seed_run import Watch
    from unmask.finetuning.suites.run import SuiteResult

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _naming.add_model(parser)
    parser.add_argument("recipe", nargs="?", help="a TOML or JSON file with options (default: none)")
    parser.add_argument(
        "--from-scratch", action="store_true", help="also train the same network from random weights, for comparison"
    )
    parser.add_argument(
        "--suite",
        choices=["glue", "genomic-benchmarks"],
        metavar="NAME",
        help="glue or genomic-benchmarks: the tasks in --data-dir, with one table",
    )
    parser.add_argument(
        "--data-dir", metavar="DIR", help="folder with the suite's files: CoLA/train.tsv, RTE/dev.tsv, ..."
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help="for glue: cola sst2 mrpc stsb rte (default: these), and qnli qqp mnli, reduced; "
        "for genomic-benchmarks: cohn ensembl regulatory ocr nontata (default: all)",
    )
    parser.add_argument(
        "--against",
        nargs="+",
        metavar="FOLDER",
        help="finished fine-tunings on the same examples: reports the gaps to them",
    )
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--options", action="store_true", help="list every --KEY with its value and choices")


def run(args: argparse.Namespace) -> int:
    from unmask.finetuning.config import load_finetune_config

    _naming.refuse_text(args.model, "--data.train FILE")
    if args.recipe is None and args.model.endswith((".toml", ".json")):
        raise UsageError(f"the model comes first: unmask finetune MODEL {args.model}")
    config = load_finetune_config(args.recipe, args.overrides | ({"from_scratch": True} if args.from_scratch else {}))
    if args.options:
        print_options(config, width=24)
        return 0
    if args.suite is not None:
        return _suite(args, config)
    for flag in ("data_dir", "tasks"):
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag.replace('_', '-')} belongs to a suite: give --suite glue, or leave it out")
    if args.against and not config.data.train:
        _print_gaps(_gaps(args.model, args.against), as_json=args.json)
    else:
        _print(*_one(args, config), as_json=args.json)
    return 0


def _one(args: argparse.Namespace, config: FinetuneConfig) -> tuple[Finetuned, list[Gap]]:
    from unmask.finetuning.gaps import check_examples, check_others, gaps
    from unmask.finetuning.run import finetune
    from unmask.finetuning.splits import read_labelled

    others = check_others(config.out, args.against or ())
    if others:
        check_examples(read_labelled(config), others)
    done = finetune(args.model, config, device=args.device, watch=lines_on_stderr())
    return done, gaps(done.folder, others)


def _suite(args: argparse.Namespace, config: FinetuneConfig) -> int:
    from unmask.finetuning.suites import find_suite
    from unmask.finetuning.suites.run import finetune_suite

    if args.data_dir is None:
        raise UsageError(
            f"--suite {args.suite} needs --data-dir DIR, the folder that holds {find_suite(args.suite).holds}"
        )
    how: dict[str, Any] = {"data_dir": args.data_dir, "tasks": args.tasks, "device": args.device}
    how |= {"suite": args.suite, "against": args.against or ()}
    result = finetune_suite(args.model, config, **how, watch=lines_on_stderr())
    _print_suite(result, as_json=args.json)
    return 0 if result.ok else 1


def _gaps(folder: str, others: list[str]) -> dict[str, list[Gap]]:
    """Of two finished fine-tunings, or of the tasks that two suites have in common."""
    from unmask.finetuning.gaps import gaps_of_folders

    return gaps_of_folders(folder, others)


def lines_on_stderr() -> Watch:
    """A line on stderr for each validation, and at a terminal one that shows the step."""
    from unmask.cli._terminal import stderr
    from unmask.finetuning.scores import TITLES
    from unmask.finetuning.seed_run import Watch
    from unmask.finetuning.table import NAMES, percent

    console = stderr()

    class Lines(Watch):
        steps, where = 0, ""

        def on_seed(self, start: Start, seed: int, steps: int) -> None:
            self.steps, self.where = steps, f"{NAMES[start]}, seed {seed}"

        def on_fold(self, fold: int, folds: int) -> None:
            self.where += f", fold {fold + 1} of {folds}"

        def on_step(self, step: int, loss: float) -> None:
            if console.is_terminal:
                said = f"{self.where}: step {step} of {self.steps}, loss {loss:.3f}"
                console.print(said.ljust(min(console.width - 1, 100)), end="\r", highlight=False)

        def on_valid(self, step: int, scores: dict[str, float], *, best: bool) -> None:
            said = ", ".join(f"{TITLES[name]} {percent(value)}" for name, value in scores.items())
            console.print(
                f"{self.where}: step {step} of {self.steps}, validation {said}{' (best)' if best else ''}",
                highlight=False,
                soft_wrap=True,
            )

        def on_note(self, sentence: str) -> None:
            console.print(f"unmask: {sentence}", highlight=False, markup=False, soft_wrap=True)

    return Lines()


def _print(done: Finetuned, found: list[Gap], *, as_json: bool) -> None:
    from unmask.finetuning.gaps import GAP_COLUMNS, GAP_NOTE
    from unmask.finetuning.table import COLUMNS, notes, reported, rows

    if as_json:
        told = {"gaps": [gap.plain() for gap in found]} if found else {}
        print(json.dumps({"out": str(done.folder), **done.report, **told}, ensure_ascii=False))
        return
    part = reported(done.report)
    guess = "majority" if done.report["task"]["kind"] == "classification" else "mean"
    words = {"test": "test", "valid": "validation; it also chose the best weights, so the numbers flatter"}
    print(f"{done.report['model']} on {done.report['examples'][part]:,} examples ({words[part]})")
    _print_table([[*COLUMNS, guess], *rows(done.report, part)])
    if found:
        _print_table([GAP_COLUMNS, *(gap.cells() for gap in found)])
        print(GAP_NOTE)
    print("\n".join(notes(done.report)))
    print(f"report: {done.folder}/report.md; use it: unmask classify {done.folder} TEXT")


def _print_gaps(found: dict[str, list[Gap]], *, as_json: bool) -> None:
    from unmask.finetuning.gaps import GAP_COLUMNS, GAP_NOTE

    if as_json:
        print(json.dumps({"gaps": {name: [gap.plain() for gap in gaps] for name, gaps in found.items()}}))
        return
    _print_table([["", *GAP_COLUMNS], *([name, *gap.cells()] for name, gaps in found.items() for gap in gaps)])
    print(GAP_NOTE)


def _print_suite(result: SuiteResult, *, as_json: bool) -> None:
    from unmask.finetuning.gaps import GAP_COLUMNS
    from unmask.finetuning.suites.page import COLUMNS, gap_lines, invisible, lines

    if as_json:
        print(json.dumps({"out": str(result.folder), **result.plain()}, ensure_ascii=False))
        return
    if result.reports:
        _print_table([COLUMNS, *lines(result)])
    if told := gap_lines(result):
        _print_table([["task", *GAP_COLUMNS], *told])
    for task in result.suite.chosen(list(result.reports)):
        if said := invisible(result, task):
            print(said)
    for name, said in result.failures.items():
        print(f"{result.suite.tasks[name].title} is not here: {said}")
    print(f"table, with the paper's figures quoted beside: {result.folder}/{result.suite.name}.md")


def _print_table(table: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
