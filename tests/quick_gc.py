"""Trainings by the hundred: each begins with a collection of all that lives, a fifth of a second where much is loaded.

Here the youngest alone are looked through; the collector sees to the others when it is their turn.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

from unmask.training import monitor


def install(patch: Any = setattr) -> None:
    rest = {name: getattr(gc, name) for name in ("isenabled", "freeze", "unfreeze", "disable", "enable")}
    patch(monitor, "gc", SimpleNamespace(collect=lambda: gc.collect(0), **rest))
