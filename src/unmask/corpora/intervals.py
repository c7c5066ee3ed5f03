"""Intervals of sequences from BED files: strict reading, merging, subtraction, overlaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unmask.corpora import sources
from unmask.errors import DataError

END = 1 << 62  # end of a record of unknown length
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Interval:
    """Bases start..end of a record, counted from 0, excluding `end`. line: its line in the file."""

    record: str
    start: int
    end: int
    name: str = ""
    reverse: bool = False  # on the other strand
    line: int = 0


def read_bed(path: str) -> list[Interval]:
    """The intervals of a BED file: record, start, end, and optionally name, score and strand.

    >>> read_bed("no/such.bed")
    Traceback (most recent call last):
    unmask.errors.DataError: no such file or folder: no/such.bed; check the path, seen from the current folder
    """
    found = []
    for file in sources.find(path, (".bed",)):
        for number, line in sources.lines(file):
            if line.strip() and not line.startswith(("#", "track", "browser")):
                found.append(_interval(f"{file}, line {number}", number, line))
    if not found:
        raise DataError(f"{path} holds no interval: a line has a record's name, a start and an end")
    return found


def _interval(where: str, number: int, line: str) -> Interval:
    cells = line.rstrip("\r\n").split("\t") if "\t" in line else line.split()
    if len(cells) < 3 or not (cells[1].strip().isdecimal() and cells[2].strip().isdecimal()):
        raise DataError(f"{where} is no interval of a BED file: it begins with a record's name, a start and an end")
    start, end = int(cells[1]), int(cells[2])
    if start >= end:
        raise DataError(
            f"{where}: the interval {start:,}..{end:,} is empty; starts count from 0, ends are not included"
        )
    strand = cells[5].strip() if len(cells) > 5 else "+"
    if strand not in ("+", "-", "."):
        raise DataError(f"{where}: the strand is {strand[:10]!r}, not +, - or .")
    return Interval(cells[0].strip(), start, end, cells[3].strip() if len(cells) > 3 else "", strand == "-", number)


def spans_of(intervals: Iterable[Interval]) -> dict[str, Spans]:
    """The part of each record that the intervals cover: sorted spans, merged where they touch.

    >>> spans_of([Interval("a", 5, 9), Interval("a", 0, 3), Interval("a", 2, 5)])
    {'a': [(0, 9)]}
    """
    by_record: dict[str, Spans] = defaultdict(list)
    for one in intervals:
        by_record[one.record].append((one.start, one.end))
    return {record: _joined(spans) for record, spans in by_record.items()}


def _joined(spans: Spans) -> Spans:
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def without(spans: Spans, holes: Spans) -> Spans:
    """Subtract sorted holes from sorted spans.

    >>> without([(0, 10)], [(2, 3), (5, 20)])
    [(0, 2), (3, 5)]
    """
    left: Spans = []
    for start, end in spans:
        for low, high in holes:
            if high <= start or low >= end:
                continue
            if low > start:
                left.append((start, low))
            start = max(start, high)
        if start < end:
            left.append((start, end))
    return left


def overlap(ours: Mapping[str, Spans], theirs: Mapping[str, Spans]) -> Interval | None:
    """The first interval that both cover; None if there is none.

    >>> overlap({"a": [(0, 5)]}, {"a": [(4, 9)]})
    Interval(record='a', start=4, end=5, name='', reverse=False, line=0)
    """
    for record in ours:
        for start, end in ours[record]:
            for low, high in theirs.get(record, []):
                if max(start, low) < min(end, high):
                    return Interval(record, max(start, low), min(end, high))
    return None
