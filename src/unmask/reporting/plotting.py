"""Common parts of curve figures: smoothing, thinning, and the unit of the x axis."""

from __future__ import annotations

from itertools import accumulate, pairwise

BUCKETS = 400  # points of a curve at most: more than a screen shows
Points = list[tuple[float, float]]


def smoothed(points: Points) -> Points:
    """Each point's mean with its neighbours on both sides, which avoids the lag of a running mean.

    >>> smoothed([(1.0, 3.0), (2.0, 2.0)])
    [(1.0, 3.0), (2.0, 2.0)]
    """
    reach = len(points) // 40
    sums = [0.0, *accumulate(y for _, y in points)]
    out = []
    for i, (x, _) in enumerate(points):
        half = min(reach, i)  # symmetric also at the steep beginning
        low, high = i - half, min(i + half + 1, len(points))
        out.append((x, (sums[high] - sums[low]) / (high - low)))
    return out


def thinned(points: Points) -> Points:
    """At most BUCKETS points, each the mean of its neighbours; the first and last points are kept.

    >>> len(thinned([(float(i), 1.0) for i in range(10_000)]))
    402
    """
    if len(points) <= BUCKETS:
        return points
    cuts = [round(i * len(points) / BUCKETS) for i in range(BUCKETS + 1)]
    parts = [points[lo:hi] for lo, hi in pairwise(cuts)]
    means = [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
    return [points[0], *means, points[-1]]


def unit_of(across: str, most: float) -> tuple[str, float]:
    """The label of the axis, and the divisor of its numbers.

    >>> unit_of("seconds", 7000.0), unit_of("steps", 9.0)
    (('minutes', 60.0), ('steps', 1.0))
    """
    if across == "seconds":
        return ("hours", 3600.0) if most > 7200 else ("minutes", 60.0) if most > 180 else ("seconds", 1.0)
    return across, 1.0
