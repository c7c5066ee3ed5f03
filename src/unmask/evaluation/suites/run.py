"""Runs a suite: each set is found and measured; what is finished is taken from its file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
from unmask.metrics.perplexity import Perplexity

if TYPE_CHECKING:
    from unmask.model import Model

Say = Callable[[str], None]
Bar = Callable[[str], AbstractContextManager[Progress | None]]


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """How a suite is measured. say: is told what is taken from a file or measured again. bar: a progress bar for each
    set, by its title.

    Of likelihoods: metric; packing, None: each set's own. Of what a model writes: writing.
    length: None: the model's window.
    """

    suite: Suite
    metric: Perplexity = field(default_factory=Perplexity)
    writing: Writing = field(default_factory=Writing)
    data_dir: Path | None = None
    out: Path | None = None
    packing: Policy | None = None
    length: int | None = None
    seed: int = 0
    world: World = field(default_factory=World)
    say: Say = lambda sentence: None
    bar: Bar = lambda label: nullcontext()

    def outcomes(self, model: Model, sets: Iterable[Entry]) -> Iterator[Outcome]:
        """Each set's outcome, as soon as it is there. A set that cannot be read or measured does not stop the others.

        >>> run = SuiteRun(suite=find_suite("zero-shot"), data_dir=Path("data"))  # doctest: +SKIP
        >>> for outcome in run.outcomes(model, run.suite.chosen(None, run.data_dir)):  # doctest: +SKIP
        ...     print(outcome.set.title, outcome.numbers or outcome.failure)
        """
        sets = list(sets)
        results = Results(self.out, self.suite)
        results.check(sets)
        common = self._common(model)
        self.world.from_first(results.prepare)
        for one in sets:
            try:
                yield self._outcome(model, one, results, common)
            except (DataError, MissingExtraError, NonFiniteError) as e:
                yield Outcome(set=one, failure=" ".join(str(e).split()))

    def _common(self, model: Model) -> Identity:
        """What decides the numbers of every set."""
        return {
            "suite": self.suite.name,
            "version": self.suite.version,
            **self.suite.common(model, self),  # first what may be refused: the hash takes a while
            "model": model_fingerprint(model),
            "seed": self.seed,
            "device": model.device.type,
            "dtype": str(next((p.dtype for p in model.denoiser.parameters()), None)).removeprefix("torch."),
            "unmask": unmask.__version__,
        }

    def _outcome(self, model: Model, one: Entry, results: Results, common: Identity) -> Outcome:
        found, data = self.world.agree(lambda: one.find(self.data_dir))[self.world.rank]
        identity = common | {"set": one.name, "data": data} | self.suite.of_set(model, one, self)
        numbers, changed = self.world.from_first(lambda: results.finished(one, identity))
        if numbers is not None:
            self.say(f"{one.title}: measured already, its numbers are taken from {one.name}.json")
            return Outcome(set=one, numbers=numbers, taken=True)
        if changed:
            self.say(f"{one.title}: measured again, for what {one.name}.json is of has changed: {', '.join(changed)}")
        measured = self.suite.measure(model, one, found, self, identity)
        numbers = {"suite": self.suite.name, "set": one.name, "title": one.title, **measured.numbers}
        numbers["identity"] = identity
        if self.world.first:
            numbers = results.keep(one, numbers, measured.outputs)
        return Outcome(set=one, numbers=numbers)
