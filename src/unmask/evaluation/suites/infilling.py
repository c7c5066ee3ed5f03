"""The infilling suite: tokens of known texts are hidden, at random and in spans, and the model fills them in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.corpora.sources import from_path
from unmask.errors import DataError
from unmask.evaluation.gaps import Gap, Mask, gaps_of, hide_spans, hide_tokens
from unmask.evaluation.overlap import Score, rouge_l, share
from unmask.evaluation.suites.base import Entry
from unmask.evaluation.suites.scores import ScoreTable
from unmask.evaluation.suites.texts import Source, TextSet
from unmask.evaluation.suites.writing import in_batches
from unmask.evaluation.suites.written import OPTIONS, Items, Record, Written, WrittenSuite
from unmask.evaluation.suites.zero_shot import ZERO_SHOT
from unmask.rng import fold, row_keys
from unmask.text.editing import write

if TYPE_CHECKING:
    from unmask.evaluation.evaluate import Progress
    from unmask.evaluation.suites.run import SuiteRun
    from unmask.model import Model

SHARES = (0.15, 0.30, 0.45, 0.60, 0.75)
WAYS = {"tokens": hide_tokens, "spans": hide_spans}
LEAST = 8  # minimum number of tokens per text


@dataclass(frozen=True, kw_only=True)
class Passages(Entry):
    """The documents of a set of texts."""

    texts: TextSet

    def readable(self, folder: Path | None) -> bool:
        return self.texts.readable(folder)

    def find(self, folder: Path | None) -> tuple[Items, str]:
        source, fingerprint = self.texts.find(folder)
        return Items(
            source=source.line(), records=[{"text": text} for text in source.texts() if text.strip()]
        ), fingerprint


@dataclass(frozen=True, kw_only=True)
class TextFile(Entry):
    """The documents of any file that `--data` accepts."""

    path: str

    def readable(self, folder: Path | None) -> bool:
        return True

    def find(self, folder: Path | None) -> tuple[Items, str]:
        source = Source(corpus=from_path(self.path), what="its documents", name=Path(self.path).name)
        return Items(
            source=source.line(), records=[{"text": text} for text in source.texts() if text.strip()]
        ), source.fingerprint()


class Infilling(WrittenSuite):
    """Each text with 15, 30, 45, 60 and 75% of its tokens hidden, in two ways."""

    def question(self, record: Record) -> Any:
        gaps = [gap["reference"] for gap in record["gaps"]]
        return record["text"], record["hidden"], record["way"], gaps

    def of_file(self, path: str) -> Entry:
        """The set for a file of the user's."""
        return TextFile(name=Path(path).name.split(".")[0] or "data", title=Path(path).name[:12], path=path)

    def asked(self, model: Model) -> str:
        sees = (
            "each gap is written from what stands before it alone, its own tokens and earlier gaps as they were written"
            if model.process is None
            else "each gap is written from what stands on both sides of it"
        )
        return f"A text's first window of tokens, a share of them hidden; the number of hidden tokens is given; {sees}"

    def write(
        self, model: Model, records: list[Record], run: SuiteRun, found: Any, progress: Progress | None
    ) -> Written:
        room = model.length - len(model.begin) - len(model.end)
        all_ids = [ids[:room] for ids in model.tokenizer.encode_batch([record["text"] for record in records])]
        long_enough = [i for i, ids in enumerate(all_ids) if len(ids) >= LEAST]
        if not long_enough:
            raise DataError(f"{found.source}: no text has {LEAST} tokens, there is nothing to hide")
        plan = [(i, k, way) for k in range(len(SHARES)) for way in WAYS for i in long_enough]
        sampler = run.writing.make(model)
        how: dict[str, Any] = {"sampler": sampler, "guidance": run.writing.guidance, "constraint": None}

        def gaps(some: list[int]) -> list[list[Gap]]:
            texts, masks, keys = [], list[Mask](), list[Tensor]()
            for i, k, way in (plan[number] for number in some):
                keys.append(fold(row_keys(run.seed, torch.tensor(i)), k, list(WAYS).index(way)))
                masks.append(WAYS[way](len(all_ids[i]), SHARES[k], keys[-1]))
                texts.append(all_ids[i])
            fill = _between if model.process is not None else _from_the_left
            return [*map(gaps_of, masks, texts, fill(model, texts, masks, torch.stack(keys), how))]

        written = in_batches(run.world, range(len(plan)), run.writing.batch, gaps, progress)
        made = [_record(model, i, SHARES[k], way, one) for (i, k, way), one in zip(plan, written, strict=True)]
        short = len(records) - len(long_enough)
        cut = sum(len(ids) == room for ids in all_ids)
        told = [f"{short:,} texts of fewer than {LEAST} tokens"] * bool(short)
        told += [f"what {cut:,} texts have beyond the window"] * bool(cut)
        return Written(records=made, scores=_scores(made, run.seed), left_out=", ".join(told))


