"""A report as Markdown; its curves are in a separate picture."""

from __future__ import annotations

import re

from unmask.reporting.blocks import Block, Code, Document, Figure, Replay, Table, Text, Title, printable
from unmask.reporting.curves import sheet

_SIGNS = re.compile(r"([\\`*_{}\[\]#|!~$])")


def as_markdown(document: Document, picture: str) -> str:
    """The Markdown text. picture: the file name to which `picture_of` is written.

    >>> as_markdown(Document("a_b", [Text("<b>")]), "a.svg")
    '# a\\\\_b\\n\\n&lt;b&gt;\\n'
    """
    parts = [f"# {_line(document.title)}"]
    shown = False
    for block in document.blocks:
        if isinstance(block, Figure):
            parts += [] if shown else [f"![Learning curves]({picture})"]
            shown = True
        elif not isinstance(block, Replay):
            parts.append(_block(block))
    return "\n\n".join(parts) + "\n"


def picture_of(document: Document) -> str | None:
    """All panels as one SVG; None if there are none."""
    figures = [block for block in document.blocks if isinstance(block, Figure)]
    return sheet([one.panels for one in figures], figures[0].names) if figures else None


def _block(block: Block) -> str:
    if isinstance(block, Title):
        return f"{'#' * block.level} {_line(block.text)}"
    if isinstance(block, Text):
        return f"**Note:** {_line(block.text)}" if block.warning else _line(block.text)
    if isinstance(block, Table):
        rows = [block.columns, ["---"] * len(block.columns), *block.rows]
        lines = [
            "| " + " | ".join(cell if i == 1 else _line(cell) for cell in row) + " |" for i, row in enumerate(rows)
        ]
        return "\n".join(lines) + (f"\n\n{_line(block.caption)}" if block.caption else "")
    assert isinstance(block, Code)
    return (f"{_line(block.title)}:\n\n" if block.title else "") + _fenced(printable(block.text))


def _fenced(text: str) -> str:
    """Fence a text with more backticks than it contains, so that it cannot end the fence."""
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _line(text: str) -> str:
    """The text in one line, with everything that Markdown or HTML would interpret escaped."""
    text = " ".join(printable(text).split())
    return _SIGNS.sub(r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
