"""Denoisers: the networks x_theta. A plug-in describes one; its `build()` makes the module."""

from __future__ import annotations

from typing import Any

from unmask.denoisers.base import Denoiser as Denoiser
from unmask.denoisers.base import room as room


def __getattr__(name: str) -> Any:
    return room.attribute(name)


def __dir__() -> list[str]:
    return room.attributes()
