"""Corpora: where documents come from. A corpus yields documents; packing turns them into rows."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

from unmask.corpora.remote import is_url
from unmask.errors import UsageError
from unmask.registry import Room

room = Room(
    "unmask.corpora",
    base="Corpus",
    helpers=("intervals", "labels", "reading", "records", "regions", "remote", "sources"),
)


@dataclass(frozen=True)
class Document:
    """One text. A `prompt`, if there is one, precedes it with its separator and is neither noised nor scored.

    `label`: its class, if it has one: a number, or a word (packing numbers the words).
    """

    text: str
    prompt: str = ""
    label: int | str | None = None


class Corpus(ABC):
    """A source of documents that can be read any number of times and larger than memory."""

    room: ClassVar[Room] = room
    paths: ClassVar[tuple[str, ...]] = ("path",)  # the options that name files
    choosing: ClassVar[tuple[str, ...]] = ()  # the options that select a part of the file
    tokenized: ClassVar[bool] = False  # whether it holds token ids: see `unmask.corpora.tokens`

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """The documents, in a fixed order, read lazily."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes exactly when the documents change: the cache's key (a hash of the content, not of the path)."""

    def check_beside(self, held_out: Corpus) -> None:  # noqa: B027 - most need not know of each other
        """Raise UsageError if a corpus held out for validation contains documents of this one, which is trained on."""

    @property
    def parts(self) -> tuple[Corpus, ...]:
        """The corpora that this one consists of: itself, or those that it concatenates."""
        return (self,)

    def absolute(self) -> Self:
        """The same corpus, independent of the working directory: the options that are paths (`paths`) are made
        absolute.

        >>> from unmask.corpora.text import Text
        >>> Text(path="/data/sub/../a.txt").absolute()
        Text(path='/data/a.txt', separator=None)
        """
        named = {name: getattr(self, name, None) for name in self.paths}
        changes = {
            name: os.path.abspath(os.path.expanduser(path))
            for name, path in named.items()
            if isinstance(path, str) and not is_url(path)
        }
        return cast(Self, dataclasses.replace(cast(Any, self), **changes)) if changes else self

    def is_test(self) -> bool:
        """Whether this is (part of) a test split, on which nothing may be tuned."""
        return False

    @property
    def has_prompts(self) -> bool:
        """Whether each text has a prompt, as set by the option `prompt_field` if there is one."""
        return getattr(self, "prompt_field", None) is not None

    @property
    def prompt_end(self) -> str:
        """The separator at the end of every prompt, which shows a model where its text begins; part of
        `Document.prompt`."""
        return str(getattr(self, "separator", "")) if self.has_prompts else ""


MAX_SEPARATOR = 1000  # characters; stored in model folders


def check_separator(separator: str, prompt_field: str | None) -> None:
    """Refuse a separator that is too long, or without prompts before it.

    >>> check_separator("\\n", prompt_field="question")
    """
    if separator and prompt_field is None:
        raise UsageError("the separator stands between prompt and text: name the prompt_field, or leave it out")
    if len(separator) > MAX_SEPARATOR:
        raise UsageError(
            f"the separator has {len(separator)} characters, {MAX_SEPARATOR} are allowed: use a shorter one"
        )
