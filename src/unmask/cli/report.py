"""Write a report on training runs as one HTML page.

It has curves, best results beside the paper's figures, samples and recipes. The page works offline and loads no
external resources. If something in a run is missing or damaged, the page says so in its place.

Examples:
  unmask report runs/demo
  unmask report runs/a runs/b --format both --out compared
  unmask report runs/a --results a-zero-shot --samples 4
"""

from __future__ import annotations

import argparse
from pathlib import Path

from unmask.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", help="a run's folder, also while it trains")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where the report goes (default: the run's folder; for several runs, the current one)",
    )
    parser.add_argument(
        "--format", choices=("html", "md", "both"), default="html", help="format of the report (default html)"
    )
    parser.add_argument(
        "--results",
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR",
        help="folders of unmask eval --suite ... --out; those inside a run are found automatically",
    )
    parser.add_argument(
        "--samples", type=int, default=2, help="number of texts that each model generates, 0 to 4 (default 2)"
    )
    parser.add_argument(
        "--length", type=int, help="their length in tokens (default: the model's typical length, 256 at most)"
    )
    parser.add_argument("--seed", type=int, default=0, help="their seed (default 0)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU if there is one)")


def run(args: argparse.Namespace) -> int:
    from unmask.reporting.report import make_report, write_report

    out = Path(args.out or (args.run[0] if len(args.run) == 1 else "."))
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out: {out} is a file; give the name of a folder")
    if out.suffix in (".html", ".md") and not out.exists():
        raise UsageError(f"--out: {out} looks like a file; give the name of a folder")
    document = make_report(
        args.run,
        results=args.results,
        samples=args.samples,
        length=args.length,
        seed=args.seed,
        device=args.device,
        words=args.words,
    )
    for path in write_report(document, out, args.format):
        print(path)
    return 0
