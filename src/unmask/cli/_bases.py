"""`unmask score` of DNA base by base: regions of a FASTA file or sequences, as CSV and as a picture."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.cli import _naming, _sampling
from unmask.errors import UsageError
from unmask.storage.built_in import DEFAULT

if TYPE_CHECKING:
    from unmask.corpora.intervals import Interval
    from unmask.corpora.regions import Stretch
    from unmask.evaluation.per_base import BaseScores
    from unmask.model import Model

HEAD = ("record", "position", "strand", "base", "nats", "bits", "p_A", "p_C", "p_G", "p_T")
READING = ("region", "bed", "flank")
OWN = ("estimator", "both_strands")
OF_TEXTS = ("data", "prompt", "separator", "field", "prompt_field", "label_field")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("DNA, base by base", "sequences, or regions of a FASTA file")
    group.add_argument("--fasta", metavar="FILE", help="plain or compressed; needs no index")
    group.add_argument(
        "--region",
        action="append",
        metavar="REGION",
        help="chr20:60001-61000, counted from 1; append :- for the other strand",
    )
    group.add_argument("--bed", metavar="FILE", help="the regions with their strands")
    group.add_argument(
        "--flank", type=int, metavar="N", help="bases of context on either side (default: half a window)"
    )
    group.add_argument(
        "--estimator", metavar="NAME", help="exact, conditional or bound (default: the first that the model supports)"
    )
    group.add_argument("--both-strands", action="store_true", help="average over both strands")
    group.add_argument("--csv", metavar="FILE", help="one line per base; - is standard output")
    group.add_argument("--plot", metavar="FILE", help="an SVG plot")


def asked(args: argparse.Namespace) -> bool:
    """Whether anything of it is asked for."""
    return any(getattr(args, name) is not None for name in ("fasta", "csv", "plot", *READING)) or any(
        getattr(args, name) for name in OWN
    )


def run(args: argparse.Namespace) -> int:
    from unmask.cli._terminal import progress_bar
    from unmask.evaluation.per_base import SAID, known_bases, score_bases
    from unmask.model import load

    _check(args)
    name, texts = _named(args)
    wanted = _wanted(args)
    model = load(name, device=args.device)
    model.class_of(args.label)
    stretches = _stretches(args, model, texts, wanted)
    how: dict[str, Any] = {"estimator": args.estimator, "both_strands": args.both_strands, "label": args.label}
    how |= {"seed": args.seed, "num_samples": args.num_samples}
    scored, done, total = [], 0, sum(known_bases(one.text) for one in stretches) * (1 + args.both_strands)
    with progress_bar("scoring bases") as bar:
        for one in stretches:
            told = bar and partial(_told, bar, done, total)
            scores = score_bases(model, one.text, before=one.before, after=one.after, progress=told, **how)
            scored.append((one, scores))
            done += known_bases(one.text) * (1 + args.both_strands)
    if args.plot:
        _draw(Path(args.plot), scored)
    if args.csv == "-":
        sys.stdout.writelines(_lines(scored))
    elif args.csv:
        _write(Path(args.csv), scored)
    estimator = scored[0][1].estimator
    if args.json:
        print(json.dumps({"regions": [_summary(*one) for one in scored], "estimator": estimator}))
        return 0
    stream = sys.stderr if args.csv == "-" else sys.stdout
    for record in (_summary(*one) for one in scored):
        bits = "nothing scored" if record["bits_per_base"] is None else f"{record['bits_per_base']:.3f} bits/base"
        unknown = f", {record['unknown']:,} not known" if record["unknown"] else ""
        print(f"{bits}  {record['nats']:.2f} nats  {record['bases']:,} bases{unknown}  {record['region']}", file=stream)
    print(f"{estimator}: {SAID[estimator]}", file=sys.stderr)
    return 0


def _told(bar: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    """Progress through all regions, of which some are done before this one."""
    bar(before + done, total)


def _named(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The model and the sequences, where no FASTA file brings them."""
    if args.fasta is None:
        name, texts = _naming.model_and_texts(args.arguments, "a sequence, as in unmask score runs/dna ACGT --csv -")
        texts = [_sampling.standard_input() if text == "-" else text for text in texts]
        if not all(texts):
            raise UsageError("an empty sequence has no base: give one that holds some")
        return name, texts
    if len(args.arguments) > 1:
        raise UsageError("--fasta brings its own sequences: leave out those of the command")
    return args.arguments[0] if args.arguments else DEFAULT, []


