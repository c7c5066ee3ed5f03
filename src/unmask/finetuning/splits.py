"""The splits: what is trained on, used for early stopping and reported; files, shares and folds; labels as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unmask.data.order import permuted
from unmask.errors import DataError, UsageError, did_you_mean
from unmask.finetuning.config import FinetuneConfig
from unmask.finetuning.examples import Example, content_of, read_examples
from unmask.heads.task import MAX_LABELS, Kind

MANY = 100  # more classes than this are checked for plausibility


@dataclass(frozen=True)
class Split:
    """Examples with their class numbers or numbers."""

    examples: list[Example]
    targets: list[float]
    what: str  # the file, and the part of it

    def __len__(self) -> int:
        return len(self.examples)


@dataclass(frozen=True)
class Splits:
    """The examples for training, early stopping and the final measurement."""

    train: Split
    valid: Split
    test: Split | None
    labels: tuple[str, ...]

    @property
    def all(self) -> dict[str, Split]:
        """All splits by name, including train."""
        return {"train": self.train} | self.parts

    @property
    def parts(self) -> dict[str, Split]:
        """The splits for which predictions are written, by name."""
        return {"valid": self.valid} | ({} if self.test is None else {"test": self.test})


@dataclass(frozen=True)
class Labelled:
    """The files of a fine-tuning, read and checked once. left_out: how many texts of each were too short."""

    config: FinetuneConfig
    files: dict[str, list[Example]]  # train, and valid and test if they have a file
    left_out: dict[str, int]

    def splits(self, seed: int = 0, fold: int | None = None) -> Splits:
        """The examples of a run. fold: for cross-validation, whose folds are drawn anew for each seed.

        >>> labelled.splits(seed=0, fold=2).test  # doctest: +SKIP
        """
        data, files = self.config.data, self.files
        rest, what = files["train"], data.train
        labels: tuple[str, ...] = ()
        if fold is not None:
            labels = self._labels(rest)
            targets(rest, self.config.kind, labels)  # report an invalid label before making folds
        named: dict[str, tuple[list[Example], str]] = {}
        named |= {name: (files[name], getattr(data, name)) for name in ("valid", "test") if name in files}
        if fold is not None:
            rest, what = self._without_fold(seed, fold, named)
        elif data.test_share:
            rest, part = divided(rest, data.test_share, 1)
            named["test"] = part, f"{len(part):,} examples of {data.train}, kept from training"
        if "valid" not in named:
            rest, part = divided(rest, data.held_out, 0 if fold is None else _key(seed, fold))
            named["valid"] = part, f"{len(part):,} examples of {data.train}, kept from training"
        labels = self._labels(rest) if fold is None else labels
        named["train"] = rest, what
        made = {
            name: Split(examples, targets(examples, self.config.kind, labels), said)
            for name, (examples, said) in named.items()
        }
        return Splits(made["train"], made["valid"], made.get("test"), labels)

    def _labels(self, train: list[Example]) -> tuple[str, ...]:
        return class_words(train, self.config) if self.config.kind == "classification" else ()

    def _without_fold(
        self, seed: int, fold: int, named: dict[str, tuple[list[Example], str]]
    ) -> tuple[list[Example], str]:
        """All examples but a fold; the fold is reported or, if the reported examples have their own file,
        used to stop."""
        train, folds, path = self.files["train"], self.config.folds or 0, self.config.data.train
        place_E = folds_of(train, folds, seed, stratified=self.config.kind == "classification")
        part = [one for one, place in zip(train, place_E, strict=True) if place == fold]
        named["valid" if "test" in named else "test"] = part, f"fold {fold + 1} of {folds} of {path}"
        rest = [one for one, place in zip(train, place_E, strict=True) if place != fold]
        return rest, f"the other {folds - 1} of {folds} folds of {path}"


def read_labelled(config: FinetuneConfig) -> Labelled:
    """Read a fine-tuning's files; texts shorter than `data.shortest` are left out and counted.

    >>> read_labelled(FinetuneConfig(data=TaskData(train="mine.tsv"))).left_out  # doctest: +SKIP
    {'train': 0}
    """
    data = config.data
    if not data.train:
        raise UsageError("there are no examples: give --data.train FILE with labelled texts, or --suite glue")
    files, left_out = dict[str, list[Example]](), dict[str, int]()
    for name in ("train", "test", "valid"):
        path = getattr(data, name)
        if path is None:
            continue
        how = data if name == "train" else replace(data, skip_lines=())  # they refer to train
        read = read_examples(path, how)
        files[name] = [one for one in read if len(one.text) >= data.shortest]
        left_out[name] = len(read) - len(files[name])
        if not files[name]:
            raise DataError(f"all texts of {path} are shorter than {data.shortest}: give a smaller data.shortest")
    return Labelled(config, files, left_out)


def make_splits(config: FinetuneConfig, *, seed: int = 0, fold: int | None = None) -> Splits:
    """Read a fine-tuning's files and split them; all labels are checked before anything is trained.

    >>> make_splits(FinetuneConfig(data=TaskData(train="mine.tsv")))  # doctest: +SKIP
    """
    return read_labelled(config).splits(seed, fold)


def _key(seed: int, fold: int) -> int:
    """The key of the validation share: different for each fold of each seed, and from that of a run without folds."""
    return 2 + (seed << 16) + fold


def folds_of(examples: Sequence[Example], folds: int, seed: int, *, stratified: bool) -> list[int]:
    """The fold of each example: each class is spread evenly over the folds, and equal texts stay together.

    Texts are assigned class by class, in the order of a permutation keyed by the seed, each to the fold with the fewest
    of its class so far; ties go to the smallest fold. All copies of a text (`content_of`) go to one fold, under the
    label of the first.

    >>> folds_of([Example(word, None, "a", "") for word in "abcabc"], 3, 0, stratified=True)
    [1, 0, 2, 1, 0, 2]
    """
    copies: dict[tuple[str, str | None], list[int]] = {}
    content = content_of(examples)
    for i, one in enumerate(examples):
        copies.setdefault(content(one.text, one.pair), []).append(i)
    classes: dict[str, list[list[int]]] = {}
    for same in copies.values():
        classes.setdefault(examples[same[0]].label or "" if stratified else "", []).append(same)
    place_E, sizes = [0] * len(examples), [0] * folds
    for number, (word, groups) in enumerate(sorted(classes.items())):
        if len(groups) < folds:
            of = f"the class {word[:40]!r} has {len(groups)}" if stratified else f"there are {len(groups)}"
            raise DataError(f"{of} different texts, too few for {folds} folds: give fewer folds, or more examples")
        order = permuted(np.arange(len(groups)), len(groups), seed, np.full(len(groups), -1 - number))
        own = [0] * folds
        for g in order.tolist():
            fold = min(range(folds), key=lambda k: (own[k], sizes[k], k))
            for i in groups[g]:
                place_E[i] = fold
            own[fold] += len(groups[g])
            sizes[fold] += len(groups[g])
    return place_E


def divided(examples: list[Example], share: float, key: int) -> tuple[list[Example], list[Example]]:
    """All but a share, and the share, each in file order; a keyed permutation chooses the examples.

    >>> one, other = divided([Example(str(n), None, None, "") for n in range(10)], 0.2, 0)
    >>> len(one), len(other)
    (8, 2)
    """
    n = len(examples)
    count = max(1, round(n * share))
    if count >= n:
        raise DataError(f"{n} examples are too few to keep {count} of them from training: give more, or data.valid")
    taken = {*permuted(np.arange(count), n, key, np.zeros(count, dtype=np.int64)).tolist()}
    kept = [one for i, one in enumerate(examples) if i not in taken]
    return kept, [one for i, one in enumerate(examples) if i in taken]


def class_words(train: list[Example], config: FinetuneConfig) -> tuple[str, ...]:
    """The classes: the configured ones, each of which must have an example, otherwise those that occur."""
    there = {example.label for example in train if example.label is not None}
    if config.labels:
        targets(train, "classification", config.labels)  # first report a label of another class, with its line
        if missing := [word for word in config.labels if word not in there]:
            raise UsageError(
                f"the class {missing[0][:40]!r} has no example in {config.data.train}: leave it out of labels"
            )
        return config.labels
    if len(there) == 1:
        raise UsageError(
            f"all of {config.data.train} is of one class, {min(there)[:40]!r}: there is nothing to tell apart"
        )
    if len(there) > MAX_LABELS or (len(there) > MANY and len(there) > len(train) / 2):
        raise UsageError(
            f"{config.data.train} has {len(there):,} different labels in {len(train):,} examples: set kind = "
            "regression if they are numbers, or name another column in data.label"
        )
    numbers = [_number(word) for word in there]
    if all(number is not None for number in numbers):
        return tuple(sorted(there, key=lambda word: (_number(word) or 0.0, word)))
    return tuple(sorted(there))


def targets(examples: list[Example], kind: Kind, labels: tuple[str, ...]) -> list[float]:
    """The class numbers, or numeric targets, of labelled examples.

    >>> targets([Example("a text", None, "yes", "a.tsv, line 2")], "classification", ("no", "yes"))
    [1]
    """
    numbers: list[float] = []
    known = {word: i for i, word in enumerate(labels)}
    for example in examples:
        label = example.label or ""
        if kind == "classification":
            if label not in known:
                raise DataError(
                    f"{example.where}: the label {label[:40]!r} is not among the {len(labels)} classes; "
                    f"{did_you_mean(label, [word[:40] for word in labels[:20]])}"
                )
            numbers.append(known[label])
            continue
        number = _number(label)
        if number is None:
            raise DataError(f"{example.where}: the label {label[:40]!r} is no number, which a regression needs")
        numbers.append(number)
    return numbers


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
