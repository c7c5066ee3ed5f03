"""Parallel text (also compressed): two files, each line of one being the source of the same line of the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from unmask.corpora import Corpus, Document, check_separator, sources
from unmask.errors import DataError, UsageError


@dataclass(frozen=True, kw_only=True)
class Parallel(Corpus):
    """Lines of the file `target`, each with that line of the file `source` as its prompt.

    separator: ends every source, so that a model sees where its text begins. Pairs with a blank side are skipped.

    >>> Parallel(source="train.de.xz", target="train.en.xz").documents()  # doctest: +SKIP
    """

    paths = ("source", "target")

    source: str
    target: str
    separator: str = "\n"

    def __post_init__(self) -> None:
        check_separator(self.separator, "source")

    def documents(self) -> Iterator[Document]:
        source, target = (sources.existing(path) for path in (self.source, self.target))
        for path in (source, target):
            if path.is_dir():
                raise UsageError(f"{path} is a folder: give the file of one language")
        ours, theirs = sources.lines(source), sources.lines(target)
        any_documents = False
        for lines, (before, text) in enumerate(itertools.zip_longest(ours, theirs)):
            if before is None or text is None:
                rest = 1 + sum(1 for _ in (theirs if before is None else ours))
                both = (lines, lines + rest) if before is None else (lines + rest, lines)
                raise DataError(
                    f"{source} has {both[0]:,} lines and {target} has {both[1]:,}: a line of one must belong to that "
                    "line of the other"
                )
            if before[1].strip() and text[1].strip():
                any_documents = True
                yield Document(text[1].rstrip("\r"), before[1].rstrip("\r") + self.separator)
        if not any_documents:
            raise sources.is_empty(f"{source} with {target}")

    def fingerprint(self) -> str:
        files = [sources.existing(path) for path in (self.source, self.target)]
        return sources.digest(["parallel", self.separator], files)

    @property
    def has_prompts(self) -> bool:
        return True
