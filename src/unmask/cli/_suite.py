"""`unmask eval --suite`: a table of sets, a line as each is measured."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from unmask.cli import _reading
from unmask.errors import UnmaskError, UsageError

if TYPE_CHECKING:
    from unmask.distributed.world import World
    from unmask.evaluation.suites.base import Entry, Outcome, Suite
    from unmask.evaluation.suites.writing import Writing
    from unmask.metrics.perplexity import Perplexity

# of `unmask eval`, which some suites know and others refuse
OPTIONS = frozenset(["packing", "length", "max_rows", "num_samples", "precision", "estimator", "batch"])
OPTIONS |= {"sampler", "against_sampler", "guidance", "lengths"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "suites", "several sets measured with one protocol; see docs/evaluation.md and docs/conditional.md"
    )
    group.add_argument("--suite", metavar="NAME", help="zero-shot, translation, style, infilling, last-word, planning")
    group.add_argument(
        "--data-dir",
        metavar="DIR",
        help="folder with the sets' files (default: fetched by name from the Hugging Face hub)",
    )
    group.add_argument("--sets", nargs="+", metavar="SET", help="only these sets, such as ptb wikitext (default: all)")
    group.add_argument(
        "--out", metavar="DIR", help="write a JSON file for each set and a table; resumes where it stopped"
    )
    group.add_argument(
        "--sampler",
        metavar="SAMPLER",
        help="sampler for written texts: a name, or a JSON object with name and options "
        "(default: the model's, taking the likeliest tokens)",
    )
    group.add_argument(
        "--against-sampler", metavar="SAMPLER", help="sampler for the model of --against (default: the same)"
    )
    group.add_argument(
        "--guidance", type=float, metavar="W", help="follow the source more closely; two network calls per step"
    )
    group.add_argument(
        "--lengths",
        type=int,
        metavar="N",
        help="try N lengths of the target and keep the one with the lowest bound (default: padding)",
    )


def check(args: argparse.Namespace) -> tuple[Suite, list[Entry]]:
    """The suite and its sets, or what is wrong with the command line; nothing is read or written yet."""
    from unmask.evaluation.suites import find_suite
    from unmask.evaluation.suites.results import Results

    suite = find_suite(args.suite)
    given = {"--data": None if "data" in suite.options else args.data, "--metric": args.metric}
    given |= {f"--{name.replace('_', '-')}": value for name, value in _reading.reading_options(args).items()}
    if wrong := [flag for flag, value in given.items() if value is not None]:
        raise UsageError(f"a suite has its own texts and metric: leave out {wrong[0]}, or --suite")
    for name in OPTIONS - suite.options:
        if getattr(args, name) is not None:
            raise UsageError(f"the suite {suite.name} has no option --{name.replace('_', '-')}: leave it out")
    if args.against_sampler is not None and args.against is None:
        raise UsageError("--against-sampler is what the model of --against writes with: give both, or leave it out")
    if args.packing == "sentence":
        raise UsageError("a suite scores every token, and --packing sentence cuts lines: give wrap or pad")
    folder = None if args.data_dir is None else Path(args.data_dir).expanduser()
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--data-dir: there is no folder {args.data_dir}; give the one that holds the sets' files")
    if args.data is not None and (args.sets or folder):
        raise UsageError("--data is a set by itself: leave out --sets and --data-dir")
    sets = suite.chosen(args.sets, folder) if args.data is None else [suite.of_file(args.data)]
    Results(_out(args), suite).check(sets)
    return suite, sets


def refuse_without(args: argparse.Namespace) -> None:
    """The options of a suite mean nothing where none is named."""
    for flag in ("data_dir", "sets", "out", "sampler", "against_sampler", "guidance", "lengths"):
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag.replace('_', '-')} belongs to a suite: give --suite zero-shot, or leave it out")


def run(args: argparse.Namespace, metric: Perplexity, world: World) -> int:
    """Measure, print, and fail at the end where a set was not measured."""
    from unmask.cli._terminal import progress_bar
    from unmask.evaluation.suites.results import Results
    from unmask.evaluation.suites.run import SuiteRun
    from unmask.model import load

    suite, sets = check(args)
    writing = _writing(args, args.sampler)
    model = load(args.model, device=world.device)
    other = None if args.against is None else load(args.against, device=world.device)
    if args.sets is None:
        sets = list(suite.usual(model, sets))
    way = SuiteRun(
        suite=suite,
        metric=metric,
        writing=writing,
        data_dir=None if args.data_dir is None else Path(args.data_dir).expanduser(),
        out=_out(args),
        packing=args.packing,
        length=args.length,
        against=other,
        writing_against=None if args.against_sampler is None else _writing(args, args.against_sampler),
        words=args.words,
        seed=args.seed,
        world=world,
        say=_say if world.first else lambda sentence: None,
        bar=progress_bar if world.first else lambda label: nullcontext(),
    )
    outcomes: list[Outcome] = []
    for outcome in way.outcomes(model, sets):
        outcomes.append(outcome)
        if world.first:
            _show(suite, outcome, first=len(outcomes) == 1, as_json=args.json)
    if world.first:
        page = suite.layout.markdown(suite, args.model, outcomes, args.against)
        _close(suite, args, outcomes, Results(way.out, suite).write_table(page))
    if failed := [one.set.title for one in outcomes if one.failure]:
        raise UnmaskError(f"{len(failed)} of {len(sets)} sets not measured: {', '.join(failed)}")
    return 0


def _writing(args: argparse.Namespace, named: str | None) -> Writing:
    from unmask.evaluation.suites.writing import Writing

    given = {"guidance": args.guidance, "lengths": args.lengths, "max_rows": args.max_rows, "draws": args.num_samples}
    given["batch"] = args.batch
    try:
        options = json.loads(named) if named is not None and named.lstrip().startswith("{") else {"name": named}
    except (ValueError, RecursionError) as e:
        flag = "--sampler" if named == args.sampler else "--against-sampler"
        raise UsageError(f"{flag} is not valid JSON: {e}") from None
    name = options.pop("name", None)
    how = {key: value for key, value in given.items() if value is not None}
    return Writing(sampler=name, options=options, **how)


def _out(args: argparse.Namespace) -> Path | None:
    return None if args.out is None else Path(args.out).expanduser()


def _say(sentence: str) -> None:
    print(f"unmask: {sentence}", file=sys.stderr, flush=True)


def _show(suite: Suite, outcome: Outcome, *, first: bool, as_json: bool) -> None:
    if outcome.failure:
        _say(f"{outcome.set.title}: {outcome.failure}")
    if as_json:
        return
    if first:
        print(suite.layout.header(outcome.numbers))
    print("\n".join(suite.layout.lines(outcome)), flush=True)


def _close(suite: Suite, args: argparse.Namespace, outcomes: list[Outcome], table: Path | None) -> None:
    layout = suite.layout
    measured = {one.set.name: one.numbers for one in outcomes if one.numbers is not None}
    if args.json:
        failed = {one.set.name: one.failure for one in outcomes if one.failure}
        names = {"model": args.model} | ({} if args.against is None else {"against": args.against})
        print(json.dumps({"suite": suite.name, **names, "sets": measured, "failed": failed}))
        return
    if args.against is not None and measured:
        _show_against(suite, args, outcomes)
    print()
    for one in outcomes:
        if one.numbers is not None:
            print(_wrapped(one.set.title, layout.source_line(one.numbers)))
            if left_out := one.numbers.get("left_out"):
                print(_wrapped("left out", left_out))
    for told in dict.fromkeys(line for one in measured.values() for line in layout.told(one)):
        print(_wrapped("note", f"{told}."))
    for common in dict.fromkeys(map(layout.protocol_line, measured.values())):
        print(_wrapped("protocol", common))
    if table is not None:
        print(_wrapped("table", f"{table}{layout.beside}"))


def _show_against(suite: Suite, args: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """The other model's table, and below it the differences."""
    from unmask.cli._against import short_names
    from unmask.evaluation.suites import differences
    from unmask.evaluation.suites.base import others_of

    others = [one for one in others_of(outcomes) if one.numbers is not None]
    print(f"\nagainst {args.against}\n{suite.layout.header(others[0].numbers)}")
    for one in others:
        print("\n".join(suite.layout.lines(one)))
    ours, theirs = short_names(args)
    if ours == theirs:
        ours, theirs = f"{ours} by {args.sampler or 'itself'}", f"by {args.against_sampler or 'the same'}"
    print(f"\n{ours} − {theirs}, on the same texts")
    print("\n".join(differences.terminal_lines(outcomes)))
    for note in differences.notes_of(outcomes):
        print(_wrapped("", f"{note}."))


def _wrapped(head: str, text: str) -> str:
    first = f"{head:<11} "
    return textwrap.fill(first + text, 79, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False)
