"""Labels in a corpus: class numbers, or words that are numbered once all of them are known."""

from __future__ import annotations

from typing import Any

from unmask.errors import DataError

MAX_CLASSES = 1 << 20
MAX_WORDS = 4096  # distinct words; they are stored in the model's config.json
MAX_WORD = 100  # characters


def check_label(value: Any, where: str) -> int | str | None:
    """The label of a document: a whole number from 0, a word, or None for a missing one (null, an empty word).

    >>> check_label("positive", "a.jsonl, line 1"), check_label(3, "line 2"), check_label(" ", "line 3")
    ('positive', 3, None)
    """
    if isinstance(value, str) and len(word := value.strip()) <= MAX_WORD:
        return word or None
    if value is None or (type(value) is int and 0 <= value < MAX_CLASSES):
        return value
    raise DataError(
        f"{where}: the label {str(value)[:40]!r} is neither a whole number from 0 to {MAX_CLASSES - 1}, nor a word of "
        f"up to {MAX_WORD} characters, nor null; name another label_field"
    )


class Words:
    """Words of a corpus, numbered in order of appearance.

    >>> words = Words()
    >>> [words.number(label) for label in ("good", "bad", None, "good")]
    [0, 1, None, 0]
    """

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._has_numbers = False

    def number(self, label: int | str | None) -> int | None:
        """The number of the word in `numbers`; a class number is its own."""
        if not isinstance(label, str):
            self._has_numbers |= label is not None
        elif label not in self.numbers:
            if len(self.numbers) == MAX_WORDS:
                raise DataError(
                    f"the labels are more than {MAX_WORDS:,} different words: name a label_field that holds classes"
                )
            self.numbers[label] = len(self.numbers)
        if self._has_numbers and self.numbers:
            word = next(iter(self.numbers))
            raise DataError(
                f"some labels are numbers, others words such as {word!r}: write all of them as one or the other"
            )
        return self.numbers[label] if isinstance(label, str) else label


def class_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of the classes 0, 1, ... in alphabetical order, whatever their order in the corpus; empty if all are
    numbers.

    >>> class_words(("positive", "negative")), class_words(("1", "0"))
    (('negative', 'positive'), ())
    """
    return () if all(map(is_number, words)) else tuple(sorted(words))


def is_number(word: str) -> bool:
    """Whether a word is a class number in canonical spelling.

    >>> is_number("12"), is_number("012"), is_number("-1")
    (True, False, False)
    """
    return word.isascii() and word.isdecimal() and len(word) <= 7 and str(int(word)) == word and int(word) < MAX_CLASSES
