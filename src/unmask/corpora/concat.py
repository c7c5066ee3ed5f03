"""Several corpora, one after another, such as files of different formats, columns or options."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from unmask.corpora import Corpus, Document
from unmask.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Concat(Corpus):
    """The documents of several corpora, one corpus after another.

    >>> from unmask.corpora.memory import Memory
    >>> both = Concat(of=(Memory(texts=("a", "b")), Memory(texts=("c",))))
    >>> [document.text for document in both.documents()]
    ['a', 'b', 'c']
    """

    of: tuple[Corpus, ...]

    def __post_init__(self) -> None:
        if not self.of:
            raise UsageError("concat needs corpora: name at least one in `of`")
        if any(corpus.tokenized for corpus in self.of):
            raise UsageError("concat joins texts: shards of tokens are joined by a pattern that meets them all")
        if len({(corpus.has_prompts, corpus.prompt_end) for corpus in self.of}) > 1:
            raise UsageError(
                "of the corpora some have prompts and some have none, or they end otherwise: make them alike"
            )

    def documents(self) -> Iterator[Document]:
        for corpus in self.of:
            yield from corpus.documents()

    def fingerprint(self) -> str:
        total = hashlib.sha256(b"concat")
        for corpus in self.of:
            total.update(corpus.fingerprint().encode() + b"\n")
        return total.hexdigest()

    def check_beside(self, held_out: Corpus) -> None:
        for corpus in self.of:
            corpus.check_beside(held_out)

    @property
    def parts(self) -> tuple[Corpus, ...]:
        return tuple(part for corpus in self.of for part in corpus.parts)

    def absolute(self) -> Self:
        return replace(self, of=tuple(corpus.absolute() for corpus in self.of))

    def is_test(self) -> bool:
        return any(corpus.is_test() for corpus in self.of)

    @property
    def has_prompts(self) -> bool:
        return self.of[0].has_prompts

    @property
    def prompt_end(self) -> str:
        return self.of[0].prompt_end
