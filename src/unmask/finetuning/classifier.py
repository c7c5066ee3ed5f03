"""A fine-tuned model in use: texts and pairs in, classes with probabilities (or numbers) out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unmask.errors import UsageError
from unmask.finetuning.examples import Example
from unmask.finetuning.predictions import predict_rows
from unmask.finetuning.rows import make_rows
from unmask.heads.task import Task
from unmask.model import Model, load_any
from unmask.storage.atomic import atomic_folder
from unmask.storage.model_folder import FILES, write_folder
from unmask.text.arguments import check_texts


@dataclass(frozen=True)
class Answer:
    """A classifier's answer to a text.

    label and probabilities: of a classification; value: of a regression; cut: the number of tokens at a text's end that
    did not fit in the window.
    """

    text: str
    pair: str | None
    label: str | None
    value: float | None
    probabilities: dict[str, float]
    cut: int = 0

    def plain(self) -> dict[str, Any]:
        """The answer for JSON.

        >>> Answer("a text", None, "yes", None, {"no": 0.25, "yes": 0.75}).plain()
        {'text': 'a text', 'label': 'yes', 'probabilities': {'no': 0.25, 'yes': 0.75}}
        """
        texts: dict[str, Any] = {"text": self.text} | ({} if self.pair is None else {"pair": self.pair})
        texts |= {"cut_tokens": self.cut} if self.cut else {}
        if self.value is not None:
            return {**texts, "value": self.value}
        return {**texts, "label": self.label, "probabilities": self.probabilities}


class Classifier:
    """A model with the head of a task.

    >>> classifier = unmask.load_classifier("runs/reviews")         # doctest: +SKIP
    >>> classifier.classify("a charming journey")[0].label           # doctest: +SKIP
    'positive'
    """

    def __init__(self, model: Model, task: Task) -> None:
        if model.denoiser.task is None:
            raise UsageError("this network has no task head: fine-tune it, or call task.attach(network)")
        self.model, self.task = model, task

    def __repr__(self) -> str:
        what = f"{len(self.task.labels)} classes" if self.task.labels else "a number"
        of = "pairs of texts" if self.task.pairs else "texts"
        return f"Classifier({what} of {of} of up to {self.task.length} tokens, {self.model!r})"

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes; empty for a regression."""
        return self.task.labels

    def classify(
        self, texts: str | Sequence[str], pairs: str | Sequence[str] | None = None, *, batch: int = 32
    ) -> list[Answer]:
        """An answer for each text, or each text with its pair. batch: texts per network call.

        A single pair is used with every text. A text that is longer than the window is cut, as in training.

        >>> classifier.classify(["a dog sleeps"], ["an animal rests"])  # doctest: +SKIP
        """
        firsts = check_texts(texts, "texts")
        seconds = self._seconds(pairs, len(firsts))
        return self.answers([Example(*both, None, "") for both in zip(firsts, seconds, strict=True)], batch=batch)

    def answers(self, examples: Sequence[Example], *, batch: int = 32) -> list[Answer]:
        """An answer for each example of a file; an example that cannot be read is reported by its line.

        >>> classifier.answers(read_examples("more.tsv", columns_of(classifier.task)))  # doctest: +SKIP
        """
        if batch < 1:
            raise UsageError(f"batch must be at least 1, got {batch}")
        if not examples:
            return []
        rows = make_rows(examples, self.task, self.model)
        predictions = predict_rows(self.task, self.model.denoiser, rows, batch=batch)
        answers = []
        found = zip(examples, predictions.out_NK, predictions.answers, rows.cut, strict=True)
        for one, out_K, answer, cut in found:
            if self.task.kind == "regression":
                answers.append(Answer(one.text, one.pair, None, answer, {}, cut))
                continue
            probs = dict(zip(self.task.labels, out_K.exp().tolist(), strict=True))
            answers.append(Answer(one.text, one.pair, self.task.labels[int(answer)], None, probs, cut))
        return answers

    def _seconds(self, pairs: str | Sequence[str] | None, count: int) -> list[str | None]:
        if not self.task.pairs:
            if pairs is not None:
                raise UsageError("this classifier takes single texts: leave out the pairs")
            return [None] * count
        if pairs is None:
            raise UsageError("this classifier takes pairs of texts: give each text its pair")
        seconds = check_texts(pairs, "pairs")
        if len(seconds) == 1:
            seconds = seconds * count
        if len(seconds) != count:
            raise UsageError(f"{count} texts need as many pairs, or one for all; got {len(seconds)}")
        return [*seconds]

    def save(self, folder: str | Path) -> None:
        """Write model.safetensors + config.json + tokenizer.json, head and network together, atomically.

        >>> classifier.save("models/reviews")  # doctest: +SKIP
        """
        folder = Path(folder)
        others = {p.name for p in folder.iterdir()} - {*FILES, ".DS_Store"} if folder.is_dir() else set()
        if others:
            raise UsageError(f"{folder} holds {min(others)}, which is no part of a model; give a folder of its own")
        with atomic_folder(folder) as tmp:
            write_folder(tmp, self.model, task=self.task)


def load_classifier(
    name: str | Path, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> Classifier:
    """Load a classifier from its folder or from its fine-tuning run. Nothing in it is executed.

    >>> load_classifier("runs/reviews", device="cpu").labels  # doctest: +SKIP
    ('negative', 'positive')
    """
    model, task = load_any(name, device=device, dtype=dtype)
    if task is None:
        raise UsageError(f"{name} is no classifier but a model that writes text: make one of it by unmask finetune")
    return Classifier(model, task)
