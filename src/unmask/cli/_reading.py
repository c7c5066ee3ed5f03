"""How a file of texts is read, for the commands that measure one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unmask.config import DataConfig
    from unmask.corpora import Corpus
    from unmask.data.packing import Rows
    from unmask.model import Model

LABEL_FIELD = "--label-field"
DATA = "text, JSONL, CSV, TSV or Parquet, a file, folder, pattern or URL, also .gz .xz .zst; or stdlib"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "reading --data", "default: as the run reads its own texts; an empty string removes a value"
    )
    group.add_argument("--field", metavar="NAME", help="JSONL, CSV, Parquet: column or key of the text")
    group.add_argument(
        "--prompt-field", metavar="NAME", help="column or key of the prompt, which is conditioned on and not scored"
    )
    group.add_argument(LABEL_FIELD, metavar="NAME", help="column or key of the label")
    group.add_argument("--separator", metavar="TEXT", help="between prompt and text; in text files: between documents")


def reading_options(args: argparse.Namespace) -> dict[str, str]:
    """The options of reading on the command line."""
    from unmask.corpora.reading import OPTIONS

    return {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}


def corpus_of(args: argparse.Namespace, model: Model, trained: DataConfig | None) -> Corpus:
    """What --data names, read as the run reads its own texts."""
    from unmask.corpora.reading import read_like

    like = None if trained is None else trained.valid or trained.train
    options = reading_options(args)
    if like is None and options.get("prompt_field") and model.separator:
        options.setdefault("separator", model.separator)  # a model's folder knows no more of how texts were read
    return read_like(args.data, like, options)


def trained_on(name: str, *, needed: bool) -> DataConfig | None:
    """The data of a run, by its folder."""
    from unmask.config import RECIPE_FILE, load_config
    from unmask.errors import ConfigError

    try:
        return load_config(name).data if (Path(name) / RECIPE_FILE).is_file() else None
    except ConfigError:  # of a plug-in that is not here, say
        if needed:
            raise
        return None


def treatment(corpus: Corpus, rows: Rows, model: Model, trained: DataConfig | None) -> dict[str, str]:
    """What became of prompts, labels and separators, for the protocol."""
    like = None if trained is None else trained.valid or trained.train
    dropped = getattr(like, "label_field", None) is not None and model.denoiser.num_classes
    labels = "none, unlike the run's" if dropped else "none"
    if rows.labelled:
        labels = "given" if model.denoiser.num_classes else "in the data, not used: the model has no classes"
    separator: Any = getattr(corpus, "separator", None) or None
    between = "prompt and text" if corpus.has_prompts else "documents"
    unlike = like is not None and like.has_prompts
    return {
        "prompts": "given, not scored" if corpus.has_prompts else "none, unlike the run's" if unlike else "none",
        "labels": labels,
        "separator": "none" if separator is None else f"{separator!r} between {between}",
    }
