"""Fine-tune a model for a task: classes or a number, of texts or of pairs of texts.

The examples are a TSV, CSV or JSON-lines file with a text and a label; its columns are named by --data.text,
--data.pair and --data.label. RECIPE is a TOML or JSON file with the options; --options lists them. Several seeds are
trained, each of which is kept when it is finished: the same command goes on where it was stopped.

--suite glue trains for the tasks of GLUE that lie in --data-dir and makes one table of them.

Example:
  unmask finetune stories --data.train reviews.tsv --data.label sentiment --out runs/reviews
  unmask finetune runs/mine --data.train pairs.jsonl --data.pair second --seeds 5 --from-scratch --out runs/pairs
  unmask finetune runs/mine --data.train rated.csv --data.label stars --kind regression --out runs/rated
  unmask finetune runs/mine --suite glue --data-dir glue --tasks cola rte --out runs/glue
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
    from unmask.finetuning.run import Finetuned
    from unmask.finetuning.seed_run import Start, Watch
    from unmask.finetuning.suite import SuiteResult

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _naming.add_model(parser)
    parser.add_argument("recipe", nargs="?", help="a TOML or JSON file with options (default: none)")
    parser.add_argument("--from-scratch", action="store_true", help="the same network from random weights, beside it")
    parser.add_argument("--suite", choices=["glue"], help="the tasks of GLUE in --data-dir")
    parser.add_argument(
        "--data-dir", metavar="DIR", help="where the suite's files are: CoLA/train.tsv, RTE/dev.tsv, ..."
    )
    parser.add_argument(
        "--tasks", nargs="+", metavar="TASK", help="of the suite: cola sst2 mrpc stsb rte (default: all)"
    )
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU where there is one)")
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
    if args.suite is None:
        for flag in ("data_dir", "tasks"):
            if getattr(args, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} belongs to a suite: give --suite glue, or leave it out")
        _print(_one(args, config), as_json=args.json)
    else:
        if args.data_dir is None:
            raise UsageError("--suite glue needs --data-dir DIR, the folder that holds CoLA, RTE and the others")
        _print_suite(_suite(args, config), as_json=args.json)
    return 0


def _one(args: argparse.Namespace, config: FinetuneConfig) -> Finetuned:
    from unmask.finetuning.run import finetune

    return finetune(args.model, config, device=args.device, watch=_lines())


def _suite(args: argparse.Namespace, config: FinetuneConfig) -> SuiteResult:
    from unmask.finetuning.suite import finetune_suite

    how: dict[str, Any] = {"data_dir": args.data_dir, "tasks": args.tasks, "device": args.device}
    return finetune_suite(args.model, config, **how, watch=_lines())


def _lines() -> Watch:
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


def _print(done: Finetuned, *, as_json: bool) -> None:
    from unmask.finetuning.table import COLUMNS, notes, reported, rows

    if as_json:
        print(json.dumps({"out": str(done.folder), **done.report}, ensure_ascii=False))
        return
    part = reported(done.report)
    guess = "majority" if done.report["task"]["kind"] == "classification" else "mean"
    words = {"test": "test", "valid": "validation; it also chose the best weights, so the numbers flatter"}
    print(f"{done.report['model']} on {done.report['examples'][part]:,} examples ({words[part]})")
    _print_table([[*COLUMNS, guess], *rows(done.report, part)])
    print("\n".join(notes(done.report)))
    print(f"report: {done.folder}/report.md; use it: unmask classify {done.folder} TEXT")


def _print_suite(result: SuiteResult, *, as_json: bool) -> None:
    from unmask.finetuning.suite import COLUMNS, lines

    if as_json:
        print(json.dumps({"out": str(result.folder), "suite": "glue", "model": result.model, "tasks": result.reports}))
        return
    _print_table([COLUMNS, *lines(result)])
    print(f"table, with the paper's figures quoted beside: {result.folder}/glue.md")


def _print_table(table: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
