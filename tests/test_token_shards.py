"""Tokens in shards: the same for any number of processes and kills, and rows read from them as from the texts."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrix import environment
from unmask import cli
from unmask.config import DataConfig, load_config
from unmask.corpora.jsonl import Jsonl
from unmask.corpora.memory import Memory
from unmask.corpora.reading import read_like
from unmask.corpora.sources import from_path
from unmask.corpora.text import Text
from unmask.corpora.tokens import Tokens
from unmask.data import tokenizing
from unmask.data.loader import Loader
from unmask.data.order import Blocks
from unmask.data.packing import build_rows, pack_texts, rows_of
from unmask.data.rows import Rows
from unmask.data.tokenizers import load_tokenizer
from unmask.data.tokenizing import tokenize
from unmask.errors import DataError, UsageError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
BYTES = load_tokenizer("bytes")
TEXTS = [f"{'tale ' * (i % 7)}number {i}, whose end is near" for i in range(120)]
CORPUS = Memory(texts=tuple(TEXTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine shards of 120 texts, some of them held out. Shared: do not change it."""
    out = tmp_path_factory.mktemp("tokens") / "out"
    totals = tokenize(CORPUS, BYTES, out, held_out=0.2, shard_tokens=600)
    assert totals.documents == len(TEXTS)
    assert totals.tokens == totals.bytes == sum(map(len, TEXTS))
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")}


def texts_of(rows: Rows) -> list[str]:
    found = rows.take(np.arange(len(rows)))
    chain = np.concatenate([x[:n] for x, n in zip(found.x, found.valid_len, strict=True)])
    parts = np.split(chain, np.nonzero(chain == BYTES.eot_id)[0] + 1)
    return [BYTES.decode(part[:-1]) for part in parts if len(part)]


# --- what is written --------------------------------------------------------------------------------------------------


def test_the_shards_are_the_same_for_any_number_of_processes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "PIECE", 500)
    tokenize(CORPUS, BYTES, tmp_path / "two", held_out=0.2, shard_tokens=600, processes=2)
    assert contents(tmp_path / "two") == contents(folder)
    assert len([name for name in contents(folder) if name.startswith("train-")]) > 4


def test_a_reader_of_others_finds_the_ids_where_they_are_expected(folder: Path) -> None:
    table = pq.read_table(folder / "train-00000.parquet")
    assert table.column_names == ["input_ids", "bytes"]
    text = BYTES.decode(table["input_ids"][0].as_py())
    assert text in TEXTS
    assert table["bytes"][0].as_py() == len(text)


class Killed(Exception):
    pass


@pytest.mark.parametrize("shards", [0, 1, 4])
def test_what_was_stopped_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    written, write = [], tokenizing._write

    def dies(*args: Any) -> None:
        if len(written) == shards:
            raise Killed
        written.append(len(args[2].ids))
        write(*args)

    monkeypatch.setattr(tokenizing, "_write", dies)
    with pytest.raises(Killed):
        tokenize(CORPUS, BYTES, tmp_path / "out", held_out=0.2, shard_tokens=600)
    with pytest.raises(DataError, match="not tokenized to its end"):
        Tokens(path=str(tmp_path / "out")).shards()
    monkeypatch.setattr(tokenizing, "_write", write)
    seen, encode = [], tokenizing._Encoder.__call__

    def counted(self: Any, texts: list[str]) -> Any:
        seen.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(tokenizing._Encoder, "__call__", counted)
    totals = tokenize(CORPUS, BYTES, tmp_path / "out", held_out=0.2, shard_tokens=600)
    assert totals.before == shards
    # What is in a shard is not tokenized again, also where the other part is further behind.
    assert len(seen) == len(TEXTS) - sum(written)
    assert contents(tmp_path / "out") == contents(folder)
    assert tokenize(CORPUS, BYTES, tmp_path / "out", held_out=0.2, shard_tokens=600).before == totals.shards


