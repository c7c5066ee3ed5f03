"""A training of a few steps, for tests that need no conftest."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from unmask.config import DataConfig, OptimConfig, RunConfig
from unmask.corpora.text import Text
from unmask.denoisers.dit import DiT


def small_run(folder: Path, name: str = "run", **changes: Any) -> RunConfig:
    text = folder / "text.txt"
    text.write_text("".join(f"line {i * i % 97}: the cat sat on mat {i % 7}\n" for i in range(400)), encoding="utf-8")
    config = RunConfig(
        out=str(folder / name),
        steps=12,
        batch=16,
        micro_batch=8,
        denoiser=DiT(size="nano", hidden=64, blocks=2, heads=2, dropout=0.0, qk_norm=False, zero_init=False),
        data=DataConfig(train=Text(path=str(text)), length=64, held_out=0.1, cache=str(folder / "cache")),
        optim=OptimConfig(lr=3e-3, muon=False, warmup=4, schedule="constant", ema=0.9),
        log_every=1,
        valid_every=6,
        valid_rows=8,
        sample_every=6,
        save_every=4,
        async_save=False,  # so that saves are told at their own steps
    )
    return dataclasses.replace(config, **changes)
