"""A run that is killed and goes on, beside one that nobody disturbed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import unmask
from unmask.config import RunConfig
from unmask.training.checkpoint.files import Checkpoint, load_checkpoint
from unmask.training.loop import train


class Killed(unmask.Callback):
    def on_step(self, report: Any) -> None:
        if report.step == 5:
            raise KeyboardInterrupt


def whole_and_resumed(folder: Path, make_config: Any, objective: unmask.objectives.Objective) -> list[unmask.Model]:
    """The models of both, in `whole` and `stopped` of the folder: bit for bit the same."""
    names = ("whole", "stopped")
    whole, stopped = (make_config(folder / name, objective=objective, steps=8, save_every=4) for name in names)
    train(whole, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        train(stopped, device="cpu", callbacks=[Killed()])
    train(stopped, device="cpu", resume=True)
    models = [unmask.load(folder / name) for name in names]
    for a, b in itertools.zip_longest(*(dict(model.denoiser.named_parameters()).values() for model in models)):
        assert a.equal(b)
    return models


class StopAt(unmask.Callback):
    """Asks the run to stop after its fifth step."""

    def on_run(self, run: Any) -> None:
        self.run = run

    def on_step(self, report: Any) -> None:
        if report.step == 5:
            self.run.stop("seen enough")


def straight_and_stopped(straight: RunConfig, stopped: RunConfig) -> tuple[unmask.Model, Checkpoint]:
    """The model and the last checkpoint of a run, whose tensors one that was stopped and went on has, too."""
    model = train(straight, device="cpu")
    train(stopped, callbacks=[StopAt()], device="cpu")
    train(stopped, resume=True, device="cpu")
    one, other = (load_checkpoint(Path(each.out)) for each in (straight, stopped))
    assert one is not None
    assert other is not None
    for group, named in one.tensors.items():
        for name, tensor in named.items():
            assert tensor.equal(other.tensors[group][name]), (group, name)
    return model, one
