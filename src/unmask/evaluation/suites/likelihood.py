"""Likelihood suites: the texts of a set are detokenized, packed and scored, every token once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from unmask.data.packing import Anchor, Rows, pack_texts
from unmask.errors import DataError, UsageError
from unmask.evaluation.against import Difference, Other, evaluate_against, metrics_of
from unmask.evaluation.evaluate import evaluate
from unmask.evaluation.suites.base import Entry, Identity, Measured, Numbers, Suite, Two
from unmask.evaluation.suites.differences import difference_of
from unmask.evaluation.suites.texts import Source, TextSet

if TYPE_CHECKING:
    from unmask.evaluation.measurement import Measurement
    from unmask.evaluation.suites.run import SuiteRun
    from unmask.model import Model

OPTIONS = frozenset(["packing", "length", "max_rows", "num_samples", "precision", "estimator", "batch"])


@dataclass(frozen=True, kw_only=True)
class LikelihoodSuite(Suite):
    """Perplexity, nats and bits per byte of sets of texts, beside figures from a paper."""

    quoted: Mapping[str, str]  # quoted models, in the order of the table → = or ≤
    quotation: str  # source of the quoted figures, and what they measure
    differs: str  # differences from the paper in every set

    def common(self, model: Model, run: SuiteRun) -> Identity:
        length, metric = run.length or model.length, run.metric
        if length > model.length:
            raise UsageError(f"length {length} is beyond the model's window of {model.length} tokens")
        if run.packing == "sentence":
            raise UsageError("a suite scores every token, and the packing 'sentence' cuts lines: give wrap or pad")
        estimator = metric.estimator or model.objective.estimator(model.denoiser)
        model.objective.with_estimator(estimator).check(model.denoiser)  # check now, rather than for each set
        if run.packing is None and model.packing != "wrap":
            packed = f"this model was trained on rows of the packing {model.packing}"
            run.say(f"{packed}, sets are packed by wrap: see --packing")
        return {
            "length": length,
            "estimator": estimator,
            "num_samples": metric.num_samples,
            "precision": metric.precision,
            "max_rows": metric.max_rows,
            **({} if run.max_texts is None else {"max_texts": run.max_texts}),
        }

    def of_set(self, model: Model, one: Entry, run: SuiteRun) -> Identity:
        packing = run.packing or cast(TextSet, one).packing
        return {"packing": packing, "anchor": model.anchor_of(packing)}

    def measure(self, model: Model, one: Entry, found: Any, run: SuiteRun, identity: Identity) -> Measured:
        (read,) = _read([model], found, run, [identity])
        with run.bar(one.title) as progress:
            how: dict[str, Any] = {"seed": run.seed, "world": run.world, "progress": progress}
            about = read.about(found, identity["data"])
            measured = evaluate(model, read.rows, metric=run.metric, about=about, **how)
        return Measured(numbers=_numbers(cast(TextSet, one), measured, read))

    def alike(self, models: Two[Model], run: SuiteRun) -> Two[SuiteRun]:
        if run.packing != "pad" and len({model.tokenizer.fingerprint() for model in models}) > 1:
            raise UsageError(
                "these models spell texts in different tokens, so rows of packed texts hold other parts of them: "
                "compare them with --packing pad"
            )
        run = replace(run, length=run.length or min(model.length for model in models))
        ours, theirs = metrics_of(models, run.metric)
        runs = replace(run, metric=ours), replace(run, metric=theirs)
        if len({model.tokenizer.fingerprint() for model in models}) == 1:
            return runs
        most = run.metric.max_rows  # the two models' rows hold different parts of a text, so the limit counts texts
        first, second = (replace(one, metric=replace(one.metric, max_rows=None), max_texts=most) for one in runs)
        return first, second

    def measure_both(
        self, models: Two[Model], one: Entry, found: Any, runs: Two[SuiteRun], identities: Two[Identity]
    ) -> Measured:
        (model, other), run = models, runs[0]
        ours, theirs = _read(models, found, run, identities)
        try:
            against = Other.of(other, theirs.rows, (ours.rows, model.tokenizer), run.metric.max_rows)
        except UsageError as e:  # concerns only this set
            raise DataError(str(e)) from None
        with run.bar(one.title) as progress:
            how: dict[str, Any] = {"seed": run.seed, "world": run.world, "progress": progress}
            about = ours.about(found, identities[0]["data"])
            metric = run.metric if run.metric.estimator is not None else runs[1].metric  # the one that has it
            first, second, apart = evaluate_against(model, ours.rows, against, metric, about=about, **how)
        texts = cast(TextSet, one)
        numbers = _numbers(texts, second, theirs, "the other model") | {"identity": identities[1]}
        kinds = f"Differences are of an {apart.kinds[0]} and an {apart.kinds[1]} value"
        numbers["notes"] = [*([kinds] if len(set(apart.kinds)) > 1 else []), *([apart.note] if apart.note else [])]
        both = {"against": numbers, "differences": [_difference(apart, first, second)]}
        return Measured(numbers=_numbers(texts, first, ours) | both)


def _difference(apart: Difference, first: Measurement, second: Measurement) -> Numbers:
    bounds = (first.bound, second.bound)
    key = "nats_per_token" if apart.unit == "nats per token" else "bits_per_byte"
    ours, theirs = (getattr(bound, key) for bound in bounds)
    return difference_of(apart.unit, apart.unit, ours, theirs, apart.interval.ci95) | apart.summary()


def _read(models: Sequence[Model], found: Source, run: SuiteRun, identities: Sequence[Identity]) -> list[_Read]:
    """The set's rows as tokenized and framed for each model."""
    read: list[_Read] = []
    for model, identity in zip(models, identities, strict=True):
        anchor: Anchor = identity["anchor"]
        how: dict[str, Any] = {"policy": identity["packing"], "length": identity["length"], "anchor": anchor}
        run.world.agree(lambda: read.append(_pack(model, found, how, run.max_texts)))  # noqa: B023 - called at once
    run.world.arm()
    return read


