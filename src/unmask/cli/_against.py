"""`unmask eval --against`: another model on the same rows, and how far apart the two are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.corpora import Corpus
    from unmask.data.packing import Rows
    from unmask.evaluation.against import Difference, Other
    from unmask.metrics import Metric
    from unmask.model import Model


def check(args: argparse.Namespace, metric: Metric) -> None:
    """Refuse what cannot be compared before anything is read."""
    from unmask.metrics.perplexity import Perplexity

    if args.against is None:
        return
    if not isinstance(metric, Perplexity):
        raise UsageError("--against compares perplexities: leave out --metric")


def length_of(args: argparse.Namespace, model: Model, other: Model | None) -> int:
    """Tokens of a row: the option's, else the window of the model, or the smaller one of both."""
    windows = {"the model": model.length} if other is None else {args.model: model.length, args.against: other.length}
    name, window = min(windows.items(), key=lambda pair: pair[1])
    if args.data is None and window < model.length:
        raise UsageError(
            f"{name} reads {window} tokens at once, fewer than a row that {args.model} held out: give --data"
        )
    if args.length is not None and args.length > window:
        whose = "the model's window" if other is None else f"the window of {name}"
        raise UsageError(f"--length {args.length} is beyond {whose} of {window} tokens")
    length: int = args.length or window
    return length


def other_of(
    args: argparse.Namespace, other: Model, model: Model, rows: Rows, corpus: Corpus, max_rows: int | None
) -> Other:
    """The other model with its rows: the same ones where it spells and frames texts alike, else the same texts anew."""
    from unmask.data.packing import Anchor, build_rows
    from unmask.evaluation.against import Other

    policy = rows.report.policy
    anchor: Anchor = other.anchor_of(policy)
    if anchor == rows.report.anchor and other.tokenizer.fingerprint() == model.tokenizer.fingerprint():
        found = rows
    elif args.data is None:
        raise UsageError(f"{args.against} spells or frames texts unlike {args.model}: give both the same --data FILE")
    else:
        found = build_rows(corpus, other.tokenizer, policy=policy, length=rows.length, anchor=anchor)
    return Other.of(other, found, (rows, model.tokenizer), max_rows)


def told(args: argparse.Namespace, apart: Difference) -> list[str]:
    """The difference in words, a line each."""
    from unmask.evaluation.paired import seen

    ours, theirs = short_names(args)
    interval = "no interval: a single text"
    if (ends := apart.interval.ci95) is not None:
        interval = "95% interval {:+.4f} – {:+.4f} over texts".format(*ends)
    unit, found = apart.unit.replace(" per ", "/"), seen(apart.interval.ci95)
    lines = [f"difference  {apart.sign} {apart.value:+.4f} {unit}   {interval}: {found}   ({ours} − {theirs})"]
    if apart.draws_half > 0:  # of a single draw nothing is known, and where nothing is drawn there is nothing to know
        lines.append(f"given texts ± {apart.draws_half:.4f} {unit}, over times and masks alone")
    if len(set(apart.kinds)) > 1:
        lines.append(f"of {ours} {_kind(apart.kinds[0])}, of {theirs} {_kind(apart.kinds[1])}")
    return [*lines, *([apart.note] if apart.note else [])]


def short_names(args: argparse.Namespace) -> tuple[str, str]:
    """What the two models are called where there is little room."""
    ours, theirs = (Path(name).name or name for name in (args.model, args.against))
    return (ours, theirs) if ours != theirs else (args.model, args.against)


def _kind(kind: str) -> str:
    return "the exact value" if kind == "exact" else f"an {kind}"
