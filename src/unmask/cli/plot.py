"""Plot the training loss and the validation bound of runs as an SVG.

The thin line is the training loss (smoothed over the logged steps), dots are validations. Nats per token are not
comparable between runs with different tokenizers; --bits-per-byte plots their validations in a comparable unit.

Examples:
  unmask plot runs/demo
  unmask plot runs/a runs/b --x tokens --out compared.svg
  unmask plot runs/a --csv > a.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.errors import DataError, UsageError
from unmask.reporting.metrics_file import METRICS, Point, read_metrics

if TYPE_CHECKING:
    from unmask.cli._chart import Curve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", help="a run's folder, also while it trains, or its metrics.jsonl")
    parser.add_argument(
        "--x", choices=("steps", "tokens", "seconds"), default="steps", help="unit of the x axis (default steps)"
    )
    parser.add_argument("--bits-per-byte", action="store_true", help="only validations, in bits per byte")
    parser.add_argument("--log", action="store_true", help="logarithmic y axis")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--out",
        metavar="FILE",
        help="output file; - is standard output (default RUN/plot.svg, or plot.svg for several runs)",
    )
    form.add_argument("--csv", action="store_true", help="print the numbers as CSV instead")
    form.add_argument("--json", action="store_true", help="print the numbers as one JSON object instead")


def run(args: argparse.Namespace) -> int:
    from unmask.cli._chart import draw
    from unmask.storage.atomic import atomic_text

    names = _names(args.run)
    runs = {name: read_metrics(Path(path), name).points for name, path in zip(names, args.run, strict=True)}
    if args.json:
        print(json.dumps({"runs": {name: list(map(_plain, points)) for name, points in runs.items()}}))
        return 0
    if args.csv:
        table = csv.DictWriter(sys.stdout, [field.name for field in fields(Point)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(point) for points in runs.values() for point in points)
        return 0
    unit = "bits per byte" if args.bits_per_byte else "nats per token"
    picture = draw([_curve(name, points, args) for name, points in runs.items()], across=args.x, up=unit, log=args.log)
    first = Path(args.run[0])
    out = args.out or ("plot.svg" if len(runs) > 1 or not first.is_dir() else str(first / "plot.svg"))
    if out == "-":
        print(picture, end="")
        return 0
    if Path(out).is_dir() or not Path(out).parent.is_dir():
        raise UsageError(f"cannot write {out}: give the name of a file in a folder that is there")
    atomic_text(Path(out), picture)
    print(out)
    return 0


def _curve(name: str, points: list[Point], args: argparse.Namespace) -> Curve:
    from unmask.cli._chart import Curve

    if args.x == "tokens" and not points[-1].tokens:
        raise DataError(f"the metrics of {name} do not count tokens (an older unmask wrote them): use --x steps")
    if args.bits_per_byte and not any(point.valid_bits_per_byte is not None for point in points):
        raise DataError(f"{name} has no validation in bits per byte yet: leave out --bits-per-byte")

    def x(point: Point) -> float:
        return float(getattr(point, "step" if args.x == "steps" else args.x))

    unit = "valid_bits_per_byte" if args.bits_per_byte else "valid"
    losses = [(x(p), p.loss) for p in points if p.loss is not None and not args.bits_per_byte]
    return Curve(name, losses, [(x(p), v) for p in points if (v := getattr(p, unit)) is not None])


def _names(runs: list[str]) -> list[str]:
    """What the runs are called: the folder's name, or all of the path where two have the same."""
    names = [(path.parent if path.name == METRICS else path).resolve().name for path in map(Path, runs)]
    return names if len(set(names)) == len(names) else list(dict.fromkeys(runs))


def _plain(point: Point) -> dict[str, Any]:
    return {name: value for name, value in asdict(point).items() if name != "run" and value is not None}
