"""Sentences of two styles without parallel text: each is rebuilt from what is left after removing its style.

The words that mark a style are deleted, and the sentence is written anew from the rest and the name of its style; with
the other name the same model rewrites a sentence in the other style (Li et al., arXiv 1804.06437, "DeleteOnly").
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unmask.corpora import Corpus, Document, sources
from unmask.errors import DataError, UsageError
from unmask.registry import check_fields

STYLES = ("negative", "positive")
FILES = ("yelp/sentiment.dev.{}", "yelp/sentiment.test.{}")  # 0: negative, 1: positive
REFERENCES = "lijuncen/yelp_reference.{}"  # a sentence, a tab, its human rewrite
MAX_WORDS = 4  # maximum words of a style marker
Run = tuple[str, ...]  # consecutive words


@dataclass(frozen=True, kw_only=True)
class Restyle(Corpus):
    """Yelp's sentences in the folder `path`, each a text; its prompt is its style and the words that do not mark it.

    Consecutive words mark a style if they are `salience` times as frequent in it as in the other (counts smoothed by
    one) and no part of them marks it already. Sentences of the 1,000 human references, both the sentences and their
    rewrites, are removed; only letters are compared.

    >>> Restyle(path="style_transfer").documents()  # doctest: +SKIP
    """

    path: str
    salience: float = 15.0
    separator: str = "\n"

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.salience > 1:
            raise UsageError(f"salience must be above 1, got {self.salience}")

    @property
    def has_prompts(self) -> bool:
        return True

    def documents(self) -> Iterator[Document]:
        sentences, _ = self.sentences()
        markers = self.markers(sentences)
        for text, style in sentences:
            yield Document(text, prompt_of(STYLES[style], without(text, markers[style])) + self.separator)

    def fingerprint(self) -> str:
        files = [file for style in (0, 1) for file in (*self._files(style), self._file(REFERENCES.format(style)))]
        return hashlib.sha256(
            json.dumps([self.salience, sources.digest(["restyle", self.separator], files)]).encode()
        ).hexdigest()

    def sentences(self) -> tuple[list[tuple[str, int]], int]:
        """All sentences with their style, 0 or 1, without those of the references; and the number of removed ones."""
        taken = {letters(text) for pair in self.references() for text in pair[:2]}
        kept, out = list[tuple[str, int]](), 0
        for style in (0, 1):
            for file in self._files(style):
                for _, line in sources.lines(file):
                    if (key := letters(line)) in taken:
                        out += 1
                    elif key:
                        kept.append((line.strip(), style))
        if not kept:
            raise sources.is_empty(self.path)
        return kept, out

    def references(self) -> list[tuple[str, str, int]]:
        """The human references: a sentence, its rewrite, and the style of the sentence."""
        found = []
        for style in (0, 1):
            file = self._file(REFERENCES.format(style))
            for number, line in sources.lines(file):
                if not line.strip():
                    continue
                source, tab, rewrite = line.partition("\t")
                if not tab:
                    raise DataError(f"{file}, line {number} has no tab between a sentence and its rewrite")
                found.append((source.strip(), rewrite.strip(), style))
        return found

    def markers(self, sentences: Sequence[tuple[str, int]]) -> tuple[frozenset[Run], ...]:
        """For each style the runs of words that mark it."""
        counts: tuple[Counter[Run], ...] = (Counter(), Counter())
        for text, style in sentences:
            words = text.split()
            for size in range(1, MAX_WORDS + 1):
                counts[style].update(tuple(words[i : i + size]) for i in range(len(words) - size + 1))
        return tuple(self._marking(mine, theirs) for mine, theirs in (counts, counts[::-1]))

    def _marking(self, mine: Counter[Run], theirs: Counter[Run]) -> frozenset[Run]:
        """The shortest runs that mark a style; a run that contains a shorter marker is not one itself."""
        often = (run for run, count in mine.items() if count + 1 >= self.salience * (theirs[run] + 1))
        marking: set[Run] = set()
        for run in sorted(often, key=len):
            parts = (run[i:j] for i in range(len(run)) for j in range(i + 1, len(run) + 1) if j - i < len(run))
            if not any(part in marking for part in parts):
                marking.add(run)
        return frozenset(marking)

    def _files(self, style: int) -> list[Path]:
        return [self._file(name.format(style)) for name in FILES]

    def _file(self, name: str) -> Path:
        folder = sources.existing(self.path)
        for ending in ("", *sources.COMPRESSED):
            if (folder / f"{name}{ending}").is_file():
                return folder / f"{name}{ending}"
        raise DataError(f"{name} is not in {folder}, neither plain nor as .gz, .xz, .bz2 or .zst: put it there")


def prompt_of(style: str, content: str) -> str:
    """The prompt for writing a sentence of that style.

    >>> prompt_of("positive", "the food was .")
    'positive: the food was .'
    """
    return f"{style}: {content}"


def without(text: str, markers: frozenset[Run]) -> str:
    """A sentence without its style markers, the longest removed first; the whole sentence if nothing would be left.

    >>> without("the food was really bad .", frozenset({("really", "bad"), ("bad",)}))
    'the food was .'
    """
    words = text.split()
    for size in range(MAX_WORDS, 0, -1):
        at, kept = 0, list[str]()
        while at < len(words):
            if tuple(words[at : at + size]) in markers:
                at += size
            else:
                kept.append(words[at])
                at += 1
        words = kept
    return " ".join(words) or text


def letters(text: str) -> str:
    """Only the letters of a sentence, to recognise it in any spelling.

    >>> letters("It 's ok , _num_ times !") == letters("it's OK, 3 times")
    True
    """
    return re.sub(r"[^a-z]", "", text.lower().replace("_num_", ""))
