"""Suites of generated texts: a model writes for each item of a set, and the output is scored and stored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import unmask
from unmask.errors import DataError
from unmask.evaluation.bootstrap import paired_ci95
from unmask.evaluation.overlap import Score
from unmask.evaluation.suites.base import Entry, Identity, Measured, Numbers, Suite, Two
from unmask.evaluation.suites.differences import difference_of
from unmask.evaluation.suites.writing import check_prompts, targets

if TYPE_CHECKING:
    from unmask.evaluation.evaluate import Progress
    from unmask.evaluation.suites.run import SuiteRun
    from unmask.model import Model

OPTIONS = frozenset(["max_rows", "batch", "sampler", "against_sampler", "guidance"])
Record = dict[str, Any]
Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Items:
    """The items of a set. source: their origin, for the protocol; records: one per item, plain data."""

    source: str
    records: Sequence[Record]
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Written:
    """The results: one record per item with the output, the scores, and a description of what was left out."""

    records: list[Record]
    scores: list[Score]
    left_out: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WrittenSuite(Suite):
    """A model writes, a tool scores; decoding is greedy by default.

    answers: the fields of a record that hold the model's output. Two models can be compared only if the other fields of
    their records are equal.
    """

    answers: ClassVar[frozenset[str]] = frozenset({"output"})

    def common(self, model: Model, run: SuiteRun) -> Identity:
        return run.writing.identity(model)

    @abstractmethod
    def asked(self, model: Model) -> str:
        """What the model is asked, and what it knows about the answer's length, as a sentence without a full stop."""

    @abstractmethod
    def write(
        self, model: Model, records: list[Record], run: SuiteRun, found: Any, progress: Progress | None
    ) -> Written:
        """Write the output for these items, and score it."""

    def ready(self, one: Entry, found: Any, run: SuiteRun) -> Items:
        """The questions for the models, from the result of the set's `find`."""
        items: Items = found
        return items

    def question(self, record: Record) -> Any:
        """The part of a record that is the question."""
        return {name: value for name, value in record.items() if name not in self.answers}

    def measure(self, model: Model, one: Entry, found: Any, run: SuiteRun, identity: Identity) -> Measured:
        numbers, written = self._measured(model, one, self.ready(one, found, run), run, identity)
        return Measured(numbers=numbers, outputs=written.records)

    def alike(self, models: Two[Model], run: SuiteRun) -> Two[SuiteRun]:
        """The other model writes with the same sampler if it has it, otherwise with its own."""
        if run.writing_against is not None:
            return run, replace(run, writing=run.writing_against)
        writing = run.writing.fits(models[1])
        if writing.sampler != run.writing.sampler:
            run.say(f"the sampler {run.writing.sampler} is not for the other model, which writes with its own")
        return run, replace(run, writing=writing)

    def measure_both(
        self, models: Two[Model], one: Entry, found: Any, runs: Two[SuiteRun], identities: Two[Identity]
    ) -> Measured:
        items = self.ready(one, found, runs[0])
        numbers, ours = self._measured(models[0], one, items, runs[0], identities[0])
        against, theirs = self._measured(models[1], one, items, runs[1], identities[1])
        against["identity"] = identities[1]
        same = [*map(self.question, ours.records)] == [*map(self.question, theirs.records)]
        if same:
            both = [
                record | {"against": {name: value for name, value in second.items() if record[name] != value}}
                for record, second in zip(ours.records, theirs.records, strict=True)
            ]
        else:
            against["notes"] = [f"{one.title}: the models were not asked the same, so no difference is told"]
            both = [*ours.records, *({"against": record} for record in theirs.records)]
        found_of = {(score.of, score.name): score for score in theirs.scores}
        seed = runs[0].seed
        differences = [_difference(score, found_of.get((score.of, score.name)), seed) for score in ours.scores]
        numbers |= {"against": against, "differences": [one for one in differences if one is not None] if same else []}
        return Measured(numbers=numbers, outputs=both)

    def _measured(
        self, model: Model, one: Entry, items: Items, run: SuiteRun, identity: Identity
    ) -> tuple[Numbers, Written]:
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
        return numbers, written


def _difference(ours: Score, theirs: Score | None, seed: int) -> Numbers | None:
    """Paired by bootstrap; None for texts that no model wrote, and if the two cover different texts."""
    if theirs is None or ours.sums is None or theirs.sums is None or ours.sums.over != theirs.sums.over:
        return None
    ci95 = paired_ci95(ours.sums, theirs.sums, seed=seed)
    return difference_of(ours.name, "points", ours.value, theirs.value, ci95, of=ours.of)


@dataclass(frozen=True, kw_only=True)
class PromptSuite(WrittenSuite):
    """Suites of sources and targets: a record's `prompt` is given, never noised, and the model writes a target after
    it."""

    def common(self, model: Model, run: SuiteRun) -> Identity:
        check_prompts(model, run.writing)
        return super().common(model, run)

    @abstractmethod
    def scores(self, records: list[Record], items: Items, seed: int) -> list[Score]:
        """The scores of the records, each with its `output`."""

    def spelled(self, output: str) -> str:
        """An output as it is scored and stored: on one line."""
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
