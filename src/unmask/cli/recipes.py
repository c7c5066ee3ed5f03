"""List the recipes that come with unmask, or print one.

A recipe is a TOML file. Train it by its name, or print it to a file to start your own from.

Examples:
  unmask recipes
  unmask recipes demo > mine.toml
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "recipes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print this recipe")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from unmask.errors import UsageError, did_you_mean

    recipes = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.toml"))}
    if args.name is not None:
        if args.name not in recipes:
            raise UsageError(f"no built-in recipe {args.name!r}; {did_you_mean(args.name, recipes)}")
        recipes = {args.name: recipes[args.name]}
    if args.json:
        listed = {name: {"summary": _summary(text), "recipe": text} for name, text in recipes.items()}
        print(json.dumps({"recipes": listed}, ensure_ascii=False))
    elif args.name is not None:
        print(recipes[args.name], end="")
    else:
        width = max(map(len, recipes))
        print("\n".join(f"{name:<{width}}  {_summary(text)}" for name, text in recipes.items()))
    return 0


def _summary(recipe: str) -> str:
    """The comment on a recipe's first line."""
    first = recipe.partition("\n")[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""
