"""The planning suite: sums, whose first digit depends on their last ones, written in both directions.

If the sum is written forward, autoregression has to write each digit before those that it depends on. Reversed, each
digit only needs the carry of the one before. A model that generates in any order may write the end first. The numbers
are those of the corpus `addition`, from the part that no training run sees.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unmask.corpora.addition import PROMPT_END, Addition, Direction, longest_chain
from unmask.errors import DataError, UsageError
from unmask.evaluation.overlap import Score, share
from unmask.evaluation.suites.base import Entry, Identity
from unmask.evaluation.suites.scores import ScoreTable
from unmask.evaluation.suites.written import OPTIONS, Items, PromptSuite, Record

if TYPE_CHECKING:
    from unmask.evaluation.suites.run import SuiteRun
    from unmask.model import Model

NUM = 1000
CHAINS = ((0, 1), (2, 3), (4, 99))  # lengths of the carry chain


@dataclass(frozen=True, kw_only=True)
class Sums(Entry):
    """Sums written in one direction, identical in every run."""

    direction: Direction

    def readable(self, folder: Path | None) -> bool:
        return True

    def find(self, folder: Path | None) -> tuple[Items, str]:
        corpus = Addition(num=NUM, direction=self.direction, part="test", seed=2)
        records: list[Record] = []
        for one in corpus.documents():
            prompt = one.prompt.removesuffix(corpus.prompt_end)
            step = -1 if self.direction == "reversed" else 1
            chain = longest_chain([int(number[::step]) for number in prompt.split("+")])
            records.append({"prompt": prompt, "reference": one.text, "chain": chain})
        first = "last" if self.direction == "reversed" else "first"
        what = f"{NUM:,} sums of {corpus.terms} numbers of {corpus.digits} digits, made; {first} digit first"
        return Items(source=what, records=records), corpus.fingerprint()


class Planning(PromptSuite):
    """The prompt is the two numbers; the model writes their sum."""

    def common(self, model: Model, run: SuiteRun) -> Identity:
        identity = super().common(model, run)
        if model.separator not in PROMPT_END.values():
            raise UsageError(
                f"this model's prompts end in {model.separator[:20]!r}, those of the corpus addition in = or =<: train "
                "one on it, as in benchmarks/conditional/sums.toml"
            )
        return identity

    def of_set(self, model: Model, one: Entry, run: SuiteRun) -> Identity:
        if isinstance(one, Sums) and PROMPT_END[one.direction] != model.separator:
            raise DataError(f"this model was trained on sums of the other direction: leave out --sets {one.name}")
        return {}

    def usual(self, model: Model, sets: Sequence[Entry]) -> Sequence[Entry]:
        return [one for one in sets if isinstance(one, Sums) and PROMPT_END[one.direction] == model.separator] or sets

    def asked(self, model: Model) -> str:
        return "The numbers are given, the sum is written after them; all answers of a set have one length"

    def scores(self, records: list[Record], items: Items, seed: int) -> list[Score]:
        right = [one["output"] == one["reference"] for one in records]
        digits = [_right_digits(one["output"], one["reference"]) for one in records]
        size = [len(one["reference"]) for one in records]
        made = [share("exact match", right, seed=seed), share("right digits", digits, size, seed=seed)]
        if wrong := [i for i, good in enumerate(right) if not good]:
            missed = [size[i] - digits[i] for i in wrong]
            made.append(
                share("wrong digits", missed, [size[i] for i in wrong], over=wrong, of="wrong answers", seed=seed)
            )
        for low, high in CHAINS:
            some = [i for i, one in enumerate(records) if low <= one["chain"] <= high]
            if some:
                of = f"carries over {low} to {high}" if high < 99 else f"carries over {low} or more"
                made.append(share("exact match", [right[i] for i in some], over=some, of=of, seed=seed))
        return made


def _right_digits(output: str, reference: str) -> int:
    """The number of digits that are correct and in the right place."""
    return sum(a == b for a, b in zip(re.sub(r"\s", "", output), reference, strict=False))


PLANNING = Planning(
    name="planning",
    version=1,
    sets={
        one.name: one
        for one in (
            Sums(name="forward", title="forward", direction="forward"),
            Sums(name="reversed", title="reversed", direction="reversed"),
        )
    },
    layout=ScoreTable(),
    options=OPTIONS,
)
