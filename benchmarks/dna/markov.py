"""What counting alone says of DNA: perplexity per base of Markov models of several orders. --add is the count that each
base begins with; at high orders the perplexity depends on it.

    python benchmarks/dna/markov.py chr20.fa.gz --train 0 52_000_000 --test 57_000_000 65_000_000 --orders 0 4 8 11
    python benchmarks/dna/markov.py chr20.fa.gz --train 0 52_000_000 --test 57_000_000 65_000_000 --beds splits/

The last also writes splits/test.bed, which recipes exclude from what they learn and hold out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unmask.corpora.fasta import Fasta
from unmask.data.dna import Dna

UNKNOWN = 4


def bases_of(fasta: Fasta) -> NDArray[np.int64]:
    """All of it, as 0 to 3, and 4 where a base is unknown."""
    dna = Dna()
    return np.concatenate([dna.encode_spans([document.text])[0][0] for document in fasta.documents()])


def contexts(base_N: NDArray[np.int64], order: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What stands before each base, as a number, and the base; only where all of it is known.

    >>> contexts(np.array([0, 1, 2, 4, 3]), 1)
    (array([0, 1]), array([1, 2]))
    """
    before_N = np.zeros(max(0, len(base_N) - order), dtype=np.int64)
    known_N = np.ones(len(before_N), dtype=bool)
    for i in range(order + 1):
        part_N = base_N[i : i + len(before_N)]
        known_N &= part_N != UNKNOWN
        if i < order:
            before_N = 4 * before_N + part_N
    return before_N[known_N], base_N[order:][known_N]


def perplexity(
    train_N: NDArray[np.int64], test_N: NDArray[np.int64], order: int, add: float = 0.5
) -> tuple[float, int]:
    """Perplexity per base of the test, under counts in the training plus `add` for each base; and the bases measured.

    >>> text = np.array([0, 1] * 500)
    >>> round(perplexity(text, text, 1)[0], 3)
    1.003
    """
    before_N, base_N = contexts(train_N, order)
    count_CV = np.bincount(4 * before_N + base_N, minlength=4 ** (order + 1)).reshape(-1, 4) + add
    before_M, base_M = contexts(test_N, order)
    p_M = count_CV[before_M, base_M] / count_CV.sum(axis=1)[before_M]
    return float(np.exp(-np.log(p_M).mean())), len(p_M)


def rows(train_N: NDArray[np.int64], test_N: NDArray[np.int64], orders: Iterable[int], add: float) -> Iterable[str]:
    yield "| model | perplexity per base | bases |\n| --- | --- | --- |\n| uniform | 4.000 | |"
    for order in orders:
        value, measured = perplexity(train_N, test_N, order, add)
        yield f"| Markov, order {order} | {value:.3f} | {measured:,} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fasta")
    parser.add_argument("--record", default="chr20")
    for name in ("train", "test"):
        parser.add_argument(f"--{name}", nargs=2, type=int, required=True, metavar=("START", "END"))
    parser.add_argument("--orders", nargs="*", type=int, default=[4, 8, 11])
    parser.add_argument("--add", type=float, default=0.5, metavar="COUNT")
    parser.add_argument("--beds", type=Path, metavar="DIR", help="write train.bed and test.bed there")
    args = parser.parse_args()
    if not args.add > 0:
        parser.error("--add must be above 0: what never occurred in the training would be impossible")
    whole = bases_of(Fasta(path=args.fasta, records=(args.record,), gap=1 << 30, piece=1 << 40))
    spans = {name: (span[0], min(span[1], len(whole))) for name, span in (("train", args.train), ("test", args.test))}
    if args.beds:
        args.beds.mkdir(parents=True, exist_ok=True)
        for name, (start, end) in spans.items():
            (args.beds / f"{name}.bed").write_text(f"{args.record}\t{start}\t{end}\n", encoding="utf-8")
    for line in rows(whole[slice(*spans["train"])], whole[slice(*spans["test"])], args.orders, args.add):
        print(line, flush=True)


if __name__ == "__main__":
    main()
