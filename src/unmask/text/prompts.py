"""Text with gaps → token rows with masks, and rows back to text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unmask.constraints import Constraint
from unmask.data.tokenizers import Tokenizer
from unmask.errors import Public, UsageError

MASK_SPELLING = re.compile(r"\[MASK(?::(\d+)(?:\.\.(\d+))?)?\]", re.ASCII)
# These are meant as gaps: [MASK:abc], [ MASK ], [MASK 3]. In lower case brackets are mostly code, as in
# x[mask] or rows[mask:3]: there only brackets with a number that index nothing count as gaps.
NEAR_SPELLING = re.compile(
    r"\[[ \t]*MASK(?:[ \t]*:[^\[\]\n]*|[ \t]+[\d.]+[ \t]*|[ \t]*)\]"
    r"|(?<![\w)\]])\[[ \t]*(?i:mask)[ \t]*:[ \t\d.]*\d[ \t.]*\]"
)
MAX_GAP = 1_000_000
CONTEXT = 16  # context tokens that determine how a vocabulary joins a piece


class Part(NamedTuple):
    """A stretch of a text and the gap after it: the original text, its ids, and the gap's tokens (0: the text ends)."""

    text: str
    ids: list[int]
    gap: int


def split_gaps(text: str, tokenizer: Tokenizer, *, exact: bool = False) -> list[Part]:
    """Split a text into parts; in it `[MASK]` is one masked token and `[MASK:n]` is n of them.

    If tokens contain the space before a word, a space before a gap belongs to the gap. exact: it stays where it is.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> split_gaps("a[MASK:2]b", load_tokenizer("bytes"))
    [Part(text='a', ids=[97], gap=2), Part(text='b', ids=[98], gap=0)]
    """
    parts: list[Part] = []
    end = 0
    for gap in MASK_SPELLING.finditer(text):
        n, most = _lengths(gap)
        if n != most:
            raise UsageError("{gap}: a gap of unknown length is for fill alone; give one number here", gap=gap[0])
        before = _checked(text[end : gap.start()])
        ids = tokenizer.encode(before)
        if not exact and before.endswith(" ") and spaces_lead(tokenizer):
            lent = tokenizer.encode(before[:-1])  # in such vocabularies a token contains the space before its word
            before, ids = (before[:-1], lent) if lent != ids else (before, ids)  # unless spaces have no ids
        if parts and not before:
            parts[-1] = parts[-1]._replace(gap=parts[-1].gap + n)  # adjacent gaps are one: a character may span both
        else:
            parts.append(Part(before, ids, n))
        end = gap.end()
    rest = _checked(text[end:])
    return [*parts, Part(rest, tokenizer.encode(rest), 0)]


def parse_gaps(text: str, tokenizer: Tokenizer, *, exact: bool = False) -> list[int]:
    """The ids of a text with gaps, masks where they are; see `split_gaps`.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> parse_gaps("a[MASK:2]", load_tokenizer("bytes"))
    [97, 257, 257]
    """
    return row_of_parts(split_gaps(text, tokenizer, exact=exact), tokenizer)


def row_of_parts(parts: Iterable[Part], tokenizer: Tokenizer) -> list[int]:
    """The ids, with masks in the gaps.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> row_of_parts([Part("a", [97], 2), Part("b", [98], 0)], load_tokenizer("bytes"))
    [97, 257, 257, 98]
    """
    return [id for part in parts for id in (*part.ids, *[tokenizer.mask_id] * part.gap)]


