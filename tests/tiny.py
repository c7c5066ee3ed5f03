"""The smallest network that tests train, how they make a run of it, and what is kept of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.config import OptimConfig, RunConfig
from unmask.denoisers.dit import DiT
from unmask.model import Model
from unmask.training.callbacks import Callback, StepReport

TINY = DiT(size="nano", hidden=32, blocks=1, heads=2, dropout=0.1, qk_norm=False, zero_init=False)
# AdamW at one rate however long the run is, so that a short run is the beginning of a long one
PLAIN = OptimConfig(lr=5e-3, betas=(0.9, 0.999), muon=False, warmup=4, schedule="constant", ema=0.9)
MakeConfig = Callable[..., RunConfig]

WORDS = (
    "the cat sat on the mat",
    "a dog ran to the red hut",
    "the sun set and the moon rose",
    "no rat ate the oat cake",
)


class Record(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.events: list[tuple[Any, ...]] = []
        self.info: dict[str, Any] = {}

    def on_start(self, config: RunConfig, info: dict[str, Any]) -> None:
        self.info = info
        self.events.append(("start",))

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)
        self.events.append(("step", report.step))

    def on_valid(self, step: int, bound: Any) -> None:
        self.events.append(("valid", step))

    def on_sample(self, step: int, text: str) -> None:
        self.events.append(("sample", step))

    def on_save(self, step: int, path: Path) -> None:
        self.events.append(("save", step))

    def on_end(self) -> None:
        self.events.append(("end",))


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, its config, its model and what it reported."""

    folder: Path
    config: RunConfig
    model: Model
    record: Record

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"
