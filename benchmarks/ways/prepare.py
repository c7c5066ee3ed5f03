"""Texts become one chain of tokens, each text with end-of-text after it: what the packing `wrap` cuts into rows."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from unmask.corpora.reading import read_like
from unmask.data.tokenizers import Tokenizer, load_tokenizer
from ways.data import Ids


def chain(path: str, tokenizer: Tokenizer) -> Ids:
    """All documents of a file, as 16-bit ids."""

    def pieces() -> Iterator[Ids]:
        texts = (document.text for document in read_like(path).documents())
        while some := list(islice(texts, 64)):
            for ids in tokenizer.encode_batch(some):
                yield np.array([*ids, tokenizer.eot_id], dtype=np.uint16)

    return np.concatenate(list(pieces()))


def prepare(train: str, valid: str, tokenizer: str, out: Path) -> None:
    made = load_tokenizer(tokenizer)
    num_ids, mask_id = np.array(made.num_ids), np.array(made.mask_id)
    np.savez_compressed(out, train=chain(train, made), valid=chain(valid, made), num_ids=num_ids, mask_id=mask_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("train", "valid"):
        parser.add_argument(f"--{name}", required=True, help="a file or folder as `unmask eval --data` takes it")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    prepare(args.train, args.valid, args.tokenizer, args.out)
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
