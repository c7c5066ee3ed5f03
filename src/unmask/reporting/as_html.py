"""A report as one HTML file: it loads nothing, and runs no script except the replay's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape as html_escape
from importlib.resources import files

from unmask.reporting.blocks import Block, Code, Document, Figure, Replay, Table, Text, Title, printable
from unmask.reporting.curves import STYLE, key
from unmask.reporting.replay import hash_source


def as_html(document: Document) -> str:
    """The page.

    >>> "&lt;b&gt;" in as_html(Document("a report", [Text("<b>")]))
    True
    """
    style = files("unmask.reporting").joinpath("page.css").read_text(encoding="utf-8") + STYLE
    title = _escape(document.title)
    body = "\n".join(map(_block, document.blocks))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, document.blocks)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body}\n</main>\n"
        "</body>\n</html>\n"
    )


def _policy(style: str, blocks: Sequence[Block]) -> str:
    """The page's policy also applies to a replay's frame, in addition to the replay's own, so it names the replay's
    parts."""
    replays = [block.html for block in blocks if isinstance(block, Replay)]
    inside = {tag: dict.fromkeys(hash_source(_inside(html, tag)) for html in replays) for tag in ("script", "style")}
    scripts = " ".join(inside["script"]) or "'none'"
    styles = " ".join([hash_source(style), *inside["style"]])
    return f"default-src 'none'; script-src {scripts}; style-src {styles}; base-uri 'none'; form-action 'none'"


def _inside(html: str, tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return found[1] if found else ""


def _escape(text: str) -> str:
    return html_escape(printable(text))


def _block(block: Block) -> str:
    if isinstance(block, Title):
        return f"<h{block.level}>{_escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        kind = ' class="warning"' if block.warning else ""
        return f"<p{kind}>{'⚠ ' if block.warning else ''}{_escape(block.text)}</p>"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Code):
        return _code(block)
    if isinstance(block, Figure):
        keys = "".join(f"<li>{key(i)} {_escape(name)}</li>" for i, name in enumerate(block.names))
        caption = f"<figcaption>{_escape(block.caption)}</figcaption>"
        panels = "\n".join(f"<div>{one}</div>" for one in block.panels)
        return f'<figure>{caption}<ul class="keys">{keys}</ul><div class="panels">{panels}</div></figure>'
    frame = f'sandbox="allow-scripts" title="{_escape(block.title)}" srcdoc="{_escape(block.html)}"'
    return f"<p>{_escape(block.title)}:</p><iframe {frame}></iframe>"


def _table(block: Table) -> str:
    head = "".join(f'<th scope="col">{_escape(cell)}</th>' for cell in block.columns)
    rows = []
    for number, row in enumerate(block.rows):
        kind = ' class="quoted"' if number in block.quoted else ""
        first, *rest = [_escape(cell) for cell in row]
        cells = "".join(f"<td>{cell}</td>" for cell in rest)
        rows.append(f'<tr{kind}><th scope="row">{first}</th>{cells}</tr>')
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    caption = f'<p class="caption">{_escape(block.caption)}</p>' if block.caption else ""
    return f'<div class="wide" tabindex="0" role="group" aria-label="table">{table}</div>{caption}'


def _code(block: Code) -> str:
    text = f'<pre tabindex="0">{_escape(block.text)}</pre>'
    if block.folded:
        return f"<details><summary>{_escape(block.title)}</summary>{text}</details>"
    return f"<p>{_escape(block.title)}:</p>{text}" if block.title else text
