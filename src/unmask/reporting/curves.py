"""Learning curves of several runs as SVG elements, for a page that includes their style: `STYLE`.

Runs differ in dashes and marks as well as in colour, so that they can be told apart in black and white.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count

from unmask.axes import short, ticks
from unmask.reporting.blocks import printable
from unmask.reporting.metrics_file import Point
from unmask.reporting.plotting import Points, smoothed, thinned, unit_of

WIDTH, HEIGHT = 400, 260
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 26, 42
ACROSS = ("steps", "tokens", "seconds")
DASHES = ("", "7 3", "2 3", "10 3 2 3", "12 5", "4 2 4 6", "1 4", "14 3 2 3 2 3")
STYLE = """
.curves text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
.curves .note { fill: #57606a; } .curves .grid { stroke: #d8dee4; } .curves .axis { stroke: #57606a; }
.curves polyline { fill: none; stroke-linejoin: round; stroke-width: 1.8; }
.curves .raw { opacity: .25; stroke-width: 1; }
.curves .mark { stroke-width: 1.5; } .curves .hollow { fill: #ffffff; } .curves .bar { stroke-width: 1.2; fill: none; }
.c0 { stroke: #0072b2; fill: #0072b2; } .c1 { stroke: #c04f00; fill: #c04f00; }
.c2 { stroke: #00805c; fill: #00805c; } .c3 { stroke: #a8508a; fill: #a8508a; }
.c4 { stroke: #8a6508; fill: #8a6508; } .c5 { stroke: #2f8fd0; fill: #2f8fd0; }
.c6 { stroke: #7e57c2; fill: #7e57c2; } .c7 { stroke: #57606a; fill: #57606a; }
@media (prefers-color-scheme: dark) {
  .curves text { fill: #e6edf3; } .curves .note { fill: #9aa4af; } .curves .grid { stroke: #21262d; }
  .curves .axis { stroke: #8b949e; } .curves .hollow { fill: #0d1117; }
  .c0 { stroke: #58b4e8; fill: #58b4e8; } .c1 { stroke: #ff8a3d; fill: #ff8a3d; }
  .c2 { stroke: #35c99b; fill: #35c99b; } .c3 { stroke: #e59cc9; fill: #e59cc9; }
  .c4 { stroke: #dcb03c; fill: #dcb03c; } .c5 { stroke: #8fcdf5; fill: #8fcdf5; }
  .c6 { stroke: #b79bf0; fill: #b79bf0; } .c7 { stroke: #9aa4af; fill: #9aa4af; }
}
"""
Place = Callable[[float, float], tuple[float, float]]
_numbers = count()  # ids of clip paths, which must be unique on a page


@dataclass(frozen=True)
class Series:
    """One run's points in a panel. bars: intervals as (x, low, high). marked: whether each point has a mark."""

    number: int  # index of the run, which determines its colour, dashes and mark
    points: Points
    bars: list[tuple[float, float, float]] = field(default_factory=list)
    marked: bool = False
    raw: Points = field(default_factory=list)


def series_of(number: int, points: Sequence[Point], what: str, across: str) -> Series:
    """what: loss, lr, valid or valid_bits_per_byte."""

    def x(point: Point) -> float:
        return float(point.step if across == "steps" else point.tokens if across == "tokens" else point.seconds)

    line = [(x(p), float(y)) for p in points if (y := getattr(p, what)) is not None]
    if what == "loss":
        smooth = smoothed(line)
        return Series(number, thinned(smooth), raw=thinned(line) if smooth != line else [])
    if what == "lr":
        return Series(number, thinned(line))
    ends = ("valid_low", "valid_high") if what == "valid" else ("valid_bits_low", "valid_bits_high")
    triples = [(x(p), getattr(p, ends[0]), getattr(p, ends[1])) for p in points if getattr(p, what) is not None]
    return Series(number, line, [(a, low, high) for a, low, high in triples if low is not None], marked=True)


def panel(series: Sequence[Series], *, across: str, up: str, names: Sequence[str]) -> str:
    """The SVG element; empty if there is nothing to draw: no points, or no values for the x axis.

    >>> panel([Series(0, [(0.0, 3.0), (9.0, 2.0)])], across="steps", up="nats per token", names=["a"])[:4]
    '<svg'
    """
    every = [p for one in series for p in one.points]
    most = max((x for x, _ in every), default=0.0)
    if not every or (most <= 0 and across != "steps"):
        return ""
    x_hi = most or 1.0
    low, high = _reach(series, x_hi)
    unit, divisor = unit_of(across, x_hi)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * x / x_hi, bottom - (bottom - TOP) * (y - low) / (high - low)

    body = []
    for tick in ticks(low, high):
        y = place(0.0, tick)[1]
        body.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text class="note" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_spelled(tick)}</text>')
    marks = ticks(0.0, x_hi / divisor)
    for tick in marks[:: 2 if across == "tokens" and len(marks) > 5 else 1]:  # token counts are long
        x = place(tick * divisor, low)[0]
        body.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        body.append(f'<text class="note" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{short(tick)}</text>')
    body.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    body.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{bottom}"/>')
    body.append(f'<text x="{(LEFT + right) / 2}" y="{bottom + 35}" text-anchor="middle">{unit}</text>')
    body.append(f'<text x="4" y="{TOP - 10}">{escape(up)}</text>')
    clip = f"clip{next(_numbers)}"
    field_of = f'<rect x="{LEFT - 6}" y="{TOP - 6}" width="{right - LEFT + 12}" height="{bottom - TOP + 12}"/>'
    body.append(f'<clipPath id="{clip}">{field_of}</clipPath><g clip-path="url(#{clip})">')
    for one in series:
        body += _lines(one, place)
    title = escape(printable(f"{up} against {unit}: {', '.join(names)}"))
    head = f'<svg class="curves" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return "\n".join([f'{head} role="img"><title>{title}</title>', *body, "</g></svg>"])


def key(number: int) -> str:
    """How a run is drawn, for a legend: an SVG element of 44 by 14."""
    dash = _dash(number)
    line = f'<polyline class="c{number % 8}"{dash} points="1,7 43,7"/>'
    return f'<svg class="curves key" viewBox="0 0 44 14" width="44" height="14">{line}{_mark(number, 22, 7)}</svg>'


def sheet(figures: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    """Panels of several figures, one line per figure, as a separate picture, for formats that cannot embed them.

    >>> sheet([], ["a"])[:4]
    '<svg'
    """
    top = 12 + 20 * len(names)
    width = max(1, max((len(line) for line in figures), default=1)) * WIDTH
    body = []
    for number, name in enumerate(names):
        y = 12 + 20 * number
        body.append(key(number).replace("<svg ", f'<svg x="12" y="{y}" ', 1))
        body.append(f'<text x="64" y="{y + 11}">{escape(printable(name))}</text>')
    for row, line in enumerate(figures):
        for column, one in enumerate(line):
            at = f'x="{column * WIDTH}" y="{top + 12 + row * HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
            body.append(one.replace("<svg ", f"<svg {at} ", 1))
    height = top + 12 + HEIGHT * len(figures)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    page = '<rect class="hollow" width="100%" height="100%"/>'
    return "\n".join([f'{head} class="curves"><style>{STYLE}</style>{page}', *body, "</svg>\n"])


def _lines(one: Series, place: Place) -> list[str]:
    colour = f"c{one.number % 8}"

    def line(points: Points, kind: str, dash: str) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in points))
        return f'<polyline class="{colour} {kind}"{dash} points="{path}"/>'

    out = [line(one.raw, "raw", "")] if one.raw else []
    out.append(line(one.points, "line", _dash(one.number)))
    for at, low, high in one.bars:
        x, top = place(at, high)
        end = place(at, low)[1]
        path = f"M{x:.1f} {top:.1f}V{end:.1f}M{x - 4:.1f} {top:.1f}h8M{x - 4:.1f} {end:.1f}h8"
        out.append(f'<path class="{colour} bar" fill="none" d="{path}"/>')
    if one.marked and len(one.points) <= 60:
        out += [_mark(one.number, *place(*point)) for point in one.points]
    return out


def _mark(number: int, x: float, y: float) -> str:
    """A circle, square, triangle or diamond; hollow for every second group of four runs."""
    shape = (
        f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7z",
        f"M{x:.1f} {y - 4.5:.1f}l4.5 8h-9z",
        f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
    )[number % 4]
    return f'<path class="mark c{number % 8}{" hollow" if number % 8 > 3 else ""}" d="{shape}"/>'


def _dash(number: int) -> str:
    dash = DASHES[number % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _spelled(value: float) -> str:
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}".replace("e-0", "e-")


def _reach(series: Sequence[Series], x_hi: float) -> tuple[float, float]:
    """The limits of the y axis.

    A run's initial fall would flatten the rest, so the first part is shown only within reach of the rest, and the curve
    enters from above.
    """
    points = [p for one in series for p in one.points]
    points += [(x, y) for one in series for x, low, high in one.bars for y in (low, high)]
    later = [y for x, y in points if x >= 0.05 * x_hi] or [y for _, y in points]
    low, high = min(y for _, y in points), max(later if len(later) > 6 * len(series) else (y for _, y in points))
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        gap = 0.1 * abs(high) or 0.5
        return low - gap, high + gap
    return low - 0.05 * (high - low), high + 0.05 * (high - low)
