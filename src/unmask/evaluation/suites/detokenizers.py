"""Detokenizers: they restore natural spelling in texts that were split into words and punctuation.

A language model trained on natural text should not be measured on " , " and " @-@ ". Each set of the zero-shot suite
(MDLM, arXiv 2406.07524, table 3) names one of these detokenizers. A line is processed word by word: a punctuation mark
is joined to the word on its left, on its right or on both sides, and a quotation mark according to whether it opens or
closes. So only spaces change, apart from a set's known placeholders (`@-@`, `N`, `<unk>`, curly quotes).

Differences from the published evaluation, whose rules are string replacements: an unpaired quotation mark is unchanged,
all English contractions are joined ("they 're"), and `N` is also a number at the ends of a line, but only in PTB ("40 °
N" in WikiText is north).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

Detokenizer = Callable[[str], str]

CONTRACTIONS = frozenset(["'s", "'t", "'re", "'ve", "'ll", "'d", "'m", "n't"])
_MARKS = frozenset([",", ".", ";", ":", "!", "?", ")", "]", "}"])
_BRACKETS = frozenset(["(", "[", "{"])
_HEADING = re.compile(r"((?:= )+)(.+?)((?: =)+)")


@dataclass(frozen=True)
class Joining:
    """Which words are joined without a space: to the word before (`left`), to the word after (`right`), to both, or as
    a pair."""

    left: frozenset[str]
    right: frozenset[str]
    both: frozenset[str] = frozenset()
    paired: frozenset[str] = frozenset(['"', "'"])

    def line(self, line: str) -> str:
        """Join the words of a line; spaces at its ends are removed.

        >>> ENGLISH.line(' He said , " it was n\\'t ( quite ) black " . ')
        'He said, "it wasn\\'t (quite) black".'
        """
        words = line.strip(" ").split(" ")
        left = {word: words.count(word) for word in self.paired}
        opened: set[str] = set()
        pieces: list[str] = []
        joined = True  # no space before the next word
        for i, word in enumerate(words):
            before = words[i - 1] if i else ""
            to_left, to_right = self._sides(word)
            if word in self.paired:
                left[word] -= 1
                to_left, to_right = _quotation(word, before, opened, left[word])
            while to_left and pieces and not pieces[-1].strip(" "):
                pieces.pop()
            pieces += [word] if to_left or joined else [" ", word]
            joined = to_right
        return "".join(pieces)

    def _sides(self, word: str) -> tuple[bool, bool]:
        contraction = word.lower() in CONTRACTIONS
        return contraction or word in self.left or word in self.both, word in self.right or word in self.both


def _quotation(mark: str, before: str, opened: set[str], left: int) -> tuple[bool, bool]:
    """Whether a quotation mark is joined to its left and to its right. left: how many more of them the line has."""
    if mark in opened:
        opened.discard(mark)
        return True, False
    if mark == "'" and before.endswith("s"):
        return True, False  # the boys ' room
    if not left:
        return False, False
    opened.add(mark)
    return False, True


ENGLISH = Joining(left=_MARKS, right=_BRACKETS)
_WIKITEXT = Joining(left=_MARKS, right=_BRACKETS, both=frozenset(["°"]))
_NEWS = Joining(left=_MARKS, right=_BRACKETS | {"$", "£"}, both=frozenset(["/"]))
_PTB = Joining(left=frozenset(), right=frozenset(["$", "#", "us$", "c$", "hk$", "a$", "m$"]), paired=frozenset(["'"]))


def as_it_is(text: str) -> str:
    """Return the text unchanged: it is already natural.

    >>> as_it_is(" a , b ")
    ' a , b '
    """
    return text


def wikitext(text: str) -> str:
    """WikiText: `@-@`, `@,@` and `@.@` between parts of words and numbers, spaced punctuation, headings `= = so = =`.

    >>> wikitext(" = = Range = = \\n \\n Some 12 @.@ 5 @-@ mile ( 20 km ) roads . ")
    '== Range ==\\n\\nSome 12.5-mile (20 km) roads.'
    """
    lines = (re.sub(r" @([-,.])@ ", r"\1", line).strip(" ") for line in text.split("\n"))
    return "\n".join(_heading(line) or _WIKITEXT.line(line) for line in lines)


def _heading(line: str) -> str:
    match = _HEADING.fullmatch(line)
    if match is None:
        return ""
    marks = match[1].replace(" ", ""), match[3].replace(" ", "")
    return f"{marks[0]} {_WIKITEXT.line(match[2])} {marks[1]}"


def ptb(text: str) -> str:
    """Penn Treebank as Mikolov prepared it: contractions, `N` for a number, `<unk>` for a rare word, `\\/`.

    A number is 1 and a rare word ?, as the published evaluation writes them.

    >>> ptb(" the <unk> did n't cost $ N or N\\\\/N ")
    "the ? didn't cost $1 or 1/1"
    """
    words = text.replace("\\/", "/").replace("<unk>", "?")
    return _PTB.line(re.sub(r"(?<![^\s/-])N(?![^\s/-])", "1", words))


def lm1b(text: str) -> str:
    """The One Billion Word Benchmark: spaced punctuation, contractions, prices, slashes and addresses.

    >>> lm1b('She paid $ 5 : see http : / / a.b , or do n\\'t .')
    "She paid $5: see http://a.b, or don't."
    """
    return "\n".join(map(_NEWS.line, text.split("\n")))


def papers(text: str) -> str:
    """Articles of arXiv and PubMed as Cohan et al. prepared them: the rules of WikiText and LM1B.

    >>> papers("the rate ( @xmath0 ) , see fig . 1 / 2")
    'the rate (@xmath0), see fig. 1/2'
    """
    return lm1b(wikitext(text))


def lambada(text: str) -> str:
    """LAMBADA as OpenAI released it: straight quotation marks, and a line break before the passage.

    >>> lambada(" “Go,” she said ")
    '\\n"Go," she said'
    """
    return "\n" + text.replace("“", '"').replace("”", '"').strip()
