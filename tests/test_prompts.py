"""Text with gaps → rows with masks, and back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.data.tokenizers import Tokenizer, load_tokenizer
from unmask.errors import DataError, UsageError
from unmask.text.prompts import MAX_GAP, encode_fixed, filled_text, parse_gaps, split_gaps, until_end

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
    "near",
    [
        *("[MASK:]", "[MASK:abc]", "[MASK:-1]", "[MASK:3..]", "[MASK:..3]", "[MASK:3-8]", "[MASK: 3]", "[MASK :2]"),
        *("[ MASK]", "[MASK ]", "[MASK 3]", "[MASK:5 tokens]", "[mask:3]", "[Mask:3..8]", "[ mask : 3 ]"),
    ],
)
def test_what_is_meant_for_a_gap_is_refused_rather_than_kept_as_words(near: str) -> None:
    for text in (near, f"a [MASK] b {near} c", f"{near}[MASK:2]"):
        with pytest.raises(UsageError, match=re.escape(f"{near!r} is no gap: write [MASK] for one token")):
            parse_gaps(text, BYTES)
    with pytest.raises(UsageError, match="the prompt contains the mask's spelling"):
        encode_fixed(f"see {near}", BYTES, "prompt")


@pytest.mark.parametrize(
    "text",
    [
        *("[mask]", "[Mask]", "[MASK", "MASK]", "MASK:3", "[MASKED]", "[UNMASK:3]", "[MASK_1]", "[MASK\n:3]"),
        *("[mask: removed]", "[mask:]", "[1]", "[x:3]", "[MASQUE:3]", "(MASK:3)", "[a [MASK", "[MASK REQUIRED]"),
        *("rows[mask:3]", "f(x)[mask:3]", "x[0][mask:3]", "image[mask]", "a[mask[i]:3]", "{mask:3}"),
    ],
)
def test_other_brackets_are_text(text: str) -> None:
    assert parse_gaps(text, BYTES) == list(text.encode())
    assert encode_fixed(text, BYTES, "prompt") == list(text.encode())


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


def test_end_of_text_ends_the_text() -> None:
    eot = BYTES.eot_id
    assert until_end([97, 98, eot, 99, eot], BYTES) == [97, 98]
    assert until_end([97, 98], BYTES) == [97, 98]
    assert until_end([eot, 97], BYTES) == []


# --- what was typed stays ---------------------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "naive", "the", "cat", "sat", "##s", ",", ".", "hotel"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A WordPiece vocabulary that lowers, drops accents and spaces, and does not know snowmen."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    return load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("text", "written", "filled"),
    [
        ("Naïve ☃ [MASK] sat", ["cat"], "Naïve ☃ cat sat"),
        ("The  Hôtel,\n[MASK:2].", ["the", "cat"], "The  Hôtel,\nthe cat."),
        ("THE cat[MASK] SAT", ["##s"], "THE cats SAT"),
        ("☃[MASK]☃", ["cat"], "☃ cat☃"),
        ("[MASK][MASK] Sat", ["cat", "##s"], "cats Sat"),
        ("the [MASK] sat", ["cat"], "the cat sat"),
    ],
)
def test_what_was_typed_stays_letter_by_letter(bert: Tokenizer, text: str, written: list[str], filled: str) -> None:
    parts = split_gaps(text, bert)
    ids = iter(WORDS.index(word) for word in written)
    row = [next(ids) if id == bert.mask_id else id for id in parse_gaps(text, bert)]
    assert filled_text(parts, row, bert) == filled


@given(parts=st.lists(st.tuples(plain, st.lists(st.integers(0, 255), min_size=1, max_size=3)), max_size=4), last=plain)
def test_where_nothing_is_lost_it_is_the_text_of_the_ids(parts: list[tuple[str, list[int]]], last: str) -> None:
    """Whatever bytes a gap holds, halves of characters included, also across gaps that touch."""
    text = "".join(f"{before}[MASK:{len(ids)}]" for before, ids in parts) + last
    row = [id for before, ids in parts for id in (*before.encode(), *ids)] + list(last.encode())
    assert filled_text(split_gaps(text, BYTES), row, BYTES) == BYTES.decode(row)
