"""Each way's difference to the baseline, seed by seed, with a 95% interval; best first.

    python -m ways.table runs.jsonl [--setting small] [--steps 600]

±: Student's t over the way's own seeds. ±all: the same with the spread of all ways' differences put together, which
two seeds allow. worth: the tokens with which the baseline would end at this bound, as a multiple, read off the runs
work-*. reached: the share of its own tokens after which a way had the baseline's last bound, by straight lines.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, variance

from unmask.errors import UsageError
from unmask.evaluation.measurement import student_975
from ways.catalogue import SETTINGS, way_named
from ways.command import run_command
from ways.results import TIMED, Line, read_lines

Point = tuple[float, float]


@dataclass(frozen=True)
class Row:
    """What the table says of a way; differences are the way less the baseline, in nats a token."""

    way: str
    seeds: int
    third: float
    last: float
    own: float  # half of the interval
    pooled: float
    bound: float
    worth: float | None
    reached: float | None
    seconds: float
    alone: bool  # seconds: of a run with nothing beside it
    more_parameters: int
    more_embeddings: int


def curves(lines: Sequence[Line]) -> dict[str, dict[int, Line]]:
    """Whole runs by way and seed; one that diverged has no number and is left out."""
    found: dict[str, dict[int, Line]] = {}
    for line in lines:
        if "curve" in line and all(point[2] is not None for point in line["curve"]):
            found.setdefault(line["way"], {})[line["seed"]] = line
    return found


def crossing(points: Sequence[Point], level: float) -> float | None:
    """Where a falling line of points first reaches a level; None: it never does.

    >>> crossing([(1.0, 5.0), (2.0, 3.0)], 4.0), crossing([(1.0, 5.0)], 4.0)
    (1.5, None)
    """
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 == level:
            return x0
        if y0 > level >= y1:
            return x0 + (x1 - x0) * (y0 - level) / (y0 - y1)
    return None


def exchange(found: dict[str, dict[int, Line]], bound: float) -> float | None:
    """The multiple of its tokens with which the baseline ends at a bound; None: beyond what was run."""
    base = found["baseline"]
    ends = [(0.0, mean_end(base))]
    for name, runs in found.items():
        both = sorted(runs.keys() & base.keys())
        if is_longer(name) and both:
            apart = fmean(_end(runs[s]) - _end(base[s]) for s in both)
            ends.append((math.log(way_named(name).work), mean_end(base) + apart))
    at = crossing(sorted(ends), bound)
    return None if at is None else math.exp(at)


def is_longer(name: str) -> bool:
    """Is it the baseline with more or less work, and nothing else?"""
    return name.startswith("work-") and "+" not in name


def mean_end(runs: dict[int, Line]) -> float:
    return fmean(_end(run) for run in runs.values())


def half_interval(spread: float, freedom: int, count: int) -> float:
    return student_975(freedom) * math.sqrt(spread / count) if freedom and count else math.nan


def rows(lines: Sequence[Line]) -> list[Row]:
    found = curves(lines)
    alone = {line["way"]: line["alone_seconds"] for line in lines if line["seed"] == TIMED and "error" not in line}
    if not (base := found.get("baseline", {})):
        raise UsageError("there is no run of the baseline to compare with: run it first")
    pairs = {way: sorted(runs.keys() & base.keys()) for way, runs in found.items() if way != "baseline"}
    last = {way: [_end(found[way][s]) - _end(base[s]) for s in seeds] for way, seeds in pairs.items() if seeds}
    freedom = sum(len(some) - 1 for some in last.values())
    squares = sum(variance(some) * (len(some) - 1) for some in last.values() if len(some) > 1)
    made = [_row("baseline", found, [0.0] * len(base), 0.0, 0, alone)]
    for way, some in last.items():
        made.append(_row(way, found, some, squares / max(1, freedom), freedom, alone))
    return sorted(made, key=lambda row: row.last)


def best_ways(lines: Sequence[Line], count: int) -> list[str]:
    """The baseline, and the ways with the lowest bounds so far."""
    ranked = [row.way for row in rows(lines) if row.way != "baseline" and not is_longer(row.way)]
    return ["baseline", *ranked[:count]]


def _end(run: Line) -> float:
    return float(run["curve"][-1][2])


def _row(
    way: str,
    found: dict[str, dict[int, Line]],
    some: list[float],
    spread: float,
    freedom: int,
    alone: dict[str, float],
) -> Row:
    base, runs = found["baseline"], found[way]
    seeds = sorted(runs.keys() & base.keys())
    n, one = len(seeds), runs[seeds[0]]
    bound = mean_end(base) + fmean(some)
    reached = []
    for s in seeds:
        points = [(point[0], point[2]) for point in runs[s]["curve"]]
        at = crossing(points, _end(base[s]))
        reached += [] if at is None else [at / points[-1][0]]
    return Row(
        way=way,
        seeds=n,
        third=fmean(runs[s]["curve"][0][2] - base[s]["curve"][0][2] for s in seeds),
        last=fmean(some),
        own=half_interval(variance(some), n - 1, n) if n > 1 else math.nan,
        pooled=half_interval(spread, freedom, n),
        bound=bound,
        worth=exchange(found, bound),
        reached=fmean(reached) if len(reached) == n else None,
        seconds=alone.get(way, fmean(runs[s]["curve"][-1][1] for s in seeds)),
        alone=way in alone or all(runs[s]["processes"] == 1 for s in seeds),
        more_parameters=one["parameters"] - next(iter(base.values()))["parameters"],
        more_embeddings=one["embeddings"] - next(iter(base.values()))["embeddings"],
    )


def show(row: Row) -> str:
    def multiple(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    more = [f"{n:+,} {word}" for n, word in ((row.more_parameters, "in blocks"), (row.more_embeddings, "embeddings"))]
    about = "; ".join([way_named(row.way).about, *(text for text in more if not text.startswith("+0 "))])
    seconds = f"{row.seconds:.1f}{'' if row.alone else '*'}"
    return (
        f"{row.way:<18} {row.seeds:>2} {row.bound:8.4f} {row.third:+8.4f} {row.last:+8.4f} {row.own:7.4f} "
        f"{row.pooled:7.4f} {multiple(row.worth):>6} {multiple(row.reached):>7} {seconds:>8}  {about}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    lines = read_lines(args.lines, args.setting, args.steps or SETTINGS[args.setting].steps)
    print(
        f"{'way':<18} {'n':>2} {'bound':>8} {'third':>8} {'last':>8} {'±':>7} {'±all':>7} {'worth':>6} {'reached':>7} "
        f"{'seconds':>8}  what changed (* seconds beside other runs)"
    )
    for row in rows(lines):
        print(show(row))
    failed = {line["way"]: line["error"] for line in lines if "error" in line} | {
        line["way"]: "diverged" for line in lines if "curve" in line and line["curve"][-1][2] is None
    }
    for way, error in failed.items():
        print(f"{way}: {error}")


if __name__ == "__main__":
    run_command(main)
