"""What a suite is: sets of texts, each with where it is read, how it is detokenized and how it is packed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from unmask.corpora import Corpus
from unmask.corpora.sources import COMPRESSED
from unmask.data.rows import Policy
from unmask.errors import DataError, UsageError, did_you_mean
from unmask.evaluation.suites.detokenizers import Detokenizer, as_it_is

PLAIN_OR_COMPRESSED = ("", *COMPRESSED)


def each(texts: Iterable[str]) -> Iterator[str]:
    """Every text is a document."""
    return iter(texts)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Documents of a set, from a corpus; the path of a local one is relative to the folder of the data.

    what: the split and what a document is, for the protocol. documents: of what the corpus yields (lines, say).
    differs: what is not as in the paper whose figures are quoted. name: the file in the folder, or the dataset.
    """

    corpus: Corpus
    what: str
    differs: str = ""
    name: str = ""
    detokenize: Detokenizer = as_it_is
    documents: Callable[[Iterable[str]], Iterator[str]] = each

    def texts(self) -> Iterator[str]:
        """The documents as they are measured; what stands before a text as its prompt (a title) is part of it."""
        read = (document.prompt + document.text for document in self.corpus.documents())
        return map(self.detokenize, self.documents(read))

    def fingerprint(self) -> str:
        """Changes exactly when the texts would."""
        parts = [self.corpus.fingerprint(), self.detokenize.__name__, self.documents.__name__]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TextSet:
    """One set: local files of a folder, a dataset of the hub, or either. packing: the suite's own, see `Policy`.

    quoted: what a paper reports for it, by the model's name.
    """

    name: str
    title: str
    local: Source | None = None
    hub: Source | None = None
    packing: Policy = "wrap"
    quoted: Mapping[str, float] = field(default_factory=dict)

    def source(self, folder: Path | None) -> Source:
        """Where this set is read: in the folder of the data, where one is given and the set has local files.

        >>> from unmask.evaluation.suites import find_suite
        >>> find_suite("zero-shot").sets["ptb"].source(None).name
        'ptb-text-only/ptb_text_only'
        """
        if folder is None or self.local is None:
            if self.hub is None:
                raise DataError(f"{self.title} is on no hub: give --data-dir with {self._path()} in it")
            return dataclasses.replace(self.hub, name=str(getattr(self.hub.corpus, "dataset", "")))
        path = self._path()
        for ending in PLAIN_OR_COMPRESSED:
            if (folder / f"{path}{ending}").is_file():
                corpus = dataclasses.replace(cast(Any, self.local.corpus), path=str(folder / f"{path}{ending}"))
                return dataclasses.replace(self.local, corpus=corpus, name=f"{path}{ending}")
        raise DataError(f"{path} is not in {folder}, neither plain nor as .gz, .xz, .bz2 or .zst: put it there")

    def _path(self) -> str:
        return str(getattr(self.local.corpus, "path", "")) if self.local is not None else ""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Sets that are measured by one protocol. version: of the protocol; a new one makes older results unknown."""

    name: str
    version: int
    sets: Mapping[str, TextSet]
    quoted: Mapping[str, str]  # the models whose figures are quoted, in their order → = or ≤
    quotation: str  # where the quoted figures are from, and of what they are
    differs: str  # what is otherwise there, in every set

    def chosen(self, names: Iterable[str] | None, folder: Path | None) -> list[TextSet]:
        """The sets of these names; None: all that the folder can hold, or all that the hub has.

        >>> from unmask.evaluation.suites import find_suite
        >>> [one.title for one in find_suite("zero-shot").chosen(["wikitext", "ptb"], None)]
        ['WikiText', 'PTB']
        """
        if names is None:
            every = self.sets.values()
            return [one for one in every if (one.hub if folder is None else one.local) is not None]
        names = list(dict.fromkeys(names))
        for name in names:
            if name not in self.sets:
                raise UsageError(f"unknown set {name!r} of the suite {self.name}; {did_you_mean(name, self.sets)}")
        return [self.sets[name] for name in names]
