"""The style suite: Yelp's 1,000 human references; the sentiment of a sentence is reversed and everything else kept.

Style is judged by our own classifier, preservation by BLEU and chrF against the source and the human rewrite. The same
table has lines for the unchanged sources and for the human rewrites: copying preserves everything.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unmask.corpora.restyle import STYLES, Restyle, prompt_of, without
from unmask.evaluation.ngram_classifier import NgramClassifier, train_classifier
from unmask.evaluation.overlap import Score, bleu, chrf, need_sacrebleu, share
from unmask.evaluation.suites.base import Entry, Identity, find_file
from unmask.evaluation.suites.detokenizers import ENGLISH
from unmask.evaluation.suites.scores import ScoreTable
from unmask.evaluation.suites.written import OPTIONS, Items, PromptSuite, Record

if TYPE_CHECKING:
    from unmask.evaluation.suites.run import SuiteRun
    from unmask.model import Model

_FOLDER = "style_transfer"


@dataclass(frozen=True, kw_only=True)
class Judged(Items):
    """The references, with the sentences that the classifier is trained on."""

    corpus: Restyle


@dataclass(frozen=True, kw_only=True)
class References(Entry):
    """Sentences with their human rewrites."""

    def readable(self, folder: Path | None) -> bool:
        return True

    def find(self, folder: Path | None) -> tuple[Judged, str]:
        first = find_file(folder, f"{_FOLDER}/lijuncen/yelp_reference.0")
        corpus = Restyle(path=str(first.parent.parent))
        records = [
            {"source": _spelled(source), "wanted": STYLES[1 - style], "reference": _spelled(rewrite), "raw": source}
            for source, rewrite, style in corpus.references()
        ]
        what = f"{_FOLDER}/lijuncen/yelp_reference, rewrites by people; lower case, marks joined to their words"
        return Judged(source=what, records=records, corpus=corpus), corpus.fingerprint()


class Style(PromptSuite):
    """Deletes the words that mark a sentence's style and rewrites it under the other style's name."""

    def common(self, model: Model, run: SuiteRun) -> Identity:
        need_sacrebleu()
        return super().common(model, run)

    def asked(self, model: Model) -> str:
        return (
            "The name of the other style and the sentence without the words that mark its own are given; it is written "
            "anew after them"
        )

    def ready(self, one: Entry, found: Any, run: SuiteRun) -> Items:
        judged = cast(Judged, found)
        sentences, taken_out = judged.corpus.sentences()
        markers = judged.corpus.markers(sentences)
        records = []
        for record in judged.records:
            own = STYLES.index(record["wanted"]) ^ 1
            content = without(record["raw"], markers[own])
            kept = {name: value for name, value in record.items() if name != "raw"}
            records.append(kept | {"prompt": prompt_of(record["wanted"], content)})
        run.say(f"{one.title}: a classifier of style learns from {len(sentences):,} sentences")
        classifier = train_classifier([_spelled(text) for text, _ in sentences], [style for _, style in sentences])
        told = [
            classifier.sentence(),
            f"{taken_out:,} of {len(sentences) + taken_out:,} sentences are among the references, by their letters, "
            "and are taken out of the training data of the classifier and of the corpus restyle",
        ]
        return _Ready(
            source=judged.source, records=records, about={"notes": told}, corpus=judged.corpus, classifier=classifier
        )

    def spelled(self, output: str) -> str:
        return _spelled(output)

    def scores(self, records: list[Record], items: Items, seed: int) -> list[Score]:
        classifier = cast(_Ready, items).classifier
        texts = {name: [one[name] for one in records] for name in ("output", "reference", "source")}
        wanted = [STYLES.index(one["wanted"]) for one in records]

        def accuracy(name: str, of: str, style: int | None = None) -> Score:
            likely = classifier.probabilities(texts[name]).tolist()
            over = [i for i, w in enumerate(wanted) if style in (None, w)]
            some = [(likely[i] > 0.5) == bool(wanted[i]) for i in over]
            return share("style accuracy", some, over=over, of=of, seed=seed)

        def alike(name: str, to: str, of: str) -> list[Score]:
            made = [measure(texts[name], [texts[to]], of=of, seed=seed) for measure in (bleu, chrf)]
            return [dataclasses.replace(one, name=f"{one.name} to {to}") for one in made]

        scores = [accuracy("output", "outputs")]
        scores += [accuracy("output", f"outputs, to {STYLES[s]}", s) for s in (0, 1) if s in wanted]
        scores += [*alike("output", "source", "outputs"), *alike("output", "reference", "outputs")]
        beside = [accuracy("reference", "rewrites by people"), *alike("reference", "source", "rewrites by people")]
        beside += [accuracy("source", "sources unchanged"), *alike("source", "reference", "sources unchanged")]
        return [*scores, *(dataclasses.replace(one, sums=None) for one in beside)]  # not written by a model


@dataclass(frozen=True, kw_only=True)
class _Ready(Judged):
    classifier: NgramClassifier


def _spelled(text: str) -> str:
    """Natural spelling in lower case: human rewrites join punctuation, Yelp's sentences do not.

    >>> _spelled("it 's small , yet good .")
    "it's small, yet good."
    """
    return ENGLISH.line(" ".join(text.lower().split()))


STYLE = Style(
    name="style",
    version=1,
    sets={"yelp": References(name="yelp", title="Yelp")},
    layout=ScoreTable(),
    options=OPTIONS | {"lengths", "num_samples"},
)
