"""Train recipes on the same tokens and report visible differences.

RECIPE is a built-in recipe's name or a TOML or JSON file, as for train. Each recipe is trained with each seed on the
same number of tokens, with the same data, tokenizer, length, batch and network size, and is measured with one protocol
at its best validation. --KEY VALUE sets a recipe key in all recipes.

Trials that do not fill a GPU by themselves can share it (--jobs 3). This affects only the timings.

--out holds results.md, results.json, results.csv and results.svg. After a stop or kill the same command resumes, and no
finished trial is repeated; more recipes or seeds can be added later.

Example:
  unmask compare ar.toml mdlm.toml --tokens 10M --seeds 3 --out runs/compared --data.train stdlib --batch 32
"""

from __future__ import annotations

import argparse
import json
import re

from unmask.errors import UsageError

TAKES_OVERRIDES = True
MOST_TOKENS = 10**18
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="+", help="a recipe file or a built-in recipe's name; the first is the reference"
    )
    parser.add_argument("--tokens", required=True, metavar="N", help="training tokens per trial: 500000, 50M, 1.5G")
    parser.add_argument("--out", required=True, metavar="DIR", help="the comparison's folder")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds per recipe: 0 to N - 1 (default 1)")
    parser.add_argument(
        "--reference", metavar="NAME", help="the recipe that the others are compared with (default: the first)"
    )
    parser.add_argument(
        "--valid-rows", type=int, metavar="N", help="measure this many held-out rows, spread evenly (default: all)"
    )
    parser.add_argument("--draws", type=int, default=8, metavar="K", help="draws of time and masks per row (default 8)")
    parser.add_argument("--draws-seed", type=int, default=0, metavar="N", help="seed of these draws (default 0)")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="ESTIMATOR",
        help="measure the same weights with another estimator as well, such as T=10; "
        "with several the slope in 1/T is reported",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="number of concurrent trials on the device (default 1)"
    )
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU if there is one)")
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
    value = float(match[1].replace("_", "").replace(",", "")) * UNITS[match[2]]
    if value > MOST_TOKENS:
        raise UsageError(f"--tokens {text} is more than {MOST_TOKENS:.0e}: give fewer")
    return round(value)
