"""What a suite is: sets that are measured by one protocol, and how its numbers are laid out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from unmask.corpora.sources import COMPRESSED
from unmask.errors import DataError, UsageError, did_you_mean

if TYPE_CHECKING:
    from unmask.evaluation.suites.run import SuiteRun
    from unmask.model import Model

T = TypeVar("T")
Two = tuple[T, T]  # of a model, and of the one that it is measured against
Numbers = dict[str, Any]
Identity = dict[str, Any]
PLAIN_OR_COMPRESSED = ("", *COMPRESSED)
NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Entry(ABC):
    """A set of a suite: where it is read. name: of its file of results; title: in tables."""

    name: str
    title: str

    @abstractmethod
    def readable(self, folder: Path | None) -> bool:
        """Whether it can be in a folder of data (None: on the hub), so that it is measured where no set is named."""

    @abstractmethod
    def find(self, folder: Path | None) -> tuple[Any, str]:
        """What the suite measures on, and a hash that changes exactly when that does."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a set: its numbers, or why there are none. taken: they are an earlier run's, from its file."""

    set: Entry
    numbers: Numbers | None = None
    failure: str = ""
    taken: bool = False


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a suite has found of a set: numbers with their protocol, and what the model wrote, a record a text."""

    numbers: Numbers
    outputs: Sequence[Mapping[str, Any]] | None = None


class Layout(ABC):
    """A suite's numbers for a terminal of 80 columns, in Markdown and in a report. beside: what else the table has."""

    beside: ClassVar[str] = ""

    @abstractmethod
    def header(self, numbers: Numbers | None) -> str:
        """The terminal table's first line; numbers: those of the first set."""

    @abstractmethod
    def lines(self, outcome: Outcome) -> list[str]:
        """A set's lines in the terminal table."""

    @abstractmethod
    def columns_and_rows(self, suite: Suite, outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
        """The table's cells, also of what is quoted beside."""

    @abstractmethod
    def notes(self, suite: Suite, outcomes: Sequence[Outcome]) -> list[str]:
        """What the table's signs and columns mean."""

    @abstractmethod
    def protocol_line(self, numbers: Numbers) -> str:
        """What all sets of a run have in common, in a line."""

    @abstractmethod
    def source_line(self, numbers: Numbers) -> str:
        """Where a set comes from and what it went through."""

    def told(self, numbers: Numbers) -> list[str]:
        """What else must be known of a set's numbers, in sentences without their full stop."""
        return []

    def counts(self, numbers: Numbers) -> dict[str, str]:
        """What was counted in a set, for the protocol's table."""
        return {}

    def markdown(self, suite: Suite, model: str, outcomes: Sequence[Outcome], against: str | None = None) -> str:
        """The table, its notes, and the protocol of each set; of a model that it is measured against the same table,
        and the differences."""
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
            parts += [markdown_table(names, rows), *lines]
        return "\n\n".join(parts) + "\n"


def others_of(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes of the model that a suite was measured against.

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
    """Sets that are measured by one protocol. version: of the protocol; a new one makes older results unknown.

    options: what `unmask eval` may be told of how it is measured; others are refused.
    """

    name: str
    version: int
    sets: Mapping[str, Entry]
    layout: Layout
    options: frozenset[str]

    @abstractmethod
    def common(self, model: Model, run: SuiteRun) -> Identity:
        """What decides the numbers of every set, besides model, seed and version; what cannot be is refused."""

    def of_set(self, model: Model, one: Entry, run: SuiteRun) -> Identity:
        """What decides the numbers of this set besides."""
        return {}

    @abstractmethod
    def measure(self, model: Model, one: Entry, found: Any, run: SuiteRun, identity: Identity) -> Measured:
        """The numbers of a set, of what its `find` gave."""

    @abstractmethod
    def measure_both(
        self, models: Two[Model], one: Entry, found: Any, runs: Two[SuiteRun], identities: Two[Identity]
    ) -> Measured:
        """The same of two models: numbers with `against`, the other one's, and `differences`; see `differences.py`."""

    @abstractmethod
    def alike(self, models: Two[Model], run: SuiteRun) -> Two[SuiteRun]:
        """How each of two models is measured, so that they can be compared; or why they cannot be."""

    def of_file(self, path: str) -> Entry:
        """The set of a file of the user's, where `options` has data."""
        raise UsageError(f"the suite {self.name} has its own texts: leave out --data, or --suite")

    def usual(self, model: Model, sets: Sequence[Entry]) -> Sequence[Entry]:
        """Of the sets that a folder can hold those that mean something of this model, where no set is named."""
        return sets

    def chosen(self, names: Iterable[str] | None, folder: Path | None) -> list[Entry]:
        """The sets of these names; None: all that the folder can hold, or all that the hub has.

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
    """A set's file in the folder of the data, plain or compressed.

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