def test_a_killed_command_goes_on(folder: Path, tmp_path: Path) -> None:
    """SIGKILL while it works; the same command ends with the files of one that was not killed."""
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXTS * 60), encoding="utf-8")
    out = tmp_path / "out"
    words = ["tokenize", str(lines), str(out), "--tokenizer", "bytes", "--separator", "\n", "--shard-tokens", "9000"]
    begun = subprocess.Popen([sys.executable, "-m", "unmask", *words, "--nproc", "2"], env=environment())
    deadline = time.monotonic() + 60
    while not (out / "train-00003.parquet").exists() and begun.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(begun.pid, signal.SIGKILL)
    begun.wait()
    assert not (out / "tokens.json").exists()
    assert cli.run(words) == 0
    assert cli.run([*words[:2], str(tmp_path / "whole"), *words[3:]]) == 0
    assert contents(out) == contents(tmp_path / "whole")


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_hold_what_the_texts_hold(folder: Path) -> None:
    rows = build_rows(Tokens(path=str(folder)), BYTES, length=32, part="train")
    from_texts = build_rows(CORPUS, BYTES, length=32, part="train", held_out=0.2)
    assert texts_of(rows) == texts_of(from_texts)
    assert (rows.report.documents, rows.report.tokens, rows.report.bytes) == (
        from_texts.report.documents,
        from_texts.report.tokens,
        from_texts.report.bytes,
    )
    valid = build_rows(Tokens(path=str(folder)), BYTES, length=32, part="valid")
    assert texts_of(valid) == texts_of(build_rows(CORPUS, BYTES, length=32, part="valid", held_out=0.2))
    everything = build_rows(Tokens(path=str(folder)), BYTES, length=32)
    assert sorted(texts_of(everything)) == sorted(TEXTS)
    counts = build_rows(CORPUS, BYTES, length=32).token_counts()
    assert everything.token_counts().tolist() == counts.tolist()
    indices = np.array([5, 0, len(rows) - 1])
    assert rows.bytes_of(indices).tolist() == [
        int((x[:n] != BYTES.eot_id).sum())
        for x, n in zip(rows.take(indices).x, rows.take(indices).valid_len, strict=True)
    ]
    assert rows.counts(indices) == (int(rows.take(indices).valid_len.sum()),) * 2


def test_bytes_are_those_of_the_text_alone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bpe:270", CORPUS)
    tokenize(CORPUS, tokenizer, tmp_path / "out", shard_tokens=600)
    rows = build_rows(Tokens(path=str(tmp_path / "out")), tokenizer, length=32)
    assert rows.bytes_of(np.arange(len(rows))).sum() == rows.report.bytes == sum(map(len, TEXTS))


def test_each_shard_is_packed_by_itself(folder: Path) -> None:
    corpus = Tokens(path=str(folder))
    rows = build_rows(corpus, BYTES, length=32, part="train")
    first = 0
    for shard in corpus.shards("train"):
        ids = corpus.read(shard, BYTES.eot_id)
        texts = [BYTES.decode(part) for part in np.split(ids, np.nonzero(ids == BYTES.eot_id)[0] + 1)]
        alone = pack_texts([text.removesuffix("<|endoftext|>") for text in texts if text], BYTES, "wrap", 32)
        took = rows.take(np.arange(first, first + len(alone)))
        assert np.array_equal(took.x, alone.take(np.arange(len(alone))).x)
        assert np.array_equal(took.valid_len, alone.take(np.arange(len(alone))).valid_len)
        first += len(alone)
    assert first == len(rows)


def test_others_shards_are_counted_and_may_end_their_documents(tmp_path: Path) -> None:
    ids = [[1, 2, 3], [], [4, 5]]
    for name, values in (("plain", ids), ("ended", [[*one, 256] for one in ids])):
        pq.write_table(pa.table({"tokens": pa.array(values, type=pa.list_(pa.int64()))}), tmp_path / f"{name}.parquet")
    plain = build_rows(Tokens(path=str(tmp_path / "plain.parquet"), field="tokens"), BYTES, length=3)
    ended = build_rows(Tokens(path=str(tmp_path / "ended.parquet"), field="tokens", ended=True), BYTES, length=3)
    for rows in (plain, ended):
        assert rows.take(np.arange(len(rows))).x.tolist() == [[1, 2, 3], [256, 256, 4], [5, 256, 256]]
    assert (
        rows_of(
            DataConfig(train=CORPUS, valid=Tokens(path=str(tmp_path / "plain.parquet"), field="tokens")), BYTES, "valid"
        ).report.tokens
        == 8
    )


