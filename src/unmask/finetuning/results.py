"""What a fine-tuning keeps in its folder: one file a finished run, written whole after its predictions and its model.

finetune.json               what the fine-tuning is of: model, data, options; another one is refused here
seeds/model-0.json          a finished seed; seeds/scratch-0.json the same network from random weights
seeds/model-0-fold-1.json   of a cross-validation: a fold of a seed
predictions/model-0-test.jsonl
model/                      of the run that was best on the validation examples
report.md, report.json
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unmask.errors import UsageError
from unmask.finetuning.examples import Example
from unmask.storage.atomic import atomic_text
from unmask.storage.untrusted import read_json

Numbers = dict[str, Any]
Start = Literal["model", "scratch"]
FORMAT = 1
ABOUT = "finetune.json"


class RunName(NamedTuple):
    """A training run of a fine-tuning: its start, its seed, and the fold that it leaves out.

    >>> str(RunName("model", 0)), str(RunName("scratch", 1, 2))
    ('model-0', 'scratch-1-fold-2')
    """

    start: Start
    seed: int
    fold: int | None = None

    def __str__(self) -> str:
        return f"{self.start}-{self.seed}" + ("" if self.fold is None else f"-fold-{self.fold}")


def digest(examples: Iterable[Example]) -> str:
    """Changes exactly when the examples or their labels change."""
    total = hashlib.sha256()
    for one in examples:
        total.update(json.dumps([one.text, one.pair, one.label]).encode() + b"\n")
    return total.hexdigest()[:40]


@dataclass(frozen=True)
class Results:
    """The folder of a fine-tuning."""

    folder: Path

    def begin(self, identity: Numbers, about: Numbers) -> None:
        """Refuse a folder with other content or another fine-tuning; then record this one."""
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{self.folder} is a file: give out the name of a folder")
        before = self.identity()
        if before is not None:
            if changed := changes(before, identity):
                raise UsageError(
                    f"{self.folder} is of a fine-tuning with another {changed[0]}: give out another folder, or go on "
                    "as it was begun"
                )
        elif others := sorted(p.name for p in self._files()):
            raise UsageError(f"{self.folder} holds {others[0]}, which is no part of a fine-tuning: give another out")
        self._write(self.folder / ABOUT, {"format": FORMAT, "identity": identity, **about})

    def identity(self) -> Numbers | None:
        """What the fine-tuning in the folder is of; None if none was begun there."""
        path = self.folder / ABOUT
        if not path.exists():
            return None
        found = read_json(path).get("identity")
        return found if isinstance(found, dict) else {}

    def _files(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from (path for path in self.folder.iterdir() if not path.name.startswith("."))

    def finished(self, run: RunName) -> Numbers | None:
        """The stored numbers of a finished run."""
        path = self._seed(run)
        return read_json(path) if path.exists() else None

    def keep(self, run: RunName, numbers: Numbers) -> None:
        """Write a run's numbers atomically: this marks it as finished."""
        self._write(self._seed(run), numbers)

    def keep_predictions(self, run: RunName, part: str, records: Iterable[Numbers]) -> None:
        """Write the predictions of a part as JSON lines."""
        path = self.predictions(run, part)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))

    def predictions(self, run: RunName, part: str) -> Path:
        """The path of a run's predictions for a part."""
        return self.folder / "predictions" / f"{run}-{part}.jsonl"

    def keep_report(self, numbers: Numbers, markdown: str) -> None:
        """Write the report as JSON and Markdown."""
        self._write(self.folder / "report.json", numbers)
        atomic_text(self.folder / "report.md", markdown)

    def _seed(self, run: RunName) -> Path:
        return self.folder / "seeds" / f"{run}.json"

    @staticmethod
    def _write(path: Path, numbers: Numbers) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_text(path, json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def changes(before: Numbers, now: Numbers, prefix: str = "") -> list[str]:
    """The differences, by dotted keys, with abbreviated values.

    >>> changes({"options": {"epochs": 3}}, {"options": {"epochs": 5}})
    ['options.epochs (3 there, 5 now)']
    """
    names: list[str] = []
    for key in sorted({*before, *now}):
        one, other = before.get(key), now.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            names += changes(one, other, f"{prefix}{key}.")
        elif one != other:
            short = max(len(str(one)), len(str(other))) <= 20
            names.append(f"{prefix}{key}" + (f" ({one} there, {other} now)" if short else ""))
    return names
