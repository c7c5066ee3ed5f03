"""Runs a suite: finds and measures each set; finished sets are read from their files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import unmask
from unmask.data.packing import Policy
from unmask.distributed.world import World
from unmask.errors import DataError, MissingExtraError, NonFiniteError
from unmask.evaluation.evaluate import Progress
from unmask.evaluation.suites.base import Entry, Identity, Outcome, Suite
from unmask.evaluation.suites.results import Results, model_fingerprint
from unmask.evaluation.suites.writing import Writing
from unmask.machine import made_with
from unmask.metrics.perplexity import Perplexity

if TYPE_CHECKING:
    from unmask.model import Model

Say = Callable[[str], None]
Bar = Callable[[str], AbstractContextManager[Progress | None]]


@dataclass(frozen=True)
class _Way:
    """A model, how it is measured, and what determines the numbers of every set."""

    model: Model
    run: SuiteRun
    common: Identity


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """How a suite is measured.

    say: receives a sentence when a set is read from a file or measured again. bar: a progress bar for each set, by its
    title. metric and packing apply to likelihoods (packing None: each set's own), writing to generated texts. length:
    None: the model's window, or the smaller one of two models. against: a second model measured on the same data, for
    differences; writing_against: how it writes, if not like the first. max_texts: maximum number of texts per set,
    spread evenly, where texts rather than rows are counted; None: all. words: of the command line, kept with the
    numbers.
    """

    suite: Suite
    metric: Perplexity = field(default_factory=Perplexity)
    writing: Writing = field(default_factory=Writing)
    data_dir: Path | None = None
    out: Path | None = None
    packing: Policy | None = None
    length: int | None = None
    against: Model | None = None
    writing_against: Writing | None = None
    max_texts: int | None = None
    words: Sequence[str] = ()
    seed: int = 0
    world: World = field(default_factory=World)
    say: Say = lambda sentence: None
    bar: Bar = lambda label: nullcontext()

    def outcomes(self, model: Model, sets: Iterable[Entry]) -> Iterator[Outcome]:
        """Yield each set's outcome as soon as it is available.

        A set that cannot be read or measured does not stop the others.

        >>> run = SuiteRun(suite=find_suite("zero-shot"), data_dir=Path("data"))  # doctest: +SKIP
        >>> for outcome in run.outcomes(model, run.suite.chosen(None, run.data_dir)):  # doctest: +SKIP
        ...     print(outcome.set.title, outcome.numbers or outcome.failure)
        """
        sets = list(sets)
        results = Results(self.out, self.suite)
        results.check(sets)
        if self.against is None:
            ways = [_Way(model, self, self._common(model))]
        else:
            models = model, self.against
            runs = self.suite.alike(models, self)
            ways = [_Way(each, run, run._common(each)) for each, run in zip(models, runs, strict=True)]
        self.world.from_first(results.prepare)
        for one in sets:
            try:
                yield self._outcome(ways, one, results)
            except (DataError, MissingExtraError, NonFiniteError) as e:
                yield Outcome(set=one, failure=" ".join(str(e).split()))

    def _common(self, model: Model) -> Identity:
        """What determines the numbers of every set."""
        return {
            "suite": self.suite.name,
            "version": self.suite.version,
            **self.suite.common(model, self),  # first, because it may refuse the run and the hash takes a while
            "model": model_fingerprint(model),
            "seed": self.seed,
            "device": model.device.type,
            "dtype": str(next((p.dtype for p in model.denoiser.parameters()), None)).removeprefix("torch."),
            "unmask": unmask.__version__,
        }

    def _outcome(self, ways: list[_Way], one: Entry, results: Results) -> Outcome:
        found, data = self.world.agree(lambda: one.find(self.data_dir))[self.world.rank]
        here = {"set": one.name, "data": data}
        identity, *others = (way.common | here | self.suite.of_set(way.model, one, way.run) for way in ways)
        if others:
            own = {key: value for key, value in others[0].items() if value != identity.get(key, ...)}
            identity["against"] = {"model": others[0]["model"]} | own
        numbers, changed = self.world.from_first(lambda: results.finished(one, identity))
        if numbers is not None:
            self.say(f"{one.title}: measured already, its numbers are taken from {one.name}.json")
            return Outcome(set=one, numbers=numbers, taken=True)
        if changed:
            self.say(f"{one.title}: measured again, for what {one.name}.json is of has changed: {', '.join(changed)}")
        if not others:
            measured = self.suite.measure(ways[0].model, one, found, self, identity)
        else:
            models, runs = (ways[0].model, ways[1].model), (ways[0].run, ways[1].run)
            measured = self.suite.measure_both(models, one, found, runs, (identity, others[0]))
        numbers = {"suite": self.suite.name, "set": one.name, "title": one.title, **measured.numbers}
        numbers |= {"identity": identity, "made_with": made_with(self.words)}
        if self.world.first:
            numbers = results.keep(one, numbers, measured.outputs)
        return Outcome(set=one, numbers=numbers)
