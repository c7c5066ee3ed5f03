"""Task heads: they turn a denoiser's vectors into the classes or the number of a task."""

from __future__ import annotations

from typing import Any

from unmask.heads.base import Head as Head
from unmask.heads.base import room as room


def __getattr__(name: str) -> Any:
    return room.attribute(name)


def __dir__() -> list[str]:
    return room.attributes()
