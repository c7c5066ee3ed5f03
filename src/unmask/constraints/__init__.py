"""Constraints: what a text or a gap must match. Each becomes an automaton over tokens that every draw obeys."""

from __future__ import annotations

from typing import Any

from unmask.constraints.base import MAX_STATES as MAX_STATES
from unmask.constraints.base import Constraint as Constraint
from unmask.constraints.base import room as room


def __getattr__(name: str) -> Any:
    return room.attribute(name)


def __dir__() -> list[str]:
    return room.attributes()
