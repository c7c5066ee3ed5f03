"""Tokenize a corpus into shards that training reads as a stream.

IN is a text, JSONL, CSV, TSV or Parquet file, a folder of them, a pattern such as 'shards/*.jsonl.zst', or a URL that
fsspec supports; also .gz .xz .bz2 .zst. OUT gets the tokenizer and train-00000.parquet and so on, with one document per
row. After a stop or kill the same command resumes; the shards are the same for any --nproc.

Examples:
  unmask tokenize texts/ tokens/ --tokenizer bpe:16384 --held-out 0.01 --nproc 8
  unmask train --data.train tokens --data.train.path tokens/ --tokenizer tokens/
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unmask.data.tokenizers import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", metavar="IN", help="a file, folder, pattern or URL of texts")
    parser.add_argument("out", metavar="OUT", help="the shards' folder, new or to be resumed")
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="T",
        help="as in a recipe: bytes, bpe:SIZE (trained on IN), a file, a folder, a name on the hub",
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="tokenize with N processes (default 1)")
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the documents, chosen by a hash of their content, that goes to valid-*.parquet (default 0)",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=1 << 24,
        metavar="N",
        help="approximate tokens per shard (default 16,777,216)",
    )
    parser.add_argument(
        "--field", metavar="NAME", help="JSONL, CSV, Parquet: column or key of the text (default: text)"
    )
    parser.add_argument("--separator", metavar="TEXT", help="text files: separator between documents")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    import dataclasses
    import json
    import time

    from unmask.corpora.reading import read_like
    from unmask.data.reading_bar import reading_bar
    from unmask.data.tokenizers import load_tokenizer
    from unmask.data.tokenizing import tokenize
    from unmask.distributed.world import World
    from unmask.errors import Stopped, UsageError
    from unmask.training.run_lock import one_writer

    out = Path(args.out).expanduser()
    options = {name: value for name in ("field", "separator") if (value := getattr(args, name)) is not None}
    corpus = read_like(args.corpus, None, options)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: give a folder")
    tokenizer = _trained_before(out, args.tokenizer) or load_tokenizer(args.tokenizer, corpus)
    began = time.monotonic()
    try:
        with one_writer(out, World()), reading_bar("tokenizing") as tell:
            totals = tokenize(
                corpus,
                tokenizer,
                out,
                processes=args.nproc,
                held_out=args.held_out,
                shard_tokens=args.shard_tokens,
                tell=tell,
            )
    except KeyboardInterrupt:
        raise Stopped(f"stopped; the same command goes on in {args.out}") from None
    seconds = time.monotonic() - began
    if args.json:
        print(json.dumps(dataclasses.asdict(totals) | {"out": args.out, "seconds": seconds}))
    else:
        before = f" ({totals.before} of them before)" if totals.before else ""
        print(
            f"{totals.documents:,} documents, {totals.tokens:,} tokens, {totals.bytes:,} bytes in "
            f"{totals.shards} shards{before}: {args.out}"
        )
        if args.held_out and not any(out.glob("valid-*.parquet")):
            print("no document is held out: there are too few, so name a corpus of its own for data.valid")
    return 0


def _trained_before(out: Path, spec: str) -> Tokenizer | None:
    """The tokenizer of shards that are there, if it was trained as this one is to be."""
    from unmask.data.tokenizers import load_tokenizer

    if not spec.startswith("bpe") or not any(out.glob("*.parquet")):
        return None
    found = load_tokenizer(str(out / "tokenizer.json"))
    return found if spec == f"bpe:{found.num_ids - 1}" else None  # the mask is one more
