"""Reading a file as another corpus is read: the same fields and the same separator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from unmask.corpora import Corpus
from unmask.corpora.sources import ending, from_path
from unmask.corpora.stdlib import Stdlib
from unmask.errors import UsageError

FIELDS = ("field", "prompt_field", "label_field")
OPTIONS = (*FIELDS, "separator")  # that may be given with a file


def read_like(path: str, like: Corpus | None = None, options: Mapping[str, str] | None = None) -> Corpus:
    """The corpus in a file, read with the options of `like`; `options` override them, and an empty word means the
    default.

    For a file of the same kind all options apply, otherwise those that mean the same for both kinds.

    >>> read_like("test.jsonl", Jsonl(path="train.jsonl", prompt_field="q"), {"field": "a"})  # doctest: +SKIP
    Jsonl(path='test.jsonl', field='a', prompt_field='q', label_field=None, separator='')
    """
    corpus = Stdlib() if path == "stdlib" else from_path(path)
    if like is not None and path != "stdlib" and _same_kind(corpus, like, path):
        corpus = _changed(like, path=path, **{name: _default(like, name) for name in like.choosing})
    elif like is not None and corpus.tokenized == like.tokenized:
        # A text file's separator separates documents, that of other kinds prompt and text.
        shared = OPTIONS if _known(like, "prompt_field") and _known(corpus, "prompt_field") else FIELDS
        names = [name for name in shared if _known(like, name) and _known(corpus, name)]
        corpus = _changed(corpus, **{name: getattr(like, name) for name in names})
    changes: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if not _known(corpus, name):
            kind = type(corpus).__name__.lower()
            raise UsageError(f"--{name.replace('_', '-')}: {path} is read as {kind}, which has no such option")
        changes[name] = value or _default(corpus, name)
    if "separator" not in changes and changes.get("prompt_field", ...) is None:
        changes["separator"] = ""  # it belonged to the prompts
    return _changed(corpus, **changes)


def _same_kind(corpus: Corpus, like: Corpus, path: str) -> bool:
    """Whether both are of one kind, also if their ending is not known: if a run reads it as JSON lines, so is the next
    file."""
    if not _known(like, "path"):
        return False
    files = Path(path).is_file() and ending(Path(path)) == ending(Path(like.path))  # type: ignore[attr-defined]
    return type(like) is type(corpus) or files


def _known(corpus: Corpus, name: str) -> bool:
    return name in {option.name for option in dataclasses.fields(cast(Any, corpus))}


def _default(corpus: Corpus, name: str) -> Any:
    return next(option.default for option in dataclasses.fields(cast(Any, corpus)) if option.name == name)


def _changed(corpus: Corpus, **changes: Any) -> Corpus:
    return cast(Corpus, dataclasses.replace(cast(Any, corpus), **changes))
