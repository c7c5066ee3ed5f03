"""Train recipes side by side on the same tokens and tell which gaps are visible.

RECIPE is a built-in recipe's name or a TOML or JSON file, as for train. Each is trained with each seed to the same
budget of tokens, on the same data, tokenizer, length, batch and network size, and measured by one protocol at its best
validation. Every option of a recipe can be given as --KEY VALUE, for all of them.

Trials that do not fill a GPU by themselves may share it: --jobs 3. Their numbers stay the same, but for the seconds.

OUT holds results.md, results.json, results.csv and results.svg. A comparison that was stopped or killed goes on with
the same command; more recipes or seeds may be added later, and what is finished is not done again.

Example:
  unmask compare ar.toml mdlm.toml --tokens 10M --seeds 3 --out runs/compared --data.train stdlib --batch 32
"""

from __future__ import annotations

import argparse
import json
import re

from unmask.errors import UsageError

TAKES_OVERRIDES = True
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="+", help="a recipe file or a built-in recipe's name; the first is the reference"
    )
    parser.add_argument("--tokens", required=True, metavar="N", help="that each trial trains on: 500000, 50M, 1.5G")
    parser.add_argument("--out", required=True, metavar="DIR", help="the comparison's folder")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="of each recipe: 0 to N - 1 (default 1)")
    parser.add_argument("--reference", metavar="NAME", help="what gaps are told against (default: the first recipe)")
    parser.add_argument("--valid-rows", type=int, metavar="N", help="measure this many held-out rows (default: all)")
    parser.add_argument("--draws", type=int, default=8, metavar="K", help="of time and masks for each row (default 8)")
    parser.add_argument("--draws-seed", type=int, default=0, metavar="N", help="of these draws (default 0)")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="ESTIMATOR",
        help="measure the same weights by another estimator as well: T=10; several tell the slope in 1/T",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trials at once on the device (default 1)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU where there is one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from unmask.cli._compared import Lines, print_table
    from unmask.comparison.compare import compare

    found = compare(
        args.recipe,
        tokens=number(args.tokens),
        out=args.out,
        seeds=args.seeds,
        overrides=args.overrides,
        reference=args.reference,
        valid_rows=args.valid_rows,
        draws=args.draws,
        seed=args.draws_seed,
        also=args.also,
        device=args.device,
        jobs=args.jobs,
        watch=Lines(args.jobs),
    )
    if args.json:
        print(json.dumps({"out": str(found.out), "shared": found.shared} | found.table.plain()))
    else:
        print_table(found)
    return 0 if found.ok else 1


def number(text: str) -> int:
    """How many tokens these are.

    >>> number("500_000"), number("1.5M"), number("2e6")
    (500000, 1500000, 2000000)
    """
    match = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?(?:e\d+)?)([kmgb]?)", text.strip().lower())
    if not match:
        raise UsageError(f"--tokens must be a number such as 500000, 50M or 1.5G, got {text!r}")
    return round(float(match[1].replace("_", "").replace(",", "")) * UNITS[match[2]])
