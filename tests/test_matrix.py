"""What a sample of a matrix promises: the same cases every time, and any two values of two axes together."""

from __future__ import annotations

import itertools

import pytest

import matrix
from matrix import pairwise, sample

AXES = (("a", "b", "c"), (1, 2, 3, 4), (True, False), ("x",))


@pytest.mark.parametrize("everything", [False, True])
def test_any_two_values_meet(everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "ALL", everything)
    cases = pairwise(*AXES)
    assert len(cases) == (24 if everything else 12)
    for (i, one), (j, other) in itertools.combinations(enumerate(AXES), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(one, other))
    assert set(cases) <= set(itertools.product(*AXES))
    assert cases == pairwise(*AXES)


def test_a_sample_is_the_same_every_time_and_has_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "ALL", False)
    few = sample(range(100), 5, keep=[99, 7])
    assert len(few) == 7
    assert {7, 99} <= set(few)
    assert few == sorted(few) == sample(range(100), 5, keep=[99, 7])
    assert few != sample(range(100), 5, seed=1, keep=[99, 7])
    assert sample("abc", 9) == ["a", "b", "c"]
    monkeypatch.setattr(matrix, "ALL", True)
    assert sample(range(100), 5) == list(range(100))
