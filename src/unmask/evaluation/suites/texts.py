"""Sets of texts: where they are read, how they are detokenized and packed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from unmask.corpora import Corpus
from unmask.data.rows import Policy
from unmask.errors import DataError
from unmask.evaluation.suites.base import Entry, find_file
from unmask.evaluation.suites.detokenizers import Detokenizer, as_it_is


def each(texts: Iterable[str]) -> Iterator[str]:
    """Every text is a document."""
    return iter(texts)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The documents of a set, from a corpus; a local path is relative to the data folder.

    what: the split and what counts as a document, for the protocol. documents: turns what the corpus yields (lines, for
    example) into documents. differs: differences from the paper whose figures are quoted. name: the file in the folder,
    or the dataset.
    """

    corpus: Corpus
    what: str
    differs: str = ""
    name: str = ""
    detokenize: Detokenizer = as_it_is
    documents: Callable[[Iterable[str]], Iterator[str]] = each

    def texts(self) -> Iterator[str]:
        """The documents as they are measured; a corpus's prompt for a text (such as a title) becomes part of it."""
        read = (document.prompt + document.text for document in self.corpus.documents())
        return map(self.detokenize, self.documents(read))

    def fingerprint(self) -> str:
        """Changes exactly when the texts change."""
        parts = [self.corpus.fingerprint(), self.detokenize.__name__, self.documents.__name__]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def line(self) -> str:
        """Where the texts come from and how they are detokenized."""
        undone = "as it is" if self.detokenize is as_it_is else f"detokenizer {self.detokenize.__name__}"
        return f"{self.name}: {self.what}; {undone}"


@dataclass(frozen=True, kw_only=True)
class TextSet(Entry):
    """One set: local files in a folder, a dataset of the hub, or either. packing: the suite's own, see `Policy`.

    quoted: a paper's figures for it, by model name.
    """

    local: Source | None = None
    hub: Source | None = None
    packing: Policy = "wrap"
    quoted: Mapping[str, float] = field(default_factory=dict)

    def readable(self, folder: Path | None) -> bool:
        return (self.hub if folder is None else self.local) is not None

    def find(self, folder: Path | None) -> tuple[Source, str]:
        source = self.source(folder)
        return source, source.fingerprint()

    def source(self, folder: Path | None) -> Source:
        """Where this set is read: from the data folder, if there is one and the set has local files, otherwise from the
        hub.

        >>> from unmask.evaluation.suites import find_suite
        >>> find_suite("zero-shot").sets["ptb"].source(None).name
        'ptb-text-only/ptb_text_only'
        """
        path = str(getattr(self.local.corpus, "path", "")) if self.local is not None else ""
        if folder is None or self.local is None:
            if self.hub is None:
                raise DataError(f"{self.title} is on no hub: give --data-dir with {path} in it")
            return dataclasses.replace(self.hub, name=str(getattr(self.hub.corpus, "dataset", "")))
        file = find_file(folder, path)
        corpus = dataclasses.replace(cast(Any, self.local.corpus), path=str(file))
        return dataclasses.replace(self.local, corpus=corpus, name=file.relative_to(folder).as_posix())
