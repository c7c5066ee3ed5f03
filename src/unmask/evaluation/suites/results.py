"""A suite's results in a folder: one file per set, written atomically, with the model and protocol it belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.errors import UsageError
from unmask.evaluation.suites.base import Entry, Identity, Numbers, Suite
from unmask.storage.atomic import atomic_text
from unmask.storage.digests import weights_digest

if TYPE_CHECKING:
    from unmask.model import Model

OUTPUTS = ".jsonl"  # suffix of the file with the generated texts, next to the numbers


def model_fingerprint(model: Model) -> str:
    """A hash that changes exactly when the weights, or anything else that determines a model's bound, change.

    >>> model_fingerprint(model)  # doctest: +SKIP
    '9c0b…'
    """
    config = getattr(model.denoiser, "config", None)
    about = [repr(config), repr(model.objective), model.tokenizer.fingerprint(), model.length, model.anchor]
    return weights_digest(model.denoiser.state_dict(), json.dumps(about).encode())


@dataclass(frozen=True)
class Results:
    """The results of a suite in a folder; without a folder nothing is stored."""

    folder: Path | None
    suite: Suite

    def check(self, sets: Iterable[Entry]) -> None:
        """Refuse a path that is not a folder, or a folder with unrelated files under the names of results."""
        if self.folder is None:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"--out: {self.folder} is a file; give the name of a folder")
        for one in sets:
            path = self._path(self.folder, one)
            if path.exists() and _read(path).get("suite") != self.suite.name:
                raise UsageError(f"--out: {path} is no result of the suite {self.suite.name}: give a folder of its own")

    def prepare(self) -> None:
        """Create the folder, so that an unwritable one fails before anything is measured."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def finished(self, one: Entry, identity: Identity) -> tuple[Numbers | None, list[str]]:
        """A set's stored numbers if they match this model and protocol; otherwise what has changed, if there
        are any."""
        if self.folder is None or not (path := self._path(self.folder, one)).exists():
            return None, []
        numbers = _read(path)
        kept = numbers.get("identity")
        kept = kept if isinstance(kept, dict) else {}
        changed = [name for name in identity if kept.get(name, ...) != identity[name]]
        outputs = numbers.get("outputs")
        if not changed and isinstance(outputs, dict) and outputs.get("sha256") != _digest(path.with_suffix(OUTPUTS)):
            changed = [f"{one.name}{OUTPUTS}, what the model wrote"]
        if "against" not in identity:  # two models then, one now
            numbers = {name: value for name, value in numbers.items() if name not in ("against", "differences")}
        return (None, changed) if changed else (numbers, [])

    def keep(self, one: Entry, numbers: Numbers, outputs: Sequence[Mapping[str, Any]] | None = None) -> Numbers:
        """Write what the model wrote, then the set's numbers, each atomically; returns what is stored."""
        if self.folder is None:
            return numbers
        path = self._path(self.folder, one)
        if outputs is not None:
            beside = path.with_suffix(OUTPUTS)
            atomic_text(beside, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in outputs))
            numbers = numbers | {"outputs": {"file": beside.name, "sha256": _digest(beside)}}
        atomic_text(path, json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        return numbers

    def write_table(self, markdown: str) -> Path | None:
        """Write the table of all sets; returns its path."""
        if self.folder is None:
            return None
        path = self.folder / f"{self.suite.name}.md"
        atomic_text(path, markdown)
        return path

    @staticmethod
    def _path(folder: Path, one: Entry) -> Path:
        return folder / f"{one.name}.json"


def results_in(folder: Path, suite: Suite) -> dict[str, Numbers]:
    """A suite's results in a folder, by set name; other files are ignored.

    >>> results_in(Path("no/such/folder"), suite)  # doctest: +SKIP
    {}
    """
    found = {name: _read(folder / f"{name}.json") for name in suite.sets}
    return {name: numbers for name, numbers in found.items() if numbers.get("suite") == suite.name}


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _read(path: Path) -> Numbers:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
