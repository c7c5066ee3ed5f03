"""The translation suite: Multi30k (Elliott et al., arXiv 1605.00459), German to English, BLEU and chrF."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unmask.corpora.parallel import Parallel
from unmask.evaluation.overlap import Score, bleu, chrf, need_sacrebleu
from unmask.evaluation.suites.base import Entry, Identity, find_file
from unmask.evaluation.suites.scores import ScoreTable
from unmask.evaluation.suites.written import OPTIONS, Items, PromptSuite, Record

if TYPE_CHECKING:
    from unmask.evaluation.suites.run import SuiteRun
    from unmask.model import Model


@dataclass(frozen=True, kw_only=True)
class PairFiles(Entry):
    """Two parallel files: line i of one belongs to line i of the other. path: of both, without the language suffix."""

    path: str
    source: str = "de"
    target: str = "en"

    def readable(self, folder: Path | None) -> bool:
        return True

    def find(self, folder: Path | None) -> tuple[Items, str]:
        source, target = (find_file(folder, f"{self.path}.{one}") for one in (self.source, self.target))
        pairs = Parallel(source=str(source), target=str(target), separator="")
        records = [{"prompt": one.prompt, "reference": one.text} for one in pairs.documents()]
        what = f"{source.name} → {target.name}, lines as they are"
        return Items(source=what, records=records), hashlib.sha256(pairs.fingerprint().encode()).hexdigest()


class Translation(PromptSuite):
    """The source is the prompt; the model writes its translation."""

    def common(self, model: Model, run: SuiteRun) -> Identity:
        need_sacrebleu()
        return super().common(model, run)

    def asked(self, model: Model) -> str:
        return "The source is given, never noised; the target is written after it, one reference"

    def scores(self, records: list[Record], items: Items, seed: int) -> list[Score]:
        outputs, references = [one["output"] for one in records], [[one["reference"] for one in records]]
        return [bleu(outputs, references, seed=seed), chrf(outputs, references, seed=seed)]


_SETS = (
    PairFiles(name="flickr2016", title="Flickr 2016", path="multi30k/test_2016_flickr"),
    PairFiles(name="flickr2017", title="Flickr 2017", path="multi30k/test_2017_flickr"),
    PairFiles(name="flickr2018", title="Flickr 2018", path="multi30k/test_2018_flickr"),
    PairFiles(name="mscoco2017", title="MSCOCO 2017", path="multi30k/test_2017_mscoco"),
)

TRANSLATION = Translation(
    name="translation",
    version=1,
    sets={one.name: one for one in _SETS},
    layout=ScoreTable(),
    options=OPTIONS | {"lengths", "num_samples"},
)
