"""Corpora: where documents come from. A corpus yields documents; packing makes rows of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from unmask.registry import Room

room = Room(__name__, base="Corpus")


@dataclass(frozen=True)
class Document:
    """One text. `prompt`, when there is one, stands before it, is never noised and is not scored.

    `label`: the class it is of, where it has one: its number, or a word (packing gives words their numbers).
    """

    text: str
    prompt: str = ""
    label: int | str | None = None


class Corpus(ABC):
    """A source of documents that can be read any number of times and larger than memory."""

    room: ClassVar[Room] = room

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """The documents, in a fixed order, read as they are asked for."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes exactly when the documents would: the cache's key (a hash of the content, not of the path)."""

    def is_test(self) -> bool:
        """Whether this is (part of) a test split, which nothing may be tuned on."""
        return False


def __getattr__(name: str) -> Any:
    return room.attribute(name)
