"""What adapting has changed, of the folders of benchmarks/adapt/stages: python benchmarks/adapt/table.py OUT

Before: the source as autoregression, exact; after: masked diffusion, an upper bound. The judge is the source itself, so
that its own texts are easy for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from unmask.finetuning.table import table

WHEN = ("before", "after")
VARIETY = {"entropy": "entropy of words", "distinct_2": "distinct 2-grams", "repeated_4": "repeated 4-grams"}


def read(out: Path, name: str) -> dict[str, Any]:
    """What is there of a measurement, by when it was made."""
    paths = {when: out / when / f"{name}.json" for when in WHEN}
    return {when: json.loads(path.read_text(encoding="utf-8")) for when, path in paths.items() if path.exists()}


def cell(found: dict[str, Any] | None, key: str = "value", digits: int = 3) -> str:
    if found is None or found.get(key) is None:
        return ""
    ends = found.get(f"{key}_ci95" if key != "value" else "ci95")
    half = "" if not ends or ends[0] is None else f" ± {(ends[1] - ends[0]) / 2:.{digits}f}"
    return f"{found[key]:.{digits}f}{half}"


def likelihoods(out: Path) -> list[list[str]]:
    """Bits per byte of every set."""
    sets, wiki = read(out, "sets"), read(out, "wiki")
    rows = [["Wikipedia, validation", *(cell(wiki.get(when), "bits_per_byte", 4) for when in WHEN)]] if wiki else []
    names: dict[str, str] = {}
    for found in sets.values():
        names |= {name: one["title"] for name, one in found["sets"].items()}
    for name, title in names.items():
        both = [sets.get(when, {}).get("sets", {}).get(name) for when in WHEN]
        rows.append([title, *(cell(one, "bits_per_byte", 4) for one in both)])
    return rows


def gaps(out: Path) -> list[list[str]]:
    """Right tokens and ROUGE-L of hidden spans, in hundredths."""
    by_when: dict[str, dict[tuple[str, str], Any]] = {}
    for when, found in read(out, "infilling").items():
        scores = [one for said in found["sets"].values() for one in said["scores"]]
        by_when[when] = {(one["of"], one["name"]): one for one in scores}
    keys = dict.fromkeys(key for scores in by_when.values() for key in scores)
    wanted = [key for key in keys if key[1] in ("right tokens", "ROUGE-L of gaps")]
    return [[", ".join(key), *(cell(by_when.get(when, {}).get(key), digits=1) for when in WHEN)] for key in wanted]


def judged(out: Path) -> list[list[str]]:
    found = read(out, "judge")
    numbers = {when: said["texts"][0]["numbers"] for when, said in found.items() if said["texts"]}
    real = next((said["real"]["numbers"] for said in found.values()), {})
    rows = []
    for name, title in {"judge_ppl": "perplexity by the source", **VARIETY}.items():
        values = [*(numbers.get(when, {}).get(name) for when in WHEN), real.get(name)]
        rows.append([title, *(cell(value, digits=2) for value in values)])
    return rows if found else []


def training(out: Path) -> str:
    """The bound on the recipe's validation rows, first and best."""
    path = out / "run" / "metrics.jsonl"
    if not path.exists():
        return ""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [(one["step"], one["valid_nats_per_token"]) for one in lines if "valid_nats_per_token" in one]
    if not found:
        return ""
    best = min(found, key=lambda one: one[1])
    return (
        f"On the validation rows of the recipe the bound was {found[0][1]:.3f} nats per token at step {found[0][0]}, "
        f"and {best[1]:.3f} at step {best[0]}."
    )


def page(out: Path) -> str:
    parts = ["# From autoregression to masked diffusion", training(out)]
    for title, rows, columns in (
        ("Bits per byte: exact before, an upper bound after", likelihoods(out), ["", *WHEN]),
        ("Infilling, in hundredths: before from the left alone", gaps(out), ["", *WHEN]),
        ("Texts, judged by the source", judged(out), ["", *WHEN, "real"]),
    ):
        if rows:
            parts += [f"## {title}", table(columns, rows)]
    parts.append("± is half of the 95% interval: over rows, passages or texts; of one training, one seed.")
    return "\n\n".join(part for part in parts if part)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder of benchmarks/stages.py")
    print(page(parser.parse_args(words).out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
