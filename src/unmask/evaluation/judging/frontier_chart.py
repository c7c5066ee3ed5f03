"""The frontier as one SVG: a judge's perplexity against unigram entropy, network calls and seconds.

Lines differ in marks and dashes as well as in colour, so that the figure can be read in black and white. A hollow mark
is a point whose texts show less variety than the real ones, whatever its perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from unmask.axes import short, ticks
from unmask.errors import DataError

Line = dict[str, Any]
Scale = Callable[[float], float]
Box = tuple[float, float, float]  # left, bottom, width
WIDTH, HEIGHT, LEFT, GAP, TOP, BOTTOM, ROW = 300, 300, 64, 74, 26, 56, 20
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7e57c2", "#6e7781"]
DASHES = ["none", "7 4", "2 4", "9 3 2 3", "14 4", "4 2"]
SHAPES = ["circle", "square", "triangle", "diamond", "down"]
ALONG = ("temperature", "top_p", "steps")  # options along a line over entropy: the first that varies, otherwise steps
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
  .page { fill: #ffffff; } .note { fill: #6e7781; } .small { font-size: 11px; } .grid { stroke: #d8dee4; }
  .axis { stroke: #8c959f; } polyline { fill: none; stroke-width: 1.8; } .bar { stroke-width: 1.2; }
  .real { stroke: #1f2328; } .band { fill: #8c959f; opacity: 0.18; } .hollow { fill: #ffffff; }
  .over { paint-order: stroke; stroke: #ffffff; stroke-width: 3; stroke-linejoin: round; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .page, .hollow { fill: #0d1117; } .note { fill: #8b949e; } .grid { stroke: #21262d; }
    .real { stroke: #e6edf3; } .over { stroke: #0d1117; }
  }
"""


@dataclass
class Series:
    """Points drawn alike: they differ only in the options that lines follow."""

    name: str
    lines: list[Line] = field(default_factory=list)


@dataclass(frozen=True)
class Panel:
    """One panel: its x axis, the option that its lines follow, and the options that label a point."""

    label: str
    across: Callable[[Line], Any]
    key: str | None
    said: tuple[str | None, ...]
    log: bool = False


def draw(lines: Sequence[Line]) -> str:
    """The figure for a points.jsonl, whose first line is that of the real texts.

    >>> one = {"name": "real", "less_varied": [], "numbers": {k: {"value": 4.0, "ci95": [3.9, 4.1], "n": 2}
    ...        for k in ("judge_ppl", "entropy")}}
    >>> draw([one])[:4]
    '<svg'
    """
    real, *rest = [line for line in lines if line["numbers"]["judge_ppl"]["value"] is not None]
    if real["name"] != "real":
        raise DataError("the real texts have no finite perplexity, so there is nothing to compare with")
    along, cost, found = series(rest)
    top = TOP + ROW * (len(found) + 2)
    body = _legend(found, [key for key in dict.fromkeys((along, cost)) if key], real)
    panels = [
        Panel(
            "unigram entropy of a text, nats", lambda line: line["numbers"]["entropy"]["value"], along, (along, cost)
        ),
        Panel("network calls at most", lambda line: line.get("protocol", {}).get("calls"), cost, (along,), True),
        Panel("seconds a text", lambda line: line.get("protocol", {}).get("seconds_per_text"), cost, (along,), True),
    ]
    shown = [panel for panel in panels if not panel.log or any(panel.across(line) for line in rest)]
    for number, panel in enumerate(shown):
        body += _panel(real, found, panel, (LEFT + number * (WIDTH + GAP), top))
    width, height = LEFT + len(shown) * (WIDTH + GAP) - GAP + 28, top + HEIGHT + BOTTOM
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    title = f"<title>a judge's perplexity: {escape(', '.join(one.name for one in found) or 'real texts')}</title>"
    page = f'{title}<style>{STYLE}</style><rect class="page" width="100%" height="100%" rx="6"/>'
    return "\n".join([f'{head} role="img">{page}', *body, "</svg>\n"])


def series(lines: Sequence[Line]) -> tuple[str | None, str | None, list[Series]]:
    """The options that lines follow over entropy and over cost, and the points grouped by the remaining options.

    >>> points = [{"model": "a", "options": {"steps": str(n), "top_p": p}} for n in (16, 64) for p in ("0.9", "1")]
    >>> along, cost, found = series(points)
    >>> along, cost, [one.name for one in found]
    ('top_p', 'steps', ['a'])
    """
    options = list(dict.fromkeys(key for line in lines for key in line["options"]))
    values = {key: {line["options"].get(key) for line in lines} - {None} for key in options}
    varied = [key for key in options if len(values[key]) > 1]
    numeric = [key for key in varied if all(_number(value) is not None for value in values[key])]
    along = next((key for key in (*ALONG, *numeric) if key in numeric), None)
    cost = "steps" if "steps" in numeric else along
    found: dict[str, Series] = {}
    for line in lines:
        others = [f"{key} {line['options'][key]}" for key in varied if key in line["options"]]
        others = [said for said in others if said.split(" ")[0] not in (along, cost)]
        name = ", ".join([line["model"], *others])
        found.setdefault(name, Series(name)).lines.append(line)
    return along, cost, list(found.values())


