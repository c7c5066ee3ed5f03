"""The smallest network that tests train, and how they make a run of it."""

from __future__ import annotations

from collections.abc import Callable

from unmask.config import RunConfig
from unmask.denoisers.dit import DiT

TINY = DiT(size="nano", hidden=32, blocks=1, heads=2, dropout=0.1)
MakeConfig = Callable[..., RunConfig]
