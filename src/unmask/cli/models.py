"""List the models that come with unmask, or print the card of one.

Examples:
  unmask models
  unmask models stories
"""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print this model's card: data, licence, figures, samples, limits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from unmask.storage.built_in import DEFAULT, built_in_folder, built_in_names, card

    names = [args.name] if args.name else built_in_names()
    cards = {name: card(name) for name in names}
    if args.json:
        about = {name: {"folder": str(built_in_folder(name)), "card": text} for name, text in cards.items()}
        print(json.dumps({"default": DEFAULT, "models": about}, ensure_ascii=False))
    elif args.name:
        print(cards[args.name], end="")
    else:
        for name, text in cards.items():
            print(f"{name:<12} {_summary(text)}")
    return 0


def _summary(card: str) -> str:
    """The first line of a card below its title."""
    return next((line for line in card.splitlines() if line.strip() and not line.startswith("#")), "")
