"""Text with gaps → rows with masks, and back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.errors import DataError, UsageError
from unmask.prompts import MAX_GAP, encode_fixed, parse_gaps, to_text
from unmask.tokens import load_tokenizer

BYTES = load_tokenizer("bytes")
CHARS = load_tokenizer("chars")
M = BYTES.mask_id

plain = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda s: "[MASK" not in s)


@given(parts=st.lists(st.tuples(plain, st.integers(1, 40), st.booleans()), max_size=4), last=plain)
def test_gaps_become_masks_and_all_else_stays(parts: list[tuple[str, int, bool]], last: str) -> None:
    """Byte for byte, whatever stands between the gaps; [MASK] and [MASK:1] are the same."""
    text, ids = "", []
    for before, n, long in parts:
        text += before + (f"[MASK:{n}]" if long or n > 1 else "[MASK]")
        ids += [*before.encode(), *[M] * n]
    assert parse_gaps(text + last, BYTES) == [*ids, *last.encode()]


@pytest.mark.parametrize(
    "near", ["[MASK:]", "[MASK:-1]", "[MASK:x]", "[mask]", "[MASK", "MASK]", "[MASK :2]", "[ MASK]"]
)
def test_what_only_looks_like_a_gap_is_text(near: str) -> None:
    assert parse_gaps(near, BYTES) == list(near.encode())
    assert encode_fixed(near, BYTES, "prompt") == list(near.encode())


@pytest.mark.parametrize("gap", ["[MASK:0]", "[MASK:00]", f"[MASK:{MAX_GAP + 1}]", "[MASK:" + "9" * 5000 + "]"])
def test_an_absurd_gap_is_refused(gap: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"a gap holds between 1 and {MAX_GAP} tokens")) as error:
        parse_gaps(f"a{gap}b", BYTES)
    assert len(str(error.value)) < 120  # the input is not echoed whole


@pytest.mark.parametrize("spelling", ["[MASK]", "[MASK:3]"])
def test_the_masks_spelling_in_a_fixed_text_is_refused(spelling: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"the suffix contains the mask's spelling '{spelling}': use fill")):
        encode_fixed(f"see {spelling}", BYTES, "suffix")


def test_a_character_the_tokenizer_does_not_know() -> None:
    with pytest.raises(DataError, match="'!' at position 2"):
        parse_gaps("hi![MASK]", CHARS)
    with pytest.raises(DataError, match="'A' at position 0"):
        encode_fixed("A", CHARS, "prompt")


def test_end_of_text_ends_the_text_behind_the_prompt() -> None:
    eot = BYTES.eot_id
    assert to_text([97, 98, eot, 99, eot], BYTES) == "ab"
    assert to_text([97, eot, 98, eot, 99], BYTES, prompt_length=2) == "a<|endoftext|>b"
    assert to_text([97, 98], BYTES) == "ab"
    assert to_text([eot, 97], BYTES) == ""
