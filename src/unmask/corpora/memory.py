"""Texts in memory: a list of texts or documents; files store only their fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from unmask.corpora import Corpus, Document
from unmask.errors import DataError, UsageError
from unmask.registry import UNWRITTEN


@dataclass(frozen=True, kw_only=True, repr=False)
class Memory(Corpus):
    """Texts that are at hand in Python, for a corpus: one document each.

    A run's recipe stores their `sha256`, never the texts: to resume the run, pass the same texts again, in Python;
    others are refused.

    >>> corpus = Memory(texts=["one text", Document("bonjour", prompt="hello")])
    >>> [document.text for document in corpus.documents()], corpus
    (['one text', 'bonjour'], Memory(2 texts, sha256='b6388b8417b0'))
    """

    texts: tuple[str | Document, ...] | None = field(default=None, metadata={UNWRITTEN: True})
    sha256: str = ""  # computed from the texts

    def __post_init__(self) -> None:
        if self.texts is None:
            return
        several: Any = self.texts  # a dataclass accepts any type
        if isinstance(several, str) or not isinstance(several, Iterable):
            raise UsageError("texts must be a list of texts or of unmask.corpora.Document")
        texts = tuple(several)
        if not all(isinstance(text, str | Document) for text in texts):
            raise UsageError("texts must be a list of texts or of unmask.corpora.Document")
        if not texts:
            raise UsageError("there are no texts in memory: give at least one")
        digest = _digest(texts)
        if self.sha256 not in ("", digest):
            raise UsageError("sha256 is not that of these texts: leave it out, it is made of them")
        object.__setattr__(self, "texts", texts)
        object.__setattr__(self, "sha256", digest)

    def __repr__(self) -> str:
        number = "no texts here" if self.texts is None else f"{len(self.texts)} texts"
        return f"Memory({number}, sha256={self.sha256[:12]!r})"

    def documents(self) -> Iterator[Document]:
        for text in self._texts():
            yield text if isinstance(text, Document) else Document(text)

    def fingerprint(self) -> str:
        self._texts()
        return self.sha256

    @property
    def has_prompts(self) -> bool:
        return any(isinstance(text, Document) and bool(text.prompt) for text in self.texts or ())

    def _texts(self) -> tuple[str | Document, ...]:
        if self.texts is None:
            raise DataError(
                "these texts were in the memory of the process that began the run, and files keep none of them: "
                "give them again in Python, as unmask.corpora.Memory(texts=...)"
            )
        return self.texts


def _digest(texts: tuple[str | Document, ...]) -> str:
    total = hashlib.sha256(b"memory")
    for text in texts:
        document = text if isinstance(text, Document) else Document(text)
        total.update(json.dumps([document.text, document.prompt, document.label]).encode() + b"\n")
    return total.hexdigest()