def filled_text(parts: Iterable[Part], row: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text with its gaps filled: the given parts stay unchanged, whatever their ids would decode to.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> filled_text([Part("a", [97], 2), Part("b", [98], 0)], [97, 120, 121, 98], load_tokenizer("bytes"))
    'axyb'
    """
    text, at = "", 0
    for part in parts:
        text, at = text + part.text, at + len(part.ids)
        if part.gap:
            text += spelled(tokenizer, row[max(0, at - CONTEXT) : at], row[at : at + part.gap], text)
            at += part.gap
    return text


def check_spelling(
    parts: Iterable[Part],
    row: Sequence[int],
    tokenizer: Tokenizer,
    constraint: Constraint | Sequence[Constraint] | None,
) -> None:
    """Refuse a constraint on the whole text if the vocabulary spells it differently: ids are constrained, given text
    stays.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> check_spelling([Part("a", [97], 0)], [97], load_tokenizer("bytes"), None)
    """
    several = () if constraint is None else (constraint,) if isinstance(constraint, Constraint) else constraint
    if any(one.over == "text" for one in several) and filled_text(parts, row, tokenizer) != tokenizer.decode(row):
        raise UsageError(
            "the constraint is asked of the whole text, which this vocabulary spells otherwise than it was given: "
            'ask it of the gaps (over="gap"), or give the text as the vocabulary spells it'
        )


def spelled(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int], prefix: str) -> str:
    """What the ids add after the prefix, whose own ids are `before`.

    The prefix is never decoded into the result, because not every vocabulary decodes to what it encoded.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> spelled(load_tokenizer("bytes"), [97, 32], [98], "a ")
    'b'
    """
    near = list(before[-CONTEXT:])
    head, whole = tokenizer.decode(near), tokenizer.decode([*near, *ids])
    piece = whole[len(head) :] if whole.startswith(head) else tokenizer.decode(ids)
    drops_space = prefix[-1].isspace() and not head.endswith(prefix[-1]) if prefix else bool(head)
    # A vocabulary that drops spaces joins words by its own rule; here the space was already given.
    return piece.lstrip(" ") if drops_space else piece


def known_lengths(text: str, most: int) -> list[str]:
    """The text with every gap of unknown length, `[MASK:3..8]`, in each of its lengths; at most `most` texts.

    >>> known_lengths("a[MASK:2..3]b[MASK]", most=9)
    ['a[MASK:2]b[MASK]', 'a[MASK:3]b[MASK]']
    """
    texts, end, count = [""], 0, 1
    for gap in MASK_SPELLING.finditer(text):
        low, high = _lengths(gap)
        count *= high + 1 - low
        if count > most:
            raise UsageError(
                "the gaps of unknown length ask for more than {most} texts: give narrower ranges", most=Public(most)
            )
        ways = [gap[0]] if gap[2] is None else [f"[MASK:{n}]" for n in range(low, high + 1)]
        texts = [done + text[end : gap.start()] + way for done in texts for way in ways]
        end = gap.end()
    return [done + text[end:] for done in texts]


def _lengths(gap: re.Match[str]) -> tuple[int, int]:
    """The minimum and maximum number of tokens of a gap."""
    low, high = (int(d) if len(d) <= len(str(MAX_GAP)) else 0 for d in (gap[1] or "1", gap[2] or gap[1] or "1"))
    if not (1 <= low <= MAX_GAP and 1 <= high <= MAX_GAP):
        raise UsageError("{gap}: a gap holds between 1 and {most} tokens", gap=gap[0][:40], most=Public(MAX_GAP))
    if low > high:
        raise UsageError("{gap}: the smaller number comes first", gap=gap[0])
    return low, high


def _checked(text: str) -> str:
    """A text without gaps; what looks like a misspelled gap is refused, not kept as text."""
    if near := NEAR_SPELLING.search(text):
        raise UsageError(
            "{gap!r} is no gap: write [MASK] for one token, [MASK:5] for five, [MASK:3..8] for 3 to 8", gap=near[0][:40]
        )
    return text


def encode_fixed(text: str, tokenizer: Tokenizer, what: str) -> list[int]:
    """Token ids of a prompt or suffix; a mask's spelling in it is refused rather than treated as text."""
    if gap := MASK_SPELLING.search(text) or NEAR_SPELLING.search(text):
        raise UsageError(
            "the {what} contains the mask's spelling {gap!r}: use fill for gaps", what=Public(what), gap=gap[0][:40]
        )
    return tokenizer.encode(text)


def until_end(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The ids before the first end-of-text.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> until_end([97, 256, 98], load_tokenizer("bytes"))
    [97]
    """
    ids = list(ids)
    return ids[: ids.index(tokenizer.eot_id)] if tokenizer.eot_id in ids else ids


def spaces_lead(tokenizer: Tokenizer) -> bool:
    """Whether tokens contain the space before a word.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> spaces_lead(load_tokenizer("bytes"))
    False
    """
    return len(tokenizer.encode(" a")) == 1
