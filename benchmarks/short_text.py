"""When diffusion overtakes autoregression on a short text that is read repeatedly: a table and a plot.

    python benchmarks/short_text.py runs/short_text [--target 15_554_326] [--plot short.svg] [--json numbers.json]

Reads the folders that experiments.py wrote for short_text.toml: one for each part of the text and each number of
epochs, with runs whose learning rate has decayed to 0. Autoregression counts with its best budget and regularisation;
diffusion's line has its best regularisation at each budget. If the line falls below autoregression, the crossing is
interpolated in the logarithm of the epochs. If it does not, the line is extrapolated by the power law through its last
three points, and the output says so. Over several parts of the text, the crossings are fitted by a line in logarithms,
which predicts what the whole text would need.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from unmask.cli._chart import Curve, draw
from unmask.comparison.trial import FOLDER, Trial, read_trial

FARTHEST = 30.0  # a continued line is followed to so many times the epochs that were measured


@dataclass(frozen=True)
class Point:
    """A run at its best validation. read: epochs of the whole run, whose rate has fallen to 0 at its end."""

    read: float
    nats: float
    system: str


@dataclass(frozen=True)
class Part:
    """All runs on a part of the text; each line has one point for each budget, the best."""

    tokens: int
    ar: list[Point]
    diffusion: list[Point]

    @property
    def best_ar(self) -> Point:
        return min(self.ar, key=lambda point: point.nats)


@dataclass(frozen=True)
class Crossing:
    """After how many epochs diffusion's line comes below the best of autoregression. continued: nobody measured it.
    at_most: it is below already at the shortest budget measured."""

    tokens: int
    epochs: float
    continued: bool
    at_most: bool = False

    @property
    def trained(self) -> float:
        """Tokens that are read until then."""
        return self.tokens * self.epochs


def read_parts(out: Path) -> list[Part]:
    """What is finished in the folders of a queue, by the size of the text."""
    found: dict[int, list[Trial]] = defaultdict(list)
    for file in sorted(out.glob(f"*/{FOLDER}/[!.]*.json")):
        trial = read_trial(file.parent.parent, file.stem)
        if trial is not None and trial.finished:
            found[round(trial.tokens / trial.epochs)].append(trial)
    if not found:
        raise SystemExit(f"{out} holds no finished trial: run benchmarks/experiments.py with short_text.toml first")
    return [
        Part(tokens, _line(trials, exact=True), _line(trials, exact=False)) for tokens, trials in sorted(found.items())
    ]


def _line(trials: Sequence[Trial], *, exact: bool) -> list[Point]:
    """The best of each budget."""
    by_budget: dict[int, Point] = {}
    for trial in trials:
        if (trial.kind == "exact") == exact:
            point = Point(trial.epochs, trial.nats_per_token, trial.system)
            before = by_budget.setdefault(trial.steps, point)
            by_budget[trial.steps] = min(before, point, key=lambda p: p.nats)
    return [by_budget[steps] for steps in sorted(by_budget)]


def power_law(line: Sequence[Point]) -> tuple[float, float, float] | None:
    """(floor, scale, power) of floor + scale * read^-power through the last three points; None: they do not fall so.

    >>> points = [Point(e, 3.0 + 2.0 * e**-0.5, "") for e in (4.0, 16.0, 64.0)]
    >>> [round(x, 6) for x in power_law(points)]
    [3.0, 2.0, 0.5]
    """
    if len(line) < 3:
        return None
    a, b, c = line[-3:]
    if not a.nats > b.nats > c.nats:
        return None
    low, high = 1e-3, 20.0

    def off(power: float) -> float:
        x, y, z = (point.read**-power for point in (a, b, c))
        return (a.nats - b.nats) * (y - z) - (b.nats - c.nats) * (x - y)

    if off(low) * off(high) > 0:
        return None
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if off(low) * off(middle) > 0 else (low, middle)
    scale = (b.nats - c.nats) / (b.read**-low - c.read**-low)
    return c.nats - scale * c.read**-low, scale, low


def crossing(part: Part) -> Crossing | None:
    """Where diffusion passes; None: by its line it does not, or too little of it is known.

    >>> ar = [Point(4.0, 3.5, "ar")]
    >>> crossing(Part(100, ar, [Point(8.0, 4.0, "d"), Point(32.0, 3.0, "d")]))
    Crossing(tokens=100, epochs=16.0, continued=False, at_most=False)
    """
    if not part.ar or not part.diffusion:
        return None
    aim, line = part.best_ar.nats, part.diffusion
    if line[0].nats < aim:
        return Crossing(part.tokens, line[0].read, continued=False, at_most=True)
    for a, b in pairwise(line):
        if b.nats < aim:
            share = (a.nats - aim) / (a.nats - b.nats)
            return Crossing(part.tokens, a.read * (b.read / a.read) ** share, continued=False)
    law = power_law(line)
    if law is None or law[0] >= aim:
        return None
    floor, scale, power = law
    epochs = ((aim - floor) / scale) ** (-1 / power)
    return Crossing(part.tokens, epochs, continued=True) if epochs < FARTHEST * line[-1].read else None


def at_size(crossings: Sequence[Crossing], target: int) -> tuple[float, float] | None:
    """(tokens to be read, power of the text's size) for a text of `target` tokens, by least squares in logarithms.

    Of a crossing that lies before the shortest budget nobody knows where it is, so it does not count.

    >>> known = [Crossing(1, 10.0, False), Crossing(2, 20.0, False)]  # 10 and 40 tokens: as the square of the size
    >>> [round(x, 6) for x in at_size(known, 4)]
    [160.0, 2.0]
    """
    crossings = [one for one in crossings if not one.at_most]
    if len(crossings) < 2:
        return None
    x = [math.log(one.tokens) for one in crossings]
    y = [math.log(one.trained) for one in crossings]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    power = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - middle_x) ** 2 for a in x
    )
    return math.exp(middle_y + power * (math.log(target) - middle_x)), power


def table(parts: Sequence[Part], target: int | None) -> list[str]:
    """Markdown."""
    lines = ["| text, tokens | system | epochs | nats/token |", "| --- | --- | --- | --- |"]
    for part in parts:
        for point in (*part.ar, *part.diffusion):
            best = " (best of autoregression)" if part.ar and point is part.best_ar else ""
            cells = [f"{part.tokens:,}", point.system, f"{point.read:.1f}", f"{point.nats:.4f}{best}"]
            lines.append("| " + " | ".join(cells) + " |")
    known = [one for part in parts if (one := crossing(part)) is not None]
    lines.append("")
    lines += [f"{part.tokens:,} tokens: {outcome(part)}" for part in parts]
    for part in parts:
        if part.ar and part.best_ar is part.ar[-1]:
            lines.append(
                f"{part.tokens:,} tokens: autoregression is best at its longest budget, so measure a longer one"
            )
    if target is not None and (far := at_size(known, target)) is not None:
        words = f"{target:,} tokens: {far[0]:,.0f} tokens read, {far[0] / target:.0f} epochs"
        fitted = sum(not one.at_most for one in known)
        lines.append(f"{words}, by tokens read ~ size^{far[1]:.2f} through {fitted} crossings")
    return lines


def outcome(part: Part) -> str:
    """Where diffusion passes, in words, or why that is not known.

    >>> outcome(Part(100, [Point(4.0, 3.5, "ar")], []))
    'diffusion is not measured yet'
    """
    for name, line in (("autoregression", part.ar), ("diffusion", part.diffusion)):
        if not line:
            return f"{name} is not measured yet"
    met = crossing(part)
    if met is None and len(part.diffusion) < 3:
        return "diffusion is above so far; its line is continued from three budgets on"
    if met is None:
        return "by its line diffusion does not come below autoregression"
    after = f"{met.epochs:.0f} epochs, {met.trained:,.0f} tokens read"
    if met.at_most:
        return f"diffusion is below already after {after}, the shortest budget"
    how = "its line, continued by a power law, would pass" if met.continued else "diffusion passes"
    return f"{how} after {after}"


def picture(parts: Sequence[Part]) -> str:
    """Bounds over epochs, a pair of lines for each part of the text."""
    curves = []
    for part in parts:
        for name, line in (("autoregression", part.ar), ("diffusion", part.diffusion)):
            if line:
                points = [(point.read, point.nats) for point in line]
                curves.append(Curve(f"{part.tokens / 1e6:.1f}M tokens, {name}", [], points))
    return draw(curves, across="epochs", up="held-out nats per token, each point a run of its own")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the queue's folder")
    parser.add_argument("--target", type=int, metavar="TOKENS", help="tell what a text of this size would need")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    parts = read_parts(args.out)
    print("\n".join(table(parts, args.target)))
    if args.plot:
        args.plot.write_text(picture(parts), encoding="utf-8")
    if args.json:
        known = [crossing(part) for part in parts]
        numbers = {"parts": [asdict(part) for part in parts], "crossings": [one and asdict(one) for one in known]}
        args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
