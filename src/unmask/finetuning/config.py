"""The dataclasses of a fine-tuning, and how its recipes are read: TOML, JSON and the command line."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unmask.config import OptimConfig, overridden, read_table
from unmask.errors import ConfigError, UsageError
from unmask.finetuning.scores import USUAL, check_metrics
from unmask.heads import Head
from unmask.heads.pooled import Pooled
from unmask.heads.task import Kind, check_words
from unmask.reader import overlay, to_dict
from unmask.registry import check_fields

OPTIM = OptimConfig(
    lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01, muon=False, warmup=0.1, schedule="cosine", clip=1.0, ema=0.0
)


MAX_FOLDS = 1000


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """Files of labelled texts: TSV, CSV or JSON lines, also compressed, and which columns to read.

    valid: used for early stopping. Without it, a share of train, `held_out`, is used, chosen by a keyed permutation
    that is the same for every seed. test: measured once, with the weights that were best on valid; or a share of train
    if `test_share` is set.
    """

    train: str = ""
    valid: str | None = None
    test: str | None = None
    held_out: float = 0.1
    test_share: float = 0.0
    text: str = "text"
    pair: str | None = None  # the second text
    label: str = "label"
    columns: tuple[str, ...] = ()  # column names, for files without a header line
    extra_columns: bool = False  # rows may have more columns than these; they are ignored
    skip_lines: tuple[int, ...] = ()  # line numbers of train to leave out, counted from 1
    shortest: int = 0  # characters; shorter texts are left out of all files, and counted
    delimiter: str | None = None  # None: a tab, or a comma in files ending in .csv
    quoted: bool | None = None  # fields in double quotes may hold the delimiter; None: in CSV, not in TSV

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.held_out < 1 or not 0 <= self.test_share < 1:
            raise ConfigError("held_out lies between 0 and 1, test_share in [0, 1)")
        if self.shortest < 0:
            raise ConfigError(f"shortest is a number of characters, got {self.shortest}")
        if self.test is not None and self.test_share:
            raise ConfigError("data.test is a file: leave out data.test_share")
        if self.delimiter is not None and (self.delimiter != r"\t" and len(self.delimiter) != 1):
            raise ConfigError(f"delimiter must be one character, or \\t for a tab; got {self.delimiter!r}")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Everything that a fine-tuning run depends on, except the model."""

    out: str = "runs/finetuned"
    data: TaskData = TaskData()
    kind: Kind = "classification"
    labels: tuple[str, ...] = ()  # the classes, in order; empty: those of the training examples
    metrics: tuple[str, ...] = ()  # the first selects the best weights; empty: accuracy, or spearman and pearson
    head: Head = Pooled()
    between: str = ""  # the text between the two of a pair; empty: an end-of-text token
    optim: OptimConfig = OPTIM
    epochs: int = 10
    batch: int = 32
    length: int | None = None  # of a row in tokens; None: the model's window
    conjoin: bool | None = None  # one answer for both strands of DNA; None: if the vocabulary is only DNA
    valid_every: int = 0  # steps; 0: once per epoch
    patience: int = 3  # validations without improvement after which a seed stops
    freeze: bool = False  # train only the head
    from_scratch: bool = False  # also train the same network from random weights, for comparison
    seeds: int = 3  # 0 to seeds - 1: for the head's weights, the order of examples, dropout and folds
    folds: int | None = None  # folds of train, each reported once, or used once to stop if data.test is set
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 if the device supports it natively

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("epochs", "batch", "patience", "seeds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.valid_every < 0 or (self.length is not None and self.length < 4):
            raise ConfigError("valid_every is 0 or more, length at least 4")
        if self.folds is not None:
            if not 2 <= self.folds <= MAX_FOLDS:
                raise ConfigError(f"folds must lie in 2..{MAX_FOLDS}, got {self.folds}")
            if self.data.valid is not None or self.data.test_share:
                raise ConfigError("folds say what stops and what is reported: leave out data.valid and data.test_share")
        if self.labels:
            if self.kind == "regression":
                raise ConfigError("a regression has no labels: leave them out, or set kind = classification")
            check_words(self.labels)
        if self.metrics:
            check_metrics(self.metrics, self.kind, len(self.labels) or 2)  # classes in the data are counted later

    @property
    def measured(self) -> tuple[str, ...]:
        """The metrics; the first selects the best weights.

        >>> FinetuneConfig(kind="regression").measured
        ('spearman', 'pearson')
        """
        return self.metrics or USUAL[self.kind]


def load_finetune_config(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> FinetuneConfig:
    """Load a fine-tuning recipe, with overrides: strings as typed on the command line, numbers, or objects.

    path: a TOML or JSON file; None: the defaults.

    >>> load_finetune_config(None, {"optim.lr": "3e-5", "data.train": "mine.tsv", "epochs": 3}).optim.lr
    3e-05
    """
    if path is not None and Path(path).suffix not in (".toml", ".json"):
        raise UsageError(f"{path} is no recipe of a fine-tuning, which is a TOML or JSON file")
    own = {} if path is None else read_table(Path(path))
    data = overlay(FinetuneConfig, to_dict(FinetuneConfig()), own)
    return typing.cast(FinetuneConfig, overridden(FinetuneConfig, data, overrides))
