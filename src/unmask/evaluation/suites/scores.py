"""Scores of generated texts as a table: one line per number, with its interval, and the protocol of each set."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.evaluation.bootstrap import FEWEST, RESAMPLES
from unmask.evaluation.suites.base import NOT_MEASURED, Layout, Numbers, Outcome, Suite

_WIDTHS = (13, 23, 19, 7, 17)  # of set, of, number, value, interval; 79 in all
_NONE = "—"


class ScoreTable(Layout):
    """One line per number: its set and part, name, value and 95% interval."""

    def header(self, numbers: Numbers | None) -> str:
        return _line(("set", "of", "number", "value", "95% interval"))

    def lines(self, outcome: Outcome) -> list[str]:
        if outcome.numbers is None:
            return [f"{outcome.set.title:<{_WIDTHS[0]}}{NOT_MEASURED}"]
        rows = [_cells(one) for one in outcome.numbers["scores"]]
        return [_line((outcome.set.title if i == 0 else "", *row[:4])) for i, row in enumerate(rows)]

    def columns_and_rows(self, suite: Suite, outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
        rows = []
        for one in outcomes:
            if one.numbers is None:
                rows.append([one.set.title, NOT_MEASURED, *[_NONE] * 4])
            else:
                rows += [[one.set.title, *_cells(score)] for score in one.numbers["scores"]]
        return ["set", "of", "number", "value", "95% interval", "texts"], rows

    def notes(self, suite: Suite, outcomes: Sequence[Outcome]) -> list[str]:
        lines = [f"{one.set.title} was not measured: {one.failure}" for one in outcomes if one.failure]
        lines.append(f"Intervals of 95% are over texts, {INTERVALS}.")
        measured = [one.numbers for one in outcomes if one.numbers is not None]
        lines += dict.fromkeys(f"{line}." for numbers in measured for line in self.told(numbers))
        marks = dict.fromkeys(
            (score["name"], score["signature"])
            for numbers in measured
            for score in numbers["scores"]
            if "signature" in score
        )
        return lines + [f"{name} is sacrebleu's: {signature}." for name, signature in marks]

    def told(self, numbers: Numbers) -> list[str]:
        return [numbers["protocol"]["asked"], *numbers["protocol"].get("notes", ())]

    def protocol_line(self, numbers: Numbers) -> str:
        protocol = numbers["protocol"]
        shared = ("sampler", "guidance", "length of the target", "texts at most", "seed", "tokenizer")
        parts = [f"{name} {protocol[name]}" for name in shared if protocol.get(name) is not None]
        return ", ".join([*parts, f"{protocol['device']} {protocol['dtype']}", f"unmask {protocol['unmask']}"])

    def source_line(self, numbers: Numbers) -> str:
        return str(numbers["protocol"]["source"])

    def counts(self, numbers: Numbers) -> dict[str, str]:
        kept = numbers.get("outputs", {}).get("file", _NONE)
        return {"texts": f"{numbers['texts']:,}", "left out": numbers["left_out"] or _NONE, "outputs": kept}


INTERVALS = (
    f"bootstrap of {RESAMPLES:,} resamples by the seed, for {FEWEST} texts or more; exact for a share of 0 or 100%"
)


def _cells(score: Numbers) -> tuple[str, str, str, str, str]:
    interval = score.get("ci95")
    spread = _NONE if interval is None else f"{interval[0]:.2f} – {interval[1]:.2f}"
    return score["of"], score["name"], f"{score['value']:.2f}", spread, f"{score['n']:,}"


def _line(cells: tuple[str, ...]) -> str:
    left = "".join(f"{cell[: width - 1]:<{width}}" for cell, width in zip(cells[:3], _WIDTHS, strict=False))
    return left + "".join(f"{cell:>{width}}" for cell, width in zip(cells[3:], _WIDTHS[3:], strict=True))
