"""Text with gaps → token rows with masks, and rows back to text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from unmask.errors import UsageError
from unmask.tokens import Tokenizer

MASK_SPELLING = re.compile(r"\[MASK(?::(\d+)(?:\.\.(\d+))?)?\]")
MAX_GAP = 1_000_000


def parse_gaps(text: str, tokenizer: Tokenizer, *, exact: bool = False) -> list[int]:
    """Token ids of a text in which `[MASK]` is one masked token and `[MASK:n]` is n of them.

    Where words bring the space before them, a space before a gap belongs to the gap. exact: it stays where it is.

    >>> from unmask.tokens import load_tokenizer
    >>> parse_gaps("a[MASK:2]", load_tokenizer("bytes"))
    [97, 257, 257]
    """
    ids: list[int] = []
    end = 0
    for gap in MASK_SPELLING.finditer(text):
        n, most = _lengths(gap)
        if n != most:
            raise UsageError(f"{gap[0]}: a gap of unknown length is for fill alone; give one number here")
        before = text[end : gap.start()]
        if not exact and before.endswith(" ") and _spaces_lead(tokenizer):
            before = before[:-1]  # in such vocabularies a word brings the space before it
        ids += tokenizer.encode(before) + [tokenizer.mask_id] * n
        end = gap.end()
    return ids + tokenizer.encode(text[end:])


def known_lengths(text: str, most: int) -> list[str]:
    """The text with every gap of unknown length, `[MASK:3..8]`, in each of its lengths; `most` texts at most.

    >>> known_lengths("a[MASK:2..3]b[MASK]", most=9)
    ['a[MASK:2]b[MASK]', 'a[MASK:3]b[MASK]']
    """
    texts, end, count = [""], 0, 1
    for gap in MASK_SPELLING.finditer(text):
        low, high = _lengths(gap)
        count *= high + 1 - low
        if count > most:
            raise UsageError(f"the gaps of unknown length ask for more than {most} texts: give narrower ranges")
        ways = [gap[0]] if gap[2] is None else [f"[MASK:{n}]" for n in range(low, high + 1)]
        texts = [done + text[end : gap.start()] + way for done in texts for way in ways]
        end = gap.end()
    return [done + text[end:] for done in texts]


def _lengths(gap: re.Match[str]) -> tuple[int, int]:
    """The least and the most tokens of a gap."""
    low, high = (int(d) if len(d) <= len(str(MAX_GAP)) else 0 for d in (gap[1] or "1", gap[2] or gap[1] or "1"))
    if not (1 <= low <= MAX_GAP and 1 <= high <= MAX_GAP):
        raise UsageError(f"{gap[0][:40]}: a gap holds between 1 and {MAX_GAP} tokens")
    if low > high:
        raise UsageError(f"{gap[0]}: the smaller number comes first")
    return low, high


def encode_fixed(text: str, tokenizer: Tokenizer, what: str) -> list[int]:
    """Token ids of a prompt or suffix; the mask's spelling in it is refused rather than read as letters."""
    if gap := MASK_SPELLING.search(text):
        raise UsageError(f"the {what} contains the mask's spelling {gap[0][:40]!r}: use fill for gaps")
    return tokenizer.encode(text)


def to_text(ids: Sequence[int], tokenizer: Tokenizer, prompt_length: int = 0) -> str:
    """The text of a finished row: end-of-text behind the prompt ends it, and what follows is not shown."""
    ids = list(ids)
    if tokenizer.eot_id in ids[prompt_length:]:
        ids = ids[: ids.index(tokenizer.eot_id, prompt_length)]
    return tokenizer.decode(ids)


def _spaces_lead(tokenizer: Tokenizer) -> bool:
    return len(tokenizer.encode(" a")) == 1
