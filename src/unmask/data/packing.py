"""Documents → rows of a fixed length, cached on disk as a memory map.

Four policies: `wrap` concatenates all documents, each followed by end-of-text, and cuts the stream into rows. `pad`
gives each document a row of its own length. `fill` fills up that row with end-of-text, which is noised and scored, so
that a model learns where a text ends. `sentence` makes each line a row. Text that does not fit in a row is cut and
counted, or continues in further rows (`go_on`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import numpy as np

from unmask.corpora import Corpus, Document
from unmask.corpora.tokens import Tokens
from unmask.data.ahead import Ahead
from unmask.data.cache import cached, default_cache_dir
from unmask.data.packer import Packer, anchor_ids, batches
from unmask.data.rows import FILES, LABELS, Anchor, Policy, Report, Rows, dtypes
from unmask.data.shards import shard_rows
from unmask.data.share import Share, content_place
from unmask.data.tokenizers import Tokenizer
from unmask.errors import DataError, UsageError

if TYPE_CHECKING:
    from unmask.config import DataConfig

__all__ = ["Anchor", "Policy", "Report", "Rows", "anchor_ids", "build_rows", "pack_texts", "rows_of"]

Part = Literal["all", "train", "valid"]
Progress = Callable[[int], None]
FORMAT = 1  # version of the cache; incrementing it invalidates old caches
_AHEAD = 2  # batches to read and tokenize in advance


def pack_texts(
    texts: Iterable[str | Document],
    tokenizer: Tokenizer,
    policy: Policy = "wrap",
    length: int = 256,
    anchor: Anchor = "none",
    *,
    go_on: bool = False,
) -> Rows:
    """Pack texts into rows in memory. go_on: a text that is too long for a row continues in further ones, uncut.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> rows = pack_texts(["abc"], load_tokenizer("bytes"), "pad", 6).take(np.array([0]))
    >>> rows.x.tolist(), rows.valid_len.tolist()
    ([[97, 98, 99, 256, 256, 256]], [4])
    """
    files = {name: io.BytesIO() for name in (*FILES, LABELS)}
    packer = Packer(tokenizer, policy, length, anchor, cast(dict[str, BinaryIO], files), go_on)
    for batch in batches(Document(text) if isinstance(text, str) else text for text in texts):
        packer.pack(packer.tokenize(batch))
    report = packer.finish()
    if not packer.labelled:
        del files[LABELS]
    if not report.rows:
        raise DataError(f"there is no text to pack ({report.sentence()}); give at least one text that is not empty")
    kinds = dtypes(tokenizer.num_ids)
    parts = {name: np.frombuffer(file.getbuffer(), dtype=kinds[name]) for name, file in files.items()}
    words = list(packer.words.numbers)
    return Rows(parts, report, tokenizer.eot_id, tokenizer.num_ids, words, tokenizer.fixed_ids)


def rows_of(
    data: DataConfig,
    tokenizer: Tokenizer,
    part: Literal["train", "valid"],
    *,
    anchor: Anchor = "none",
    progress: Progress | None = None,
) -> Rows:
    """The rows that a run trains or validates on; anchor: that of the run, `RunConfig.anchor`.

    >>> rows_of(load_config("demo").data, load_tokenizer("bytes"), "valid")  # doctest: +SKIP
    """
    cache = None if data.cache is None else Path(data.cache)
    options: dict[str, Any] = {"policy": data.packing, "length": data.length, "anchor": anchor}
    options |= {"cache_dir": cache, "progress": progress}
    train = data.train
    if data.share < 1 and train.tokenized:
        raise UsageError("data.share chooses texts, and these are token ids: leave it out, or train on the texts")
    if data.share < 1 and part == "train":
        train = Share(train, data.share, data.held_out if data.valid is None else 0.0)
    if data.valid is not None:
        for held_out in data.valid.parts:
            data.train.check_beside(held_out)
        return build_rows(train if part == "train" else data.valid, tokenizer, **options)
    return build_rows(train, tokenizer, part=part, held_out=data.held_out, **options)


def build_rows(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    policy: Policy = "wrap",
    length: int = 256,
    anchor: Anchor = "none",
    cache_dir: Path | None = None,
    part: Part = "all",
    held_out: float = 0.02,
    progress: Progress | None = None,
) -> Rows:
    """The corpus's rows, from the cache if they are there. cache_dir None: the user's cache folder.

    `part`: documents are held out by a hash of their content, independent of their order. If that leaves a part without
    documents (a single file, a few long texts), the last `held_out` of the rows are held out instead, and the report
    says so. `progress` is called with the number of characters read since the last call.

    >>> rows = build_rows(Stdlib(), load_tokenizer("bytes"), length=256, part="valid")  # doctest: +SKIP
    >>> print(rows.report.sentence())  # doctest: +SKIP
    """
    if corpus.tokenized:
        return shard_rows(cast(Tokens, corpus), tokenizer, part, policy=policy, length=length)
    if part != "all" and not 0 < held_out < 1:
        raise UsageError(f"held_out must lie between 0 and 1, got {held_out}")
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    source = [FORMAT, corpus.fingerprint(), tokenizer.fingerprint(), policy, length]
    source += [] if anchor == "none" else [anchor]

    def get(part: Part) -> tuple[Path, dict[str, Any]]:
        share = None if part == "all" else (part, held_out)
        key = hashlib.sha256(json.dumps([*source, share]).encode()).hexdigest()[:40]
        build = partial(_pack_corpus, corpus, tokenizer, policy, length, anchor, share, progress)
        return folder / key, cached(folder, key, build)

    path, manifest = get(part)
    if not manifest["split_rows"]:
        return _open(path, manifest, tokenizer)
    whole = _open(*get("all"), tokenizer)
    num = len(whole)
    if num < 2:
        raise DataError(f"the corpus fills one row of {length}: too little to hold a part out; name a corpus for valid")
    cut = num - min(num - 1, max(1, round(num * held_out)))
    return whole.between(*((0, cut) if part == "train" else (cut, num)), split_rows=True)


def _open(path: Path, manifest: dict[str, Any], tokenizer: Tokenizer) -> Rows:
    try:
        report = Report(**manifest["report"])
        kinds = dtypes(tokenizer.num_ids)
        names = [*FILES, LABELS] if LABELS in manifest["files"] else FILES
        parts = {name: np.memmap(path / name, dtype=kinds[name], mode="r") for name in names}
        words = [str(word) for word in manifest.get("words", ())]
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise DataError(f"the token cache {path} cannot be opened: {e}; delete it, it is built again") from None
    rows = Rows(parts, report, tokenizer.eot_id, tokenizer.num_ids, words, tokenizer.fixed_ids)
    rows.key = path.name
    return rows


def _pack_corpus(
    corpus: Corpus,
    tokenizer: Tokenizer,
    policy: Policy,
    length: int,
    anchor: Anchor,
    share: tuple[str, float] | None,
    progress: Progress | None,
    work: Path,
) -> dict[str, Any]:
    """Write the rows of the corpus's part into `work`; returns the cache's manifest."""
    sides = [0, 0]  # number of documents with text: trained on, held out

    def chosen() -> Iterator[Document]:
        for document in _read(corpus):
            valid = share is not None and content_place(document) < share[1]
            sides[valid] += bool(document.text.strip())
            packer.words.number(document.label)  # number the words of both parts, which have the same classes
            if share is None or valid == (share[0] == "valid"):
                yield document
            if progress is not None:
                progress(len(document.text) + len(document.prompt))

    with ExitStack() as stack:
        files = {name: stack.enter_context((work / name).open("wb")) for name in (*FILES, LABELS)}
        packer = Packer(tokenizer, policy, length, anchor, cast(dict[str, BinaryIO], files))
        # One thread reads, another tokenizes, this one writes rows.
        read = stack.enter_context(Ahead(batches(chosen()), depth=_AHEAD, name="reader"))
        for batch in stack.enter_context(Ahead(map(packer.tokenize, read), depth=_AHEAD, name="tokenizer")):
            packer.pack(batch)
        report = packer.finish()
    if not packer.labelled:
        (work / LABELS).unlink()
    if not any(sides):
        raise DataError("the corpus is empty: it has no document with text in it")
    split_rows = share is not None and not all(sides)
    if split_rows:  # the rows are in the cache of the whole; this entry only records that
        for path in list(work.iterdir()):
            path.unlink()
    elif not report.rows:
        raise DataError(
            f"no rows for the part {share[0] if share else 'all'}: {report.sentence()}; change length or corpus"
        )
    manifest = {"format": FORMAT, "split_rows": split_rows, "report": dataclasses.asdict(report)}
    return manifest | ({"words": list(packer.words.numbers)} if packer.words.numbers else {})


def _read(corpus: Corpus) -> Iterator[Document]:
    try:
        yield from corpus.documents()
    except OSError as e:  # a third-party corpus; caught here, so that it is not reported as a cache error
        raise DataError(f"cannot read the corpus: {e.strerror or e}") from None
