"""Perplexities as a table: for a terminal of 80 columns, and in Markdown beside figures from a paper.

A pseudo-likelihood has its own column and is never listed among perplexities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unmask.evaluation.suites.base import NOT_MEASURED, Layout, Numbers, Outcome

_WIDTHS = (11, 10, 19, 9, 10, 10, 10)  # of the columns of `_cells`; 79 in all
_COLUMNS = ("95% interval", "nats/tok", "bits/byte", "tokens", "dropped")
_NONE = "—"


class PerplexityTable(Layout):
    """One line per set: perplexity with its sign and interval, nats, bits, tokens scored and dropped."""

    beside = ", with the paper's figures quoted beside"

    def header(self, numbers: Numbers | None) -> str:
        return _line(("set", "pseudo-PPL" if numbers is not None and numbers["kind"] == "pseudo" else "PPL", *_COLUMNS))

    def lines(self, outcome: Outcome) -> list[str]:
        if outcome.numbers is None:
            return [f"{outcome.set.title:<{_WIDTHS[0]}}  {NOT_MEASURED}"]
        return [_line((outcome.set.title, *_cells(outcome.numbers, pseudo=_pseudo(outcome.numbers))))]

    def columns_and_rows(self, suite: Any, outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
        measured = [one.numbers for one in outcomes if one.numbers is not None]
        kinds = sorted({_pseudo(numbers) for numbers in measured}) or [False]
        own = [column for pseudo in kinds for column in ("pseudo-PPL" if pseudo else "PPL", "95% interval")]
        quoted_names = [f"{name}, quoted" for name in suite.quoted]
        columns = ["set", *own, "nats/token", "bits/byte", "tokens", "dropped", *quoted_names]
        rows = []
        for one in outcomes:
            figures = [(sign, getattr(one.set, "quoted", {}).get(name)) for name, sign in suite.quoted.items()]
            quoted = [_NONE if figure is None else f"{sign} {figure:.2f}" for sign, figure in figures]
            if one.numbers is None:
                cells = [NOT_MEASURED, *[_NONE] * (len(own) + 3)]
            else:
                each = [_cells(one.numbers, pseudo=pseudo) for pseudo in kinds]
                cells = [cell for part in each for cell in part[:2]] + list(each[0][2:])
            rows.append([one.set.title, *cells, *quoted])
        return columns, rows

    def protocol_line(self, numbers: Numbers) -> str:
        protocol = numbers["protocol"]
        most = numbers["identity"]["max_rows"]
        rows = [] if most is None else [f"at most {most:,} rows a set, spread evenly"]
        if (texts := numbers["identity"].get("max_texts")) is not None:
            rows.append(f"at most {texts:,} texts a set, spread evenly")
        anchor = [] if protocol["anchor"] == "none" else [f"anchor {protocol['anchor']}"]
        given = [] if protocol["given"] == "nothing" else [f"given the {protocol['given']}"]
        parts = [
            f"packing {protocol['packing']}",
            *anchor,
            *given,
            f"rows of up to {protocol['length']:,}",
            f"estimator {protocol['estimator']}",
            f"{protocol['draws_per_row']} draw{'' if protocol['draws_per_row'] == 1 else 's'} a row",
            *rows,
            f"seed {protocol['seed']}",
            f"tokenizer {protocol['tokenizer']}",
            f"{protocol['device']} {protocol['dtype']}",
            f"unmask {protocol['unmask']}",
        ]
        return ", ".join(parts)

    def source_line(self, numbers: Numbers) -> str:
        protocol = numbers["protocol"]
        detokenizer = protocol["detokenizer"]
        undone = "as it is" if detokenizer == "as_it_is" else f"detokenizer {detokenizer}"
        return f"{protocol['data']}: {protocol['split']}; {undone}"

    def notes(self, suite: Any, outcomes: Sequence[Outcome]) -> list[str]:
        lines = [f"{one.set.title} was not measured: {one.failure}" for one in outcomes if one.failure]
        lines += [
            "≤ is an upper bound, = an exact value, ≈ a pseudo-likelihood, which is no perplexity. Intervals of 95% "
            "are over texts: rows that begin in the same one count as one. Where a set is a single text, they are over "
            "rows.",
            "dropped: tokens that were not scored, cut or in rows that were not chosen. Bits per byte divide by the "
            "bytes that the scored tokens have in the detokenized text.",
            "A perplexity is of its vocabulary's tokens: between models of other vocabularies compare bits per byte.",
            f"Quoted, not measured here: {suite.quotation}. {suite.differs}.",
        ]
        found = [(one.set.title, one.numbers["protocol"]["differs"]) for one in outcomes if one.numbers is not None]
        lines += [f"{title}: {differs}." for title, differs in found if differs]
        return lines

    def counts(self, numbers: Numbers) -> dict[str, str]:
        kept = {"documents": "documents", "rows scored": "sequences", "bytes": "text_bytes", "bytes scored": "bytes"}
        return {name: f"{numbers[key]:,}" for name, key in kept.items()}


def _cells(numbers: Numbers, *, pseudo: bool) -> tuple[str, ...]:
    """PPL, interval, nats, bits, tokens, dropped; PPL is empty if the number is of the other kind."""
    key = "pseudo_ppl" if pseudo else "ppl"
    interval = numbers.get(f"{key}_ci95")
    spread = _NONE if interval is None else f"{_short(interval[0])} – {_short(interval[1])}"
    value = _NONE if key not in numbers else f"{numbers['sign']} {_short(numbers[key])}"
    bits = numbers["bits_per_byte"]
    dropped = numbers["tokens_cut"] + numbers["tokens_not_chosen"]
    rest = (f"{numbers['nats_per_token']:.4f}", _NONE if bits is None else f"{bits:.4f}")
    return value, spread, *rest, f"{numbers['tokens']:,}", f"{dropped:,}"


def _pseudo(numbers: Numbers) -> bool:
    return "pseudo_ppl" in numbers


def _short(value: Any) -> str:
    """Format a value with at least four digits in at most 7 characters.

    >>> [_short(x) for x in (9.87654, 123.456, 12345.6, 1e9, None)]
    ['9.88', '123.5', '12,346', '1e+09', 'inf']
    """
    if value is None:
        return "inf"
    if value >= 1e6:
        return f"{value:.3g}"
    return f"{value:,.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def _line(cells: tuple[str, ...]) -> str:
    first, *rest = cells
    return f"{first:<{_WIDTHS[0]}}" + "".join(f"{cell:>{width}}" for cell, width in zip(rest, _WIDTHS[1:], strict=True))