# --- the order --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    rows=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    buffer=st.integers(1, 5),
    batch=st.integers(1, 40),
    seed=st.integers(0, 2**40),
)
def test_every_epoch_is_a_permutation_that_needs_few_shards(
    rows: list[int], buffer: int, batch: int, seed: int
) -> None:
    class Numbered:
        length = 3
        blocks = Blocks(np.array(rows), buffer)

        def __len__(self) -> int:
            return sum(rows)

        def take(self, indices: Any, shift: Any = None) -> Any:
            raise AssertionError

    loader, num = Loader(Numbered(), batch, seed), sum(rows)
    order = np.concatenate([loader.indices(step) for step in range(-(-2 * num // batch))])[: 2 * num].reshape(2, num)
    assert [sorted(epoch.tolist()) for epoch in order] == [list(range(num))] * 2
    shard_of = np.repeat(np.arange(len(rows)), rows)
    for epoch in order:  # as many shards as the buffer holds are read to their end before another is begun
        runs = [shard for i, shard in enumerate(shard_of[epoch]) if shard not in shard_of[epoch][:i]]
        for first in range(0, len(runs), buffer):
            group = runs[first : first + buffer]
            place = np.nonzero(np.isin(shard_of[epoch], group))[0]
            assert place[-1] - place[0] + 1 == len(place)
    again = Loader(Numbered(), batch, seed)
    step = 2 * num // batch // 2
    assert np.array_equal(again.indices(step), loader.indices(step))  # nothing is remembered


def test_neighbours_in_a_shard_are_sent_apart() -> None:
    blocks = Blocks(np.full(8, 2000), 4)
    order = blocks.order(np.arange(16_000), seed=3, epoch=1)
    assert abs(np.corrcoef(order[:7999], order[1:8000])[0, 1]) < 0.05
    assert not np.array_equal(order, blocks.order(np.arange(16_000), seed=3, epoch=2))


def test_memory_holds_no_more_than_twice_the_buffer(folder: Path) -> None:
    rows = build_rows(Tokens(path=str(folder), buffer=2), BYTES, length=16, part="train")
    loader, tokens = Loader(rows, 8, 0), rows._tokens
    reads: list[int] = []
    read = tokens._read
    tokens._read = lambda number: reads.append(number) or read(number)
    steps = len(rows) // 8
    for step in range(steps):
        loader.fetch(step)
        assert len(tokens.kept) <= 4
    assert len(reads) == len(tokens.shards)  # each once in an epoch


# --- use --------------------------------------------------------------------------------------------------------------


def recipe(folder: Path, out: Path, **more: str) -> Any:
    small = {"denoiser.hidden": "16", "denoiser.blocks": "1", "denoiser.heads": "2", "batch": "4", "valid_rows": "4"}
    data = {"data.train": "tokens", "data.train.path": str(folder), "data.length": "16", "tokenizer": str(folder)}
    options = {"out": str(out), "steps": "6", "valid_every": "3", "save_every": "1", "sample_every": "0"}
    return load_config("fast", small | data | options | more)


def test_a_run_learns_from_shards_and_goes_on_in_the_middle_of_an_epoch(folder: Path, tmp_path: Path) -> None:
    from unmask.training.callbacks import Callback
    from unmask.training.loop import train

    class Losses(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_step(self, report: Any) -> None:
            self.losses.append(report.loss)

    whole, first, second = Losses(), Losses(), Losses()
    constant = {"optim.schedule": "constant", "optim.warmup": "1", "objective.until": "0.01"}
    train(recipe(folder, tmp_path / "b", **constant), callbacks=[whole], device="cpu")
    part = recipe(folder, tmp_path / "c", **constant)
    train(dataclasses.replace(part, steps=3), callbacks=[first], device="cpu")
    train(part, callbacks=[second], resume=True, device="cpu")
    assert len(whole.losses) == 6
    assert first.losses + second.losses == whole.losses


def test_eval_reads_shards(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from unmask.training.loop import train

    train(recipe(folder, tmp_path / "run"), device="cpu")
    assert cli.run(["eval", str(tmp_path / "run"), "--data", str(folder), "--max-rows", "8", "--json"]) == 0
    assert 100 < json.loads(capsys.readouterr().out)["tokens"] <= 8 * 16  # a shard may end in a short row
    assert isinstance(from_path(str(folder)), Tokens)


@pytest.mark.parametrize("more", [[], ["--suite", "infilling"]])
def test_eval_takes_patterns_and_urls(
    more: list[str], folder: Path, tmp_path: Path, memory: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from unmask.training.loop import train

    train(recipe(folder, tmp_path / "run"), device="cpu")
    for name in ("a1", "a2", "b1"):
        (tmp_path / f"{name}.txt").write_text(f"a text of {name} with some words in it")
        memory.pipe(f"/texts/{name}.txt", f"a text of {name} with some words in it".encode())
    said = []
    for data in (f"{tmp_path}/a*.txt", "memory://texts/a*.txt"):
        assert cli.run(["eval", str(tmp_path / "run"), "--data", data, "--max-rows", "2", "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        said.append([one["scores"] for one in found["sets"].values()] if more else found["nats_per_token"])
    assert said[0] == said[1]
    assert cli.run(["eval", str(tmp_path / "run"), "--data", f"{tmp_path}/c*.txt", *more]) == 1
    assert "no file is like" in capsys.readouterr().err


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Any]:
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def test_shards_behind_a_url_are_read_as_those_here(folder: Path, memory: Any) -> None:
    for name, content in contents(folder).items():
        memory.pipe(f"/tokens/{name}", content)
    remote = Tokens(path="memory://tokens/*.parquet")
    assert texts_of(build_rows(remote, BYTES, length=32, part="train")) == texts_of(
        build_rows(Tokens(path=str(folder)), BYTES, length=32, part="train")
    )
    assert remote.absolute() == remote
    before = remote.fingerprint()
    memory.pipe("/tokens/valid-00000.parquet", contents(folder)["train-00000.parquet"])
    assert remote.fingerprint() != before


def test_texts_by_pattern_and_url(tmp_path: Path, memory: Any) -> None:
    import gzip

    for name in ("a1.txt", "a2.txt", "b1.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    pattern = str(tmp_path / "a*.txt")
    assert [document.text for document in Text(path=pattern).documents()] == ["text of a1.txt", "text of a2.txt"]
    memory.pipe({"/t/x.txt.gz": gzip.compress(b"packed"), "/t/y.txt": b"plain"})
    assert [document.text for document in from_path("memory://t").documents()] == ["packed", "plain"]
    table = pa.table({"text": ["one", "two"]})
    with memory.open("/p/0.parquet", "wb") as file:
        pq.write_table(table, file)
    assert [document.text for document in from_path("memory://p/*.parquet").documents()] == ["one", "two"]
    with pytest.raises(DataError, match="no such file or folder: memory://nowhere"):
        from_path("memory://nowhere")
    with pytest.raises(DataError, match=r"no file is like .*c.*txt; check the pattern"):
        Text(path=str(tmp_path / "c*.txt")).files()
    with pytest.raises(DataError, match=r"cannot reach|cannot read"):
        from_path("nonsense://bucket/a.txt")
    memory.pipe("/t/z.txt.gz", gzip.compress(b"packed" * 99)[:-9])
    with pytest.raises(DataError, match=r"cannot read memory://.*z.txt.gz"):
        list(Text(path="memory://t/z.txt.gz").documents())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"held_out": 1.0}, "held-out must be 0 .none. or a share below 1"),
        ({"processes": 0}, "nproc and shard-tokens must be at least 1"),
        ({"shard_tokens": 0}, "nproc and shard-tokens must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        tokenize(CORPUS, BYTES, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_another_text_or_tokenizer_in_the_same_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"held_out": 0.2, "shard_tokens": 600}
    with pytest.raises(UsageError, match="holds the tokens of another text"):
        tokenize(Memory(texts=("other",)), BYTES, folder, **how)
    with pytest.raises(UsageError, match="holds the tokens of another tokenizer"):
        tokenize(CORPUS, load_tokenizer("chars"), folder, **how)
    with pytest.raises(UsageError, match=r"was begun with held_out = 0.2, now it is 0.1"):
        tokenize(CORPUS, BYTES, folder, held_out=0.1, shard_tokens=600)
    with pytest.raises(UsageError, match="token ids already"):
        tokenize(Tokens(path=str(folder)), BYTES, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        tokenize(CORPUS, BYTES, tmp_path / "mine", **how)


def test_a_plan_without_shards_binds_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    words = ["tokenize", str(tmp_path / "texts.jsonl"), str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert cli.run(words) == 1  # the name of the field is not said
    assert cli.run([*words, "--field", "body"]) == 0
    assert cli.run([*words, "--field", "body"]) == 0
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "tokenizer.json").write_text(BYTES.to_json())  # a kill before the plan was written
    assert tokenize(CORPUS, BYTES, tmp_path / "half").documents == len(TEXTS)


def test_another_size_of_vocabulary_is_no_going_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = ["tokenize", str(tmp_path / "texts.jsonl"), str(tmp_path / "out"), "--tokenizer"]
    assert cli.run([*words, "bpe:270"]) == 0
    assert cli.run([*words, "bpe:270"]) == 0
    assert cli.run([*words, "bpe:262"]) == 2
    assert "holds the tokens of another tokenizer" in capsys.readouterr().err


def test_what_no_run_could_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vocabularies without fixed tokens"):
        tokenize(Memory(texts=("ACGT",)), load_tokenizer("dna"), tmp_path / "out")
    with pytest.raises(UsageError, match="shard-tokens must be at most"):
        tokenize(CORPUS, BYTES, tmp_path / "out", shard_tokens=1 << 31)
    assert not (tmp_path / "out").exists()


def test_a_share_of_shards_is_refused(folder: Path) -> None:
    data = DataConfig(train=Tokens(path=str(folder)), share=0.5)
    with pytest.raises(UsageError, match=r"data\.share chooses texts"):
        rows_of(data, BYTES, "train")


def test_texts_and_shards_are_read_beside_each_other(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "a text"}\n')
    texts = Jsonl(path=str(tmp_path / "texts.jsonl"))
    assert read_like(str(folder), texts) == Tokens(path=str(folder))
    assert read_like(texts.path, Tokens(path=str(folder))) == texts


def test_rows_of_shards_are_refused_where_they_would_be_wrong(folder: Path, tmp_path: Path) -> None:
    corpus = Tokens(path=str(folder))
    with pytest.raises(UsageError, match="packed by wrap, not by 'pad'"):
        build_rows(corpus, BYTES, policy="pad", length=32, part="train")
    with pytest.raises(DataError, match="made with another tokenizer: set tokenizer = "):
        build_rows(corpus, load_tokenizer("chars"), length=32, part="train")
    with pytest.raises(DataError, match="holds token ids, not text"):
        load_tokenizer("bpe:300", corpus)
    with pytest.raises(UsageError, match=r"leave out data\.windows = shifted"):
        Loader(build_rows(corpus, BYTES, length=32), 4, 0, "shifted")
    with pytest.raises(UsageError, match="at least 1 shard"):
        Tokens(path=str(folder), buffer=0)
    alone = tmp_path / "plain.parquet"
    for values, sentence in (
        (pa.array([[1, 999]], type=pa.list_(pa.int32())), "has ids from 1 to 999, the tokenizer only 0 to 257"),
        (pa.array(["text"]), "holds no lists of whole numbers but string"),
        (pa.array([[1], None], type=pa.list_(pa.int32())), "has empty places"),
    ):
        pq.write_table(pa.table({"input_ids": values}), alone)
        with pytest.raises(DataError, match=sentence):
            build_rows(Tokens(path=str(alone)), BYTES, length=4).take(np.array([0]))
    with pytest.raises(UsageError, match="does not say what is held out"):
        build_rows(Tokens(path=str(alone)), BYTES, length=4, part="valid")
    with pytest.raises(DataError, match=r"has no column 'ids'; known: input_ids"):
        build_rows(Tokens(path=str(alone), field="ids"), BYTES, length=4)


@pytest.mark.parametrize(
    "said",
    [
        b"[]",
        b"{",
        b"{}",
        b'{"documents": -5, "tokens": 1, "bytes": 1, "tokenizer": null}',
        b'{"documents": 1, "tokens": 1e15, "bytes": 1, "tokenizer": null}',
        b'{"documents": 1, "tokens": 1000000000000000, "bytes": 1, "tokenizer": null}',
        b'{"documents": 2, "tokens": 1, "bytes": 1, "tokenizer": null}',
    ],
)
def test_a_shard_that_lies_is_one_sentence(said: bytes, tmp_path: Path) -> None:
    table = pa.table({"input_ids": pa.array([[1]], type=pa.list_(pa.int32()))})
    pq.write_table(table.replace_schema_metadata({b"unmask": said}), tmp_path / "train-00000.parquet")
    with pytest.raises(DataError, match="is damaged"):
        build_rows(Tokens(path=str(tmp_path)), BYTES, length=4)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    out = str(tmp_path / "out")
    for words, code, sentence in (
        ([str(tmp_path / "nowhere.txt"), out, "--tokenizer", "bytes"], 1, "no such file or folder"),
        ([str(tmp_path / "empty.txt"), out, "--tokenizer", "bytes"], 1, "is empty"),
        ([str(tmp_path / "empty.txt"), out], 2, "--tokenizer"),
    ):
        assert cli.run(["tokenize", *words]) == code
        assert sentence in capsys.readouterr().err
