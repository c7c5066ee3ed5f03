"""Same seeds, same texts and losses as when golden.json was written; see cases.py."""

from __future__ import annotations

import json
from typing import Any

import cases
import pytest


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cases.GOLDEN.read_text())
    return found


def test_every_sampler_writes_the_same_texts(golden: dict[str, Any]) -> None:
    texts = cases.texts()
    assert texts.keys() == golden["texts"].keys()
    for name, rows in texts.items():
        assert rows == golden["texts"][name], name


@pytest.mark.parametrize("objective", cases.OBJECTIVES)
def test_every_objective_has_the_same_losses(golden: dict[str, Any], objective: str) -> None:
    found = cases.losses((objective,))[objective]
    assert len(found) == len(golden["losses"][objective])
    assert found == pytest.approx(golden["losses"][objective], rel=1e-6)
