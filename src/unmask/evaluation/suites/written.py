"""Suites of written texts: a model writes for each item of a set, and what it wrote is scored and kept."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import unmask
from unmask.errors import DataError
from unmask.evaluation.overlap import Score
from unmask.evaluation.suites.base import Entry, Identity, Measured, Suite
from unmask.evaluation.suites.writing import check_prompts, targets

if TYPE_CHECKING:
    from unmask.evaluation.evaluate import Progress
    from unmask.evaluation.suites.run import SuiteRun
    from unmask.model import Model

OPTIONS = frozenset(["max_rows", "batch", "sampler", "guidance"])
Record = dict[str, Any]
Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Items:
    """What a model is asked in a set. source: where it is from, for the protocol; records: an item each, plain data."""

    source: str
    records: Sequence[Record]
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of the items: a record each with what was written, the scores, and what was left out, in words."""

    records: list[Record]
    scores: list[Score]
    left_out: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WrittenSuite(Suite):
    """A model writes, a tool scores; the likeliest tokens are taken where nobody says otherwise."""

    def common(self, model: Model, run: SuiteRun) -> Identity:
        return run.writing.identity(model)

    @abstractmethod
    def asked(self, model: Model) -> str:
        """What the model is asked, and what it sees of the answer's length, in a sentence without its full stop."""

    @abstractmethod
    def write(
        self, model: Model, records: list[Record], run: SuiteRun, found: Any, progress: Progress | None
    ) -> Written:
        """What the model writes for these items, and the scores."""

    def measure(self, model: Model, one: Entry, found: Any, run: SuiteRun, identity: Identity) -> Measured:
        items: Items = found
        records = [dict(items.records[i]) for i in run.writing.chosen(len(items.records))]
        if not records:
            raise DataError(f"{items.source} is empty: there is nothing to ask")
        run.world.arm()
        with run.bar(one.title) as progress:
            written = self.write(model, records, run, items, progress)
        protocol = {
            "asked": self.asked(model),
            "source": items.source,
            "sampler": identity["sampler"],
            "guidance": identity["guidance"],
            "texts at most": identity["max_rows"],
            "seed": run.seed,
            "tokenizer": type(model.tokenizer).__name__.lower(),
            "device": identity["device"],
            "dtype": identity["dtype"],
            "unmask": unmask.__version__,
            **items.about,
            **written.about,
        }
        numbers = {
            "texts": len(written.records),
            "left_out": written.left_out,
            "scores": [score.summary() for score in written.scores],
            "protocol": protocol,
        }
        return Measured(numbers=numbers, outputs=written.records)


@dataclass(frozen=True, kw_only=True)
class PromptSuite(WrittenSuite):
    """Suites of sources and targets: a record's `prompt` is given, never noised, and a target written after it."""

    def common(self, model: Model, run: SuiteRun) -> Identity:
        check_prompts(model, run.writing)
        return super().common(model, run)

    @abstractmethod
    def scores(self, records: list[Record], items: Items, seed: int) -> list[Score]:
        """The numbers of the records, each with its `output`."""

    def spelled(self, output: str) -> str:
        """An output as it is scored and kept: one line."""
        return " ".join(output.split())

    def write(
        self, model: Model, records: list[Record], run: SuiteRun, found: Items, progress: Progress | None
    ) -> Written:
        prompts = [record["prompt"] for record in records]
        outputs = targets(model, run.writing, prompts, run.seed, run.world, progress)
        for record, output in zip(records, outputs, strict=True):
            record["output"] = self.spelled(output or "")
        long = sum(output is None for output in outputs)
        lengths = run.writing.lengths
        decided = (
            "by padding: the canvas goes to the window's end and end-of-text decides"
            if lengths is None
            else f"the least bound of {lengths} lengths around the source's, {run.writing.draws} draws each"
        )
        return Written(
            records=records,
            scores=self.scores(records, found, run.seed),
            left_out=f"{long:,} sources beyond the window, whose output is empty" if long else "",
            about={"length of the target": "the model's own end" if model.process is None else decided},
        )
