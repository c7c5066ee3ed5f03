"""Numbers between bounds, as patterns over their digits."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from unmask.constraints._dfa import Dfa, explore
from unmask.constraints.regex import regex_dfa

FRACTION = 6  # digits after the point of a bounded number, few enough that a parser's rounding cannot cross a bound
DIGITS = 15  # digits of a bound, for the same reason
_ANY = r"(?:\.[0-9]+)?"


def integers(least: Decimal | None, most: Decimal | None) -> str | None:
    """The pattern of the integers from least to most, inclusive; None if there are none.

    >>> import re
    >>> pattern = integers(Decimal("-1.5"), Decimal(12))
    >>> [n for n in range(-20, 30) if re.fullmatch(pattern, str(n))] == [*range(-1, 13)]
    True
    """
    lo = None if least is None else int(least.to_integral_value(ROUND_CEILING))
    hi = None if most is None else int(most.to_integral_value(ROUND_FLOOR))
    parts = []
    if lo is None or lo < 0:
        below = _whole(max(1, -hi) if hi is not None else 1, None if lo is None else -lo)
        parts += [f"-{below}"] if below else []
    if hi is None or hi >= 0:
        above = _whole(max(0, lo) if lo is not None else 0, hi)
        parts += [above] if above else []
    return f"(?:{'|'.join(parts)})" if parts else None


def numbers(least: Decimal | None, most: Decimal | None, *, above: bool, below: bool) -> Dfa | None:
    """The numbers from least to most, without an exponent; above, below: whether the bound itself is excluded.

    None if there are none.
    """
    asked = [rf"-?(?:0|[1-9][0-9]*)(?:\.[0-9]{{1,{FRACTION}}})?"]
    if least is not None:
        asked.append(_at_least(least, strict=above, sign="-", other=""))
    if most is not None:
        asked.append(_at_least(-most, strict=below, sign="", other="-"))  # x <= q if -x >= -q
    dfas = [regex_dfa(pattern) for pattern in asked]

    def step(states: tuple[int, ...], byte: int) -> tuple[int, ...] | None:
        after = tuple(int(dfa.next_SB[state, byte]) for dfa, state in zip(dfas, states, strict=True))
        return None if min(after) < 0 else after

    def accepts(states: tuple[int, ...]) -> bool:
        return all(dfa.accept_S[state] for dfa, state in zip(dfas, states, strict=True))

    both = explore((0,) * len(dfas), step, accepts, {*b"-.0123456789"})
    return both if both.accept_S.any() else None


def _at_least(bound: Decimal, *, strict: bool, sign: str, other: str) -> str:
    """The pattern of x >= bound (strict: >). sign is the prefix of numbers below zero, other that of numbers above; for
    a condition on -x they are swapped."""
    whole, _, fraction = f"{abs(bound):f}".partition(".")
    size, fraction = int(whole), fraction.rstrip("0")
    if bound > 0 or (bound == 0 and strict):
        return other + _larger(size, fraction, strict)
    zero = rf"{sign}0(?:\.0+)?"
    all_of_one_sign = rf"{other}(?:0|[1-9][0-9]*){_ANY}"
    if bound == 0:
        return f"(?:{all_of_one_sign}|{zero})"
    return f"(?:{all_of_one_sign}|{sign}{_smaller(size, fraction, strict)})"


def _larger(size: int, fraction: str, strict: bool) -> str:
    rest = "[0-9]*[1-9][0-9]*" if strict else "[0-9]*"
    if fraction:
        ways = [f"{fraction[:i]}[{int(d) + 1}-9][0-9]*" for i, d in enumerate(fraction) if d != "9"]
        same = rf"\.(?:{'|'.join([*ways, fraction + rest])})"
    else:
        same = rf"\.{rest}" if strict else _ANY
    return f"(?:{_whole(size + 1, None)}{_ANY}|{size}{same})"


def _smaller(size: int, fraction: str, strict: bool) -> str:
    """The pattern of the numbers from 0 to size.fraction, or below it if strict."""
    ways = [f"{fraction[:i]}[0-{int(d) - 1}][0-9]*" for i, d in enumerate(fraction) if d != "0"]
    ways += [fraction[:i] for i in range(1, len(fraction))]
    ways += [] if strict else [f"{fraction}0*" if fraction else "0+"]
    parts = [f"{_whole(0, size - 1)}{_ANY}"] if size else []
    if fraction or not strict:
        parts.append(rf"{size}(?:\.(?:{'|'.join(ways)}))?")
    return f"(?:{'|'.join(parts)})"


def _whole(lo: int, hi: int | None) -> str | None:
    """The pattern of integers from lo (0 or more) to hi, without a sign."""
    if hi is not None and lo > hi:
        return None
    longest = len(str(lo if hi is None else hi))
    parts = []
    for n in range(len(str(lo)), longest + 1):
        first, last = max(lo, 10 ** (n - 1) if n > 1 else 0), 10**n - 1
        parts.append(_between(str(first), str(last if hi is None else min(hi, last))))
    parts += [f"[1-9][0-9]{{{longest},}}"] if hi is None else []
    return f"(?:{'|'.join(parts)})"


def _between(a: str, b: str) -> str:
    """The pattern of digit strings from a to b, which have the same length."""
    if len(a) <= 1:
        return f"[{a}-{b}]" if a else ""
    tail = len(a) - 1
    if a[0] == b[0]:
        return a[0] + _between(a[1:], b[1:])
    lo, hi, parts = int(a[0]), int(b[0]), []
    if a[1:].strip("0"):
        parts.append(f"{lo}{_between(a[1:], '9' * tail)}")
        lo += 1
    if b[1:].strip("9"):
        parts.append(f"{hi}{_between('0' * tail, b[1:])}")
        hi -= 1
    if lo <= hi:
        parts.append(f"[{lo}-{hi}][0-9]{{{tail}}}")
    return f"(?:{'|'.join(parts)})"
