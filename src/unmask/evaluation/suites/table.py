"""A suite's numbers as a table: for a terminal of 80 columns, and in Markdown beside the figures of a paper.

A pseudo-likelihood's number stands in a column of its own name, never among perplexities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unmask.evaluation.suites.base import Suite
from unmask.evaluation.suites.results import Numbers
from unmask.evaluation.suites.run import Outcome

_WIDTHS = (11, 10, 19, 9, 10, 10, 10)  # of the columns of `cells`; 79 in all
_COLUMNS = ("95% interval", "nats/tok", "bits/byte", "tokens", "dropped")
_NONE = "—"


def header(*, pseudo: bool) -> str:
    """The terminal table's first line."""
    return _line(("set", "pseudo-PPL" if pseudo else "PPL", *_COLUMNS))


def line(outcome: Outcome) -> str:
    """A set's line in the terminal table.

    >>> from unmask.evaluation.suites import find_suite
    >>> line(Outcome(set=find_suite("zero-shot").sets["ptb"], failure="no such file"))
    'PTB          not measured'
    """
    if outcome.numbers is None:
        return f"{outcome.set.title:<{_WIDTHS[0]}}  not measured"
    return _line((outcome.set.title, *_cells(outcome.numbers, pseudo=_pseudo(outcome.numbers))))


def markdown(suite: Suite, model: str, outcomes: Sequence[Outcome]) -> str:
    """The table with the quoted figures beside it, and the protocol of each set."""
    parts = [f"# {suite.name}: {model}", _table(*columns_and_rows(suite, outcomes))]
    parts.append("\n".join(f"- {line}" for line in notes(suite, outcomes)))
    parts.append(_protocol(outcomes))
    return "\n\n".join(parts) + "\n"


def columns_and_rows(suite: Suite, outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """The table's cells: what was measured, and what is quoted."""
    measured = [one.numbers for one in outcomes if one.numbers is not None]
    kinds = sorted({_pseudo(numbers) for numbers in measured}) or [False]
    own = [column for pseudo in kinds for column in ("pseudo-PPL" if pseudo else "PPL", "95% interval")]
    quoted_names = [f"{name}, quoted" for name in suite.quoted]
    columns = ["set", *own, "nats/token", "bits/byte", "tokens", "dropped", *quoted_names]
    rows = []
    for one in outcomes:
        figures = [(sign, one.set.quoted.get(name)) for name, sign in suite.quoted.items()]
        quoted = [_NONE if figure is None else f"{sign} {figure:.2f}" for sign, figure in figures]
        if one.numbers is None:
            cells = ["not measured", *[_NONE] * (len(own) + 3)]
        else:
            each = [_cells(one.numbers, pseudo=pseudo) for pseudo in kinds]
            cells = [cell for part in each for cell in part[:2]] + list(each[0][2:])
        rows.append([one.set.title, *cells, *quoted])
    return columns, rows


def protocol_line(numbers: Numbers) -> str:
    """What all sets of a run have in common, in a line."""
    protocol = numbers["protocol"]
    most = numbers["identity"]["max_rows"]
    rows = [] if most is None else [f"at most {most:,} rows a set, spread evenly"]
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


def source_line(numbers: Numbers) -> str:
    """Where a set's text comes from and what it went through."""
    protocol = numbers["protocol"]
    detokenizer = protocol["detokenizer"]
    undone = "as it is" if detokenizer == "as_it_is" else f"detokenizer {detokenizer}"
    return f"{protocol['data']}: {protocol['split']}; {undone}"


def notes(suite: Suite, outcomes: Sequence[Outcome]) -> list[str]:
    """What the table's signs and columns mean, and what differs from what is quoted."""
    lines = [f"{one.set.title} was not measured: {one.failure}" for one in outcomes if one.failure]
    lines += [
        "≤ is an upper bound, = an exact value, ≈ a pseudo-likelihood, which is no perplexity. Intervals of 95% are "
        "over rows.",
        "dropped: tokens that were not scored, cut or in rows that were not chosen. Bits per byte divide by the bytes "
        "that the scored tokens have in the detokenized text.",
        "A perplexity is of its vocabulary's tokens: between models of other vocabularies compare bits per byte.",
        f"Quoted, not measured here: {suite.quotation}. {suite.differs}.",
    ]
    found = [(one.set.title, one.numbers["protocol"]["differs"]) for one in outcomes if one.numbers is not None]
    lines += [f"{title}: {differs}." for title, differs in found if differs]
    return lines


def _protocol(outcomes: Sequence[Outcome]) -> str:
    rows = []
    measured = [(one.set.title, one.numbers) for one in outcomes if one.numbers is not None]
    for title, numbers in measured:
        counts = [numbers["documents"], numbers["sequences"], numbers["text_bytes"], numbers["bytes"]]
        rows.append([title, source_line(numbers), *(f"{count:,}" for count in counts)])
    common = dict.fromkeys(protocol_line(numbers) for _, numbers in measured)
    models = dict.fromkeys(numbers["identity"]["model"] for _, numbers in measured)
    lines = [f"Protocol: {line}." for line in common] + [f"Model: sha256 {model}." for model in models]
    columns = ["set", "text", "documents", "rows scored", "bytes", "bytes scored"]
    return "\n\n".join([_table(columns, rows), *lines]) if rows else ""


def _cells(numbers: Numbers, *, pseudo: bool) -> tuple[str, ...]:
    """PPL, interval, nats, bits, tokens, dropped; where the number is of the other kind, no PPL."""
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
    """Four digits or more, in 7 characters.

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


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)
