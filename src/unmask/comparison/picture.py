"""The table as bars, in SVG: perplexity of each system with its interval, readable in black and white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from unmask.axes import short, ticks
from unmask.comparison.quoted import Quoted
from unmask.comparison.table import Entry, Table

LEFT, WIDTH, RIGHT, TOP, LINE, BAR, THIN = 190, 480, 150, 72, 40, 16, 6
FAR = 6.0  # a value so many times the median is cut off, so that it does not make all other bars invisible
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
  .page { fill: #ffffff; } .note { fill: #57606a; font-size: 12px; }
  .grid { stroke: #d8dee4; } .axis { stroke: #57606a; }
  .exact { fill: #1f2328; } .bound { fill: url(#hatch); stroke: #1f2328; } .hatch { stroke: #1f2328; stroke-width: 2; }
  .quoted { fill: none; stroke: #57606a; stroke-dasharray: 3 2; } .error { stroke: #1f2328; stroke-width: 1.6; }
  .halo { stroke: #ffffff; stroke-width: 5; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .page { fill: #0d1117; } .note { fill: #8b949e; } .grid { stroke: #21262d; }
    .axis, .quoted { stroke: #8b949e; } .exact { fill: #e6edf3; } .bound, .hatch, .error { stroke: #e6edf3; }
    .halo { stroke: #0d1117; }
  }
"""


def draw(table: Table, shared: Mapping[str, Any]) -> str:
    """The figure as SVG; a system without a result has a line with the reason.

    >>> draw(Table([], "a", None, [], []), {"tokens": 10})[:4]
    '<svg'
    """
    most = _most(table.entries)
    height = TOP + LINE * len(table.entries)
    body = [
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>',
        f'<text x="{LEFT}" y="24" font-weight="600">Perplexity at {short(shared["tokens"])} tokens, '
        "95% intervals over texts and seeds</text>",
        *_legend(any(entry.quoted for entry in table.entries)),
    ]
    for tick in ticks(0.0, most):
        x = LEFT + WIDTH * tick / most
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height}"/>')
        body.append(f'<text class="note" x="{x:.1f}" y="{height + 18}" text-anchor="middle">{tick:g}</text>')
    for number, entry in enumerate(table.entries):
        body += _bar(entry, table, TOP + LINE * number, most)
    body.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP - 6}" y2="{height}"/>')
    body.append(
        f'<text x="{LEFT + WIDTH / 2}" y="{height + 38}" text-anchor="middle">'
        "perplexity per token, less is better</text>"
    )
    width, whole = LEFT + WIDTH + RIGHT, height + 52
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}" width="{width}" height="{whole}"'
    names = escape(", ".join(entry.system for entry in table.entries))
    page = '<rect class="page" width="100%" height="100%" rx="6"/>'
    return "\n".join(
        [f'{head} role="img"><title>{names}: perplexity</title><style>{STYLE}</style>{page}', *body, "</svg>\n"]
    )


def _most(entries: Sequence[Entry]) -> float:
    """The perplexity at the end of the axis."""
    levels = [entry.ppl for entry in entries if entry.ppl]
    reach = [*levels, *(v for entry in entries if entry.ppl for v in entry.ppl_ci95 or ())]
    reach += [entry.quoted.ppl for entry in entries if entry.quoted]
    far = FAR * median(levels or reach or [1.0])
    return max((value for value in reach if value <= far), default=1.0) * 1.04


def _legend(with_quoted: bool) -> list[str]:
    parts = [("exact", "=  exact"), ("bound", "≤  upper bound")]
    parts += [("quoted", "quoted from the paper: other data and size")] if with_quoted else []
    out, x = [], float(LEFT)
    for kind, words in parts:
        out.append(f'<rect class="{kind}" x="{x}" y="38" width="18" height="11"/>')
        out.append(f'<text class="note" x="{x + 24}" y="48">{words}</text>')
        x += 44 + 7 * len(words)
    return out


def _bar(entry: Entry, table: Table, y: float, most: float) -> list[str]:
    middle = y + BAR / 2
    name = escape(_short_name(entry.system)) + (f" ×{len(entry.seeds)}" if len(entry.seeds) > 1 else "")
    out = [f'<text x="{LEFT - 10}" y="{middle + 4.5:.1f}" text-anchor="end">{name}</text>']
    if entry.ppl is None:
        reasons = [trial.reason for trial in table.failed if trial.system == entry.system]
        words = "a pseudo-likelihood is no perplexity" if entry.pseudo_ppl else (reasons or ["not run yet"])[0]
        out.append(f'<text class="note" x="{LEFT + 8}" y="{middle + 4.5:.1f}">{escape(words[:80])}</text>')
    else:
        end = LEFT + WIDTH * min(entry.ppl / most, 1.0)
        kind = "exact" if entry.kind == "exact" else "bound"
        out.append(f'<rect class="{kind}" x="{LEFT}" y="{y:.1f}" width="{end - LEFT:.1f}" height="{BAR}"/>')
        if entry.ppl > most:
            out += _cut(end, y, BAR)
        elif entry.ppl_ci95 is not None:
            low, high = (LEFT + WIDTH * min(max(value, 0.0) / most, 1.0) for value in entry.ppl_ci95)
            line = f"M{low:.1f} {middle - 5} v10 M{low:.1f} {middle} H{high:.1f}"
            if entry.ppl_ci95[1] <= most:
                line += f" M{high:.1f} {middle - 5} v10"
            out += [f'<path class="{kind}" d="{line}"/>' for kind in ("halo", "error")]
            end = high
        out.append(f'<text x="{end + 8:.1f}" y="{middle + 4.5:.1f}">{entry.sign} {entry.ppl:.4g}</text>')
    return out + (_quoted(entry.quoted, y + BAR + 3, most) if entry.quoted else [])


def _quoted(found: Quoted, y: float, most: float) -> list[str]:
    width = WIDTH * min(found.ppl / most, 1.0)
    words = f"{found.ppl:g}, {found.data}"
    return [
        f'<rect class="quoted" x="{LEFT}" y="{y:.1f}" width="{width:.1f}" height="{THIN}"/>',
        f'<text class="note" x="{LEFT + width + 8:.1f}" y="{y + THIN + 2:.1f}">{escape(words)}</text>',
        *(_cut(LEFT + width, y, THIN) if found.ppl > most else []),
    ]


def _cut(end: float, y: float, height: float) -> list[str]:
    """A gap near the end of a bar that is longer than the axis."""
    return [f'<path class="halo" d="M{end - 16:.1f} {y + height + 2:.1f} l6 {-height - 4}"/>']


def _short_name(name: str) -> str:
    return name if len(name) <= 24 else name[:23] + "…"
