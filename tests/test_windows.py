"""Shifted windows: in each epoch every token of the stream once, cut at another place, the same however it is read."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiny import MakeConfig
from unmask.config import RECIPE_FILE, DataConfig, RunConfig, load_config, to_dict
from unmask.corpora.text import Text
from unmask.data.loader import Loader, window_shifts
from unmask.data.packing import Rows, build_rows, pack_texts
from unmask.data.rows import FILES, Report, dtypes
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import ConfigError, UsageError
from unmask.training.checkpoint.files import load_checkpoint
from unmask.training.loop import train

Ints = NDArray[np.int64]


def counted(num_tokens: int, length: int) -> Rows:
    """Rows of a stream in which every token is another: 0, 1, 2, ..."""
    ends = np.minimum(np.arange(length, num_tokens + length, length), num_tokens)
    none = np.zeros(len(ends), dtype=np.int64)
    parts = dict(zip(FILES, (np.arange(num_tokens), ends, none, none), strict=True))
    stored = {name: part.astype(dtypes(num_tokens + 1)[name]) for name, part in parts.items()}
    report = Report(policy="wrap", length=length, rows=len(ends), tokens=num_tokens)
    return Rows(stored, report, num_tokens, num_tokens + 1)


def epochs_of(loader: Loader, num: int) -> list[list[tuple[int, list[int]]]]:
    """The index and the tokens of each row, epoch by epoch; batches may reach over the end of one."""
    steps = -(-num * len(loader.rows) // loader.batch)
    taken = [loader.fetch(step) for step in range(steps)]
    rows = [
        (index, x[:n].tolist())
        for rows in taken
        for index, x, n in zip(rows.indices.tolist(), rows.x, rows.valid_len.tolist(), strict=True)
    ]
    return [rows[e * len(loader.rows) : (e + 1) * len(loader.rows)] for e in range(num)]


@settings(deadline=None, max_examples=30)
@given(
    num_tokens=st.integers(1, 90), length=st.integers(2, 12), batch=st.integers(1, 9), seed=st.integers(-(2**70), 2**70)
)
def test_every_token_is_in_one_row_of_each_epoch(num_tokens: int, length: int, batch: int, seed: int) -> None:
    loader = Loader(counted(num_tokens, length), batch, seed, "shifted")
    for epoch, rows in enumerate(epochs_of(loader, 4)):
        assert sorted(token for _, tokens in rows for token in tokens) == list(range(num_tokens))
        shift = int(window_shifts(np.array([epoch]), length, seed)[0])
        for index, tokens in rows:  # row i is stream[o + iL : o + (i + 1)L], what lies before o after the stream's end
            places = range(shift + index * length, shift + min((index + 1) * length, num_tokens))
            assert tokens == [place % num_tokens for place in places]


@settings(deadline=None, max_examples=20)
@given(num_tokens=st.integers(1, 90), length=st.integers(2, 12), batch=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_order_of_rows_and_their_lengths_are_those_of_fixed_windows(
    num_tokens: int, length: int, batch: int, seed: int
) -> None:
    rows = counted(num_tokens, length)
    fixed, shifted = Loader(rows, batch, seed), Loader(rows, batch, seed, "shifted")
    for step in range(2 * len(rows) // batch + 1):
        one, other = fixed.fetch(step), shifted.fetch(step)
        assert one.indices.tolist() == other.indices.tolist() == shifted.indices(step).tolist()
        assert one.valid_len.tolist() == other.valid_len.tolist()  # so that Rows.counts holds for both
        assert one.prefix_len.tolist() == other.prefix_len.tolist()
    assert epochs_of(fixed, 1) == epochs_of(shifted, 1)  # the first epoch is the rows as they are stored


@pytest.mark.parametrize("length", [2, 3, 16, 37])
def test_epochs_are_cut_at_different_places(length: int) -> None:
    """All places in as many epochs as there are, in another order by another seed and in the next so many epochs."""
    orders = set()
    for seed in range(20):
        shifts = window_shifts(np.arange(2 * length), length, seed)
        assert shifts[0] == 0
        assert sorted(shifts[:length].tolist()) == sorted(shifts[length:].tolist()) == list(range(length))
        orders |= {tuple(shifts[:length].tolist()), tuple(shifts[length:].tolist())}
    assert len(orders) > {2: 1, 3: 3}.get(length, 39)


def test_shifts_are_uniform_and_not_those_of_the_rows() -> None:
    second = [int(window_shifts(np.array([1]), 8, seed)[0]) for seed in range(4000)]
    counts = np.bincount(second, minlength=8)
    assert counts[0] == 0  # the first epoch's
    assert (abs(counts[1:] - 4000 / 7) < 5 * (4000 / 7) ** 0.5).all()


def test_shifts_are_pinned() -> None:
    """Resuming a run with a later version must go on with the same rows."""
    assert window_shifts(np.arange(6), 512, 42).tolist() == [0, 433, 183, 408, 53, 453]


def test_slices_are_the_global_batch() -> None:
    """Of any number of processes, at a step whose batch lies in three epochs."""
    loader = Loader(counted(47, 8), 12, 3, "shifted")
    whole = loader.fetch(1)
    for world in (1, 2, 3, 4):
        share = 12 // world
        parts = [loader.fetch(1, rank * share, (rank + 1) * share).x for rank in range(world)]
        assert np.concatenate(parts).tolist() == whole.x.tolist()
    small = Loader(loader.rows, 4, 3, "shifted")
    assert np.concatenate([small.fetch(step).x for step in (3, 4, 5)]).tolist() == whole.x.tolist()


def test_a_part_of_the_rows_reads_nothing_of_the_others() -> None:
    """Where the last rows are held out, training never sees them: the end of its part is joined to its beginning."""
    rows = counted(95, 10)
    for lo, hi in ((0, 7), (3, 7), (3, 10)):
        loader = Loader(rows.between(lo, hi), 4, 5, "shifted")
        for taken in epochs_of(loader, 12):
            assert sorted(token for _, tokens in taken for token in tokens) == list(range(lo * 10, min(hi * 10, 95)))


def test_a_memory_map_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words of a long text\n" * 100_000, encoding="utf-8")
    corpus = Text(path=str(tmp_path / "text.txt"))
    rows = build_rows(corpus, load_tokenizer("bytes"), length=64, cache_dir=tmp_path / "cache")
    size = rows.report.tokens * 2  # bytes on disk
    loader = Loader(rows, 8, 0, "shifted")
    tracemalloc.start()
    try:
        for step in range(0, 3 * len(rows) // 8, 997):
            loader.fetch(step)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 5_000_000
    assert most < size / 50


# --- in a run ---------------------------------------------------------------------------------------------------------


def final(config: RunConfig) -> dict[str, Any]:
    checkpoint = load_checkpoint(Path(config.out))
    assert checkpoint is not None
    return {f"{group}/{k}": t.tolist() for group, tensors in checkpoint.tensors.items() for k, t in tensors.items()}


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path: Path, make_config: MakeConfig) -> None:
    """Over several epochs; only the first of them is that of fixed windows."""
    shifted: dict[str, Any] = {"data": {"windows": "shifted", "train": Text(path=str(tmp_path / "text.txt"))}}
    (tmp_path / "text.txt").write_text("the cat sat on the mat, " * 40, encoding="utf-8")
    config = make_config(tmp_path / "whole", steps=14, **shifted)
    train(config, device="cpu")
    broken = make_config(tmp_path / "broken", steps=6, **shifted)
    train(broken, device="cpu")
    train(dataclasses.replace(broken, steps=14), resume=True, device="cpu")
    assert final(broken) == final(config)
    plain = make_config(tmp_path / "fixed", steps=14, data=shifted["data"] | {"windows": "fixed"})
    train(plain, device="cpu")
    assert final(plain) != final(config)
    steps = [json.loads((Path(c.out) / "metrics.jsonl").read_text().splitlines()[1])["loss"] for c in (config, plain)]
    assert steps[0] == steps[1]
    with pytest.raises(ConfigError, match=r"^data\.windows is 'fixed', the run in .* has 'shifted'; it cannot change$"):
        train(dataclasses.replace(plain, out=config.out, steps=16), resume=True, device="cpu")


@pytest.mark.parametrize("packing", ["pad", "sentence"])
def test_other_packings_have_no_windows(packing: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^only rows of the packing wrap are shifted, .*: set data\.windows = fixed$"
    ):
        RunConfig(data=DataConfig(packing=packing, windows="shifted"))
    rows = pack_texts(["one text", "another"], load_tokenizer("bytes"), packing, 16)
    with pytest.raises(UsageError, match=f"packing '{packing}' hold whole texts"):
        Loader(rows, 2, 0, "shifted").fetch(0)


def test_what_an_older_run_wrote_has_fixed_windows(tmp_path: Path) -> None:
    written = to_dict(RunConfig())
    del written["data"]["windows"]
    (tmp_path / RECIPE_FILE).write_text(json.dumps(written), encoding="utf-8")
    assert load_config(tmp_path).data.windows == "fixed"
