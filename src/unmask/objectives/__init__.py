"""Training objectives: what is minimised, the bound it gives, and what the trained network predicts for a sampler."""

from __future__ import annotations

from typing import Any

from unmask.objectives.base import Objective as Objective
from unmask.objectives.base import room as room


def __getattr__(name: str) -> Any:
    return room.attribute(name)


def __dir__() -> list[str]:
    return room.attributes()