def _joined(lines: list[Line], key: str | None) -> list[list[Line]]:
    """Group points that differ only in the option `key`, ordered by it."""
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        rest = tuple(sorted((k, v) for k, v in line["options"].items() if k != key))
        groups.setdefault(rest, []).append(line)
    return [sorted(group, key=lambda line: _number(line["options"].get(key)) or 0.0) for group in groups.values()]


def _number(value: Any) -> float | None:
    try:
        return math.inf if value in ("inf", "none") else float(value)
    except (TypeError, ValueError):
        return None


def _legend(found: list[Series], follow: list[str], real: Line) -> list[str]:
    out = []
    for number, one in enumerate(found):
        y = TOP + ROW * number
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        out.append(
            f'<line x1="{LEFT}" x2="{LEFT + 34}" y1="{y - 4.5}" y2="{y - 4.5}" stroke="{colour}" stroke-width="1.8" '
            f'stroke-dasharray="{dash}"/>'
        )
        out.append(_mark(number, LEFT + 17, y - 4.5, hollow=False))
        out.append(f'<text x="{LEFT + 44}" y="{y}">{escape(one.name)}</text>')
    value = real["numbers"]["judge_ppl"]["value"]
    y = TOP + ROW * len(found)
    said = f"real texts {value:.2f}; bars and bands: 95% intervals; hollow: less variety than real texts"
    said += f"; numbers: {', '.join(follow)}" if follow else ""
    out += [_cross(LEFT + 17, y - 4.5), f'<text class="note" x="{LEFT + 44}" y="{y}">{escape(said)}</text>']
    return out


def _panel(real: Line, found: list[Series], panel: Panel, corner: tuple[float, float]) -> list[str]:
    left, top = corner
    across, over_entropy = panel.across, not panel.log

    def there(line: Line) -> bool:
        """Whether the panel can show the point.

        An entropy of 0 is shown; 0 calls or seconds cannot be on a logarithmic axis.
        """
        return across(line) is not None and (over_entropy or across(line) > 0)

    lines = [line for one in found for line in one.lines if there(line)]
    ppl = [end for line in [real, *lines] for end in _ends(line, "judge_ppl")]
    entropies = [end for line in [real, *lines] for end in _ends(line, "entropy")]
    x_of, x_reach = _scale(entropies if over_entropy else list(map(across, lines)), left, left + WIDTH, log=panel.log)
    y_of, y_reach = _scale(ppl, top + HEIGHT, top, log=True)
    out = _axes(panel.label, corner, x_of, x_reach, y_of, y_reach, panel.log)
    low, high = (y_of(end) for end in (_ends(real, "judge_ppl")[0], _ends(real, "judge_ppl")[-1]))
    y = y_of(real["numbers"]["judge_ppl"]["value"])
    out.append(f'<rect class="band" x="{left}" width="{WIDTH}" y="{high:.1f}" height="{max(0.0, low - high):.1f}"/>')
    out.append(_stroke("real", left, y, left + WIDTH, y, extra='stroke-dasharray="5 4"'))
    if over_entropy:
        x, low, high = x_of(across(real)), *(x_of(_ends(real, "entropy")[end]) for end in (0, -1))
        out.append(f'<rect class="band" x="{low:.1f}" width="{high - low:.1f}" y="{top}" height="{HEIGHT}"/>')
        out += [_stroke("real", x, top, x, top + HEIGHT, extra='stroke-dasharray="5 4"'), _cross(x, y)]
    for number, one in enumerate(found):
        for group in _joined([line for line in one.lines if there(line)], panel.key):
            out += _curve(number, group, panel, x_of, y_of)
    places = [(x_of(across(line)), y_of(line["numbers"]["judge_ppl"]["value"]), _said(line, panel)) for line in lines]
    bars: list[Box] = []
    for line, (_, y, _) in zip(lines, places, strict=True) if over_entropy else ():
        ends = [x_of(end) for end in _ends(line, "entropy")]
        bars.append((ends[0], y + 5, ends[-1] - ends[0]))
    return out + _names(places, bars, left, left + WIDTH + GAP - 30)


def _curve(number: int, group: list[Line], panel: Panel, x_of: Scale, y_of: Scale) -> list[str]:
    """A line with its marks and their intervals."""
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    places = [(x_of(panel.across(line)), y_of(line["numbers"]["judge_ppl"]["value"]), line) for line in group]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    out = [f'<polyline stroke="{colour}" stroke-dasharray="{dash}" points="{path}"/>']
    for x, y, line in places:
        bar = f'stroke="{colour}"'
        ends = [y_of(end) for end in _ends(line, "judge_ppl")]
        out.append(_stroke("bar", x, ends[0], x, ends[-1], extra=bar))
        if not panel.log:
            ends = [x_of(end) for end in _ends(line, "entropy")]
            out.append(_stroke("bar", ends[0], y, ends[-1], y, extra=bar))
        out.append(_mark(number, x, y, hollow=bool(line["less_varied"])))
    return out


