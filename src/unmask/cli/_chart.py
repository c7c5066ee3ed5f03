"""Curves of training runs as a self-contained SVG, light or dark as the reader's screen is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from unmask.axes import short, ticks
from unmask.errors import DataError
from unmask.reporting.plotting import Points, smoothed, thinned, unit_of

WIDTH, HEIGHT = 720, 360  # of the field
LEFT, RIGHT, TOP, BOTTOM, LINE = 64, 24, 24, 52, 20
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7e57c2", "#6e7781"]
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
  .page { fill: #ffffff; } .note { fill: #6e7781; } .grid { stroke: #d8dee4; } .axis { stroke: #8c959f; }
  polyline { fill: none; stroke-linejoin: round; } .raw { stroke-width: 1; opacity: 0.22; } .loss { stroke-width: 1.4; }
  .valid { stroke-width: 2.4; } .dot { stroke: #ffffff; stroke-width: 1.2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .page { fill: #0d1117; } .note { fill: #8b949e; } .grid { stroke: #21262d; }
    .axis { stroke: #6e7681; } .dot { stroke: #0d1117; } polyline, .dot, .key { filter: brightness(1.35); }
  }
"""
Scale = Callable[[float], float]


@dataclass
class Curve:
    """A run: its name, the training loss and the validations, over whatever is across."""

    name: str
    loss: Points
    valid: Points


def draw(curves: list[Curve], *, across: str, up: str, log: bool = False) -> str:
    """The picture.

    >>> draw([Curve("a", [(1.0, 3.0), (2.0, 2.0)], [(2.0, 2.1)])], across="steps", up="nats per token")[:4]
    '<svg'
    """
    top = TOP + LINE * len(curves) + LINE
    x_hi = max(x for curve in curves for x, _ in (*curve.loss, *curve.valid)) or 1.0
    y_lo, y_hi = _reach(curves, x_hi, log)
    unit, divisor = unit_of(across, x_hi)
    x_of = _scale(0.0, x_hi, LEFT, LEFT + WIDTH)
    y_of = _scale(y_lo, y_hi, top + HEIGHT, top, log=log)
    body = [
        f'<clipPath id="field"><rect x="{LEFT}" y="{top - 4}" width="{WIDTH + 8}" height="{HEIGHT + 4}"/></clipPath>'
    ]
    for tick in ticks(y_lo, y_hi, log):
        y = y_of(tick)
        body.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text class="note" x="{LEFT - 8}" y="{y + 4.5:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in ticks(0.0, x_hi / divisor, False):
        x = x_of(tick * divisor)
        body.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top + HEIGHT}" y2="{top + HEIGHT + 5}"/>')
        body.append(f'<text class="note" x="{x:.1f}" y="{top + HEIGHT + 20}" text-anchor="middle">{short(tick)}</text>')
    bottom = top + HEIGHT
    body.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{bottom}" y2="{bottom}"/>')
    body.append(f'<text x="{LEFT + WIDTH / 2}" y="{bottom + 42}" text-anchor="middle">{unit}</text>')
    body.append(f'<text class="note" x="{LEFT}" y="{top - 12}">{up}{", logarithmic" if log else ""}</text>')
    if any(curve.loss for curve in curves):
        key = "thin: training, smoothed; dots: validation"
        body.append(f'<text class="note" x="{LEFT + WIDTH}" y="{top - 12}" text-anchor="end">{key}</text>')
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        body += [*_legend(curve, colour, TOP + LINE * number), '<g clip-path="url(#field)">']
        body += [*_lines(curve, colour, x_of, y_of), "</g>"]
    width, height = LEFT + WIDTH + RIGHT, bottom + BOTTOM
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    page = '<rect class="page" width="100%" height="100%" rx="6"/>'
    names = escape(", ".join(curve.name for curve in curves))
    return "\n".join([f'{head} role="img"><title>{names}: {up}</title><style>{STYLE}</style>{page}', *body, "</svg>\n"])


def _lines(curve: Curve, colour: str, x_of: Scale, y_of: Scale) -> list[str]:
    def place(points: Points) -> list[tuple[float, float]]:
        return [(x_of(x), y_of(y)) for x, y in points]

    def line(kind: str, points: Points) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in place(points))
        return f'<polyline class="{kind}" stroke="{colour}" points="{path}"/>'

    out = []
    if curve.loss:
        smooth = smoothed(curve.loss)
        out += [line("raw", thinned(curve.loss))] if smooth != curve.loss else []
        out.append(line("loss", thinned(smooth)))
    if curve.valid:
        out.append(line("valid", curve.valid))
        if len(curve.valid) <= 60:
            out += [
                f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in place(curve.valid)
            ]
    return out


def _legend(curve: Curve, colour: str, y: float) -> list[str]:
    parts = []
    if curve.loss:
        parts.append(f"training loss {smoothed(curve.loss)[-1][1]:.4f}")
    if curve.valid:
        best, newest = min(value for _, value in curve.valid), curve.valid[-1][1]
        parts.append(f"validation {newest:.4f}" + (f" (best {best:.4f})" if best < newest else ""))
    x = LEFT + 26
    name = curve.name if len(curve.name) <= 48 else "…" + curve.name[-47:]
    return [
        f'<line class="key" x1="{LEFT}" x2="{LEFT + 18}" y1="{y - 4.5}" y2="{y - 4.5}" '
        f'stroke="{colour}" stroke-width="3"/>',
        f'<text x="{x}" y="{y}"><tspan font-weight="600">{escape(name)}</tspan>'
        f'<tspan class="note" dx="10">{", ".join(parts)}</tspan></text>',
    ]


def _reach(curves: list[Curve], x_hi: float, log: bool) -> tuple[float, float]:
    """The ends of the axis. How far a run falls at first would flatten all that follows: of its first part only
    what lies within reach of the rest is drawn, and the curve comes in from above."""
    points = [p for curve in curves for p in (*thinned(smoothed(curve.loss)), *curve.valid)]
    later = [y for x, y in points if x >= 0.05 * x_hi] or [y for _, y in points]
    if log and min(y for _, y in points) <= 0:
        raise DataError("a loss of 0 or less cannot be drawn logarithmically: leave out --log")
    low, high = min(y for _, y in points), max(y for _, y in points) if log else max(later)
    if high <= low:
        return (low / 1.1, high * 1.1) if log else (low - 0.5, high + 0.5)
    if log:
        return low / (high / low) ** 0.04, high * (high / low) ** 0.04
    return low - 0.04 * (high - low), high + 0.04 * (high - low)


def _scale(low: float, high: float, begin: float, end: float, *, log: bool = False) -> Scale:
    form: Scale = math.log if log else float

    def scale(value: float) -> float:
        return begin + (end - begin) * (form(value) - form(low)) / (form(high) - form(low))

    return scale