def _between(
    model: Model, texts: list[list[int]], masks: list[Mask], key_B: Tensor, how: dict[str, Any]
) -> list[list[int]]:
    """Fill every gap given the text on both sides of it."""
    masked = [_masked(model, ids, mask) for ids, mask in zip(texts, masks, strict=True)]
    rows = [[*model.begin, *ids, *model.end] for ids in masked]
    return [model.unframed(row or []) for row in write(model, rows, key_B, list(range(len(rows))), **how)]


def _from_the_left(
    model: Model, texts: list[list[int]], masks: list[Mask], key_B: Tensor, how: dict[str, Any]
) -> list[list[int]]:
    """Fill the gaps one after the other, each given only the text before it: known tokens, and earlier gaps
    as filled."""
    written = [_masked(model, ids, mask) for ids, mask in zip(texts, masks, strict=True)]
    mask_id = model.tokenizer.mask_id
    while open_rows := [i for i, ids in enumerate(written) if mask_id in ids]:
        heads = []
        for ids in (written[i] for i in open_rows):
            stop = ids.index(mask_id)
            while stop < len(ids) and ids[stop] == mask_id:
                stop += 1
            heads.append([*model.begin, *ids[:stop]])
        done = write(model, heads, key_B[open_rows], list(range(len(heads))), **how)
        for i, head in zip(open_rows, done, strict=True):
            ids = (head or [])[len(model.begin) :]
            written[i] = [*ids, *written[i][len(ids) :]]
    return written


def _masked(model: Model, ids: list[int], mask: Mask) -> list[int]:
    return [model.tokenizer.mask_id if hidden else id for id, hidden in zip(ids, mask, strict=True)]


def _record(model: Model, text: int, hidden: float, way: str, gaps: list[Gap]) -> Record:
    decode = model.tokenizer.decode
    return {
        "text": text,
        "hidden": hidden,
        "way": way,
        "gaps": [{"reference": decode(gap.reference), "output": decode(gap.output)} for gap in gaps],
        "ids": [[gap.reference, gap.output] for gap in gaps],
    }


def _scores(records: list[Record], seed: int) -> list[Score]:
    scores: list[Score] = []
    for hidden, way in dict.fromkeys((one["hidden"], one["way"]) for one in records):
        some = [one for one in records if (one["hidden"], one["way"]) == (hidden, way)]
        of = f"{hidden:.0%} hidden, {way}"
        num = [len(one["ids"]) for one in some]
        tokens = [sum(len(reference) for reference, _ in one["ids"]) for one in some]
        right = [sum(a == b for pair in one["ids"] for a, b in zip(*pair, strict=True)) for one in some]
        whole = [sum(reference == output for reference, output in one["ids"]) for one in some]
        alike = [sum(rouge_l(gap["output"], gap["reference"]) for gap in one["gaps"]) for one in some]
        scores.append(share("right tokens", right, tokens, of=of, seed=seed))
        scores.append(share("right gaps", whole, num, of=of, seed=seed))
        scores.append(share("ROUGE-L of gaps", alike, num, of=of, seed=seed))
    return scores


_SETS = [
    Passages(name=one.name, title=one.title, texts=one) for one in ZERO_SHOT.sets.values() if isinstance(one, TextSet)
]

INFILLING = Infilling(
    name="infilling",
    version=1,
    sets={one.name: one for one in _SETS},
    layout=ScoreTable(),
    options=OPTIONS | {"data"},
)
