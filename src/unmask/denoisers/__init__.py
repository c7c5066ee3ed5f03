"""Denoisers: the networks x_theta. A plug-in describes one; its `build()` creates the module."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unmask.denoisers.base import Denoiser as Denoiser
from unmask.denoisers.base import room as room

if TYPE_CHECKING:
    from unmask.denoisers.network import Attend as Attend
    from unmask.denoisers.network import Network as Network

_CONTRACT = ("Attend", "Network")  # they need torch, which is imported when somebody asks


def __getattr__(name: str) -> Any:
    if name in _CONTRACT:
        return getattr(importlib.import_module("unmask.denoisers.network"), name)
    return room.attribute(name)


def __dir__() -> list[str]:
    return room.attributes()
