"""Tokens read as the two that they were merged from: the text stays, the tokens do not, and no row grows."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from unmask.config import DataConfig, load_config
from unmask.corpora.memory import Memory
from unmask.corpora.text import Text
from unmask.data.augment import augmentation
from unmask.data.loader import Loader
from unmask.data.packing import pack_texts
from unmask.data.rows import RowBatch
from unmask.data.splitting import SplitTokens, merged_from
from unmask.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_json
from unmask.errors import UsageError
from unmask.training.callbacks import Callback
from unmask.training.loop import train

TEXTS = tuple(f"the {a} runs over the {b} and the {c}" for a in ("dog", "cat") for b in ("hill", "sea") for c in "xyz")


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return load_tokenizer("bpe:320", Memory(texts=TEXTS))


def test_a_token_spells_what_its_parts_spell(bpe: Tokenizer) -> None:
    parts_I2 = merged_from(bpe)
    words = bpe.spellings()[1]
    merged = np.flatnonzero(parts_I2[:, 0] >= 0)
    assert len(merged) == bpe.num_ids - 2 - 256  # all but end of text, mask and bytes
    for id in merged:
        left, right = (words[part] for part in parts_I2[id])
        assert left is not None
        assert right is not None
        assert words[id] == left + right


def test_rows_keep_their_text_and_their_number_of_tokens(bpe: Tokenizer) -> None:
    rows = pack_texts(TEXTS, bpe, "wrap", 16)
    plain, split = (Loader(rows, 8, 3, augment=augmentation(DataConfig(split_tokens=p), bpe, 3)) for p in (0.0, 0.4))
    seen = set()
    for step in range(6):
        ours, theirs = split.fetch(step), plain.fetch(step)
        assert np.array_equal(ours.valid_len, theirs.valid_len)
        for mine, other, index in zip(ours.x, theirs.x, ours.indices, strict=True):
            n = ours.valid_len[ours.indices == index][0]
            assert bpe.decode(other[:n]).startswith(bpe.decode(mine[:n]))
            assert (mine[n:] == other[n:]).all()
            seen.add((int(index), tuple(mine)))
    assert len(seen) > 2 * len(rows)  # other tokens in each epoch
    assert np.array_equal(split.fetch(2).x[3:5], split.fetch(2, 3, 5).x)  # of the row alone, whoever reads it
    assert not np.array_equal(split.fetch(2).x, plain.fetch(2).x)


def test_each_token_is_split_as_often_as_said(bpe: Tokenizer) -> None:
    """Rows of one token that can be split: split, its first part comes first. Chi-square over epochs and rows."""
    parts_I2 = merged_from(bpe)
    token = int(np.flatnonzero(parts_I2[:, 0] >= 0)[0])
    n = 20_000
    x = np.full((n, 2), token)
    batch = RowBatch(np.arange(n), x, np.full(n, 2), np.zeros(n, dtype=np.int64))
    share = 0.3
    split = SplitTokens(parts_I2, share, seed=5)(batch, np.full(n, 4)).x
    first, second = split[:, 0] == parts_I2[token, 0], split[:, 1] == parts_I2[token, 0]
    counts = [first.sum(), (~first & second).sum(), (~first & ~second).sum()]
    expected = [n * share, n * (1 - share) * share, n * (1 - share) ** 2]
    chi_square = sum((a - b) ** 2 / b for a, b in zip(counts, expected, strict=True))
    assert chi_square < 13.8  # one in a thousand, of two degrees of freedom
    assert np.array_equal(split[first][:, 1], np.full(first.sum(), parts_I2[token, 1]))


def test_what_frames_a_row_stays(bpe: Tokenizer) -> None:
    parts_I2 = merged_from(bpe)
    token = int(np.flatnonzero(parts_I2[:, 0] >= 0)[0])
    x = np.full((1, 6), token)
    batch = RowBatch(np.zeros(1, dtype=np.int64), x, np.array([5]), np.array([1]), suffix=1)
    split = SplitTokens(parts_I2, 1.0, seed=0)(batch, np.zeros(1, dtype=np.int64)).x[0]
    a, b = parts_I2[token]
    assert split.tolist() == [token, a, b, a, token, token]
    assert (x == token).all()  # what was handed in is not changed


def test_a_run_reads_parts_and_is_measured_on_whole_tokens(tmp_path: Path, bpe: Tokenizer) -> None:
    class Told(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.bounds: list[float] = []

        def on_step(self, report: Any) -> None:
            self.losses.append(report.loss)

        def on_valid(self, step: int, bound: Any) -> None:
            self.bounds.append(bound.nats_per_token)

    (tmp_path / "tokenizer.json").write_text(bpe.to_json())
    small = {"denoiser.hidden": "16", "denoiser.blocks": "1", "denoiser.heads": "2", "batch": "4", "steps": "2"}
    small |= {"tokenizer": str(tmp_path / "tokenizer.json"), "data.length": "12", "valid_rows": "2"}
    told = {}
    for share in (0.0, 0.5):
        options = {"out": str(tmp_path / str(share)), "data.split_tokens": str(share), "sample_every": "0"}
        config = load_config("fast", small | options)
        corpus = Memory(texts=TEXTS)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=corpus, valid=corpus))
        train(config, callbacks=[one := Told()], device="cpu")
        told[share] = one
    assert told[0.0].losses[0] != told[0.5].losses[0]
    assert math.isclose(told[0.0].bounds[0], told[0.5].bounds[0])


def test_merges_of_a_vocabulary_that_marks_what_continues_a_word() -> None:
    vocab = {"a": 0, "##b": 1, "ab": 2, "##bb": 3, "abbb": 4, "[MASK]": 5, "<|endoftext|>": 6}
    merges = [("a", "##b"), ("##b", "##b"), ("ab", "##bb")]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges, continuing_subword_prefix="##"))
    parts_I2 = merged_from(tokenizer_from_json(inner.to_str()))
    assert parts_I2[2:5].tolist() == [[0, 1], [1, 1], [2, 3]]


def test_it_is_refused_before_the_texts_are_read(tmp_path: Path, make_config: Any) -> None:
    config = make_config(out=tmp_path / "run", tokenizer="bytes")
    missing = dataclasses.replace(config.data, train=Text(path=str(tmp_path / "none.txt")), split_tokens=0.1)
    with pytest.raises(UsageError, match="has no merges"):
        train(dataclasses.replace(config, data=missing), device="cpu")


def test_what_cannot_be_split_is_refused(bpe: Tokenizer) -> None:
    assert augmentation(DataConfig(), bpe, 0) is None
    with pytest.raises(UsageError, match="has no merges"):
        augmentation(DataConfig(split_tokens=0.1), load_tokenizer("bytes"), 0)
    refused = {"data.packing": "pad", "data.split_tokens": "1.0", "data.augment": "reverse_complement"}
    for key, value in refused.items():
        with pytest.raises(UsageError, match=r"split_tokens|letters"):
            load_config("fast", {"data.split_tokens": "0.1", key: value})
