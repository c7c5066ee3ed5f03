"""DDP and FSDP on a GPU through NCCL, as far as one GPU shows it: a group of one process, against no group.

NCCL takes no two processes on one GPU; what several do is tested with gloo in tests/parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_run import small_run

from unmask.config import RunConfig
from unmask.distributed import parallel
from unmask.training.callbacks import Callback
from unmask.training.loop import train

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: NCCL is not tested here"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # torch's own compiler warns of torch
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # and looks at what fsdp made
]
DEVICE, BACKEND = "cuda", "cpu:gloo,cuda:nccl"


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NCCL's group of this process alone; `parallel` is taken at its word though there is nobody to share with."""
    dist.init_process_group(BACKEND, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    monkeypatch.setattr(parallel, "_choose", lambda network, world, kind: kind)
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


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "compile": True}], ids=["fp32", "bf16 compiled"])
@pytest.mark.usefixtures("group")
def test_a_group_of_one_trains_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any]
) -> None:
    spread = losses(small_run(tmp_path, kind, parallel=kind, checkpoint_activations=True, **options))
    monkeypatch.setattr(parallel, "_choose", lambda network, world, kind: "alone")
    alone = losses(small_run(tmp_path, "alone", **options))
    assert spread == pytest.approx(alone, rel=1e-2 if options else 1e-4)
