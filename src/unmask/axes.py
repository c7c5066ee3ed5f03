"""Axes of figures: the positions of their ticks, and the format of their numbers."""

from __future__ import annotations

import math


def ticks(low: float, high: float, log: bool = False) -> list[float]:
    """Round numbers in the range: about six, or on a logarithmic scale 1, 2, 5 times powers of ten.

    >>> ticks(0, 5500)
    [0.0, 1000.0, 2000.0, 3000.0, 4000.0, 5000.0]
    """
    if log and high / low > 4:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def short(value: float) -> str:
    """A number in few characters.

    >>> short(1500), short(2_500_000), short(0.5)
    ('1.5k', '2.5M', '0.5')
    """
    for limit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{sign}"
    return f"{value:g}"
