"""What a suite is: sets measured by one protocol, and the layout of its numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from unmask.corpora.sources import COMPRESSED
from unmask.errors import DataError, UsageError, did_you_mean
from unmask.machine import commands_of, machines_of

if TYPE_CHECKING:
    from unmask.evaluation.suites.run import SuiteRun
    from unmask.model import Model

T = TypeVar("T")
Two = tuple[T, T]  # for the model, and for the one it is compared with
Numbers = dict[str, Any]
Identity = dict[str, Any]
PLAIN_OR_COMPRESSED = ("", *COMPRESSED)
NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Entry(ABC):
    """A set of a suite: where it is read. name: of its results file; title: in tables."""

    name: str
    title: str

    @abstractmethod
    def readable(self, folder: Path | None) -> bool:
        """Whether the set can be read from this folder (None: from the hub), and so is measured by default."""

    @abstractmethod
    def find(self, folder: Path | None) -> tuple[Any, str]:
        """The data to measure on, and a hash that changes exactly when the data does."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a set: its numbers, or why there are none. taken: the numbers are an earlier run's, read from its
    file."""

    set: Entry
    numbers: Numbers | None = None
    failure: str = ""
    taken: bool = False


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of a set: numbers with their protocol, and what the model wrote, one record per text."""

    numbers: Numbers
    outputs: Sequence[Mapping[str, Any]] | None = None


class Layout(ABC):
    """The layout of a suite's numbers for a terminal of 80 columns, Markdown and a report. beside: further parts of the
    table."""

    beside: ClassVar[str] = ""

    @abstractmethod
    def header(self, numbers: Numbers | None) -> str:
        """The terminal table's first line; numbers: those of the first set."""

    @abstractmethod
    def lines(self, outcome: Outcome) -> list[str]:
        """A set's lines in the terminal table."""

    @abstractmethod
    def columns_and_rows(self, suite: Suite, outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
        """The table's cells, including quoted figures."""

    @abstractmethod
    def notes(self, suite: Suite, outcomes: Sequence[Outcome]) -> list[str]:
        """What the table's signs and columns mean."""

    @abstractmethod
    def protocol_line(self, numbers: Numbers) -> str:
        """What all sets of a run have in common, in one line."""

    @abstractmethod
    def source_line(self, numbers: Numbers) -> str:
        """Where a set comes from and how it was preprocessed."""

    def told(self, numbers: Numbers) -> list[str]:
        """Further remarks on a set's numbers, as sentences without a full stop."""
        return []

    def counts(self, numbers: Numbers) -> dict[str, str]:
        """The counts of a set, for the protocol's table."""
        return {}

    def markdown(self, suite: Suite, model: str, outcomes: Sequence[Outcome], against: str | None = None) -> str:
        """The table, its notes, and the protocol of each set; with a second model also its table and the
        differences."""
        from unmask.evaluation.suites import differences

        parts = [f"# {suite.name}: {model}", markdown_table(*self.columns_and_rows(suite, outcomes))]
        if against is not None:
            parts += [f"## Against {against}", markdown_table(*self.columns_and_rows(suite, others_of(outcomes)))]
            parts += [f"## {model} − {against}", *differences.markdown(outcomes), "## How"]
        parts.append("\n".join(f"- {line}" for line in self.notes(suite, outcomes)))
        measured = [(one.set.title, one.numbers) for one in outcomes if one.numbers is not None]
        if measured:
            names = ["set", "text", *self.counts(measured[0][1])]
            rows = [[title, self.source_line(one), *self.counts(one).values()] for title, one in measured]
            common = dict.fromkeys(self.protocol_line(one) for _, one in measured)
            models = dict.fromkeys(one["identity"]["model"] for _, one in measured)
            lines = [f"Protocol: {line}." for line in common] + [f"Model: sha256 {model}." for model in models]
            made = [one.get("made_with") for _, one in measured]
            lines += [f"Command: `{command}`" for command in commands_of(made)] + machines_of(made)
            parts += [markdown_table(names, rows), *lines]
        return "\n\n".join(parts) + "\n"


def others_of(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes of the model that a suite's model was compared with.

    >>> others_of([])
    []
    """
    return [
        Outcome(set=one.set, numbers=None if one.numbers is None else one.numbers["against"], failure=one.failure)
        for one in outcomes
    ]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown.

    >>> print(markdown_table(["a"], [["b|c"]]))
    | a |
    | --- |
    | b\\|c |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


@dataclass(frozen=True, kw_only=True)
class Suite(ABC):
    """Sets measured by one protocol. version: of the protocol; results of an older version are not reused.

    options: the options of `unmask eval` that affect how the suite is measured; others are refused.
    """

    name: str
    version: int
    sets: Mapping[str, Entry]
    layout: Layout
    options: frozenset[str]

    @abstractmethod
    def common(self, model: Model, run: SuiteRun) -> Identity:
        """Everything that determines the numbers of every set, besides model, seed and version; unsupported settings
        are refused."""

    def of_set(self, model: Model, one: Entry, run: SuiteRun) -> Identity:
        """What determines the numbers of this set in addition."""
        return {}

    @abstractmethod
    def measure(self, model: Model, one: Entry, found: Any, run: SuiteRun, identity: Identity) -> Measured:
        """Measure a set. found: the data from its `find`."""

    @abstractmethod
    def measure_both(
        self, models: Two[Model], one: Entry, found: Any, runs: Two[SuiteRun], identities: Two[Identity]
    ) -> Measured:
        """The same for two models: numbers with the other model's as `against`, and with `differences`; see
        `differences.py`."""

    @abstractmethod
    def alike(self, models: Two[Model], run: SuiteRun) -> Two[SuiteRun]:
        """Two runs that measure two models comparably; refused if that is impossible."""

    def of_file(self, path: str) -> Entry:
        """The set for a file of the user's, if `options` contains data."""
        raise UsageError(f"the suite {self.name} has its own texts: leave out --data, or --suite")

    def usual(self, model: Model, sets: Sequence[Entry]) -> Sequence[Entry]:
        """The default sets for this model, among those that a folder can hold."""
        return sets

    def chosen(self, names: Iterable[str] | None, folder: Path | None) -> list[Entry]:
        """The sets with these names; None: all that the folder can hold, or all that the hub has.

        >>> from unmask.evaluation.suites import find_suite
        >>> [one.title for one in find_suite("zero-shot").chosen(["wikitext", "ptb"], None)]
        ['WikiText', 'PTB']
        """
        if names is None:
            return [one for one in self.sets.values() if one.readable(folder)]
        names = list(dict.fromkeys(names))
        for name in names:
            if name not in self.sets:
                raise UsageError(f"unknown set {name!r} of the suite {self.name}; {did_you_mean(name, self.sets)}")
        return [self.sets[name] for name in names]


def find_file(folder: Path | None, path: str) -> Path:
    """A set's file in the data folder, plain or compressed.

    >>> find_file(None, "multi30k/train.de")
    Traceback (most recent call last):
    unmask.errors.DataError: multi30k/train.de is read from a folder alone: give --data-dir with it
    """
    if folder is None:
        raise DataError(f"{path} is read from a folder alone: give --data-dir with it")
    for ending in PLAIN_OR_COMPRESSED:
        if (folder / f"{path}{ending}").is_file():
            return folder / f"{path}{ending}"
    raise DataError(f"{path} is not in {folder}, neither plain nor as .gz, .xz, .bz2 or .zst: put it there")
