"""Text with gaps → token rows with masks, and rows back to text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from unmask.errors import UsageError
from unmask.tokens import Tokenizer

MASK_SPELLING = re.compile(r"\[MASK(?::(\d+))?\]")
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
        digits = gap[1] or "1"
        n = int(digits) if len(digits) <= len(str(MAX_GAP)) else 0
        if not 1 <= n <= MAX_GAP:
            raise UsageError(f"{gap[0][:40]}: a gap holds between 1 and {MAX_GAP} tokens")
        before = text[end : gap.start()]
        if not exact and before.endswith(" ") and _spaces_lead(tokenizer):
            before = before[:-1]  # in such vocabularies a word brings the space before it
        ids += tokenizer.encode(before) + [tokenizer.mask_id] * n
        end = gap.end()
    return ids + tokenizer.encode(text[end:])


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
