"""Scores base by base as an SVG, one panel per region: bits over positions, readable in black and white."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from unmask.axes import ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 860, 150, 60, 24, 58, 66
SINGLE = 430  # maximum bases of a region with one bar each; beyond that a bar is the mean of several
LETTERS = 110  # maximum bases with letters below the bars
MOST = 12  # maximum number of panels
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
  .page { fill: #ffffff; } .note { fill: #57606a; font-size: 12px; }
  .grid { stroke: #d8dee4; } .axis { stroke: #57606a; }
  .bar { fill: #9aa4ae; } .unknown { fill: url(#hatch); } .hatch { stroke: #57606a; stroke-width: 1.4; }
  .uniform { stroke: #1f2328; stroke-dasharray: 6 4; } .mean { stroke: #1f2328; stroke-dasharray: 2 3; }
  .letter { font: 600 11px ui-monospace, monospace; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .bar { fill: #4a535e; } .page { fill: #0d1117; } .note { fill: #8b949e; }
    .grid { stroke: #21262d; } .axis, .hatch { stroke: #8b949e; } .uniform, .mean { stroke: #e6edf3; }
  }
"""


@dataclass(frozen=True)
class Panel:
    """A region. first: position of its first base; step: 1, or -1 along the other strand. bits: NaN where unknown."""

    name: str
    first: int
    step: int
    text: str
    bits: Sequence[float]


def draw(panels: Sequence[Panel], *, said: str) -> str:
    """The figure as SVG. said: a description of the bits.

    >>> draw([Panel("a:1-2", 1, 1, "AN", [1.5, math.nan])], said="each base given all others")[:4]
    '<svg'
    """
    body = [
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>',
        f'<text class="note" x="{LEFT}" y="22">{escape(said)}</text>',
        f'<text class="note" x="{LEFT}" y="40">dashes: 2 bits, four bases alike; dots: the mean; hatched: not known'
        "</text>",
    ]
    top = TOP
    for panel in panels:
        body += _panel(panel, top + 20)
        top += HEIGHT + GAP + 20
    width, height = LEFT + WIDTH + RIGHT, top
    names = escape(", ".join(panel.name for panel in panels))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    page = '<rect class="page" width="100%" height="100%" rx="6"/>'
    return "\n".join(
        [f'{head} role="img"><title>{names}: bits per base</title><style>{STYLE}</style>{page}', *body, "</svg>\n"]
    )


def _panel(panel: Panel, top: int) -> list[str]:
    bars = binned(panel.bits, SINGLE)
    known = [bits for bits in panel.bits if not math.isnan(bits)]
    most = max(2.2, *(bits for _, _, bits in bars if not math.isnan(bits)), 0.0)
    bottom, each = top + HEIGHT, math.ceil(len(panel.bits) / len(bars))
    unit = "bits per base" + (f", means of {each} bases" if each > 1 else "")
    body = [f'<text x="{LEFT}" y="{top - 8}"><tspan font-weight="600">{escape(panel.name)}</tspan>']
    mean = f", {sum(known) / len(known):.3f} on average" if known else ""
    body[0] += f'<tspan class="note" dx="10">{unit}{mean}</tspan></text>'

    def y_of(bits: float) -> float:
        return bottom - HEIGHT * bits / most

    for tick in ticks(0.0, most):
        body.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y_of(tick):.1f}" y2="{y_of(tick):.1f}"/>')
        body.append(f'<text class="note" x="{LEFT - 8}" y="{y_of(tick) + 4.5:.1f}" text-anchor="end">{tick:g}</text>')
    per_base = WIDTH / len(panel.bits)
    for low, high, bits in bars:
        x, width = LEFT + low * per_base, max(0.4, (high - low) * per_base * 0.9)
        if math.isnan(bits):
            body.append(f'<rect class="unknown" x="{x:.2f}" y="{top}" width="{width / 0.9:.2f}" height="{HEIGHT}"/>')
        else:
            y = y_of(bits)
            body.append(f'<rect class="bar" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{bottom - y:.2f}"/>')
    for kind, level in (("uniform", 2.0), ("mean", sum(known) / len(known) if known else 2.0)):
        body.append(
            f'<line class="{kind}" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y_of(level):.1f}" y2="{y_of(level):.1f}"/>'
        )
    body.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{bottom}" y2="{bottom}"/>')
    return body + _below(panel, bottom, per_base)


def _below(panel: Panel, bottom: int, per_base: float) -> list[str]:
    """Letters, if there is room, and positions."""
    body, under = [], bottom
    if len(panel.text) <= LETTERS:
        under += 12
        for i, base in enumerate(panel.text):
            x = LEFT + (i + 0.45) * per_base
            body.append(f'<text class="letter" x="{x:.1f}" y="{under}" text-anchor="middle">{base}</text>')
    last = panel.first + panel.step * (len(panel.text) - 1)
    low, high = sorted((panel.first, last))
    for tick in [tick for tick in ticks(low, high) if tick == int(tick)] if high > low else [low]:
        x = LEFT + (abs(tick - panel.first) + 0.5) * per_base
        body.append(f'<text class="note" x="{x:.1f}" y="{under + 16}" text-anchor="middle">{tick:,.0f}</text>')
    unit = "position (base pairs)" + ("" if panel.step > 0 else ", along the other strand")
    body.append(f'<text class="note" x="{LEFT + WIDTH / 2}" y="{under + 33}" text-anchor="middle">{unit}</text>')
    return body


def binned(bits: Sequence[float], most: int) -> list[tuple[int, int, float]]:
    """At most `most` bars: start and end, and the mean of the known values there; NaN if there are none.

    >>> binned([1.0, 3.0, math.nan, math.nan], 2)
    [(0, 2, 2.0), (2, 4, nan)]
    """
    each = math.ceil(len(bits) / most)
    cuts = [*range(0, len(bits), each), len(bits)]
    bars = []
    for low, high in pairwise(cuts):
        known = [value for value in bits[low:high] if not math.isnan(value)]
        bars.append((low, high, sum(known) / len(known) if known else math.nan))
    return bars
