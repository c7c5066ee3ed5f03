"""Files of records, one document each: the options that JSON lines, CSV and Parquet share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from unmask.corpora import Corpus, Document, check_separator, sources


@dataclass(frozen=True, kw_only=True)
class Records(Corpus):
    """A file, or a folder's files, whose records hold a text in a field, and maybe a prompt and a label in others."""

    endings: ClassVar[tuple[str, ...]]

    path: str
    field: str = "text"
    prompt_field: str | None = None
    label_field: str | None = None  # a word, or a whole number from 0; null, or empty in CSV files, for no label
    separator: str = ""  # between prompt and text

    def __post_init__(self) -> None:
        check_separator(self.separator, self.prompt_field)

    @abstractmethod
    def read(self, file: sources.File) -> Iterator[Document]:
        """The documents of one file."""

    def files(self) -> list[sources.File]:
        """The files, in reading order."""
        return sources.one_split(self.path, sources.find(self.path, self.endings))

    def documents(self) -> Iterator[Document]:
        any_documents = False
        for file in self.files():
            for document in self.read(file):
                any_documents = True
                yield document
        if not any_documents:
            raise sources.is_empty(self.path)

    def fingerprint(self) -> str:
        options: list[Any] = [type(self).__name__.lower(), self.field, self.prompt_field]
        options += [] if self.label_field is None else [self.label_field]
        separator = [{"separator": self.separator}] if self.separator else []  # keeps older caches valid
        return sources.digest([*options, *separator], self.files())
