"""Regions of a FASTA file with their flanking sequences, requested by name or by a BED file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from unmask.corpora import sources
from unmask.corpora.fasta import other_strand, read_records
from unmask.corpora.intervals import END, Interval
from unmask.errors import DataError, UsageError, did_you_mean

_REGION = re.compile(r"(?P<record>.+?)(?::(?P<first>[\d,]+)-(?P<last>[\d,]+))?(?::(?P<strand>[+-]))?")


@dataclass(frozen=True)
class Stretch:
    """The bases of a region, read along its strand, with the bases before and after it.

    end: the end of the interval, also if it was not specified.
    """

    interval: Interval
    end: int
    text: str
    before: str = ""
    after: str = ""

    def positions(self) -> range:
        """The position of each base in its record, counted from 1; descending on the other strand.

        >>> list(Stretch(Interval("a", 4, 7, reverse=True), 7, "ACG").positions())
        [7, 6, 5]
        """
        start = self.interval.start
        return range(self.end, start, -1) if self.interval.reverse else range(start + 1, self.end + 1)

    @property
    def name(self) -> str:
        """
        >>> Stretch(Interval("a", 4, 7, reverse=True), 7, "ACG").name
        'a:5-7:-'
        """
        strand = ":-" if self.interval.reverse else ""
        return f"{self.interval.record}:{self.interval.start + 1}-{self.end}{strand}"


def parse_region(text: str) -> Interval:
    """Parse a region in the notation of genome browsers: a record, its first and its last base, counted from 1.

    >>> parse_region("chr20:60,001-61,000:-")
    Interval(record='chr20', start=60000, end=61000, name='chr20:60,001-61,000:-', reverse=True, line=0)
    >>> parse_region("chr20").start
    0
    """
    found = _REGION.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text[:60]!r} is no region: write chr20, or chr20:60001-61000, with :- for the other strand")
    reverse = found["strand"] == "-"
    if found["first"] is None:
        return Interval(found["record"], 0, END, text.strip(), reverse)
    first, last = (int(found[part].replace(",", "") or 0) for part in ("first", "last"))
    if not 1 <= first <= last:
        raise UsageError(f"the region {text[:60]!r} is empty: it goes from its first base, counted from 1, to its last")
    return Interval(found["record"], first - 1, last, text.strip(), reverse)


def read_stretches(path: str, wanted: Sequence[Interval], *, flank: int = 0, bed: str | None = None) -> list[Stretch]:
    """The regions in the requested order, with up to `flank` bases on either side.

    The file is read once, one record at a time, and needs no index. bed: the file of those that have a line number.

    >>> read_stretches("genome.fa.gz", [parse_region("chr20:60001-60004")])[0].text  # doctest: +SKIP
    'GATC'
    """
    made: dict[int, Stretch] = {}
    seen: list[str] = []
    for file in sources.find(path, sources.FASTA):
        for name, sequence in read_records(file):
            seen.append(name)
            for number, one in enumerate(wanted):
                if one.record == name:
                    made[number] = _stretch(one, sequence, flank, bed)
            if len(made) == len(wanted):
                return [made[number] for number in range(len(wanted))]
    if not seen:
        raise sources.is_empty(path)
    missing = next(one for number, one in enumerate(wanted) if number not in made)
    raise DataError(
        f"{_place(missing, bed)}{path} has no record {missing.record!r}; {did_you_mean(missing.record, seen)}"
    )


def _place(one: Interval, bed: str | None) -> str:
    """Where a region was requested, if in a file."""
    return f"{bed}, line {one.line}: " if one.line else ""


def _stretch(one: Interval, sequence: str, flank: int, bed: str | None) -> Stretch:
    end = len(sequence) if one.end == END else one.end
    if end > len(sequence) or not sequence:
        asked = f"{one.start + 1:,} to {one.end:,}" if one.end != END else "all of it"
        where = _place(one, bed)
        raise DataError(f"{where}{one.record} has {len(sequence):,} bases, but {asked} is asked for; another assembly?")
    before, text = sequence[max(0, one.start - flank) : one.start], sequence[one.start : end]
    after = sequence[end : end + flank]
    if one.reverse:
        before, text, after = (other_strand(part) for part in (after, text, before))
    return Stretch(one, end, text.upper(), before.upper(), after.upper())
