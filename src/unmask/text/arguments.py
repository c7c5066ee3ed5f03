"""Checks of argument types, with errors in one sentence: a text where a number, a sampler or a constraint belongs."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

from unmask.constraints import Constraint
from unmask.errors import Public, UsageError
from unmask.samplers import Sampler


def check_whole(**values: Any) -> None:
    """Refuse anything but whole numbers; None: not given.

    >>> check_whole(num="2")
    Traceback (most recent call last):
    unmask.errors.UsageError: num must be a whole number, got '2'
    """
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
            raise UsageError("{name} must be a whole number, got {value}", name=Public(name), value=_quoted(value))


def check_texts(value: Any, name: str) -> list[str]:
    """One text or several, as a list; anything else is refused.

    >>> check_texts("a", "text"), check_texts(("a", "b"), "text")
    (['a'], ['a', 'b'])
    >>> check_texts(5, "text")
    Traceback (most recent call last):
    unmask.errors.UsageError: text must be a text, or a list of texts, got 5
    """
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, Iterable) or isinstance(several, bytes):
        raise UsageError(
            "{name} must be a text, or a list of texts, got {value}", name=Public(name), value=_quoted(value)
        )
    texts = list(several)
    if not all(isinstance(one, str) for one in texts):
        raise UsageError(
            "{name} must be a text, or a list of texts, got {value}", name=Public(name), value=_quoted(value)
        )
    return texts


def check_sampler(value: Any) -> None:
    """Refuse anything but a sampler; None is the model's own.

    >>> check_sampler("confidence")
    Traceback (most recent call last):
    unmask.errors.UsageError: sampler must be a sampler such as unmask.samplers.Confidence(), got 'confidence'
    """
    if value is not None and not isinstance(value, Sampler):
        room = Sampler.room
        named = room.get(value).__name__ if isinstance(value, str) and value in room.names() else "Ancestral"
        raise UsageError(
            "sampler must be a sampler such as unmask.samplers.{name}(), got {value}",
            name=Public(named),
            value=_quoted(value),
        )


def check_constraint(value: Any) -> None:
    """Refuse anything but a constraint or a list of constraints; None: no constraint.

    >>> check_constraint("[a-z]+")
    Traceback (most recent call last):
    unmask.errors.UsageError: constraint must be one such as unmask.constraints.Regex(pattern=...), or several, \
got '[a-z]+'
    """
    several = value if isinstance(value, Iterable) and not isinstance(value, str | bytes | dict) else [value]
    if value is not None and not all(isinstance(one, Constraint) for one in several):
        raise UsageError(
            "constraint must be one such as unmask.constraints.Regex(pattern=...), or several, got {value}",
            value=_quoted(value),
        )


def _quoted(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 60 else repr(value)[:59] + "…"
