"""Figures quoted from the paper (MDLM, arXiv 2406.07524) for comparison, never measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Quoted:
    """A figure of the paper. kind: a likelihood, or an upper bound of -log p."""

    name: str
    ppl: float
    kind: Literal["exact", "upper bound"]
    parameters: str
    tokens: str  # training tokens; empty: not stated there
    data: str
    table: str


def _lm1b(name: str, ppl: float, parameters: str = "110M", tokens: str = "", *, exact: bool = False) -> Quoted:
    return Quoted(name, ppl, "exact" if exact else "upper bound", parameters, tokens, "LM1B", "Table 1")


def _table8(name: str, ppl: float) -> Quoted:
    return Quoted(name, ppl, "upper bound", "110M", "33B", "LM1B", "Table 8")


def _hg38(name: str, ppl: float, parameters: str, *, exact: bool = False) -> Quoted:
    return Quoted(name, ppl, "exact" if exact else "upper bound", parameters, "", "HG38", "Table 6")


@dataclass(frozen=True)
class Figures:
    """The paper's figures for one kind of data.

    by_recipe: keyed by the name of the equivalent recipe here. others: figures without a counterpart here, because the
    paper itself quotes them or the system was trained on ten times the tokens. caveat: how they differ from ours.
    """

    by_recipe: Mapping[str, Quoted]
    others: Sequence[Quoted]
    caveat: str


TEXT = Figures(
    by_recipe={
        "ar": _lm1b("Transformer", 22.32, tokens="33B", exact=True),
        "mdlm": _lm1b("MDLM", 27.04, tokens="33B"),
        "sedd": _lm1b("SEDD", 32.79, tokens="33B"),
        "diffusion_bert": _lm1b("DiffusionBERT", 63.78),
        "d3pm": _lm1b("D3PM (absorb)", 76.90, "70M"),
        "diffusion_lm": _lm1b("Diffusion-LM", 118.62, "80M"),
        "bert_mouth": _lm1b("BERT-Mouth", 142.89),
        "table8_no_continuous": _table8("MDLM without continuous time", 27.19),
        "table8_no_carry_over": _table8("and without carry-over", 28.56),
        "table8_no_zero_masking": _table8("and without zero masking", 28.51),
    },
    others=[
        _lm1b("Transformer-XL Base", 23.5, "0.46B", exact=True),
        _lm1b("OmniNet_T", 21.5, "100M", exact=True),
        _lm1b("Transformer", 20.86, tokens="327B", exact=True),
        _lm1b("MDLM", 23.00, tokens="327B"),
    ],
    caveat="Quoted from MDLM (arXiv 2406.07524): other data, another tokenizer, larger networks and far more tokens "
    "than ours. Levels do not compare; the order and the gaps of systems may.",
)
DNA = Figures(
    by_recipe={
        "ar_mamba": _hg38("Mamba", 3.067, "465K", exact=True),
        "ar_hyena": _hg38("HyenaDNA", 3.153, "433K", exact=True),
        "mdlm": _hg38("MDLM", 3.199, "467K"),
        "sedd": _hg38("SEDD", 3.216, "467K"),
        "plaid": _hg38("Plaid", 3.240, "507K"),
    },
    others=[],
    caveat="Quoted from MDLM (arXiv 2406.07524): the whole human genome, and far more bases than ours. Levels do not "
    "compare; the order and the gaps of systems may.",
)


def figures_for(tokenizer: str) -> Figures:
    """The figures for data with this tokenizer.

    >>> figures_for("dna").by_recipe["mdlm"].ppl, figures_for("bpe:8192").by_recipe["mdlm"].ppl
    (3.199, 27.04)
    """
    return DNA if tokenizer == "dna" else TEXT
