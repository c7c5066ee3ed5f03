"""The blocks of a report, independent of its format: `as_html.py` and `as_markdown.py` write the same blocks.

All text in them is plain and untrusted, such as file names and model output. The writers escape it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Title:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph. warning: whether it reports something missing or damaged."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Table:
    """quoted: the rows that were not measured here. caption: the meaning of the cells."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    quoted: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Code:
    """Verbatim text. folded: collapsed under its title, in formats that support it."""

    text: str
    title: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Figure:
    """Panels side by side, each an SVG element by `curves.py`; names: the runs, for the legend."""

    caption: str
    panels: Sequence[str]
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Replay:
    """A page that replays how texts were written, by `replay.py`."""

    title: str
    html: str


Block = Title | Text | Table | Code | Figure | Replay


@dataclass
class Document:
    title: str
    blocks: list[Block] = field(default_factory=list)


def printable(text: str) -> str:
    """The text with control characters and surrogates, which a page cannot contain, replaced by U+FFFD.

    >>> printable("a\\x00b\\ud800\\n")
    'a�b�\\n'
    """
    return "".join("\ufffd" if _odd(c) else c for c in text)


def _odd(c: str) -> bool:
    code = ord(c)
    return (code < 32 and c not in "\n\t") or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code & 0xFFFE == 0xFFFE
