"""Noise schedules: alpha(t), the probability that a token is still visible at time t (t=0 clean, t=1 all masked)."""

from __future__ import annotations

from typing import Any

from unmask.noise.base import Noise as Noise
from unmask.noise.base import room as room


def __getattr__(name: str) -> Any:
    if name == "LearnedNoise":  # needs torch, which is imported only when needed
        from unmask.noise.learned import LearnedNoise

        return LearnedNoise
    return room.attribute(name)


def __dir__() -> list[str]:
    return room.attributes()
