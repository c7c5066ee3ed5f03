"""CSV and TSV: what csv.writer writes comes back, row by row; what is wrong is told with its file and line."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.config import RunConfig, from_dict
from unmask.corpora import Document, sources
from unmask.corpora.csv import Csv
from unmask.corpora.reading import read_like
from unmask.corpora.sources import from_path
from unmask.errors import ConfigError, DataError, UsageError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
CELLS = st.text(alphabet='ab ,;"\t\r\né☃', max_size=8)


def table(rows: list[list[str]], delimiter: str = ",", end: str = "\r\n") -> bytes:
    file = io.StringIO()
    # An older csv.writer takes a carriage return for a letter where it does not end lines with one.
    quoting = csv.QUOTE_MINIMAL if end == "\r\n" else csv.QUOTE_ALL
    csv.writer(file, delimiter=delimiter, lineterminator=end, quoting=quoting).writerows(rows)
    return file.getvalue().encode()


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(CELLS, CELLS, st.sampled_from(["good", "bad", ""])), min_size=1, max_size=6),
    chunk=st.integers(1, 40),
    ending=st.sampled_from([".csv", ".tsv", ".csv.gz", ".tsv.xz", ".csv.bz2"]),
    end=st.sampled_from(["\n", "\r\n"]),
    bom=st.booleans(),
)
def test_what_is_written_comes_back(
    rows: list[tuple[str, str, str]], chunk: int, ending: str, end: str, bom: bool
) -> None:
    rows = [("x" + q, a or "y", label) for q, a, label in rows]  # no blank rows
    content = table([["q", "text", "kind"], *map(list, rows)], "\t" if ".tsv" in ending else ",", end)
    content = b"\xef\xbb\xbf" + content if bom else content
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_CHUNK", chunk)
        path = Path(folder) / f"a{ending}"
        path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](content))
        corpus = Csv(path=str(path), prompt_field="q", label_field="kind")
        assert list(corpus.documents()) == [Document(a, q, label or None) for q, a, label in rows]
        assert from_path(str(path)) == Csv(path=str(path))
        assert [document.text for document in from_path(str(path)).documents()] == [a for _, a, _ in rows]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("txet,n\na,1\n", ["a.csv", "names no column 'text'", "did you mean 'txet'"]),
        ("review,n\na,1\n", ["names no column 'text'", "known: n, review"]),
        ("text,text\na,b\n", ["names 2 columns 'text'"]),
        ('text,n\na,1\n"b\nc",2,3\n', ["a.csv, line 3", "3 columns, the first line 2"]),
        ('text,n\na,1\n\n"b,2\nc,3\n', ["a.csv, line 4", "not valid CSV", "quote"]),
        ('text,n\n"a"b,1\n', ["line 2", "not valid CSV"]),
        ("text,n\n", ["is empty"]),
        ("", ["is empty"]),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, content: str, words: list[str]) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        list(Csv(path=str(path)).documents())
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_options(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text;kind\n"so" he said;1\n', encoding="utf-8")
    corpus = Csv(path=str(path), delimiter=";", quoted=False, label_field="kind")
    assert list(corpus.documents()) == [Document('"so" he said', label="1")]
    assert corpus.fingerprint() != Csv(path=str(path), delimiter=";", label_field="kind").fingerprint()
    tabs = Csv(path=str(path), delimiter=r"\t")
    same = tmp_path / "b.tsv"
    same.write_bytes(path.read_bytes())
    assert tabs.fingerprint() == Csv(path=str(same)).fingerprint() != Csv(path=str(path)).fingerprint()
    for bad in ("", ",,", '"', "\n"):
        with pytest.raises(ConfigError, match="delimiter"):
            from_dict(RunConfig, {"data": {"train": {"name": "csv", "path": "a", "delimiter": bad}}})


def test_a_long_text_is_one_field(tmp_path: Path) -> None:
    text = "long, " * 40_000  # beyond csv's own limit for a field
    (tmp_path / "a.csv").write_bytes(table([["text"], [text]]))
    assert [document.text for document in Csv(path=str(tmp_path)).documents()] == [text]


def test_a_folder_of_tables_beside_others(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    for name in ("b.tsv", "a.csv"):
        (tmp_path / name).write_text(f"text\n{name}\n")
    assert [document.text for document in from_path(str(tmp_path)).documents()] == ["a.csv", "b.tsv"]
    (tmp_path / "c.jsonl").write_text("{}")
    with pytest.raises(DataError, match="both JSON lines and CSV"):
        from_path(str(tmp_path))


def test_rows_are_chosen_by_their_values(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,split,chr\na,train,1\nb,test,1\nc,train,2\nd,valid,3\n")

    def texts(*only: str) -> str:
        return "".join(document.text for document in Csv(path=str(tmp_path / "t.csv"), only=only).documents())

    assert texts("split=train") == "ac"
    assert texts("split=train", "split = valid") == "acd"
    assert texts("split=train", "chr=2") == "c"
    plain = Csv(path=str(tmp_path / "t.csv"))
    assert plain.fingerprint() != Csv(path=str(tmp_path / "t.csv"), only=("chr=2",)).fingerprint()
    assert read_like(str(tmp_path / "t.csv"), Csv(path="other.csv", only=("chr=2",))) == plain
    with pytest.raises(DataError, match=r"no row of .* has chr=9"):
        texts("chr=9")
    with pytest.raises(DataError, match="names no column 'spilt'; did you mean 'split'"):
        texts("spilt=train")
    with pytest.raises(UsageError, match="only holds columns with their values, as split=train; got 'train'"):
        texts("train")
