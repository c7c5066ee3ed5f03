"""The beginnings of texts, each of as many tokens as the texts that models write, so that their numbers compare:

    python benchmarks/adapt/cut.py MODEL TEXTS OUT.jsonl --num 100 --length 256

Tokens are those of MODEL, a model folder of ours. Shorter texts are left out. Other options, meant for the command that
reads OUT, are ignored.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from unmask.corpora.reading import read_like
from unmask.data.tokenizers import Tokenizer
from unmask.model import load
from unmask.storage.atomic import atomic_text


def beginnings(texts: Iterator[str], tokenizer: Tokenizer, length: int) -> Iterator[str]:
    """Of each text that is long enough, the characters that its first tokens spell whole."""
    for text in texts:
        ids = tokenizer.encode(text)
        if len(ids) >= length:
            yield tokenizer.decode(ids[:length]).rstrip("\N{REPLACEMENT CHARACTER}")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("out", type=Path)
    parser.add_argument("--num", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--length", type=int, default=256, help="tokens of each (default 256)")
    args, _ = parser.parse_known_args(words)
    texts = (document.text for document in read_like(args.texts, None, {}).documents())
    found = [*islice(beginnings(texts, load(args.model, device="cpu").tokenizer, args.length), args.num)]
    if len(found) < args.num:
        raise SystemExit(f"{args.texts} holds {len(found)} texts of {args.length} tokens, not {args.num}")
    atomic_text(args.out, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
