"""Detokenizers: natural text that was cut into words comes back, and nothing but spaces and stand-ins is lost."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.evaluation.suites import detokenizers as d

CASES: list[tuple[Callable[[str], str], str, str]] = [
    (d.ptb, " no it was n't black monday ", "no it wasn't black monday"),
    (d.ptb, "poor 's 500-stock index <unk> fell N N to N", "poor's 500-stock index ? fell 1 1 to 1"),
    (d.ptb, "N", "1"),
    (d.ptb, "N of the workers ' c$ N claims", "1 of the workers' c$1 claims"),
    (d.ptb, "a N-year-old N\\/N share # N", "a 1-year-old 1/1 share #1"),
    (d.ptb, "they 're sure we 'll say i 'm", "they're sure we'll say i'm"),
    (d.ptb, "the NATO N", "the NATO 1"),
    (d.wikitext, " a guest @-@ starring role in 9 @,@ 500 of 12 @.@ 1 ", "a guest-starring role in 9,500 of 12.1"),
    (d.wikitext, ' " Craig " , in the film " Teddy \'s Story " ; he ', '"Craig", in the film "Teddy\'s Story"; he'),
    (d.wikitext, " were like , ' Yeah , we love it ' \" . ", "were like, 'Yeah, we love it' \"."),
    (d.wikitext, " The Beach Boys ' \" Surfer Girl \" , 1963 ", "The Beach Boys' \"Surfer Girl\", 1963"),
    (d.wikitext, " Don 't Go ( 1992 ) [ sic ] : Stop ! Why ? ", "Don't Go (1992) [sic]: Stop! Why?"),
    (d.wikitext, " \n = Head VI = \n \n = = = A , b = = = \n x = y . ", "\n= Head VI =\n\n=== A, b ===\nx = y."),
    (d.wikitext, " at 40 ° N , 5 ° C ", "at 40°N, 5°C"),
    (d.lm1b, "It cost $ 5 and / or £ 6 , he said .", "It cost $5 and/or £6, he said."),
    (d.lm1b, "See https : / / a.org ; \" well \" ( yes ) !", 'See https://a.org; "well" (yes)!'),
    (d.papers, "flares ( @xmath4 $ ] years ) , @xcite .", "flares (@xmath4 $] years), @xcite."),
    (d.lambada, " “Go,” he said.\n\n“No”", '\n"Go," he said.\n\n"No"'),
    (d.as_it_is, " T N , as it was \\b ", " T N , as it was \\b "),
]  # fmt: skip
WORDS = [
    "a",
    "boys",
    "Cat",
    "'s",
    "n't",
    "'",
    '"',
    ",",
    ".",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ":",
    "?",
    "$",
    "/",
    "°",
    "=",
]


@pytest.mark.parametrize(("undo", "given_text", "natural"), CASES)
def test_by_hand(undo: Callable[[str], str], given_text: str, natural: str) -> None:
    assert undo(given_text) == natural


@given(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), st.sampled_from([d.wikitext, d.lm1b, d.papers]))
def test_only_spaces_change_and_a_second_time_nothing(text: str, undo: Callable[[str], str]) -> None:
    once = undo(text)
    assert once.replace(" ", "") == text.replace(" ", "")
    assert undo(once) == once


@given(st.lists(st.sampled_from(["N", "a", "Na", "aN", "$", "'s", "<unk>", "n't", "-"]), max_size=8).map(" ".join))
def test_ptb_keeps_no_stand_in(text: str) -> None:
    words = d.ptb(text).split(" ")
    assert not {"N", "<unk>"} & set(words)
    expected = " ".join({"N": "1", "<unk>": "?"}.get(word, word) for word in text.split(" "))
    assert d.ptb(text).replace(" ", "") == expected.replace(" ", "")


word = st.sampled_from(["the", "roads", "Oslo", "don't", "it's", "1944", "they're"])
part = st.one_of(
    word, word.map("({})".format), st.lists(word, min_size=1, max_size=3).map(lambda w: f'"{" ".join(w)}"')
)
sentence = st.tuples(
    st.lists(part, min_size=1, max_size=6).map(" ".join), st.sampled_from([".", "?", "!", ", so", "; no"])
)


@given(sentence.map("".join))
def test_a_natural_sentence_comes_back(natural: str) -> None:
    cut = re.sub(r"""([(),.;?!"])""", r" \1 ", natural)
    cut = re.sub(r"(n't|'\w+)", r" \1", cut)
    cut = re.sub(" +", " ", cut)
    assert cut != natural
    assert d.wikitext(cut) == d.lm1b(cut) == natural
