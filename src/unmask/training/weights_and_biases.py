"""Logs the run's numbers to Weights & Biases, if the recipe names a project."""

from __future__ import annotations

import importlib
import importlib.util
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.errors import MissingExtraError, UsageError
from unmask.reader import to_dict
from unmask.storage.atomic import atomic_text
from unmask.training.callbacks import Callback, StepReport, valid_numbers

if TYPE_CHECKING:
    from unmask.config import RunConfig
    from unmask.evaluation.bound import Bound
    from unmask.evaluation.measurement import Measurement

ID = "wandb-id"  # file in the run's folder, so that a resumed run continues the same run there


def check_installed(project: str | None) -> None:
    """Check before a run begins that the package is installed, if its recipe needs it."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise MissingExtraError("wandb", "log", f"the recipe's wandb = {project!r}")


class WandB(Callback):
    """Logs numbers and the recipe, but no texts and no weights. WANDB_MODE determines whether they are sent."""

    def __init__(self, project: str, folder: Path, log_every: int, resumed_step: int) -> None:
        self.project, self.folder = project, folder
        self.log_every, self.resumed_step = log_every, resumed_step
        self.run: Any = None

    def on_start(self, config: RunConfig, info: dict[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        path = self.folder / ID
        if not (self.resumed_step and path.is_file()):
            atomic_text(path, secrets.token_hex(8))
        how = {"project": self.project, "name": self.folder.name, "dir": str(self.folder), "config": to_dict(config)}
        try:
            self.run = wandb.init(**how, id=path.read_text(encoding="utf-8").strip(), resume="allow")
        except Exception as e:
            reason = (str(e).strip() or type(e).__name__).splitlines()[0][:200]
            raise UsageError(
                f"Weights & Biases does not begin: {reason}; set WANDB_MODE=offline, or leave wandb out of the recipe"
            ) from None
        # The step is logged as a metric, since a run resumed from a checkpoint logs some steps again.
        self.run.define_metric("*", step_metric="step")

    def _log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log({"step": step} | numbers)

    def on_step(self, report: StepReport) -> None:
        if report.step % self.log_every == 0:
            names = ("loss", "lr", "grad_norm", "tokens_per_second")
            self._log(report.step, {f"train/{name}": getattr(report, name) for name in names})

    def on_valid(self, step: int, bound: Bound) -> None:
        self._log(step, {f"valid/{name}": value for name, value in valid_numbers(bound).items()})

    def on_measured(self, step: int, name: str, measured: Measurement) -> None:
        self._log(step, {f"valid/{name}": measured.value})

    def on_log(self, step: int, name: str, value: float) -> None:
        self._log(step, {name: value})

    def on_end(self) -> None:
        if self.run is not None:
            self.run.finish()
