"""Where sequences of a classification set lie in a genome, as a BED file: to be left out of what is learned before.

    python benchmarks/dna/locate.py chr20.fa.gz test.tsv.xz ... --column seq --only chrom=chr20 --out splits/tasks.bed

Sequences are looked for as they are, on both strands, so coordinates of another assembly do no harm; those with unknown
bases, or that stand nowhere, are counted. --only keeps rows whose column has a value; --record names the chromosome.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path

from unmask.corpora import sources
from unmask.corpora.fasta import Fasta
from unmask.storage.atomic import atomic_text

OTHER = str.maketrans("ACGT", "TGCA")


def sequences(path: str, column: str, only: dict[str, str]) -> Iterator[str]:
    """The sequences of a TSV file's rows."""
    lines = "\n".join(line for _, line in sources.lines(Path(path)))
    for row in csv.DictReader(io.StringIO(lines), delimiter="\t"):
        if column not in row:
            sys.exit(f"{path} has no column {column!r}; it has {', '.join(row)}")
        if all(row.get(name) == value for name, value in only.items()):
            yield row[column].upper()


def places(genome: str, text: str) -> Iterator[int]:
    """Where the text or its other strand begins.

    >>> list(places("AACGTTACG", "ACG")), list(places("AACGTT", "CGTT"))
    ([1, 6, 2], [2, 0])
    """
    for strand in dict.fromkeys((text, text.translate(OTHER)[::-1])):
        at = genome.find(strand)
        while at >= 0:
            yield at
            at = genome.find(strand, at + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fasta")
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--record", default="chr20")
    parser.add_argument("--column", default="seq")
    parser.add_argument("--only", nargs="*", default=[], metavar="COLUMN=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    only = dict(pair.split("=", 1) for pair in args.only)
    genome = "".join(d.text for d in Fasta(path=args.fasta, records=(args.record,), gap=1 << 30).documents())
    lines, nowhere = [], 0
    for path in args.tables:
        for text in sequences(path, args.column, only):
            found = list(places(genome, text)) if text and "N" not in text else []
            nowhere += not found
            lines += [f"{args.record}\t{at}\t{at + len(text)}" for at in found]
    atomic_text(args.out, "\n".join(sorted(set(lines), key=lambda line: int(line.split("\t")[1]))) + "\n")
    print(f"{len(set(lines)):,} intervals in {args.out}; {nowhere:,} sequences were not found")


if __name__ == "__main__":
    main()
