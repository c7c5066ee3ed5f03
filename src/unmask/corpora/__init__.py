"""Corpora: where documents come from. A corpus yields documents; packing turns them into rows."""

from __future__ import annotations

from typing import Any

from unmask.corpora.base import MAX_SEPARATOR as MAX_SEPARATOR
from unmask.corpora.base import Corpus as Corpus
from unmask.corpora.base import Document as Document
from unmask.corpora.base import check_separator as check_separator
from unmask.corpora.base import room as room


def __getattr__(name: str) -> Any:
    return room.attribute(name)


def __dir__() -> list[str]:
    return room.attributes()
