"""Rows: nothing is lost that is not counted, and a cache is whole or not there."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.config import DataConfig
from unmask.corpora import Corpus, Document
from unmask.corpora.memory import Memory
from unmask.corpora.text import Text
from unmask.data import packer
from unmask.data.packing import Rows, build_rows, pack_texts, rows_of
from unmask.data.reading_bar import reading_bar
from unmask.data.tokenizers import Tokenizer, load_tokenizer
from unmask.errors import DataError, UsageError

BYTES = load_tokenizer("bytes")
LINES = st.lists(st.text(alphabet="ab é🙂\n", max_size=15), min_size=1, max_size=12).filter(lambda t: any(t))


class Listed(Corpus):
    def __init__(self, *texts: str, prompt: str = "") -> None:
        self.texts, self.prompt, self.reads = texts, prompt, 0

    def documents(self) -> Iterator[Document]:
        self.reads += 1
        for text in self.texts:
            yield Document(text, self.prompt)

    def fingerprint(self) -> str:
        return hashlib.sha256(repr((self.texts, self.prompt)).encode("utf-8", "surrogatepass")).hexdigest()


MANY = tuple(f"document number {i}, which is {'long ' * (i % 7)}" for i in range(400))


@cache
def bpe() -> Tokenizer:
    return load_tokenizer("bpe:280", Listed(*MANY, "é🙂 ab " * 20))


def everything(rows: Rows) -> tuple[Any, Any, Any]:
    taken = rows.take(np.arange(len(rows)))
    return taken.x, taken.valid_len, taken.prefix_len


def streams(rows: Rows) -> list[list[int]]:
    x, valid_len, _ = everything(rows)
    return [row[:n].tolist() for row, n in zip(x, valid_len, strict=True)]


def print_of(rows: Rows) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in everything(rows))).hexdigest()


# --- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@settings(deadline=None, max_examples=60)
@given(texts=LINES, length=st.integers(2, 20))
def test_wrap_is_the_stream(kind: str, texts: list[str], length: int) -> None:
    tokenizer = BYTES if kind == "bytes" else bpe()
    rows = pack_texts(texts, tokenizer, "wrap", length)
    stream = [i for text in texts if text for i in [*tokenizer.encode(text), tokenizer.eot_id]]
    assert [i for row in streams(rows) for i in row] == stream
    x, valid_len, prefix_len = everything(rows)
    assert x.shape == (-(-len(stream) // length), length)
    assert (valid_len[:-1] == length).all()
    assert not prefix_len.any()
    assert (x[-1, valid_len[-1] :] == tokenizer.eot_id).all()
    report = rows.report
    assert report.tokens == len(stream)
    assert report.bytes == sum(len(t.encode()) for t in texts) == rows.bytes_of(np.arange(len(rows))).sum()
    assert (report.documents, report.empty_documents) == (len(texts), texts.count(""))
    assert report.rows == len(rows)
    assert report.cut_tokens == report.dropped_documents == 0


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@settings(deadline=None, max_examples=60)
@given(texts=LINES, length=st.integers(2, 20), prompt=st.sampled_from(["", "b", "é é", "a long long prompt"]))
def test_pad_gives_each_document_a_row(kind: str, texts: list[str], length: int, prompt: str) -> None:
    tokenizer = BYTES if kind == "bytes" else bpe()
    head = tokenizer.encode(prompt)
    documents = [Document(text, prompt) for text in texts]
    full = [[*head, *tokenizer.encode(text), tokenizer.eot_id] for text in texts if text]
    if len(head) >= length:
        with pytest.raises(DataError, match="dropped"):
            pack_texts(documents, tokenizer, "pad", length)
        return
    rows = pack_texts(documents, tokenizer, "pad", length)
    assert streams(rows) == [row[:length] for row in full]
    assert (everything(rows)[2] == len(head)).all()
    report = rows.report
    assert report.cut_tokens == sum(max(0, len(row) - length) for row in full)
    assert report.tokens == sum(min(len(row), length) - len(head) for row in full)
    whole = sum(len(t.encode()) for t in texts)
    assert report.bytes <= whole
    if kind == "bytes":
        assert report.bytes == sum(min(len(t.encode()), length - len(head)) for t in texts)
    elif not report.cut_tokens:
        assert report.bytes == whole


def test_sentences() -> None:
    rows = pack_texts(["one\n\n  \ntwo\r\nthree and more\n", "\n"], BYTES, "sentence", 6)
    assert [BYTES.decode(row) for row in streams(rows)] == ["one<|endoftext|>", "two<|endoftext|>", "three "]
    report = rows.report
    assert (report.documents, report.empty_documents, report.cut_tokens, report.bytes) == (2, 1, 9, 12)


def test_sentences_begin_with_bos(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\nsat", encoding="utf-8")
    rows = pack_texts(["The cat\nsat the cat sat"], load_tokenizer(str(tmp_path)), "sentence", 5)
    assert streams(rows) == [[2, 5, 6, 3], [2, 7, 5, 6, 7]]
    assert rows.report.bytes == len("The cat") + len("sat the cat sat")
    assert everything(rows)[0][0].tolist() == [2, 5, 6, 3, 3]


@pytest.mark.parametrize("policy", ["wrap", "sentence"])
def test_prompts_need_pad(policy: Any) -> None:
    with pytest.raises(UsageError, match="need the packing 'pad'"):
        pack_texts([Document("a", "b")], BYTES, policy, 8)


def test_prompts_that_fill_the_row_are_dropped() -> None:
    rows = pack_texts([Document("a", "12345678"), Document("a", "1234567")], BYTES, "pad", 8)
    assert len(rows) == 1
    assert rows.report.dropped_documents == 1
    assert everything(rows)[2].tolist() == [7]
    assert "1 document dropped" in rows.report.sentence()


def test_wrong_use() -> None:
    with pytest.raises(UsageError, match="did you mean 'wrap'"):
        pack_texts(["a"], BYTES, "wrapp", 8)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 2"):
        pack_texts(["a"], BYTES, "wrap", 1)
    with pytest.raises(DataError, match="no text to pack"):
        pack_texts([], BYTES, "wrap", 8)
    rows = pack_texts(["a"], BYTES, "wrap", 8)
    for bad in (-1, 1):
        with pytest.raises(IndexError):
            rows.take(np.array([bad]))
    assert rows.take(np.array([], dtype=np.int64)).x.shape == (0, 8)


# --- the corpus's parts -----------------------------------------------------------------------------------------------


def test_cache_equals_memory(tmp_path: Path) -> None:
    corpus = Listed(*MANY)
    for policy in ("wrap", "pad", "sentence"):
        rows = build_rows(corpus, bpe(), policy=policy, length=32, cache_dir=tmp_path)
        memory = pack_texts(MANY, bpe(), policy, 32)
        assert print_of(rows) == print_of(memory)
        assert rows.report == memory.report
    reads = corpus.reads
    assert print_of(build_rows(corpus, bpe(), policy=policy, length=32, cache_dir=tmp_path)) == print_of(memory)
    assert corpus.reads == reads


def test_wide_ids(tmp_path: Path) -> None:
    class Wide(type(BYTES)):  # type: ignore[misc]
        num_ids, mask_id, eot_id = 70_002, 70_001, 70_000

    rows = build_rows(Listed("abc"), Wide(), length=5, cache_dir=tmp_path)
    assert streams(rows) == [[97, 98, 99, 70_000]]


def test_parts_are_told_by_content(tmp_path: Path) -> None:
    def parts(*texts: str) -> tuple[set[str], set[str]]:
        found = []
        for part in ("train", "valid"):
            rows = build_rows(
                Listed(*texts), BYTES, policy="pad", length=99, cache_dir=tmp_path, part=part, held_out=0.1
            )
            found.append({BYTES.decode(row[:-1]) for row in streams(rows)})
        return found[0], found[1]

    train, valid = parts(*MANY)
    assert not train & valid
    assert train | valid == set(MANY)
    assert 20 <= len(valid) <= 60
    assert parts(*reversed(MANY)) == (train, valid)
    fewer_train, fewer_valid = parts(*MANY[::2])
    assert fewer_train <= train
    assert fewer_valid <= valid


def test_a_share_is_nested_and_leaves_what_is_held_out(tmp_path: Path) -> None:
    def texts_of(part: Any, share: float, valid: Any = None) -> set[str]:
        options: dict[str, Any] = {"packing": "pad", "length": 99, "held_out": 0.1, "cache": str(tmp_path)}
        data = DataConfig(train=Memory(texts=tuple(MANY)), valid=valid, share=share, **options)
        return {BYTES.decode(row[:-1]) for row in streams(rows_of(data, BYTES, part))}

    whole, half, tenth = (texts_of("train", share) for share in (1.0, 0.5, 0.1))
    assert tenth < half < whole
    assert 0.4 < len(half) / len(whole) < 0.6
    assert 0.04 < len(tenth) / len(whole) < 0.18
    assert texts_of("valid", 0.1) == texts_of("valid", 1.0) == set(MANY) - whole
    other = Memory(texts=tuple(MANY[:9]))
    assert len(texts_of("train", 0.5, other)) > len(half)  # of all documents
    assert texts_of("valid", 0.5, other) == set(MANY[:9])
    with pytest.raises(DataError, match=r"data.share = 1e-09 takes none of the \d+ documents"):
        texts_of("train", 1e-9)


@pytest.mark.parametrize("texts", [("abcdefgh" * 50,), ("x" * 100, "y" * 100)])
def test_few_documents_are_split_by_rows(tmp_path: Path, texts: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"length": 10, "cache_dir": tmp_path, "held_out": 1e-9 if len(texts) > 1 else 0.2}
    train = build_rows(Listed(*texts), BYTES, part="train", **options)
    valid = build_rows(Listed(*texts), BYTES, part="valid", **options)
    whole = build_rows(Listed(*texts), BYTES, part="all", **options)
    assert streams(train) + streams(valid) == streams(whole)
    assert len(valid) == max(1, round(len(whole) * options["held_out"]))
    assert train.report.tokens + valid.report.tokens == whole.report.tokens
    assert train.report.bytes + valid.report.bytes == whole.report.bytes
    assert valid.report.bytes == valid.bytes_of(np.arange(len(valid))).sum()
    assert "last rows are held out" in valid.report.sentence()
    with pytest.raises(IndexError):
        train.take(np.array([len(train)]))
    again = Listed(*texts)
    assert print_of(build_rows(again, BYTES, part="valid", **options)) == print_of(valid)
    assert not again.reads


def test_too_little_to_hold_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too little to hold a part out"):
        build_rows(Listed("abc"), BYTES, length=10, cache_dir=tmp_path, part="train")
    for texts in ((), ("",), ("", " \n")):
        with pytest.raises(DataError, match="empty"):
            build_rows(Listed(*texts), BYTES, length=10, cache_dir=tmp_path, part="all")
    with pytest.raises(UsageError, match="held_out"):
        build_rows(Listed("a", "b"), BYTES, cache_dir=tmp_path, part="valid", held_out=1.5)


def test_keys_differ(tmp_path: Path) -> None:
    corpus = Listed(*MANY)
    build_rows(corpus, BYTES, length=16, cache_dir=tmp_path)
    build_rows(corpus, BYTES, length=17, cache_dir=tmp_path)
    build_rows(corpus, BYTES, length=16, policy="pad", cache_dir=tmp_path)
    build_rows(corpus, bpe(), length=16, cache_dir=tmp_path)
    build_rows(corpus, BYTES, length=16, part="train", cache_dir=tmp_path)
    build_rows(corpus, BYTES, length=16, part="train", held_out=0.3, cache_dir=tmp_path)
    build_rows(Listed(*MANY[1:]), BYTES, length=16, cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 7
    assert all(path.is_dir() for path in tmp_path.iterdir())


def test_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path / "told"))
    build_rows(Listed("abc"), BYTES, length=4)
    assert len(list((tmp_path / "told").iterdir())) == 1
    monkeypatch.delenv("UNMASK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build_rows(Listed("abc"), BYTES, length=4)
    assert len(list((tmp_path / "unmask").iterdir())) == 1


def test_progress(tmp_path: Path) -> None:
    seen: list[int] = []
    build_rows(Listed(*MANY), BYTES, cache_dir=tmp_path, progress=seen.append)
    assert sum(seen) == sum(map(len, MANY))
    with reading_bar() as progress:  # stderr is captured, so it is no terminal
        assert progress is None


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "missing", "flipped", "no manifest", "empty manifest", "a file"])
def test_damaged_caches_are_built_again(tmp_path: Path, damage: str) -> None:
    corpus = Listed(*MANY)
    good = print_of(build_rows(corpus, BYTES, length=16, cache_dir=tmp_path))
    (entry,) = tmp_path.iterdir()
    tokens, manifest = entry / "tokens", entry / "manifest.json"
    if damage == "truncated":
        os.truncate(tokens, 100)
    elif damage == "missing":
        (entry / "ends").unlink()
    elif damage == "flipped":
        tokens.write_bytes(b"\xff" + tokens.read_bytes()[1:])
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "empty manifest":
        manifest.write_text("{}", encoding="utf-8")
    else:
        for path in entry.iterdir():
            path.unlink()
        entry.rmdir()
        entry.write_text("not a folder", encoding="utf-8")
    assert print_of(build_rows(corpus, BYTES, length=16, cache_dir=tmp_path)) == good
    assert corpus.reads == 2
    assert list(tmp_path.iterdir()) == [entry]


def test_errors_leave_nothing(tmp_path: Path) -> None:
    class Broken(Listed):
        def documents(self) -> Iterator[Document]:
            yield Document("x" * 3_000_000)
            raise OSError(5, "the disk fell out")

    with pytest.raises(DataError, match="cannot read the corpus: the disk fell out"):
        build_rows(Broken(), BYTES, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("unmask-reader", "unmask-tokenizer"))]
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write the token cache"):
        build_rows(Listed("a"), BYTES, cache_dir=tmp_path / "file" / "below")


SCRIPT = """
import sys, time, hashlib, resource
from pathlib import Path
import numpy as np
from unmask.config import DataConfig
from unmask.corpora import Corpus, Document
from unmask.corpora.memory import Memory
from unmask.data.packing import build_rows
from unmask.data.tokenizers import load_tokenizer
folder, log, mode = sys.argv[1:]

