"""The second of two GPUs: the same numbers there as on the first, whichever is the current one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import small_run

import unmask
from unmask.training.callbacks import Callback
from unmask.training.loop import train

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="fewer than two GPUs: the choice between them is not tested here"
)


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step(self, report: Any) -> None:
        self.found.append(report.loss)


def test_training_and_sampling_are_the_same_on_both(tmp_path: Path) -> None:
    losses, texts = [], []
    for device in ("cuda:0", "cuda:1"):
        seen = Losses()
        train(small_run(tmp_path, device.replace(":", "-")), callbacks=[seen], device=device)
        losses.append(seen.found)
        model = unmask.load(tmp_path / device.replace(":", "-"), device=device)
        texts.append(model.generate(num=4, seed=1))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert texts[1] == texts[0]


def test_a_model_beside_the_current_gpu(tmp_path: Path) -> None:
    """Where a model of the second GPU was loaded last, the first one's still computes what it did."""
    train(small_run(tmp_path), device="cuda:0")
    first = unmask.load(tmp_path / "run", device="cuda:0")
    ids = first.tokenizer.encode("the cat sat on")
    before, text = first.logits(ids), first.generate(num=2, seed=1)
    second = unmask.load(tmp_path / "run", device="cuda:1")
    assert torch.cuda.current_device() == 1
    torch.testing.assert_close(first.logits(ids), before, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(second.logits(ids).to(before.device), before, atol=1e-3, rtol=1e-3)
    assert first.generate(num=2, seed=1) == second.generate(num=2, seed=1) == text
