"""The smallest network that tests train, and how they make a run of it."""

from __future__ import annotations

from collections.abc import Callable

from unmask.config import OptimConfig, RunConfig
from unmask.denoisers.dit import DiT

TINY = DiT(size="nano", hidden=32, blocks=1, heads=2, dropout=0.1, qk_norm=False, zero_init=False)
# AdamW at one rate however long the run is, so that a short run is the beginning of a long one
PLAIN = OptimConfig(lr=5e-3, betas=(0.9, 0.999), muon=False, warmup=4, schedule="constant", ema=0.9)
MakeConfig = Callable[..., RunConfig]