class Slow(Corpus):
    def documents(self):
        with open(log, "a") as file:
            file.write("read\\n")
        for i in range(200):
            time.sleep(0.3 if mode == "kill" else 0.004)
            yield Document(f"document {i} " * (50_000 if mode == "full" else 2000))
    def fingerprint(self):
        return "slow" + mode.replace("kill", "")

if mode == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
rows = build_rows(Slow(), load_tokenizer("bytes"), length=64, cache_dir=Path(folder))
print(hashlib.sha256(rows.take(np.arange(len(rows))).x.tobytes()).hexdigest())
"""


def start(folder: Path, log: Path, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), str(log), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_build_a_cache_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    builders = [start(folder, log, "") for _ in range(3)]
    results = [builder.communicate(timeout=60) for builder in builders]
    assert all(builder.returncode == 0 for builder in builders), results
    assert len({out for out, _ in results}) == 1
    assert log.read_text().splitlines() == ["read"]
    assert [path.name for path in folder.iterdir() if path.is_dir()] == [path.name for path in folder.iterdir()]
    assert len(list(folder.iterdir())) == 1


def test_without_locks_the_loser_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)

    class Raced(Listed):
        def documents(self) -> Iterator[Document]:
            yield from super().documents()
            if self.reads == 1:  # while the first builder is at it, a second one starts and ends
                build_rows(self, BYTES, length=16, cache_dir=tmp_path)

    corpus = Raced(*MANY)
    rows = build_rows(corpus, BYTES, length=16, cache_dir=tmp_path)
    assert corpus.reads == 2
    assert print_of(rows) == print_of(pack_texts(MANY, BYTES, "wrap", 16))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_killed_builder_does_no_harm(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    builder = start(folder, log, "kill")
    deadline = time.monotonic() + 30
    while not (folder.exists() and any(path.is_dir() for path in folder.iterdir())):
        assert time.monotonic() < deadline
        assert builder.poll() is None
        time.sleep(0.02)
    builder.send_signal(signal.SIGKILL)
    builder.communicate(timeout=30)
    left = [path.name for path in folder.iterdir()]
    assert any(name.startswith(".") for name in left), left
    again = start(folder, log, "")  # the same key: the fingerprint does not know that it sleeps less
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert len(out.strip()) == 64
    assert len(list(folder.iterdir())) == 1


def test_a_full_disk_gives_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    builder = start(folder, tmp_path / "log", "full")
    _, err = builder.communicate(timeout=60)
    assert builder.returncode == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("unmask.errors.DataError: cannot write the token cache in ")
    assert "free space" in last
    assert not list(folder.iterdir())


def test_a_large_file_is_never_whole_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with path.open("w", encoding="utf-8") as file:
        for _ in range(60):
            file.write("one line without an end " * 43_000)  # about a megabyte
    code = f"""
import resource
from pathlib import Path
from unmask.corpora.text import Text
from unmask.data.packing import build_rows, pack_texts
from unmask.data.tokenizers import load_tokenizer
tokenizer = load_tokenizer("bytes")
pack_texts(["warm"], tokenizer, "wrap", 8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = build_rows(Text(path={str(path)!r}), tokenizer, length=512, cache_dir=Path({str(tmp_path)!r}))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, rows.report.bytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, num_bytes = map(int, done.stdout.split())
    assert num_bytes == path.stat().st_size
    assert grown < 250_000  # kilobytes; the ids alone would be twice that


def test_chunks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("\n|\n".join(MANY), encoding="utf-8")
    corpus = Text(path=str(tmp_path / "a.txt"), separator="|")
    one = print_of(build_rows(corpus, bpe(), length=16, cache_dir=tmp_path / "one"))
    monkeypatch.setattr(packer, "CHUNK", 50)
    assert print_of(build_rows(corpus, bpe(), length=16, cache_dir=tmp_path / "two")) == one
