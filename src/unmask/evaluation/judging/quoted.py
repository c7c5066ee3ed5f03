"""Numbers for generated texts quoted from the MDLM paper (arXiv 2406.07524), never measured here."""

from __future__ import annotations

from typing import Any

CAVEAT = (
    "Quoted from MDLM (arXiv 2406.07524), Table 5: texts of 2,048 tokens, of other models, under the paper's judge, on "
    "the paper's hardware. Levels do not compare; what is faster, and by how much, may."
)
# Table 5: generative perplexity and seconds per sequence of 2,048 tokens.
TABLES: dict[str, dict[str, tuple[float, float]]] = {
    "table-5": {"SSD-LM": (35.43, 2473.9), "MDLM, semi-autoregressive": (27.18, 89.3)},
}


def quoted_lines(table: str) -> list[dict[str, Any]]:
    """The rows of a table of the paper, in the format of points.jsonl.

    >>> [line["name"] for line in quoted_lines("table-5")]
    ['SSD-LM (quoted)', 'MDLM, semi-autoregressive (quoted)']
    """
    return [
        {
            "name": f"{name} (quoted)",
            "quoted": True,
            "numbers": {"judge_ppl": {"value": ppl, "ci95": None, "n": 0}},
            "protocol": {"seconds_per_text": seconds},
            "less_varied": [],
        }
        for name, (ppl, seconds) in TABLES[table].items()
    ]
