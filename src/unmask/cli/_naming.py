"""Which model a command means: the one that is named first, and `stories` where none is."""

from __future__ import annotations

import argparse
import os

from unmask.errors import UsageError
from unmask.storage.built_in import DEFAULT, built_in_names

HELP = f"a model folder, a run's folder, or a built-in model's name (default {DEFAULT})"


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT, help=HELP)


def add_model_and_texts(parser: argparse.ArgumentParser, texts: str) -> None:
    """One list of both, since only a look at the first word tells whether it names a model; see `model_and_texts`."""
    parser.add_argument("arguments", nargs="*", metavar="[MODEL] TEXT", help=f"{HELP}; then {texts}")


def model_and_texts(arguments: list[str], what: str) -> tuple[str, list[str]]:
    """The model's name and the texts. what: the text that is missing where no text stands.

    >>> model_and_texts(["Once upon [MASK] time"], "a text")
    ('stories', ['Once upon [MASK] time'])
    >>> model_and_texts(["runs/mine", "a [MASK]", "b [MASK]"], "a text")
    ('runs/mine', ['a [MASK]', 'b [MASK]'])
    """
    first = arguments[0] if arguments else ""
    known = os.path.isdir(first) or first in built_in_names()
    # Of several the first is the model, also where its name is misspelled; a gap, a pipe or several words are no name.
    named = known or (len(arguments) > 1 and not any(sign in first for sign in ("[MASK", " ")) and first != "-")
    model, texts = (first, arguments[1:]) if named else (DEFAULT, arguments)
    if not texts:
        raise UsageError(f"nothing to work on: give {what}")
    return model, texts


def refuse_text(model: str, option: str) -> None:
    """A text in the model's place is refused, with the option that it belongs to."""
    if " " in model and not os.path.isdir(model):
        raise UsageError(f"{model[:40]!r} is no model's name; give the text as {option}")
