"""Two models in one suite: a table of their differences, one line per number, and which of them are visible.

For each set, a suite that measures two models stores the other model's numbers under `against`. Under `differences` it
stores one plain dict per number: of, name, unit, ours, theirs, value (ours minus theirs), ci95, visible; see
`difference_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unmask.evaluation.paired import seen
from unmask.evaluation.suites.base import Numbers, Outcome, markdown_table

COLUMNS = ["set", "of", "number", "ours", "theirs", "difference", "95% interval", ""]
_DIGITS = {"nats per token": 4, "bits per byte": 4, "points": 2}
_NONE = "—"
VISIBLE = "visible: the 95% interval of the difference does not hold 0; of other training seeds nothing is known"


def difference_of(
    name: str, unit: str, ours: float, theirs: float, ci95: Sequence[float] | None, **more: Any
) -> Numbers:
    """A difference in the format of the results file.

    >>> difference_of("BLEU", "points", 30.0, 28.0, (1.0, 3.0))["visible"]
    True
    """
    found = {"name": name, "unit": unit, "ours": ours, "theirs": theirs, "value": ours - theirs}
    found |= {"of": "all", "sign": "", "ci95": None if ci95 is None else list(ci95), **more}
    return found | {"visible": seen(ci95) == "visible"}


def rows_of(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The cells below `COLUMNS`, for every measured set."""
    rows = []
    for outcome in outcomes:
        for one in (outcome.numbers or {}).get("differences", ()):
            digits, ends = _DIGITS[one["unit"]], one["ci95"]
            spread = _NONE if ends is None else f"{ends[0]:+.{digits}f} – {ends[1]:+.{digits}f}"
            cells = [
                outcome.set.title,
                one["of"],
                one["name"],
                *(f"{one[key]:.{digits}f}" for key in ("ours", "theirs")),
            ]
            word = "too few texts" if ends is None else seen(ends)
            rows.append([*cells, f"{one['sign']} {one['value']:+.{digits}f}".strip(), spread, word])
    return rows


def notes_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Remarks on the differences, as sentences without a full stop."""
    found = [outcome.numbers for outcome in outcomes if outcome.numbers is not None and "against" in outcome.numbers]
    told = dict.fromkeys(note for numbers in found for note in numbers["against"].get("notes", ()))
    return [*told, VISIBLE] if any(numbers["differences"] for numbers in found) else list(told)


def terminal_lines(outcomes: Sequence[Outcome], width: int = 79) -> list[str]:
    """The same for a terminal, without the two models' values, which are printed above.

    >>> terminal_lines([])
    []
    """
    lines: list[list[str]] = []
    for title, of, name, _, _, *rest in rows_of(outcomes):
        what = name if of == "all" else f"{of}, {name}"
        if name in _DIGITS:  # one number per set
            lines.append([f"{title}, {what}", *rest])
        else:
            lines += [[title, "", "", ""]] * (not any(row[0] == title for row in lines))
            lines.append([f"  {what}", *rest])
    if not lines:
        return []
    cells = [["", "difference", "95% interval", ""], *lines]
    sizes = [max(len(row[i]) for row in cells) for i in range(4)]
    sizes[0] = min(sizes[0], width - sum(sizes[1:]) - 6)
    return [
        f"{what[: sizes[0]]:<{sizes[0]}}  {value:>{sizes[1]}}  {spread:>{sizes[2]}}  {word}".rstrip()
        for what, value, spread, word in cells
    ]


def markdown(outcomes: Sequence[Outcome]) -> list[str]:
    """The table and its notes, as parts of a page."""
    rows = rows_of(outcomes)
    parts = [markdown_table(COLUMNS, rows)] if rows else []
    return [*parts, "\n".join(f"- {note}." for note in notes_of(outcomes))]
