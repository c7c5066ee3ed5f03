"""Upload a model to the Hugging Face hub, with a model card.

A repository that does not exist is created. Log in once with hf auth login. The upload is the model's folder, which
unmask.load("hf:REPO") and every command read, as in unmask generate hf:REPO. With --format hf it is a transformers
folder, as written by unmask export --format hf. The card (README.md) says what is known about the model; an existing
one stays as it is.

Examples:
  unmask push runs/demo me/demo --private
  unmask push stories me/stories --license apache-2.0 --format hf
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unmask.pretrained.card import Measured

NUMBERS = {
    "valid_ppl": ("perplexity of a token", "perplexity"),
    "valid_nats_per_token": ("nats per token", "nats_per_token"),
    "valid_bits_per_byte": ("bits per byte", "bits_per_byte"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder, a run's folder, or a built-in model's name")
    parser.add_argument("repo", metavar="REPO", help="repository on the hub, such as me/my-model")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument(
        "--license", metavar="NAME", help="the hub's identifier of the model's licence, such as apache-2.0"
    )
    parser.add_argument(
        "--format", choices=("unmask", "hf"), default="unmask", help="layout of the upload (default unmask)"
    )
    parser.add_argument("--message", default="", metavar="TEXT", help="the commit message")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    import json
    import re
    from functools import partial

    from unmask.errors import UsageError
    from unmask.model import load_any
    from unmask.pretrained.card import card_of
    from unmask.pretrained.hub import check_repo, push
    from unmask.storage.built_in import built_in_names, card

    check_repo(args.repo)
    if args.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", args.license):
        raise UsageError(f"--license {args.license!r}: give the hub's word for it, such as apache-2.0, mit or other")
    model, task = load_any(args.model, device="cpu")
    built_in = args.model in built_in_names() and not Path(args.model).exists()
    text = card(args.model).partition("\n")[2] if built_in else ""
    measured = _measured(Path(args.model)) if task is None else []
    how = {"license": args.license, "layout": args.format, "measured": measured, "text": text}
    readme = partial(card_of, model, task=task, **how)
    about = {"private": args.private, "layout": args.format, "message": args.message}
    url = push(model, args.repo, readme, task=task, **about)
    print(json.dumps({"repo": args.repo, "url": url}) if args.json else url)
    return 0


def _measured(folder: Path) -> list[Measured]:
    """Of a training run, what its best validation has said; of other folders nothing is known."""
    from unmask.config import RECIPE_FILE
    from unmask.pretrained.card import Measured
    from unmask.reporting.runs import read_run

    if not (folder / RECIPE_FILE).is_file():
        return []
    run = read_run(str(folder), folder.name)
    best = run.best if run.best is not None and run.sign else {}
    of = f"the run's own validation set, at step {best.get('step')}, the best of its validations"
    return [
        Measured(name=name, type=kind, value=float(best[key]), of=of, sign=run.sign)
        for key, (name, kind) in NUMBERS.items()
        if isinstance(best.get(key), int | float)
    ]
