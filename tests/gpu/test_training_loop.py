"""The training loop on a GPU, whose numbers are read one step late, against the CPU's. Skipped without one.

Needs torch, triton and pytest alone: `python -m pytest --noconftest tests/gpu`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import small_run

from unmask.config import RunConfig
from unmask.corpora.text import Text
from unmask.distributed.world import join_world
from unmask.errors import NonFiniteError
from unmask.objectives.mdlm import MDLM
from unmask.training.callbacks import Callback
from unmask.training.loop import Run, train

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: its training loop is not tested here"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # torch's own compiler warns of torch
]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return small_run(tmp_path)


class Seen(Callback):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.losses: dict[int, float] = {}

    def on_step(self, report: Any) -> None:
        self.events.append(("step", report.step))
        self.losses[report.step] = report.loss

    def on_valid(self, step: int, bound: Any) -> None:
        self.events.append(("valid", step))

    def on_save(self, step: int, path: Path) -> None:
        self.events.append(("save", step))


def run(config: RunConfig, device: str, **options: Any) -> Seen:
    seen = Seen()
    train(config, callbacks=[seen], device=device, **options)
    return seen


def test_the_losses_are_the_cpus_and_come_in_order(config: RunConfig, tmp_path: Path) -> None:
    on_cpu = run(dataclasses.replace(config, out=str(tmp_path / "cpu")), "cpu")
    on_gpu = run(config, "cuda")
    assert on_gpu.events == on_cpu.events  # a step is reported before anything that looks at its weights
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-4)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))


@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "compile": True}], ids=["fp32", "bf16 compiled"])
def test_a_resumed_run_goes_on_where_it_stopped(config: RunConfig, tmp_path: Path, options: dict[str, Any]) -> None:
    config = dataclasses.replace(config, **options)
    whole = run(config, "cuda")
    part = dataclasses.replace(config, out=str(tmp_path / "part"))
    run(dataclasses.replace(part, steps=8), "cuda")
    rest = run(part, "cuda", resume=True)
    assert sorted(rest.losses) == [9, 10, 11, 12]
    # A GPU sums attention's gradient in no fixed order, so the last bits may differ.
    want = {step: whole.losses[step] for step in rest.losses}
    assert rest.losses == pytest.approx(want, rel=2e-2 if options else 1e-4)


def test_precision_is_the_gpus(config: RunConfig) -> None:
    run(dataclasses.replace(config, precision="auto", steps=2), "cuda")
    native = torch.cuda.get_device_capability() >= (8, 0)  # matrix units for bf16 came with Ampere
    assert json.loads((Path(config.out) / "recipe.json").read_text())["precision"] == ("bf16" if native else "fp32")


def test_a_loss_that_is_no_number_stops_the_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = MDLM.loss, [0]

    def poisoned(self: MDLM, denoiser: Any, batch: Any) -> Any:
        calls[0] += 1
        loss = real(self, denoiser, batch)
        return dataclasses.replace(loss, nats=loss.nats * torch.nan) if calls[0] == 13 else loss

    monkeypatch.setattr(MDLM, "loss", poisoned)
    with pytest.raises(NonFiniteError, match="loss nan at step 7"):  # two micro-batches a step
        train(config, device="cuda")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kind", ["plain", "padded, compiled, with muon"])
def test_no_step_waits_for_the_device(config: RunConfig, kind: str) -> None:
    """The host may only wait where it reads the last step's numbers; anything else would leave the GPU idle."""
    if kind != "plain":
        lines = Text(path=config.data.train.path, separator="\n")  # type: ignore[attr-defined]
        data = dataclasses.replace(config.data, train=lines, packing="pad")
        optim = dataclasses.replace(config.optim, muon=True)
        config = dataclasses.replace(config, data=data, optim=optim, compile=True, precision="bf16")
    with join_world("cuda") as world:
        run = Run(config, world, resume=False, init=None)
        try:
            for step in range(8):
                if step == 4:  # compiled, and all that is kept is made
                    torch.cuda.set_sync_debug_mode("error")
                rows = run.loader.fetch(run.step, *run.share)
                loss, norm, stops = run.forward_backward(rows)
                run.update(1e-3, loss, norm)
                run.note(1e-3, loss, norm, stops)
        finally:
            torch.cuda.set_sync_debug_mode("default")
