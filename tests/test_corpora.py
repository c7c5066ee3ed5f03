"""Corpora: what is in the files comes out, in order and unchanged; what is wrong with them is said in one line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask import corpora
from unmask.config import RunConfig, from_dict
from unmask.corpora import Corpus, Document, sources, text
from unmask.corpora.hub import Hub
from unmask.corpora.jsonl import Jsonl
from unmask.corpora.parquet import Parquet
from unmask.corpora.sources import from_path
from unmask.corpora.stdlib import Stdlib
from unmask.corpora.text import Text
from unmask.errors import ConfigError, DataError, MissingExtraError, UsageError

DATA = Path(__file__).parents[2] / "shared" / "data"
zstandard = pytest.importorskip("zstandard")

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data[:7]) + zstandard.ZstdCompressor().compress(data[7:]),
}


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus.documents()]


def fails(corpus: Corpus, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        list(corpus.documents())
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_the_room_lists_them() -> None:
    assert {"stdlib", "text", "jsonl", "parquet", "hub"} <= set(corpora.room.names())
    for name in corpora.room.names():
        assert issubclass(corpora.room.get(name), Corpus)
        assert corpora.room.summary(name)
    assert corpora.Jsonl is Jsonl


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", list(COMPRESS))
def test_compressed_text_is_the_same(tmp_path: Path, suffix: str) -> None:
    content = "Zeile eins\r\nzwei – drei\n\n  vier 🙂\n"
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](content.encode()))
    assert texts(Text(path=str(path))) == [content]
    assert texts(from_path(str(path))) == [content]


@pytest.mark.parametrize("suffix", [s for s in COMPRESS if s])
def test_truncated_files_are_noticed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    whole = COMPRESS[suffix]("".join(f"{i} " for i in range(5000)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    fails(Text(path=str(path)), "damaged")
    path.write_bytes(b"this is not compressed at all")
    fails(Text(path=str(path)), "a.txt")


def test_folder_in_the_order_of_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/y.txt.gz", ".hidden.txt", ".git/c.txt", "image.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        data = name.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert texts(Text(path=str(tmp_path))) == ["a/y.txt.gz", "a/z.md", "b.txt"]


@settings(deadline=None, max_examples=60)
@given(content=st.text(alphabet="ab é\n", min_size=1, max_size=200), piece=st.integers(2, 40), chunk=st.integers(1, 9))
def test_pieces_of_a_large_file_are_the_file(content: str, piece: int, chunk: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PIECE", piece)
        patch.setattr(sources, "_CHUNK", chunk)
        path = Path(folder) / "a.txt"
        path.write_bytes(content.encode())
        pieces = texts(Text(path=str(path)))
    assert "".join(pieces) == content
    assert all(0 < len(p) <= piece for p in pieces)


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(
        st.text(alphabet="ab|\n", min_size=1, max_size=12).map(lambda t: t.replace("||", "")), min_size=1
    ),
    chunk=st.integers(1, 9),
    last=st.booleans(),
)
def test_separator_lines(documents: list[str], chunk: int, last: bool) -> None:
    import tempfile

    documents = [d.strip("\n|") or "x" for d in documents]
    content = "\n||\n".join(documents) + ("\n||\n" if last else "")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_CHUNK", chunk)
        path = Path(folder) / "a.txt"
        path.write_bytes(content.encode())
        assert texts(Text(path=str(path), separator="||")) == documents


def test_separators(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"

    def split(content: str, separator: str) -> list[str]:
        path.write_bytes(content.encode())
        return texts(Text(path=str(path), separator=separator))

    assert split("a<e>b\r\n<e>\r\nc\n\n<e>\n", "<e>") == ["a", "b", "c\n"]
    assert split("a\nb\n\nc\n", "\n\n") == ["a\nb", "c\n"]
    assert split("<e>a<e><e>b", "<e>") == ["a", "", "b"]
    with pytest.raises(UsageError):
        Text(path="a", separator="")


def test_separators_are_found_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n<|endoftext|>\ntwo\n<|endoftext|>\n", encoding="utf-8")
    assert texts(from_path(str(path))) == ["one", "two"]


def test_what_is_wrong_with_text(tmp_path: Path) -> None:
    fails(Text(path=str(tmp_path / "none.txt")), "no such file", "none.txt")
    fails(Text(path=str(tmp_path)), "holds no file")
    (tmp_path / "a.txt").write_bytes(b"")
    fails(Text(path=str(tmp_path / "a.txt")), "a.txt is empty")
    (tmp_path / "a.txt").write_bytes(b"abc\xffdef")
    fails(Text(path=str(tmp_path / "a.txt")), "a.txt", "not UTF-8", "byte 3")
    (tmp_path / "a.txt").write_bytes("é".encode()[:1])
    fails(Text(path=str(tmp_path / "a.txt")), "not UTF-8")


# --- JSON lines -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=8), st.integers(1, 50))
def test_json_lines(pairs: list[tuple[str, str]], chunk: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_CHUNK", chunk)
        path = Path(folder) / "a.jsonl.gz"
        lines = [json.dumps({"q": q, "text": a}, ensure_ascii=False) for q, a in pairs]
        path.write_bytes(gzip.compress("\r\n\n".join(lines).encode()))
        assert texts(Jsonl(path=str(path))) == [a for _, a in pairs]
        prompted = Jsonl(path=str(path), prompt_field="q")
        assert list(prompted.documents()) == [Document(a, q) for q, a in pairs]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n{"text": \n', ["a.jsonl, line 2", "not valid JSON"]),
        ('\n\n["text"]', ["line 3", "not a JSON object"]),
        ('{"txet": "a"}', ["line 1", "no field 'text'", "did you mean 'txet'"]),
        ('{"text": 5}', ["line 1", "int"]),
        ('{"text": null}', ["line 1", "NoneType"]),
        ("", ["is empty"]),
        ("\n \n", ["is empty"]),
        ("[" * 100_000, ["line 1", "not valid JSON"]),
    ],
)
def test_bad_json_lines(tmp_path: Path, content: str, words: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content, encoding="utf-8")
    fails(Jsonl(path=str(path)), *words)


def test_json_lines_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    fails(Jsonl(path=str(path)), "a.jsonl", "line 2", "UTF-8")
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}')
    assert texts(Jsonl(path=str(path))) == ["a"]


# --- Parquet ----------------------------------------------------------------------------------------------------------


def write_parquet(path: Path, table: dict[str, list[Any]]) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(table), path)


def test_parquet(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"text": [f"é{i}" for i in range(3000)], "q": ["q"] * 3000, "n": [1] * 3000})
    write_parquet(tmp_path / "1.parquet", {"text": ["last"], "q": ["p"], "n": [1]})
    corpus = Parquet(path=str(tmp_path))
    assert texts(corpus) == [*(f"é{i}" for i in range(3000)), "last"]
    *_, last = Parquet(path=str(tmp_path), prompt_field="q").documents()
    assert last == Document("last", "p")
    assert from_path(str(tmp_path)) == corpus
    fails(Parquet(path=str(tmp_path), field="txt"), "no column 'txt'", "did you mean 'text'")
    fails(Parquet(path=str(tmp_path), field="n"), "row 1", "int")
    write_parquet(tmp_path / "1.parquet", {"text": ["a", None]})
    fails(Parquet(path=str(tmp_path / "1.parquet")), "row 2", "NoneType")
    (tmp_path / "1.parquet").write_bytes(b"PAR1 nonsense")
    fails(Parquet(path=str(tmp_path / "1.parquet")), "cannot read", "1.parquet")


@pytest.mark.parametrize(("module", "file"), [("pyarrow", "a.parquet"), ("zstandard", "a.jsonl.zst")])
def test_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, file: str) -> None:
    (tmp_path / file).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'unmask\[data\]'"):
        list(from_path(str(tmp_path / file)).documents())


# --- the others -------------------------------------------------------------------------------------------------------


def test_stdlib() -> None:
    corpus = Stdlib(limit_mb=0.3)
    found = texts(corpus)
    assert found == texts(corpus)
    assert 100_000 < sum(len(t.encode()) for t in found) <= 300_000
    assert all(found)
    assert corpus.fingerprint() == Stdlib(limit_mb=0.3).fingerprint() != Stdlib(limit_mb=0.2).fingerprint()
    with pytest.raises(UsageError):
        Stdlib(limit_mb=0)
    fails(Stdlib(limit_mb=1e-6), "limit_mb")


def test_hub_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"unmask\[hf\]"):
        list(Hub(dataset="a/b").documents())


def test_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    class Datasets:
        @staticmethod
        def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
            assert streaming
            if name == "away":
                raise ConnectionError("no network\nat all")
            yield {"text": f"{name} {config} {split}", "n": 1}

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert texts(Hub(dataset="a/b", split="validation", config="c")) == ["a/b c validation"]
    fails(Hub(dataset="a/b", field="txet"), "no text in a field 'txet'", "did you mean 'text'")
    fails(Hub(dataset="away"), "away", "no network")


def test_hub_knows_test_splits() -> None:
    for split in ("test", "Test", "train+test", "test[:10%]", "test.raw", "test_matched"):
        assert Hub(dataset="a", split=split).is_test(), split
        with pytest.raises(ConfigError, match="test split"):
            from_dict(RunConfig, {"data": {"valid": {"name": "hub", "dataset": "a", "split": split}}})
    for split in ("train", "validation[:5%]", "latest", "contest"):
        assert not Hub(dataset="a", split=split).is_test(), split


def test_from_path_by_ending(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about", encoding="utf-8")
    assert from_path(str(tmp_path)) == Text(path=str(tmp_path))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b'{"text": "a"}'))
    assert from_path(str(tmp_path)) == Jsonl(path=str(tmp_path))
    assert texts(from_path(str(tmp_path))) == ["a"]
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="both Parquet and JSON lines"):
        from_path(str(tmp_path))
    with pytest.raises(DataError, match="no such file"):
        from_path(str(tmp_path / "none"))


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("one", encoding="utf-8")
    b.write_text("one", encoding="utf-8")
    first = Text(path=str(a)).fingerprint()
    assert Text(path=str(b)).fingerprint() == first
    assert Text(path=str(a), separator="x").fingerprint() != first
    assert Jsonl(path=str(a)).fingerprint() != Jsonl(path=str(a), field="x").fingerprint()
    b.write_text("two", encoding="utf-8")
    assert Text(path=str(b)).fingerprint() != first
    folder = Text(path=str(tmp_path)).fingerprint()
    a.rename(tmp_path / "c.txt")  # the same texts in another order
    assert Text(path=str(tmp_path)).fingerprint() != folder


@pytest.mark.skipif(not (DATA / "stories").exists(), reason="the shared corpora are not here")
def test_shared_corpora() -> None:
    stories = texts(from_path(str(DATA / "stories" / "valid.txt.xz")))
    assert len(stories) == 3000
    assert not any("<|endoftext|>" in story or story != story.strip("\n") for story in stories)
    assert len(texts(from_path(str(DATA / "wiki" / "valid.jsonl.xz")))) == 169


def test_what_generate_says_of_its_lines_is_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "part-0.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "generate.json").write_text('{\n "complete": true\n}\n')
    assert texts(from_path(str(tmp_path))) == ["a", "b"]
    (tmp_path / "other.json").write_text('{"text": "c"}\n')
    assert texts(from_path(str(tmp_path))) == ["c", "a", "b"]
