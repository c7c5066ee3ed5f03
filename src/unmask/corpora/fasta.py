"""DNA sequences from FASTA files, whole or by the intervals of a BED file, read record by record."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from unmask.corpora import Corpus, Document, sources
from unmask.corpora.intervals import END, Interval, Spans, overlap, read_bed, spans_of, without
from unmask.errors import DataError, UsageError, did_you_mean

MOST_GAP = 1 << 30
AMBIGUOUS = "RYSWKMBDHV"  # IUPAC codes for several possible bases: treated as unknown
_STRANGE = re.compile(f"[^ACGTN{AMBIGUOUS}]", re.IGNORECASE)
_UNKNOWN = str.maketrans(AMBIGUOUS + AMBIGUOUS.lower(), "N" * len(AMBIGUOUS) + "n" * len(AMBIGUOUS))
_HIDDEN = str.maketrans("acgtn", "NNNNN")
_OTHER = str.maketrans("ACGTNacgtn", "TGCANtgcan")


@dataclass(frozen=True, kw_only=True)
class Fasta(Corpus):
    """A FASTA file or a folder's, also compressed; letters A C G T N, and those of several bases, which become N.

    records: only these, identified by the first word of their header line. bed: only the intervals of this BED file,
    each a document, read along its strand. exclude: a BED file whose intervals are left out, with `margin` bases on
    either side. piece: longer sequences are cut into documents of this many bases. gap: runs of at least this many N
    are left out. repeats: how to read lower case, which marks repeats; "unknown" replaces it by N. labelled: the
    interval's name is the document's class.

    >>> Fasta(path="genome.fa.gz", records=("chr20",), exclude="test.bed").documents()  # doctest: +SKIP
    """

    paths = ("path", "bed", "exclude")
    choosing = ("records", "bed", "exclude", "margin", "labelled")

    path: str
    records: tuple[str, ...] = ()
    bed: str | None = None
    exclude: str | None = None
    margin: int = 0
    piece: int = 1 << 20
    gap: int = 1024
    repeats: Literal["known", "unknown"] = "known"
    labelled: bool = False

    def __post_init__(self) -> None:
        for name, least in (("margin", 0), ("piece", 1), ("gap", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.gap > MOST_GAP:
            raise UsageError(f"gap must be at most {MOST_GAP:,}, got {self.gap:,}")
        if self.labelled and self.bed is None:
            raise UsageError("labels are the names of intervals: name a bed, or leave out labelled")

    def files(self) -> list[sources.File]:
        """The files, in reading order."""
        return sources.one_split(self.path, sources.find(self.path, sources.FASTA))

    def documents(self) -> Iterator[Document]:
        wanted = None if self.bed is None else read_bed(self.bed)
        holes = self._holes()
        seen: list[str] = []
        for file in self.files():
            for name, sequence in read_records(file):
                seen.append(name)
                if not self.records or name in self.records:
                    yield from self._of_record(name, sequence, wanted, holes.get(name, []))
        self._all_seen(seen, wanted)

    def _of_record(self, name: str, sequence: str, wanted: list[Interval] | None, holes: Spans) -> Iterator[Document]:
        if wanted is None:
            for start, end in without([(0, len(sequence))], holes):
                yield from self._pieces(sequence[start:end])
            return
        for one in wanted:
            if one.record != name:
                continue
            if one.end > len(sequence):
                where = f"{self.bed}, line {one.line}"
                raise DataError(f"{where}: {name} ends at {len(sequence):,}, before {one.end:,}; another assembly?")
            for start, end in without([(one.start, one.end)], holes):
                text = sequence[start:end]
                if one.reverse:
                    text = other_strand(text)
                yield from self._pieces(text, one.name if self.labelled else None)

    def _pieces(self, text: str, label: str | None = None) -> Iterator[Document]:
        if self.repeats == "unknown":
            text = text.translate(_HIDDEN)
        for part in re.split(f"[Nn]{{{self.gap},}}", text):
            for lo in range(0, len(part), self.piece):
                yield Document(part[lo : lo + self.piece].upper(), label=label)

    def _all_seen(self, seen: list[str], wanted: list[Interval] | None) -> None:
        """Refuse names that no record has: a split by a misspelled name would be empty."""
        if not seen:
            raise sources.is_empty(self.path)
        asked = [*((name, "records") for name in self.records)]
        asked += [(one.record, f"{self.bed}, line {one.line}") for one in wanted or [] if not self.records]
        for name, where in asked:
            if name not in seen:
                raise DataError(f"{where}: {self.path} has no record {name!r}; {did_you_mean(name, seen)}")

    def _holes(self) -> dict[str, Spans]:
        if self.exclude is None:
            return {}
        wider = [
            Interval(one.record, max(0, one.start - self.margin), one.end + self.margin)
            for one in read_bed(self.exclude)
        ]
        return spans_of(wider)

    def covers(self) -> dict[str, Spans] | None:
        """The intervals to read of each record; None: all of all records. Only BED files are read to determine this."""
        holes = self._holes()
        if self.bed is not None:
            spans = spans_of(one for one in read_bed(self.bed) if not self.records or one.record in self.records)
        elif self.records:
            spans = {name: [(0, END)] for name in self.records}
        elif holes:
            raise UsageError("name the records, so that what is left of them can be told from what is held out")
        else:
            return None
        return {name: without(parts, holes.get(name, [])) for name, parts in spans.items()}

    def check_beside(self, held_out: Corpus) -> None:
        """Refuse to hold out intervals that are also trained on."""
        if not isinstance(held_out, Fasta) or sources.digest("", self.files()) != sources.digest("", held_out.files()):
            return
        ours, theirs = self.covers(), held_out.covers()
        if ours is None or theirs is None:
            raise UsageError(f"data.train and data.valid both read all of {self.path}: name records, bed or exclude")
        if (both := overlap(ours, theirs)) is not None:
            end = "its end" if both.end == END else f"{both.end:,}"
            raise UsageError(
                f"{both.record} from {both.start:,} to {end} is in data.train and in data.valid: exclude the held-out "
                "intervals from data.train"
            )

    def fingerprint(self) -> str:
        beds = [path for path in (self.bed, self.exclude) if path is not None]
        options: list[Any] = ["fasta", self.records, self.bed is not None, self.exclude is not None, self.margin]
        options += [self.piece, self.gap, self.repeats, self.labelled]
        return sources.digest(
            options, [*self.files(), *(file for bed in beds for file in sources.find(bed, (".bed",)))]
        )


def other_strand(text: str) -> str:
    """The reverse complement of a text.

    >>> other_strand("AACgN")
    'NcGTT'
    """
    return text.translate(_OTHER)[::-1]


def read_records(file: sources.File) -> Iterator[tuple[str, str]]:
    """Each record's name and sequence, with unknown letters as N; one record is in memory at a time.

    >>> dict(read_records(Path("genome.fa.gz"))).keys()  # doctest: +SKIP
    dict_keys(['chr20'])
    """
    name: str | None = None
    lines: list[str] = []
    for number, line in sources.lines(file):
        line = line.strip()
        if line.startswith(">"):
            if name is not None:
                yield name, "".join(lines)
            words = line[1:].split()
            if not words:
                raise DataError(f"{file}, line {number}: a record without a name")
            name, lines = words[0], []
        elif line and not line.startswith(";"):
            if name is None:
                raise DataError(f"{file}, line {number} is no FASTA: a record begins with a line such as >chr1")
            if strange := _STRANGE.search(line):
                raise DataError(
                    f"{file}, line {number}: {strange[0]!r} is no letter of DNA (A C G T N, or {AMBIGUOUS} for several)"
                )
            lines.append(line.translate(_UNKNOWN))
    if name is not None:
        yield name, "".join(lines)
