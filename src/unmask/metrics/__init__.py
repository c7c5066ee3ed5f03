"""Metrics: one number about a model on some data, with its interval and the protocol of the measurement."""

from __future__ import annotations

from typing import Any

from unmask.metrics.base import Metric as Metric
from unmask.metrics.base import room as room


def __getattr__(name: str) -> Any:
    return room.attribute(name)


def __dir__() -> list[str]:
    return room.attributes()
