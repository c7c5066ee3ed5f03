"""Saving in the background from a GPU: what is written is the step it was asked at. Skipped without one.

Needs torch, triton and pytest alone: `python -m pytest --noconftest tests/gpu`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unmask.training.checkpoint.files import load_checkpoint
from unmask.training.checkpoint.saving import Saver

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: copies to pinned memory are not tested")


def test_the_copy_is_of_its_own_step(tmp_path: Path) -> None:
    """The weights move on while the GPU may not even have begun to copy: a long kernel stands before it."""
    saver = Saver(tmp_path, keep=9, background=True)
    weight = torch.zeros(1 << 22, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    for step in range(1, 6):
        for _ in range(20):
            busy = busy @ busy / 4096
        weight.fill_(float(step))
        saver.save(step, {"model": {"w": weight, "on_host": torch.full((3,), float(step))}}, {}, best=False)
        weight.fill_(-1.0)
    assert [step for step, _ in saver.finished(wait=True)] == [1, 2, 3, 4, 5]
    assert all(place.is_pinned() for name, place in saver._host.items() if name == ("model", "w"))
    for step in range(1, 6):
        found = load_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}")
        assert found is not None
        assert found.tensors["model"]["w"].eq(float(step)).all()
