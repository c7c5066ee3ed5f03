"""A dataset of the Hugging Face hub, streamed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unmask.corpora import Corpus, Document, sources
from unmask.errors import DataError, UsageError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Hub(Corpus):
    """A split of a dataset on the Hugging Face hub, one document an example; no code of the dataset is run.

    revision: a branch, tag or commit; refs/convert/parquet is the hub's converted copy of a dataset that is defined by
    code.

    >>> Hub(dataset="roneneldan/TinyStories", split="validation").documents()  # doctest: +SKIP
    """

    dataset: str
    split: str = "train"
    config: str | None = None
    field: str = "text"
    revision: str | None = None

    def __post_init__(self) -> None:
        if not self.dataset or not self.split:
            raise UsageError("a hub corpus needs the name of a dataset and of a split")

    def is_test(self) -> bool:
        """Whether this is (part of) a test split, on which nothing may be tuned.

        >>> Hub(dataset="wikitext", split="train+test[:10%]").is_test()
        True
        """
        names = (re.split(r"[\[.]", part.strip())[0].lower() for part in self.split.split("+"))
        return any(re.search(r"(^|[_-])test($|[_-])", name) for name in names)

    def documents(self) -> Iterator[Document]:
        datasets = sources.optional("datasets", "datasets", "hf", f"the hub's dataset {self.dataset}")
        any_documents = False
        try:
            for example in datasets.load_dataset(
                self.dataset, self.config, split=self.split, **self._of(streaming=True)
            ):
                if not isinstance(example.get(self.field), str):
                    hint = did_you_mean(self.field, map(str, example))
                    raise DataError(f"the dataset {self.dataset} has no text in a field {self.field!r}; {hint}")
                any_documents = True
                yield Document(example[self.field])
        except (DataError, GeneratorExit):
            raise
        except Exception as e:  # network, parsing and access errors have many classes
            raise self._failed(e) from None
        if not any_documents:
            raise sources.is_empty(f"the dataset {self.dataset} ({self.split})")

    def fingerprint(self) -> str:
        hub = sources.optional("huggingface_hub", "huggingface-hub", "hf", f"the hub's dataset {self.dataset}")
        try:
            revision = hub.HfApi().dataset_info(self.dataset, **self._of()).sha
        except Exception as e:
            raise self._failed(e) from None
        options = ["hub", self.dataset, revision, self.split, self.config, self.field]
        return hashlib.sha256(json.dumps(options).encode()).hexdigest()

    def _of(self, **options: Any) -> dict[str, Any]:
        return options | ({} if self.revision is None else {"revision": self.revision})

    def _failed(self, error: Exception) -> DataError:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return DataError(f"cannot read the hub's dataset {self.dataset} ({self.split}), over the network: {reason}")
