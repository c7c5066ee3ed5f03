"""DDP and FSDP on a GPU through NCCL, as far as one GPU shows it: a group of one process, against no group.

NCCL takes no two processes on one GPU; what several do is tested with gloo in tests/parallel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unmask import parallel
from unmask.callbacks import Callback
from unmask.config import DataConfig, OptimConfig, RunConfig
from unmask.corpora.text import Text
from unmask.denoisers.dit import DiT
from unmask.training import train

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: NCCL is not tested here"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # torch's own compiler warns of torch
]
DEVICE, BACKEND = "cuda", "cpu:gloo,cuda:nccl"


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NCCL's group of this process alone; `parallel` is taken at its word though there is nobody to share with."""
    dist.init_process_group(BACKEND, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    monkeypatch.setattr(parallel, "_choose", lambda network, world, kind: kind)
    monkeypatch.setenv("LOCAL_RANK", "0")
    yield
    dist.destroy_process_group()


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step(self, report: Any) -> None:
        self.found.append(report.loss)


def losses(config: RunConfig) -> list[float]:
    seen = Losses()
    train(config, callbacks=[seen], device=DEVICE)
    return seen.found


def make_config(folder: Path, name: str, **changes: Any) -> RunConfig:
    text = folder / "text.txt"
    text.write_text("".join(f"line {i * i % 97}: the cat sat on mat {i % 7}\n" for i in range(400)), encoding="utf-8")
    config = RunConfig(
        out=str(folder / name),
        steps=10,
        batch=16,
        micro_batch=8,
        denoiser=DiT(size="nano", hidden=64, blocks=2, heads=2, dropout=0.0),
        data=DataConfig(train=Text(path=str(text)), length=64, held_out=0.1, cache=str(folder / "cache")),
        optim=OptimConfig(lr=3e-3, warmup=4, ema=0.9),
        log_every=1,
        valid_every=5,
        valid_rows=8,
        sample_every=0,
        save_every=5,
    )
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "compile": True}], ids=["fp32", "bf16 compiled"])
@pytest.mark.usefixtures("group")
def test_a_group_of_one_trains_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any]
) -> None:
    spread = losses(make_config(tmp_path, kind, parallel=kind, checkpoint_activations=True, **options))
    monkeypatch.setattr(parallel, "_choose", lambda network, world, kind: "alone")
    alone = losses(make_config(tmp_path, "alone", **options))
    assert spread == pytest.approx(alone, rel=1e-2 if options else 1e-4)
