"""DNA: one token per base. N, an unknown base, may occur in a row and is never noised, scored or generated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from unmask.data.tokenizers import EOT_TEXT, MASK_TEXT, Span, Tokenizer
from unmask.errors import DataError, Public

LETTERS = "ACGTN"
_STRANGE = re.compile(f"[^{LETTERS}]", re.IGNORECASE)
_ID_OF = np.zeros(256, dtype=np.int64)
for _id, _letter in enumerate(LETTERS):
    _ID_OF[[ord(_letter), ord(_letter.lower())]] = _id


class Dna(Tokenizer):
    """A C G T N, then end of text and mask; lower case is read as upper case.

    >>> Dna().encode("acgn"), Dna().decode([0, 1, 6])
    ([0, 1, 2, 4], 'AC[MASK]')
    """

    num_ids, eot_id, mask_id = 7, 5, 6
    fixed_ids = (LETTERS.index("N"),)

    def encode(self, text: str) -> list[int]:
        return [int(id) for id in self._ids(text)]

    def encode_spans(self, texts: Sequence[str]) -> list[Span]:
        spans = []
        for text in texts:
            ids = self._ids(text)
            spans.append((ids, np.arange(1, len(ids) + 1, dtype=np.int64)))
        return spans

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.token_text(id) for id in ids)

    def token_text(self, id: int) -> str:
        return LETTERS[id] if id < len(LETTERS) else MASK_TEXT if id == self.mask_id else EOT_TEXT

    def spellings(self) -> tuple[list[bytes | None], list[bytes | None]]:
        words: list[bytes | None] = [*(letter.encode() for letter in LETTERS), None, None]
        return words, words

    def never_ids(self) -> list[int]:
        return list(self.fixed_ids)

    def to_json(self) -> str:
        return json.dumps({"unmask": "dna"})

    def _ids(self, text: str) -> NDArray[np.int64]:
        if strange := _STRANGE.search(text):
            raise DataError(
                "the tokenizer dna knows only A C G T N, the text has {character!r} at position {position}; the corpus "
                "fasta reads FASTA files, text files of one sequence a line need a separator",
                character=strange[0],
                position=Public(strange.start()),
            )
        return _ID_OF[np.frombuffer(text.encode("ascii"), dtype=np.uint8)]
