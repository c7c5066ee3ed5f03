"""Texts become one chain of tokens, each text with end-of-text after it: what the packing `wrap` cuts into rows."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from unmask.corpora.reading import read_like
from unmask.data.splitting import merged_from
from unmask.data.tokenizers import Tokenizer, load_tokenizer
from unmask.errors import UsageError
from ways.command import run_command
from ways.data import Ids, Tokens


def chain(path: str, tokenizer: Tokenizer) -> Ids:
    """All documents of a file, as 16-bit ids."""

    def pieces() -> Iterator[Ids]:
        texts = (document.text for document in read_like(path).documents())
        while some := list(islice(texts, 64)):
            for ids in tokenizer.encode_batch(some):
                if ids:
                    yield np.array([*ids, tokenizer.eot_id], dtype=np.uint16)

    return np.concatenate(list(pieces()))


def prepare(train: str, valid: str, tokenizer: str, out: Path, *, most: int | None = None) -> None:
    """most: so many tokens of the text to learn from, the first ones."""
    made = load_tokenizer(tokenizer, read_like(train))
    parts_I2 = None
    with suppress(UsageError):  # no BPE
        parts_I2 = merged_from(made)
    Tokens(chain(train, made)[:most], chain(valid, made), made.num_ids, made.mask_id, parts_I2).save(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("train", "valid"):
        parser.add_argument(f"--{name}", required=True, help="a file or folder as `unmask eval --data` takes it")
    parser.add_argument("--tokenizer", default="bytes", help="as in recipes; bpe:SIZE is trained on the first text")
    parser.add_argument("--most", type=int, help="tokens to learn from; default: all")
    parser.add_argument("--out", type=Path, required=True, help="tokens.npz.xz, say")
    args = parser.parse_args()
    prepare(args.train, args.valid, args.tokenizer, args.out, most=args.most)
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    run_command(main)
