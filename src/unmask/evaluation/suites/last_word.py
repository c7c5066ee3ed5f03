"""The last-word suite: predict the last word of a passage from everything before it (LAMBADA, arXiv 1606.06031)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from unmask.errors import DataError
from unmask.evaluation.gaps import seam
from unmask.evaluation.overlap import share
from unmask.evaluation.suites.base import Entry
from unmask.evaluation.suites.scores import ScoreTable
from unmask.evaluation.suites.texts import TextSet
from unmask.evaluation.suites.writing import in_batches
from unmask.evaluation.suites.written import OPTIONS, Items, Record, Written, WrittenSuite
from unmask.evaluation.suites.zero_shot import ZERO_SHOT
from unmask.rng import row_keys
from unmask.text.editing import write

if TYPE_CHECKING:
    from unmask.evaluation.evaluate import Progress
    from unmask.evaluation.suites.run import SuiteRun
    from unmask.model import Model

_LAST = re.compile(r"(.*\S)(\s+\S+)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class LastWords(Entry):
    """Passages, each with its last word."""

    texts: TextSet

    def readable(self, folder: Path | None) -> bool:
        return self.texts.readable(folder)

    def find(self, folder: Path | None) -> tuple[Items, str]:
        source, fingerprint = self.texts.find(folder)
        found = [_LAST.fullmatch(text.strip()) for text in source.texts()]
        records = [{"context": match[1], "reference": match[2]} for match in found if match]
        return Items(source=source.line(), records=records), fingerprint


class LastWord(WrittenSuite):
    """Writes the most likely tokens after the context, as many as the last word has."""

    answers = frozenset({"output", "tokens", "right"})

    def asked(self, model: Model) -> str:
        given = "the likeliest tokens are written after it, as many as the last word has"
        if model.process is None:
            return f"The context is given, and {given}, one after the other"
        return f"The context is given, and {given}, in the sampler's order; the row ends there, so their number is seen"

    def write(
        self, model: Model, records: list[Record], run: SuiteRun, found: Any, progress: Progress | None
    ) -> Written:
        parts = [seam(model.tokenizer, record["context"], record["reference"]) for record in records]
        room = model.length - len(model.begin) - len(model.end)
        able = [i for i, (_, word) in enumerate(parts) if len(word) < room]
        if not able:
            raise DataError(f"{found.source}: no last word has room in the model's window of {model.length} tokens")
        sampler = run.writing.make(model)

        def words(some: list[int]) -> list[list[int]]:
            rows = []
            for before, word in (parts[i] for i in some):
                given = before[max(0, len(before) - (room - len(word))) :]
                rows.append([*model.begin, *given, *[model.tokenizer.mask_id] * len(word), *model.end])
            how: dict[str, Any] = {"sampler": sampler, "guidance": run.writing.guidance, "constraint": None}
            done = write(model, rows, row_keys(run.seed, torch.tensor(some)), list(range(len(rows))), **how)
            pairs = zip(some, cast(list[list[int]], done), strict=True)
            return [model.unframed(row)[-len(parts[i][1]) :] for i, row in pairs]

        written = in_batches(run.world, able, run.writing.batch, words, progress)
        made, right, single = [], list[bool](), list[bool]()
        for i, ids in zip(able, written, strict=True):
            right.append(ids == parts[i][1])
            single.append(len(ids) == 1)
            made.append(records[i] | {"output": model.tokenizer.decode(ids), "tokens": len(ids), "right": right[-1]})
        scores = [share("greedy match", right, seed=run.seed)]
        for of, which in (("words of one token", True), ("words of more tokens", False)):
            some = [i for i, one in enumerate(single) if one == which]
            good = [right[i] for i in some]
            scores += [share("greedy match", good, over=some, of=of, seed=run.seed)] if some else []
        cut = sum(len(parts[i][0]) > room - len(parts[i][1]) for i in able)
        told = [f"the beginning of {cut:,} contexts, beyond the window"] * bool(cut)
        return Written(records=made, scores=scores, left_out=", ".join(told))


LAST_WORD = LastWord(
    name="last-word",
    version=1,
    sets={"lambada": LastWords(name="lambada", title="LAMBADA", texts=cast(TextSet, ZERO_SHOT.sets["lambada"]))},
    layout=ScoreTable(),
    options=OPTIONS,
)
