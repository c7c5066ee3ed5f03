"""Suites: sets of texts measured by one protocol, `unmask eval MODEL --suite NAME`."""

from __future__ import annotations

from unmask.errors import UsageError, did_you_mean
from unmask.evaluation.suites.base import Suite
from unmask.evaluation.suites.infilling import INFILLING
from unmask.evaluation.suites.last_word import LAST_WORD
from unmask.evaluation.suites.planning import PLANNING
from unmask.evaluation.suites.style import STYLE
from unmask.evaluation.suites.translation import TRANSLATION
from unmask.evaluation.suites.zero_shot import ZERO_SHOT

SUITES = {suite.name: suite for suite in (ZERO_SHOT, TRANSLATION, STYLE, INFILLING, LAST_WORD, PLANNING)}


def find_suite(name: str) -> Suite:
    """A suite by its name.

    >>> list(find_suite("zero-shot").sets)
    ['ptb', 'wikitext', 'lm1b', 'lambada', 'ag_news', 'pubmed', 'arxiv', 'openwebtext']
    """
    if name not in SUITES:
        raise UsageError(f"unknown suite {name!r}; {did_you_mean(name, SUITES)}")
    return SUITES[name]