@dataclass
class _Read:
    """A set's rows, and information about what was read."""

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
        }


def _pack(model: Model, source: Source, how: dict[str, Any], most: int | None = None) -> _Read:
    """Pack every document, or `most` of them spread evenly; none is truncated, long ones continue in further rows."""
    counts = [0, 0, 0]

    def documents() -> Iterator[str]:
        chosen = None if most is None else _spread(sum(bool(text.strip()) for text in source.texts()), most)
        for text in source.texts():
            counts[0] += 1
            if text.strip() and chosen is not None and counts[0] - counts[1] - 1 not in chosen:
                continue
            if text.strip():
                counts[2] += len(text.encode("utf-8", errors="surrogatepass"))
                yield text
            else:
                counts[1] += 1

    try:
        rows = pack_texts(documents(), model.tokenizer, go_on=True, **how)
    except OSError as e:  # raised by a third-party corpus
        raise DataError(f"cannot read {source.name}: {e.strerror or e}") from None
    except DataError as e:
        if counts[2]:
            raise
        empty = f"all of its {counts[1]:,} documents are blank" if counts[0] else str(e)
        raise DataError(f"{source.name} holds no text: {empty}") from None
    return _Read(rows, *counts)


def _spread(num: int, most: int) -> set[int]:
    return {i * (num - 1) // max(1, most - 1) for i in range(most)} if most < num else set(range(num))


def _numbers(one: TextSet, measured: Measurement, read: _Read, whose: str = "the model") -> Numbers:
    """All results that are stored for a set, as plain data."""
    bound, report = measured.bound, read.rows.report
    assert bound is not None  # the metric is a perplexity
    bound.check_finite(whose, one.title)
    return {
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
    }
