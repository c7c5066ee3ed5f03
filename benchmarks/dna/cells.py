"""Does a model write what its class asks for? Sequences of each cell line at several weights of guidance, told apart by
a judge that has learned from real ones which the model has not seen.

    python benchmarks/dna/cells.py dhs_4_cell_lines.txt.xz --out runs/dna/cells

It trains benchmarks/dna/cells.toml where --out holds no model yet (other options, such as --steps 2000, are the
recipe's), writes --num sequences of each class at each weight, and makes cells.md, cells.json and files of what was
written. What is written already is not written again. The judge is logistic regression, a class against all others,
on which words of five bases and pairs of them a sequence has, whatever its strand; four fifths of chr1 and chr2 teach
it, the rest says how good it is. A copy is a sequence with 24 bases in a row that stand in the training data.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import unmask
from unmask.cli import run
from unmask.config import load_config
from unmask.corpora import Document
from unmask.corpora.csv import Csv
from unmask.corpora.fasta import other_strand
from unmask.evaluation.ngram_classifier import NgramClassifier, train_classifier
from unmask.evaluation.overlap import share
from unmask.evaluation.suites.results import model_fingerprint
from unmask.model import Model
from unmask.rng import row_keys, uniform
from unmask.storage.atomic import atomic_text

HERE = Path(__file__).parent
WORD, COPY = 5, 24
TAUGHT = 0.8


def words_of(sequence: str) -> str:
    """Its words of five bases, each as the first by the alphabet of itself and its other strand.

    >>> words_of("ACGTTT")
    'AACGT AAACG'
    """
    words = (sequence[i : i + WORD] for i in range(len(sequence) - WORD + 1))
    return " ".join(min(word, other_strand(word)) for word in words)


def gc(sequences: Iterable[str]) -> float:
    """The share of G and C, in percent.

    >>> gc(["GGA", "CAA"])
    50.0
    """
    text = "".join(sequences)
    return 100 * sum(text.count(base) for base in "GC") / max(1, len(text))


@dataclass(frozen=True)
class Judge:
    """Which class a sequence is of: the one whose classifier is surest of it."""

    classes: list[str]
    classifiers: list[NgramClassifier]

    @classmethod
    def learn(cls, documents: Sequence[Document], classes: list[str]) -> Judge:
        texts = [words_of(document.text) for document in documents]
        own = [train_classifier(texts, [int(document.label == name) for document in documents]) for name in classes]
        return cls(classes, own)

    def of(self, sequences: Sequence[str]) -> list[str]:
        texts = [words_of(sequence) for sequence in sequences]
        p_NC = torch.stack([one.probabilities(texts) for one in self.classifiers], dim=1)
        return [self.classes[i] for i in p_NC.argmax(dim=1).tolist()]


def documents(data: str, *splits: str) -> list[Document]:
    only = tuple(f"data_label={split}" for split in splits)
    table = Csv(path=data, delimiter="\\t", field="sequence", label_field="TAG", only=only)
    return list(table.documents())


def pieces(sequence: str) -> set[str]:
    """All runs of 24 bases, of both strands."""
    ends = range(COPY, len(sequence) + 1)
    return {strand[end - COPY : end] for strand in (sequence, other_strand(sequence)) for end in ends}


def copied(sequences: Sequence[str], training: Iterable[str]) -> list[int]:
    """Of each sequence whether a run of it stands in the training data."""
    own = [pieces(sequence) for sequence in sequences]
    wanted: set[str] = set().union(*own)
    found = {
        one for text in training for end in range(COPY, len(text) + 1) if (one := text[end - COPY : end]) in wanted
    }
    return [int(not found.isdisjoint(one)) for one in own]


def written(model: Model, weight: float, name: str, args: argparse.Namespace) -> list[str]:
    """Sequences of a class, by seeds of its own; those that these weights have written already come from their file."""
    folder = Path(args.out) / "written" / model_fingerprint(model)[:12]
    path = folder / f"{name}-w{weight:g}-n{args.num}-t{args.sampling_steps}.txt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        sampler = model.make_sampler("ancestral", steps=args.sampling_steps)
        made: list[str] = []
        first = (model.class_of(name) or 0) * args.num
        while len(made) < args.num:
            num = min(args.batch_size, args.num - len(made))
            made += model.generate(num, sampler=sampler, seed=first + len(made), label=name, guidance=weight or None)
        atomic_text(path, "\n".join(made) + "\n")
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def line(what: str, judge: Judge, asked: dict[str, list[str]], training: list[str]) -> dict[str, Any]:
    """A row of the table, of sequences by the class that they should be of."""
    hits: dict[str, list[int]] = {}
    for name, sequences in asked.items():
        hits[name] = [int(one == name) for one in judge.of(sequences)]
    every = [sequence for sequences in asked.values() for sequence in sequences]
    return {
        "what": what,
        "right": share("right", [hit for one in hits.values() for hit in one]).summary(),
        "classes": {name: share("right", one).summary() for name, one in hits.items()},
        "gc": {name: gc(sequences) for name, sequences in asked.items()},
        "copies": share("copies", copied(every, training)).summary(),
        "different": share("different", [int(every.index(one) == i) for i, one in enumerate(every)]).summary(),
    }


def as_table(lines: list[dict[str, Any]], classes: list[str], said: str) -> str:
    short = [name.split("_")[0] for name in classes]
    head = ["", "right", *short, *(f"GC {name}" for name in short), "copies", "different"]
    rows = [head, ["---"] * len(head)]
    for one in lines:
        low, high = one["right"]["ci95"]
        cells = [one["what"], f"{one['right']['value']:.1f} ({low:.1f} – {high:.1f})"]
        cells += [f"{one['classes'][name]['value']:.1f}" for name in classes]
        cells += [f"{one['gc'][name]:.1f}" for name in classes]
        rows.append([*cells, f"{one['copies']['value']:.1f}", f"{one['different']['value']:.1f}"])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{said}\n\n{table}\n"


def train(args: argparse.Namespace, recipe: list[str], device: list[str]) -> int:
    """The recipe, from its start or from where it was stopped; nothing where it has ended."""
    latest = Path(args.out) / "checkpoints" / "latest"
    if latest.is_file():
        at = int(latest.read_text(encoding="utf-8").strip().rpartition("-")[2])
        return 0 if at >= load_config(args.out).steps else run(["train", args.out, "--resume", *device])
    paths = ["--data.train.path", args.data, "--data.valid.path", args.data]
    return run(["train", str(HERE / "cells.toml"), "--out", args.out, *paths, *recipe, *device])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False  # --batch is the recipe's
    parser.add_argument("data", help="dhs_4_cell_lines.txt, plain or compressed")
    parser.add_argument("--out", default="runs/dna/cells")
    parser.add_argument("--num", type=int, default=500, help="sequences of each class and weight")
    parser.add_argument("--guidance", type=float, nargs="+", default=[0, 1, 2, 4], metavar="W")
    parser.add_argument("--sampling-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--device")
    args, recipe = parser.parse_known_args()
    device = [] if args.device is None else ["--device", args.device]
    if code := train(args, recipe, device):
        return code
    model = unmask.load(args.out, device=args.device)
    held = documents(args.data, "validation", "test")
    taught_N = (uniform(row_keys(0, torch.arange(len(held)))) < TAUGHT).tolist()
    classes = sorted({str(document.label) for document in held})
    judge = Judge.learn([one for one, taught in zip(held, taught_N, strict=True) if taught], classes)
    kept = [one for one, taught in zip(held, taught_N, strict=True) if not taught]
    training = [document.text for document in documents(args.data, "training")]
    real = {name: [document.text for document in kept if document.label == name] for name in classes}
    lines = [line("real, held out", judge, real, training)]
    for weight in args.guidance:
        asked = {name: written(model, weight, name, args) for name in classes}
        lines.append(line(f"guidance {weight:g}", judge, asked, training))
    said = (
        f"Percent of sequences that the judge finds in the class that was asked for (chance is {100 / len(classes):.0f}"
        f"; it has learned from {sum(taught_N):,} real ones of chr1 and chr2), their GC, those with {COPY} bases in a "
        f"row from the training data, and those that repeat no other. Real ones: {len(kept):,}; written: {args.num:,} "
        "of each class."
    )
    table = as_table(lines, classes, said)
    atomic_text(Path(args.out) / "cells.json", json.dumps({"said": said, "lines": lines}, indent=1) + "\n")
    atomic_text(Path(args.out) / "cells.md", table)
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
