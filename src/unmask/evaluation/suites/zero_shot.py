"""The zero-shot suite: texts that a model was not trained on (MDLM, arXiv 2406.07524, table 3).

Each set is one entry. Differences from the published evaluation (kuleshov-group/mdlm):

- Every token is scored. There, every thousand documents are concatenated and the remainder that does not fill a row is
  dropped: short sets lose much, and a set of few short lines is empty at a window of 1,024. Here, the last row is
  shorter.
- Rows contain only the text, without the begin and end tokens that there surround each row and are scored with it.
- Test splits are used. There, validation splits are, for all sets except LM1B, LAMBADA and AG News.
- A document of WikiText is an article. There, it is a line, including blank ones, each followed by end-of-text.
- The detokenizers are our own: `detokenizers.py` lists the differences.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from unmask.corpora.csv import Csv
from unmask.corpora.hub import Hub
from unmask.corpora.jsonl import Jsonl
from unmask.corpora.text import Text
from unmask.evaluation.suites.detokenizers import lambada, lm1b, papers, ptb, wikitext
from unmask.evaluation.suites.likelihood import OPTIONS, LikelihoodSuite
from unmask.evaluation.suites.perplexity_table import PerplexityTable
from unmask.evaluation.suites.texts import Source, TextSet

PARQUET = "refs/convert/parquet"  # the hub's converted copies of datasets that are made by code, which we never run
_TITLE = re.compile(r" ?= [^=]+ = ?")


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Group WikiText's lines into articles; one begins at a title, ` = Name = ` after a blank line.

    >>> list(articles([" = A = ", " ", " x = y = z ", " ", " = B = ", " w "]))
    [' = A = \\n \\n x = y = z \\n ', ' = B = \\n w ']
    """
    article: list[str] = []
    for line in (line.removesuffix("\n") for line in lines):
        if _TITLE.fullmatch(line) and article and not article[-1].strip():
            yield "\n".join(article)
            article = []
        if article or line.strip():
            article.append(line)
    if article:
        yield "\n".join(article)


def paper_texts(lines: Iterable[str]) -> Iterator[str]:
    """Articles, one per line, without the word that some files put before each.

    >>> list(paper_texts(["Article: we show", "it is"]))
    ['we show', 'it is']
    """
    return (re.sub(r"^Article: ?", "", line) for line in lines)


def _quoted(ar: float, sedd: float, mdlm: float) -> dict[str, float]:
    return {"AR": ar, "SEDD": sedd, "MDLM": mdlm}


_LINES = "\n"
_VALIDATION = "the test split here, the validation split in the paper"
_SETS = (
    TextSet(
        name="ptb",
        title="PTB",
        local=Source(
            corpus=Text(path="ptb/ptb.test.txt", separator=_LINES),
            what="test split, sentences",
            differs=_VALIDATION,
            detokenize=ptb,
        ),
        hub=Source(
            corpus=Hub(dataset="ptb-text-only/ptb_text_only", split="test", field="sentence", revision=PARQUET),
            what="test split, sentences",
            differs=_VALIDATION,
            detokenize=ptb,
        ),
        quoted=_quoted(82.05, 100.09, 95.26),
    ),
    TextSet(
        name="wikitext",
        title="WikiText",
        local=Source(
            corpus=Text(path="wikitext2/test.raw.txt", separator=_LINES),
            what="raw test split, articles",
            differs=_VALIDATION,
            detokenize=wikitext,
            documents=articles,
        ),
        hub=Source(
            corpus=Hub(dataset="Salesforce/wikitext", config="wikitext-103-raw-v1", split="test"),
            what="raw test split, articles",
            differs=_VALIDATION,
            detokenize=wikitext,
            documents=articles,
        ),
        quoted=_quoted(25.75, 34.28, 32.83),
    ),
    TextSet(
        name="lm1b",
        title="LM1B",
        hub=Source(
            corpus=Hub(dataset="billion-word-benchmark/lm1b", split="test", revision=PARQUET),
            what="test split, sentences",
            detokenize=lm1b,
        ),
        quoted=_quoted(51.25, 68.20, 67.01),
    ),
    TextSet(
        name="lambada",
        title="LAMBADA",
        local=Source(corpus=Jsonl(path="lambada/test.jsonl"), what="test split, passages", detokenize=lambada),
        hub=Source(
            corpus=Hub(dataset="EleutherAI/lambada_openai", config="default", split="test"),
            what="test split, passages",
            detokenize=lambada,
        ),
        quoted=_quoted(51.28, 49.86, 47.52),
    ),
    TextSet(
        name="ag_news",
        title="AG News",
        local=Source(
            corpus=Csv(path="ag_news/test.csv", prompt_field="title", field="description", separator=" "),
            what="test split, title and text",
        ),
        hub=Source(corpus=Hub(dataset="fancyzhx/ag_news", split="test"), what="test split, title and text"),
        quoted=_quoted(52.09, 62.09, 61.15),
    ),
    TextSet(
        name="pubmed",
        title="PubMed",
        local=Source(
            corpus=Text(path="pubmed/abstracts.txt", separator=_LINES),
            what="all of the file, abstracts",
            differs="abstracts here, articles of the validation split in the paper",
        ),
        hub=Source(
            corpus=Hub(dataset="ccdv/pubmed-summarization", config="document", split="test", field="article"),
            what="test split, articles",
            differs=_VALIDATION,
            detokenize=papers,
        ),
        quoted=_quoted(49.01, 44.53, 41.89),
    ),
    TextSet(
        name="arxiv",
        title="arXiv",
        local=Source(
            corpus=Text(path="arxiv/arxiv.txt", separator=_LINES),
            what="all of the file, articles",
            differs="the articles of a file here, those of the validation split in the paper",
            detokenize=papers,
            documents=paper_texts,
        ),
        hub=Source(
            corpus=Hub(dataset="ccdv/arxiv-summarization", config="document", split="test", field="article"),
            what="test split, articles",
            differs=_VALIDATION,
            detokenize=papers,
        ),
        quoted=_quoted(41.73, 38.48, 37.37),
    ),
    TextSet(
        name="openwebtext",
        title="OpenWebText",
        local=Source(
            corpus=Jsonl(path="openwebtext/sample.jsonl"),
            what="a sample, web pages",
            differs="not in the paper's table, whose models were trained on OpenWebText",
        ),
    ),
)

ZERO_SHOT = LikelihoodSuite(
    name="zero-shot",
    version=2,
    sets={one.name: one for one in _SETS},
    layout=PerplexityTable(),
    options=OPTIONS,
    quoted={"AR": "=", "SEDD": "≤", "MDLM": "≤"},
    quotation=(
        "table 3 of MDLM (arXiv 2406.07524), of models of about 110M parameters trained on OpenWebText for 524B tokens "
        "with GPT-2's vocabulary at a window of 1,024"
    ),
    differs=(
        "There what does not fill a row is dropped, a begin and an end token stand in each row and are scored, and "
        "each line of WikiText is a document; here all text is scored and nothing else but end-of-text after a document"
    ),
)
