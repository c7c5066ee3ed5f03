"""Figures quoted from the paper (MDLM, arXiv 2406.07524) for comparison, never measured here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PAPER = "Quoted from MDLM (arXiv 2406.07524): "
CAVEAT = (
    f"{PAPER}other data, another tokenizer, larger networks and far more tokens than ours. Levels do not compare; the "
    "order and the gaps of systems may."
)
CAVEAT_DNA = (
    f"{PAPER}networks of about this size on the whole human genome, with far more tokens; the diffusion models were "
    "fine-tuned from a pretrained Caduceus. Levels do not compare; the order and the gaps of systems may."
)


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


def _dna(name: str, ppl: float, parameters: str, *, exact: bool = False) -> Quoted:
    return Quoted(name, ppl, "exact" if exact else "upper bound", parameters, "", "HG38", "Table 6")


# Keyed by the name of the equivalent recipe here.
QUOTED: dict[str, Quoted] = {
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
}
# The same for systems that are compared on DNA, perplexity per base.
QUOTED_DNA: dict[str, Quoted] = {
    "ar_mamba": _dna("Mamba", 3.067, "465K", exact=True),
    "ar_hyena": _dna("HyenaDNA", 3.153, "433K", exact=True),
    "plaid": _dna("Plaid", 3.240, "507K"),
    "sedd": _dna("SEDD", 3.216, "467K"),
    "mdlm": _dna("MDLM", 3.199, "467K"),
}
# Figures that the paper itself quotes, and systems trained on ten times the tokens, have no counterpart here.
OTHERS: list[Quoted] = [
    _lm1b("Transformer-XL Base", 23.5, "0.46B", exact=True),
    _lm1b("OmniNet_T", 21.5, "100M", exact=True),
    _lm1b("Transformer", 20.86, tokens="327B", exact=True),
    _lm1b("MDLM", 23.00, tokens="327B"),
]


def quoted(system: str, *, dna: bool = False) -> Quoted | None:
    """The paper's figure for a system, by the recipe's name; with `dna` that of its table on the human genome.

    >>> quoted("mdlm").ppl, quoted("mdlm", dna=True).ppl, quoted("mine")
    (27.04, 3.199, None)
    """
    return (QUOTED_DNA if dna else QUOTED).get(system)