def _said(line: Line, panel: Panel) -> str:
    """The label of a mark: the values that lines follow."""
    return ", ".join(line["options"][key] for key in dict.fromkeys(panel.said) if key in line["options"])


def _names(places: list[tuple[float, float, str]], bars: list[Box], begin: float, end: float) -> list[str]:
    """Places a label at each mark, at the first position around it that is free.

    A position is free if it overlaps no interval and no other label, is at no other mark (it would be read as that
    mark's), and lies between begin and end. If there is none, the mark has no label.
    """
    marks: list[Box] = [(x - 16, y + 5, 32) for x, y, _ in places]
    names: list[Box] = []
    out = []
    for i in sorted(range(len(places)), key=lambda i: places[i][1]):  # of two marks, the upper one gets the upper label
        x, y, said = places[i]
        width = 6.5 * len(said)
        taken = [*names, *bars, *marks[:i], (x - 5, y + 5, 10), *marks[i + 1 :]]
        lefts = (x + 7, x - 7 - width, x - width / 2)
        around: list[Box] = [(left, bottom, width) for left in lefts for bottom in (y - 7, y + 17)]
        free = [box for box in around if begin <= box[0] and box[0] + width <= end]
        box = next((box for box in free if not any(_overlap(box, other) for other in taken)), None)
        if said and box is not None:
            names.append(box)
            out.append(f'<text class="note small over" x="{box[0]:.1f}" y="{box[1]:.1f}">{escape(said)}</text>')
    return out


def _overlap(one: Box, other: Box) -> bool:
    """Whether two labels, or a label and a mark, overlap; all are 11 pixels high."""
    return abs(one[1] - other[1]) < 11 and one[0] < other[0] + other[2] and other[0] < one[0] + one[2]


def _ends(line: Line, name: str) -> list[float]:
    """The ends of an interval; the number itself if it has none."""
    one = line["numbers"][name]
    return [one["value"]] if one["ci95"] is None else [one["ci95"][0], one["value"], one["ci95"][1]]


def _scale(values: list[float], begin: float, end: float, *, log: bool) -> tuple[Scale, tuple[float, float]]:
    """The function from values to positions, and the ends of the axis, slightly beyond the values."""
    form: Scale = math.log if log else float
    low, high = form(min(values)), form(max(values))
    pad = 0.06 * (high - low) or 0.1
    low, high = low - pad, high + pad

    def scale(value: float) -> float:
        return begin + (end - begin) * (form(value) - low) / (high - low)

    return scale, (math.exp(low), math.exp(high)) if log else (low, high)


def _axes(
    label: str,
    corner: tuple[float, float],
    x_of: Scale,
    x_reach: tuple[float, float],
    y_of: Scale,
    y_reach: tuple[float, float],
    log: bool,
) -> list[str]:
    left, top = corner
    bottom = top + HEIGHT
    out = [f'<text class="note" x="{left}" y="{top - 10}">judge\'s perplexity, logarithmic</text>']
    for tick in ticks(*y_reach, log=True):
        y = y_of(tick)
        out.append(_stroke("grid", left, y, left + WIDTH, y))
        out.append(f'<text class="note" x="{left - 8}" y="{y + 4.5:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in ticks(*x_reach, log=log):
        x = x_of(tick)
        out.append(_stroke("axis", x, bottom, x, bottom + 5))
        out.append(f'<text class="note" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{short(tick)}</text>')
    out.append(_stroke("axis", left, bottom, left + WIDTH, bottom))
    said = f"{label}, logarithmic" if log else label
    return [*out, f'<text x="{left + WIDTH / 2}" y="{bottom + 42}" text-anchor="middle">{said}</text>']


def _stroke(kind: str, x1: float, y1: float, x2: float, y2: float, *, extra: str = "") -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {extra}/>'


def _cross(x: float, y: float) -> str:
    return _stroke("real", x - 6, y - 6, x + 6, y + 6) + _stroke("real", x - 6, y + 6, x + 6, y - 6)


def _mark(number: int, x: float, y: float, *, hollow: bool) -> str:
    colour = COLOURS[number % len(COLOURS)]
    look = f'class="{"hollow" if hollow else "mark"}" stroke="{colour}" stroke-width="1.6"'
    look += "" if hollow else f' fill="{colour}"'
    shape = SHAPES[number % len(SHAPES)]
    if shape == "circle":
        return f'<circle {look} cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
    shapes: dict[str, list[tuple[float, float]]] = {
        "square": [(-4, -4), (4, -4), (4, 4), (-4, 4)],
        "triangle": [(0, -5.5), (5, 4), (-5, 4)],
        "diamond": [(0, -6), (5.5, 0), (0, 6), (-5.5, 0)],
        "down": [(0, 5.5), (5, -4), (-5, -4)],
    }
    return f'<polygon {look} points="{" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in shapes[shape])}"/>'
