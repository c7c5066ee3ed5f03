"""One exception tree. Every message is one line: what is wrong, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnmaskError(Exception):
    """Anything unmask reports on purpose. The command line prints the message and exits with `exit_code`."""

    exit_code = 1


class UsageError(UnmaskError, ValueError):
    """The caller asked for something that cannot be: an unknown name, a bad value, a meaningless combination."""

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
    """Another process of the same run is gone or does not answer."""


class MissingExtraError(UnmaskError):
    """An optional dependency that this call needs."""

    def __init__(self, package: str, extra: str, what: str) -> None:
        super().__init__(f"{what} needs the package {package}; install it with: pip install 'unmask[{extra}]'")


class Stopped(UnmaskError):
    """The run was asked to stop, has saved itself and can go on."""

    exit_code = 75


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for the end of a message: the closest known word, else the whole list.

    >>> did_you_mean("cosin", ["cosine", "linear"])
    "did you mean 'cosine'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"
