"""Windows of running text with a fixed number of tokens, as JSON lines: real texts as long as those that models write.

    python benchmarks/windows.py FILE TOKENIZER LENGTH NUM OUT.jsonl

Windows are cut from the beginning of each document, never across two. NUM of them are taken, spread evenly over the
file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from unmask.corpora.sources import from_path
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import UnmaskError
from unmask.storage.atomic import atomic_text


def windows(file: str, tokenizer: str, length: int, num: int) -> list[str]:
    """The texts of the windows."""
    if min(length, num) < 1:
        raise SystemExit(f"windows have a length and a number of at least 1, got {length} and {num}")
    spells = load_tokenizer(tokenizer)
    found = []
    for document in from_path(file).documents():
        ids = spells.encode(document.text)
        found += [spells.decode(ids[lo : lo + length]) for lo in range(0, len(ids) - length + 1, length)]
    if len(found) < num:
        raise SystemExit(f"{file} has {len(found)} windows of {length} tokens, not {num}")
    return [found[i] for i in np.linspace(0, len(found) - 1, num).astype(int)]


def main(words: list[str]) -> None:
    file, tokenizer, length, num, out = words
    try:
        texts = windows(file, tokenizer, int(length), int(num))
    except UnmaskError as e:
        raise SystemExit(str(e)) from None
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    atomic_text(Path(out), "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))


if __name__ == "__main__":
    main(sys.argv[1:])
