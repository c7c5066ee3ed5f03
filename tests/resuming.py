"""A run that is killed and goes on, beside one that nobody disturbed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import unmask
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
