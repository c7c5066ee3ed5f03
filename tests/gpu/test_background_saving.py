"""Saving in the background from a GPU: what is written is the step it was asked at. Skipped without one.

Needs torch, triton and pytest alone: `python -m pytest --noconftest tests/gpu`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_run import small_run

from unmask.distributed.world import join_world
from unmask.storage.tensor_file import read_tensors
from unmask.training.checkpoint.files import load_checkpoint
from unmask.training.checkpoint.saving import Saver
from unmask.training.loop import Run

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
    steps = [step for step, _ in saver.finished(wait=True)]  # one that waits may give way to the next
    assert steps[-1] == 5
    assert len(steps) > 1
    assert saver._places
    assert all(place.tensors["model", "w"].is_pinned() for place in saver._places)
    for step in steps:
        found = load_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}")
        assert found is not None
        assert found.tensors["model"]["w"].eq(float(step)).all()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_keeping_the_best_does_not_wait_for_the_device(tmp_path: Path) -> None:
    """It is a copy in the stream: of the averages at that step, though steps follow before the device has made it."""
    with join_world("cuda") as world:
        run = Run(small_run(tmp_path, async_save=True, save_every=400), world, resume=False, init=None)
        kept = []
        try:
            for step in range(6):
                if step == 3:  # all that is kept is made
                    torch.cuda.set_sync_debug_mode("error")
                loss, norm, _ = run.forward_backward(run.loader.fetch(run.step, *run.share))
                run.update(1e-3, loss, norm)
                if step == 0:
                    run.prepare_saving()
                if step in (2, 4):
                    assert run.ema is not None
                    kept.append({name: shadow.clone() for name, shadow in run.ema.shadow.items()})
                    run.save(best=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert run.network.training
        run.saver.wait()
    weights = read_tensors(Path(run.folder) / "model" / "model.safetensors")
    assert [name for name, shadow in kept[-1].items() if not weights[name].equal(shadow.cpu())] == []
