"""Text files (also compressed): one document per file, or several split at a separator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unmask.corpora import Corpus, Document, sources
from unmask.errors import UsageError

PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".fa", ".fasta")
CODE = (
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".rs",
    ".go",
    ".java",
    ".js",
    ".ts",
    ".rb",
    ".sh",
    ".jl",
    ".sql",
)
PIECE = 4 << 20  # characters


@dataclass(frozen=True, kw_only=True)
class Text(Corpus):
    """A text file, or a folder's text files, read as UTF-8 with nothing changed.

    Without a separator each file is one document. A file of more than 4 Mi characters is cut into documents of at most
    that length, at the last blank line, line end or space in reach; concatenated they are the file again. With a
    separator, the documents are the texts between its occurrences. One line break on either side belongs to the
    separator, so that it may be on a line of its own (unless it contains a line break itself: then it is used exactly
    as given).

    >>> Text(path="book.txt", separator="\\n\\n").documents()  # doctest: +SKIP
    """

    path: str
    separator: str | None = None

    def __post_init__(self) -> None:
        if self.separator == "":
            raise UsageError("the separator between documents must not be empty; leave it out for one document a file")

    def files(self) -> list[sources.File]:
        """The files, in reading order."""
        return sources.one_split(self.path, sources.find(self.path, PROSE + CODE))

    def documents(self) -> Iterator[Document]:
        files = self.files()
        any_documents = False
        for file in files:
            texts = _pieces(file) if self.separator is None else _between(file, self.separator)
            for text in texts:
                any_documents = True
                yield Document(text)
        if not any_documents:
            raise sources.is_empty(self.path)

    def fingerprint(self) -> str:
        return sources.digest(["text", self.separator, PIECE], self.files())


def _pieces(file: sources.File) -> Iterator[str]:
    rest = ""
    for text in sources.text_chunks(file):
        rest += text
        while len(rest) > PIECE:
            cut = _cut(rest)
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _cut(text: str) -> int:
    """Where to cut a text that is too long: as late as possible, at a natural boundary."""
    for gap in ("\n\n", "\n", " "):
        at = text.rfind(gap, PIECE // 2, PIECE)
        if at >= 0:
            return at + len(gap)
    return PIECE


def _between(file: sources.File, separator: str) -> Iterator[str]:
    trim = "\n" not in separator
    rest, follows = "", False  # follows: whether a separator directly precedes `rest`
    for chunk in sources.text_chunks(file):
        # Only the end of the part already searched can contain the start of a separator.
        start = max(0, len(rest) - len(separator) + 1)
        rest += chunk
        done = 0
        while (at := rest.find(separator, max(start, done))) >= 0:
            text = _trimmed(rest[done:at], head=trim and follows, tail=trim)
            if text or follows:
                yield text
            done, follows = at + len(separator), True
        rest = rest[done:]
        while len(rest) > PIECE:
            cut = _cut(rest)
            yield _trimmed(rest[:cut], head=trim and follows, tail=False)
            rest, follows = rest[cut:], False
    last = _trimmed(rest, head=trim and follows, tail=trim)  # treat the end of the file as one more separator
    if last:
        yield last


def _trimmed(text: str, *, head: bool, tail: bool) -> str:
    if head:
        text = text.removeprefix("\r\n") if text.startswith("\r\n") else text.removeprefix("\n")
    if tail:
        text = text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")
    return text
