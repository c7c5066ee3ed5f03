"""The table of a comparison as plain data: each system's level, cost and gap to the reference."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from unmask.comparison.quoted import TEXT, Figures, Quoted
from unmask.comparison.trial import Trial
from unmask.evaluation.measurement import SIGN
from unmask.evaluation.paired import GAP_SIGN, Interval, SeedNoise, gap, level, seed_noise, slope

COSTS = ("parameters", "parameters_without_embeddings", "tokens", "epochs", "steps", "passes", "flops")
MEASURED = ("seconds", "tokens_per_second")


@dataclass(frozen=True)
class Entry:
    """A system's line.

    Perplexities are given only for likelihoods and bounds; a pseudo-likelihood has its own column.
    """

    system: str
    seeds: list[int]  # of the finished trials
    kind: str
    sign: str
    estimator: str
    nats: Interval | None
    ppl: float | None
    ppl_ci95: tuple[float, float] | None
    pseudo_ppl: float | None
    bits_per_byte: float | None
    cost: dict[str, float]  # means over the trials
    best: list[dict[str, float]]  # for each trial: where its best weights were
    gap: Interval | None  # to the reference
    gap_sign: str
    verdict: str
    quoted: Quoted | None
    slope: tuple[Interval, Interval] | None  # of the bound in 1/T: the limit for large T, and the slope


@dataclass(frozen=True)
class Table:
    """All systems of a comparison; `trials` includes all trials, also failed ones."""

    entries: list[Entry]
    reference: str
    noise: SeedNoise | None
    trials: list[Trial]
    waiting: list[str]  # names of trials that have not run yet
    figures: Figures = TEXT  # the paper's, beside ours

    @property
    def failed(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.finished]

    def plain(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "reference": self.reference,
            "seed_noise": None if self.noise is None else asdict(self.noise),
            "systems": [_plain_entry(entry) for entry in self.entries],
            "trials": [_plain_trial(trial) for trial in self.trials],
            "waiting": self.waiting,
        }


def make_table(
    systems: Sequence[str],
    trials: Sequence[Trial],
    reference: str,
    waiting: Sequence[str] = (),
    figures: Figures = TEXT,
) -> Table:
    """Build the table from these trials, with systems in this order.

    >>> a, b = (Trial(name=f"{s}-s0", system=s, seed=0, fingerprint="", state="finished", nats=[n, n], counts=[1, 1])
    ...     for s, n in (("a", 1.0), ("b", 1.5)))
    >>> table = make_table(["a", "b"], [a, b], "a")
    >>> table.entries[1].gap.value, table.entries[1].verdict  # what another seed would give, nobody knows
    (0.5, 'one seed')
    """
    by_system: dict[str, list[Trial]] = defaultdict(list)
    known = {trial.texts: trial.text_of for trial in trials if trial.text_of}  # older versions did not store it
    trials = [replace(trial, text_of=known.get(trial.texts, [])) for trial in trials]
    for trial in trials:
        if trial.finished:
            by_system[trial.system].append(trial)
    levels = [[trial.nats_per_token for trial in of] for of in by_system.values() if of[0].kind != "pseudo"]
    noise = seed_noise(levels)
    against = by_system.get(reference, [])
    paper = figures.by_recipe
    entries = [_entry(s, by_system.get(s, []), reference, against, noise, paper.get(s)) for s in systems]
    return Table(entries, reference, noise, list(trials), list(waiting), figures)


def _entry(
    system: str,
    trials: list[Trial],
    reference: str,
    against: list[Trial],
    noise: SeedNoise | None,
    found: Quoted | None,
) -> Entry:
    if not trials:
        return Entry(system, [], "", "", "", None, None, None, None, None, {}, [], None, "", "", found, None)
    first = trials[0]
    nats = level(_nats(trials), first.by_text(first.counts))
    ppl = math.exp(nats.value) if nats.value < 700 else None
    pseudo = first.kind == "pseudo"
    ci95 = None if nats.ci95 is None or nats.ci95[1] > 700 else (math.exp(nats.ci95[0]), math.exp(nats.ci95[1]))
    total = sum(first.counts) * nats.value
    between, sign, verdict = _gap(system, trials, reference, against, noise)
    return Entry(
        system=system,
        seeds=[trial.seed for trial in trials],
        kind=first.kind,
        sign=SIGN[first.kind],
        estimator=first.estimator,
        nats=nats,
        ppl=None if pseudo else ppl,
        ppl_ci95=None if pseudo else ci95,
        pseudo_ppl=ppl if pseudo else None,
        bits_per_byte=total / math.log(2) / first.num_bytes if first.num_bytes else None,
        cost={key: _mean([float(getattr(trial, key)) for trial in trials]) for key in (*COSTS, *MEASURED)},
        best=[{"seed": t.seed, "step": t.best_step, "tokens": t.best_tokens, "epochs": t.best_epochs} for t in trials],
        gap=between,
        gap_sign=sign,
        verdict=verdict,
        quoted=found,
        slope=_slope(trials),
    )


def _gap(
    system: str, trials: list[Trial], reference: str, against: list[Trial], noise: SeedNoise | None
) -> tuple[Interval | None, str, str]:
    if system == reference:
        return None, "", "reference"
    if not against:
        return None, "", "no reference"
    kinds = trials[0].kind, against[0].kind
    if "pseudo" in kinds:
        return None, "", "not compared: a pseudo-likelihood"
    if trials[0].texts != against[0].texts:
        return None, "", "not compared: other texts"
    between = gap(_nats(trials), _nats(against), trials[0].by_text(trials[0].counts), noise)
    return between, GAP_SIGN.get(kinds, "≈"), between.verdict


def _slope(trials: list[Trial]) -> tuple[Interval, Interval] | None:
    """Fit the bounds in T steps of the same weights, averaged over seeds."""
    steps = [name for name in trials[0].also if name.startswith("T=")]
    if len(steps) < 2 or any(trial.also.keys() != trials[0].also.keys() for trial in trials):
        return None
    import torch

    def mean(name: str) -> Tensor:
        return torch.stack([trial.by_text(trial.also[name]) for trial in trials]).mean(dim=0)

    return slope({int(name.removeprefix("T=")): mean(name) for name in steps}, trials[0].by_text(trials[0].counts))


def _nats(trials: list[Trial]) -> dict[int, Tensor]:
    return {trial.seed: trial.by_text(trial.nats) for trial in trials}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _plain_interval(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return asdict(interval) | {"ci95": None if interval.ci95 is None else list(interval.ci95)}


def _plain_entry(entry: Entry) -> dict[str, Any]:
    plain = {name: getattr(entry, name) for name in Entry.__dataclass_fields__}
    plain |= {"nats_per_token": _plain_interval(plain.pop("nats")), "gap": _plain_interval(entry.gap)}
    plain["slope"] = (
        None if entry.slope is None else dict(zip(("limit", "slope"), map(_plain_interval, entry.slope), strict=True))
    )
    plain["quoted"] = None if entry.quoted is None else asdict(entry.quoted)
    return plain


def _plain_trial(trial: Trial) -> dict[str, Any]:
    plain = asdict(trial)
    for name in ("nats", "counts", "text_of", "also"):  # stored in the trial's own file
        del plain[name]
    return plain | {"nats_per_token": trial.nats_per_token if trial.finished else None}
