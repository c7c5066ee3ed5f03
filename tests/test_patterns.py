"""A pattern means what Python's re says with re.ASCII, or is refused by name."""

from __future__ import annotations

import itertools
import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_automata import accepts
from unmask.constraints.regex import regex_dfa, spliced_dfa
from unmask.errors import UsageError

LETTERS = "abB_1 \n-é"
TEXTS = ["".join(x) for n in range(4) for x in itertools.product("aB_ \n", repeat=n)]
TEXTS += [
    "abc",
    "ab ba",
    "aé",
    "éé",
    "É",
    "1-1",
    "a\n\n",
    "\n\na",
    "aaaa",
    "ABab",
    "bbbb",
    "a b\n",
    "\u212a",
    "ſ",
    "\x85",
]

TEXTS += ["cats", "dogs", "s", "cat", "σσ", "ΣΣ", "a\na", "abB", "b]", "[b]", "ab "]


def matching(pattern: str) -> set[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = re.compile(pattern, re.ASCII)
    return {text for text in TEXTS if compiled.fullmatch(text)}


def held(pattern: str) -> set[str]:
    try:
        dfa = regex_dfa(pattern)
    except UsageError as e:
        if "matches no text at all" not in str(e):
            raise
        return set()
    return {text for text in TEXTS if accepts(dfa, text)}


def quantified(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = ["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "{0}"]
    return st.builds(lambda x, n, lazy: f"(?:{x}){n}{lazy}", inner, st.sampled_from(counts), st.sampled_from(["", "?"]))


def grouped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    opening = st.sampled_from(["(", "(?:", "(?i:", "(?s:", "(?m:", "(?-i:", "(?s-i:", "(?a:", "(?x: ", "(?im:"])
    return st.builds(lambda head, x: f"{head}{x})", opening, inner)


CLASSES = [
    ".",
    r"\d",
    r"\D",
    r"\w",
    r"\W",
    r"\s",
    r"\S",
    "[ab]",
    "[^a]",
    "[a-b_]",
    "[^\\w]",
    "[Z-b]",
    r"[\s\-]",
    "[]a]",
    "[^é]",
]
CLASSES += ["[é-ü]", r"[^\W_]", r"\x41", r"\u00e9", "[+--]", "[[a]", r"[\D]", "[K-k]"]
PLACES = ["^", "$", r"\A", r"\Z", r"\b", r"\B", "(?#a note)", "(?:)", "(?P<n>a)?"]
ATOMS = st.sampled_from([*map(re.escape, LETTERS), *CLASSES, *PLACES])


@st.composite
def patterns(draw: st.DrawFn) -> str:
    inner = st.recursive(
        ATOMS,
        lambda part: st.one_of(
            st.lists(part, min_size=2, max_size=4).map("".join),
            st.lists(part, min_size=2, max_size=3).map("|".join),
            quantified(part),
            grouped(part),
        ),
        max_leaves=8,
    )
    body = draw(inner)
    for i in range(body.count("(?P<n>")):
        body = body.replace("(?P<n>", f"(?P<n{i}>", 1)
    return draw(st.sampled_from(["", "", "(?i)", "(?s)", "(?m)", "(?is)", "(?x)", "(?xi) # a note\n"])) + body


@given(pattern=patterns())
@settings(max_examples=150)
def test_a_pattern_holds_what_re_matches(pattern: str) -> None:
    assert held(pattern) == matching(pattern)


SAME = [
    "(^cat|^dog)s", r"\Acat\Z", "(?#c)cat", "(?i)σ{2}", "(?i)k|ſ", "(?i)[^a]b", "(?i)[Z-a]", "a$\n", "a$(\n)?",
    "^a|b$", "(a|^)*b", r"\bab\b \bba\b", r"(?m)(^a$\n?)*", r"(?m)a$\s^", "(?x) a b # and\n [ ]", "a??b*?",
    "(?i:a)b(?-i:B)", r"[[a]b]", "(?s:.)a.", "(?P<x>a)(?:b)(c)?", "|a", "()", r"\B", r"a\B", "[^\\n]*",
    r"\N{LATIN SMALL LETTER E WITH ACUTE}", "a$\\Z", "$^", "(?:$\n)+", "a$b|aa",
]  # fmt: skip


@pytest.mark.parametrize("pattern", SAME)
def test_patterns_that_were_read_otherwise(pattern: str) -> None:
    assert held(pattern) == matching(pattern)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a++ab", "has possessive quantifiers, which cannot be held"),
        ("a?+", "has possessive quantifiers"),
        ("(a{1,2}+b)*", "has possessive quantifiers"),
        ("(?>a|ab)c", "has atomic groups"),
        ("a(?=b)b", "has look-around"),
        ("(?<!a)b", "has look-around"),
        ("a(?!)", "has look-around"),
        (r"(a)\1", "has back references"),
        ("(?P<x>a)(?P=x)", "has back references"),
        ("(a)?(?(1)b|c)", "has conditional groups"),
        (r"(?u:\w)", "has the flag u"),
        (r"(?u)\w", "ASCII and UNICODE flags are incompatible"),
        ("(?L)a", "bad inline flags"),
        ("a(?i)b", "global flags not at the start"),
        (r"\p{L}", r"bad escape \p"),
        ("[a--b]", "bad character range a--"),
        (r"[\d-x]", r"bad character range \d-x"),
        ("a{9999999999}", "the repetition number is too large"),
        ("a{20001}", "asks for more than 20000 characters"),
        ("((a{99}){99}){99}", "asks for more than 20000 characters"),
        ("(?:(?:){999}){999}", "asks for more than 20000 characters"),
        ("(" * 3000 + ")" * 3000, "is nested too deeply"),
        ("[ab]*a[ab]{30}", "has too many states"),
        ("a[^\x00-\U0010ffff]", "matches no text at all"),
        ("a^b", "matches no text at all"),
    ],
)
def test_what_is_refused_and_why(pattern: str, reason: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UsageError) as caught:
            regex_dfa(pattern)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_warning_leaks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for pattern in ("[[a]", "[+--]", "[a||b]", "[a~~b]", "[a&&b]"):
            assert held(pattern) == matching(pattern)


def test_an_automaton_stands_for_a_character() -> None:
    dfa = spliced_dfa("(?:x|<\ue000>){2}", {"\ue000": regex_dfa("(^a|b)c*$")})
    assert [text for text in ("xx", "<a>x", "<bcc><a>", "<>x", "<ab>x") if accepts(dfa, text)] == [
        "xx",
        "<a>x",
        "<bcc><a>",
    ]
