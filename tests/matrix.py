"""Which cases of a matrix run: all with UNMASK_FAULTS=all (`make faults`), else few, the same every time."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ALL = os.environ.get("UNMASK_FAULTS") == "all"


def environment(**changes: str) -> dict[str, str]:
    """Ours with changes, for a program that a test starts: it finds this module too."""
    paths = filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **changes}


def sample(cases: Iterable[T], number: int, *, seed: int = 0, keep: Iterable[T] = ()) -> list[T]:
    """All cases, or `number` of them drawn by the seed besides those to keep, in their order."""
    cases = list(cases)
    kept = {cases.index(case) for case in keep}
    others = [i for i in range(len(cases)) if i not in kept]
    drawn = random.Random(seed).sample(others, min(number, len(others)))
    return cases if ALL else [cases[i] for i in sorted({*kept, *drawn})]


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The product of the axes, or cases of it in which any two values of two axes meet, in the product's order."""
    product = list(itertools.product(*(range(len(axis)) for axis in axes)))
    if not ALL:
        product = _covering(product)
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in product]


def _covering(product: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Greedy: the case with the most pairs that have not met comes next."""

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, product))
    chosen = []
    while missing:
        chosen.append(max(product, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return sorted(chosen)
