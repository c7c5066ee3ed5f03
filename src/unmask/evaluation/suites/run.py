"""Runs a suite: each set is read, detokenized, packed and measured; what is finished is taken from its file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import unmask
from unmask.data.packing import Policy, Rows, pack_texts
from unmask.distributed.world import World
from unmask.errors import DataError, MissingExtraError, NonFiniteError, UsageError
from unmask.evaluation.evaluate import Progress, evaluate
from unmask.evaluation.suites.base import Source, Suite, TextSet
from unmask.evaluation.suites.results import Identity, Numbers, Results, model_fingerprint
from unmask.metrics.perplexity import Perplexity

if TYPE_CHECKING:
    from unmask.evaluation.measurement import Measurement
    from unmask.model import Model

Say = Callable[[str], None]
Bar = Callable[[str], AbstractContextManager[Progress | None]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a set: its numbers, or why there are none. taken: they are an earlier run's, from its file."""

    set: TextSet
    numbers: Numbers | None = None
    failure: str = ""
    taken: bool = False


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """How a suite is measured. packing: None: each set's own. length: None: the model's window.

    say: is told what is taken from a file or measured again. bar: a progress bar for each set, by its title.
    """

    suite: Suite
    metric: Perplexity = field(default_factory=Perplexity)
    data_dir: Path | None = None
    out: Path | None = None
    packing: Policy | None = None
    length: int | None = None
    seed: int = 0
    world: World = field(default_factory=World)
    say: Say = lambda sentence: None
    bar: Bar = lambda label: nullcontext()

    def outcomes(self, model: Model, sets: Iterable[TextSet]) -> Iterator[Outcome]:
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
        length = self.length or model.length
        if length > model.length:
            raise UsageError(f"length {length} is beyond the model's window of {model.length} tokens")
        if self.packing == "sentence":
            raise UsageError("a suite scores every token, and the packing 'sentence' cuts lines: give wrap or pad")
        estimator = self.metric.estimator or model.objective.estimator(model.denoiser)
        model.objective.with_estimator(estimator).check(model.denoiser)  # now, rather than once a set
        return {
            "suite": self.suite.name,
            "version": self.suite.version,
            "model": model_fingerprint(model),
            "length": length,
            "estimator": estimator,
            "num_samples": self.metric.num_samples,
            "precision": self.metric.precision,
            "max_rows": self.metric.max_rows,
            "seed": self.seed,
            "device": model.device.type,
            "dtype": str(next((p.dtype for p in model.denoiser.parameters()), None)).removeprefix("torch."),
            "unmask": unmask.__version__,
        }

    def _outcome(self, model: Model, one: TextSet, results: Results, common: Identity) -> Outcome:
        packing = self.packing or one.packing
        anchor = model.anchor_of(packing)
        how: dict[str, Any] = {"policy": packing, "length": common["length"], "anchor": anchor}
        source, data = self.world.agree(lambda: _found(one, self.data_dir))[self.world.rank]
        identity = common | {"set": one.name, "data": data, "packing": packing, "anchor": anchor}
        numbers, changed = self.world.from_first(lambda: results.finished(one, identity))
        if numbers is not None:
            self.say(f"{one.title}: measured already, its numbers are taken from {one.name}.json")
            return Outcome(set=one, numbers=numbers, taken=True)
        if changed:
            self.say(f"{one.title}: measured again, for what {one.name}.json is of has changed: {', '.join(changed)}")
        read: list[_Read] = []
        self.world.agree(lambda: read.append(_pack(model, source, how)))
        self.world.arm()
        with self.bar(one.title) as progress:
            measured = evaluate(
                model,
                read[0].rows,
                metric=self.metric,
                seed=self.seed,
                about=read[0].about(source, data),
                world=self.world,
                progress=progress,
            )
        numbers = _numbers(one, measured, read[0], identity)
        if self.world.first:
            results.keep(one, numbers)
        return Outcome(set=one, numbers=numbers)


def _found(one: TextSet, folder: Path | None) -> tuple[Source, str]:
    source = one.source(folder)
    return source, source.fingerprint()


@dataclass
class _Read:
    """A set's rows, and what was read."""

    rows: Rows
    documents: int = 0
    empty: int = 0
    text_bytes: int = 0

    def about(self, source: Source, data: str) -> dict[str, Any]:
        return {
            "data": source.name,
            "split": source.what,
            "fingerprint": data,
            "differs": source.differs,
            "detokenizer": source.detokenize.__name__,
            "documents": self.documents,
            "bits_per_byte_of": "the scored tokens' bytes in the detokenized text",
            "interval": "over rows",
        }


def _pack(model: Model, source: Source, how: dict[str, Any]) -> _Read:
    """Every document, none cut: what is too long for a row goes on in further ones."""
    counts = [0, 0, 0]

    def documents() -> Iterator[str]:
        for text in source.texts():
            counts[0] += 1
            if text.strip():
                counts[2] += len(text.encode("utf-8", errors="surrogatepass"))
                yield text
            else:
                counts[1] += 1

    try:
        rows = pack_texts(documents(), model.tokenizer, go_on=True, **how)
    except OSError as e:  # a corpus of somebody else's
        raise DataError(f"cannot read {source.name}: {e.strerror or e}") from None
    except DataError as e:
        if counts[2]:
            raise
        empty = f"all of its {counts[1]:,} documents are blank" if counts[0] else str(e)
        raise DataError(f"{source.name} holds no text: {empty}") from None
    return _Read(rows, *counts)


def _numbers(one: TextSet, measured: Measurement, read: _Read, identity: Identity) -> Numbers:
    """All that is kept of a set; plain data."""
    bound, report = measured.bound, read.rows.report
    if bound is None or not math.isfinite(bound.nats):
        value = "no likelihood" if bound is None else f"{bound.nats} nats"
        raise NonFiniteError(f"the model gives {value} on {one.title}, which is no finite number: see its weights")
    return {
        "suite": identity["suite"],
        "set": one.name,
        "title": one.title,
        "kind": measured.kind,
        "sign": measured.sign,
        **bound.summary(),
        "tokens_cut": report.cut_tokens,
        "tokens_not_chosen": report.tokens - bound.tokens,
        "text_bytes": read.text_bytes,
        "bytes_dropped": read.text_bytes - report.bytes,
        "bytes_not_chosen": report.bytes - (bound.num_bytes or 0),
        "documents": read.documents,
        "empty_documents": read.empty,
        "protocol": dict(measured.protocol),
        "identity": identity,
    }