def _check(args: argparse.Namespace) -> None:
    given = next((name for name in READING if getattr(args, name) is not None), None)
    if args.fasta is None and given is not None:
        raise UsageError(f"--{given} is of a FASTA file: give --fasta FILE, or leave it out")
    if given := next((name for name in OF_TEXTS if getattr(args, name)), None):
        raise UsageError(f"--{given.replace('_', '-')} is of whole texts, not of bases: leave it out")
    if args.flank is not None and args.flank < 0:
        raise UsageError(f"--flank must be 0 or more, got {args.flank}")
    for path in (args.csv, args.plot):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"{path} cannot be written: there is no folder {Path(path).parent}; make it before")
    if args.csv == "-" and args.json:
        raise UsageError("--csv - and --json both print: give --csv a file's name")


def _wanted(args: argparse.Namespace) -> list[Interval]:
    from unmask.corpora.intervals import read_bed
    from unmask.corpora.regions import parse_region

    if args.fasta is None:
        return []
    wanted = [parse_region(region) for region in args.region or ()]
    wanted += [] if args.bed is None else read_bed(args.bed)
    if not wanted:
        raise UsageError("nothing to score: give --region chr20:60001-61000, or --bed FILE")
    return wanted


def _stretches(args: argparse.Namespace, model: Model, texts: list[str], wanted: list[Interval]) -> list[Stretch]:
    from unmask.corpora.intervals import Interval
    from unmask.corpora.regions import Stretch, read_stretches

    if args.fasta is not None:
        flank = model.length // 2 if args.flank is None else args.flank
        found = read_stretches(args.fasta, wanted, flank=flank, bed=args.bed)
    else:
        named = [str(number) for number in range(1, len(texts) + 1)]
        found = [
            Stretch(Interval(name, 0, len(text)), len(text), text.upper())
            for name, text in zip(named, texts, strict=True)
        ]
    if args.plot:
        from unmask.reporting.base_plot import MOST

        if len(found) > MOST:
            raise UsageError(f"a picture holds {MOST} regions, {len(found)} are asked for: leave out --plot, or some")
    return found


def _summary(one: Stretch, scores: BaseScores) -> dict[str, Any]:
    bits = scores.nats / math.log(2) / scores.num if scores.num else None
    record: dict[str, Any] = {"region": one.name, "bits_per_base": bits, "nats": scores.nats, "bases": scores.num}
    return record | {"unknown": len(scores.text) - scores.num}


def _lines(scored: list[tuple[Stretch, BaseScores]]) -> Iterator[str]:
    """The CSV file, line by line."""
    yield ",".join(HEAD) + "\n"
    for one, scores in scored:
        strand = "-" if one.interval.reverse else "+"
        record = _cell(one.interval.record)
        laws = [[None] * 4] * len(scores.text) if scores.p_L4 is None else scores.p_L4.tolist()
        for position, base, nats, law in zip(one.positions(), scores.text, scores.nats_L.tolist(), laws, strict=True):
            numbers = [nats, nats / math.log(2), *law]
            shown = ["" if x is None or math.isnan(x) else f"{x:.6g}" for x in numbers]
            yield ",".join([record, str(position), strand, base, *shown]) + "\n"


def _cell(text: str) -> str:
    """As a CSV file spells it."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow([text])
    return buffer.getvalue()


def _write(path: Path, scored: list[tuple[Stretch, BaseScores]]) -> None:
    from unmask.storage.atomic import atomic_file, write_file

    with atomic_file(path) as temp:
        write_file(temp, (line.encode() for line in _lines(scored)))


def _draw(path: Path, scored: list[tuple[Stretch, BaseScores]]) -> None:
    from unmask.evaluation.per_base import SAID
    from unmask.reporting.base_plot import Panel, draw
    from unmask.storage.atomic import atomic_text

    panels = [
        Panel(
            one.name,
            one.positions()[0],
            -1 if one.interval.reverse else 1,
            one.text,
            (scores.nats_L / math.log(2)).tolist(),
        )
        for one, scores in scored
    ]
    estimator = scored[0][1].estimator
    atomic_text(path, draw(panels, said=f"{estimator}: {SAID[estimator]}"))
