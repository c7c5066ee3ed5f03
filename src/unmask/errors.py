"""All exceptions. Every message is one line: what is wrong, and what to do.

A message is a template of ours with values. Whoever runs unmask sees both. A client of a server sees only the template
(`redacted`), because a value may be part of somebody's text; values marked `Public` are not.
"""

from __future__ import annotations

import difflib
import string
import sys
from collections.abc import Iterable
from dataclasses import dataclass

_ELLIPSIS = "…"


@dataclass(frozen=True)
class Public:
    """A value in a message that anyone may read: a limit, a count, one of our names.

    redacted: its form in a redacted message, if only a part of it is public.
    """

    value: object
    redacted: str | None = None


class UnmaskError(Exception):
    """Any error that unmask raises deliberately. The command line prints the message and exits with `exit_code`.

    template: the sentence with {names} for its values. It must be a constant in the code that raises the error; for an
    f-string it is None, because its values cannot be told from the rest of the sentence.

    >>> error = UsageError("no gap in {text!r}: {most} are allowed", text="a secret", most=Public(3))
    >>> str(error), error.redacted()
    ("no gap in 'a secret': 3 are allowed", "no gap in '…': 3 are allowed")
    >>> UsageError("no gap in " + repr("a secret")).redacted() is None
    True
    """

    exit_code = 1

    def __init__(self, template: str = "", /, **values: object) -> None:
        raw = {name: value.value if isinstance(value, Public) else value for name, value in values.items()}
        super().__init__(template.format(**raw) if values else template)
        # A constant in the caller's code cannot contain anything from a request.
        self.template = template if template in sys._getframe(1).f_code.co_consts else None
        self.values = values

    def redacted(self) -> str | None:
        """The message with … for every value that is not public; None if it has no template."""
        if self.template is None or not self.values:
            return self.template
        parts = []
        for literal, name, spec, conversion in string.Formatter().parse(self.template):
            parts += [literal, "" if name is None else _redacted(self.values[name], conversion, spec or "")]
        return "".join(parts)


def _redacted(value: object, conversion: str | None, spec: str) -> str:
    if isinstance(value, UnmaskError):
        return value.redacted() or _ELLIPSIS
    if isinstance(value, Public):
        return value.redacted if value.redacted is not None else _spelled(value.value, conversion, spec)
    return f"'{_ELLIPSIS}'" if conversion == "r" else _ELLIPSIS


def _spelled(value: object, conversion: str | None, spec: str) -> str:
    return format(repr(value) if conversion == "r" else value, spec)


class UsageError(UnmaskError, ValueError):
    """Wrong use: an unknown name, an invalid value, a meaningless combination."""

    exit_code = 2


class ConfigError(UsageError):
    """A recipe or an override that does not fit the run's dataclasses."""


class DataError(UnmaskError):
    """A corpus that is missing, empty or not what its name says."""


class ModelFolderError(UnmaskError):
    """A model folder or checkpoint that is incomplete, damaged or made for something else."""


class NonFiniteError(UnmaskError):
    """A loss or gradient that is not a number; raised before the optimizer could see it."""


class PeerError(UnmaskError):
    """Another process of the same run is gone or does not respond."""


class MissingExtraError(UnmaskError):
    """An optional dependency that this call needs."""

    def __init__(self, package: str, extra: str, what: str) -> None:
        super().__init__(
            "{what} needs the package {package}; install it with: pip install 'unmask[{extra}]'",
            what=Public(what),
            package=Public(package),
            extra=Public(extra),
        )


class Stopped(UnmaskError):
    """The run was asked to stop; it has saved its state and can resume."""

    exit_code = 75


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for the end of a message: the closest known word, otherwise the whole list.

    It never repeats the word itself.

    >>> did_you_mean("cosin", ["cosine", "linear"])
    "did you mean 'cosine'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"
