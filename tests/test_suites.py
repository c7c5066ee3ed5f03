"""Suites: every token of a set is scored once, by one protocol; what is finished stays, what fails stops nothing."""

from __future__ import annotations

import json
import lzma
import math
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unmask
from unmask.cli import run
from unmask.data.packing import pack_texts
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import UsageError
from unmask.evaluation.suites import find_suite
from unmask.evaluation.suites.base import Outcome
from unmask.evaluation.suites.run import SuiteRun
from unmask.metrics.perplexity import Perplexity
from unmask.model import Model
from unmask.objectives.mlm import MLM

SUITE = find_suite("zero-shot")
LOCAL = ["ptb", "wikitext", "lambada", "ag_news", "pubmed", "arxiv", "openwebtext"]
FILES = {
    "ptb/ptb.test.txt": " the cat did n't eat \n <unk> cost $ N \n\n",
    "wikitext2/test.raw.txt": " \n = Cats = \n \n Cats , 12 @.@ 5 @-@ kg ( fat ) . \n \n = Rats = \n \n They run . \n",
    "lambada/test.jsonl": json.dumps({"text": "“No,” said the cat, and then for a long while it sat on the mat"})
    + "\n",
    "ag_news/test.csv": 'label,title,description\n3,The cat,"sat, and ate"\n1,A rat,ran\n',
    "pubmed/abstracts.txt": "The cat was fed.\nThe rat was not.\n",
    "arxiv/arxiv.txt": "Article: we show ( @xmath0 ) , a cat .\nArticle: a rat .\n",
    "openwebtext/sample.jsonl": json.dumps({"text": "a page\n\nof cats"}) + "\n",
}
TEXTS = {
    "ptb": ["the cat didn't eat", "? cost $1"],
    "wikitext": ["= Cats =\n\nCats, 12.5-kg (fat).\n", "= Rats =\n\nThey run."],
    "lambada": ['\n"No," said the cat, and then for a long while it sat on the mat'],
    "ag_news": ["The cat sat, and ate", "A rat ran"],
    "pubmed": ["The cat was fed.", "The rat was not."],
    "arxiv": ["we show (@xmath0), a cat.", "a rat."],
    "openwebtext": ["a page\n\nof cats"],
}
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Small sets in the layout, one file of them compressed."""
    for name, text in FILES.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    plain = tmp_path / "data/ptb/ptb.test.txt"
    plain.with_name("ptb.test.txt.xz").write_bytes(lzma.compress(plain.read_bytes()))
    plain.unlink()
    return tmp_path / "data"


def measure(model: Model, data: Path, sets: list[str] | None = None, **changes: Any) -> dict[str, Outcome]:
    options: dict[str, Any] = {"suite": SUITE, "data_dir": data, "metric": Perplexity(num_samples=2)} | changes
    way = SuiteRun(**options)
    return {one.set.name: one for one in way.outcomes(model, SUITE.chosen(sets, data))}


def numbers(outcome: Outcome) -> dict[str, Any]:
    assert outcome.numbers is not None, outcome.failure
    return outcome.numbers


def with_length(model: Model, length: int, **changes: Any) -> Model:
    parts: dict[str, Any] = {"denoiser": model.denoiser, "tokenizer": model.tokenizer, "objective": model.objective}
    return Model(length=length, **(parts | changes))


# --- the texts --------------------------------------------------------------------------------------------------------


def test_each_set_is_read_and_detokenized(data: Path) -> None:
    assert [one.name for one in SUITE.chosen(None, data)] == LOCAL
    for name, texts in TEXTS.items():
        read = [text for text in SUITE.sets[name].source(data).texts() if text.strip()]
        assert read == texts, name


def test_the_openwebtext_sample_is_never_called_lm1b(data: Path) -> None:
    sample, lm1b = SUITE.sets["openwebtext"], SUITE.sets["lm1b"]
    assert "lm1b" not in repr(sample).lower()
    assert not sample.quoted
    assert lm1b.local is None


def test_the_quoted_figures_are_the_papers() -> None:
    assert all(list(one.quoted) == list(SUITE.quoted) for one in SUITE.sets.values() if one.quoted)
    quoted = {one.name: tuple(one.quoted.values()) for one in SUITE.sets.values() if one.quoted}
    assert quoted == {
        "ptb": (82.05, 100.09, 95.26),
        "wikitext": (25.75, 34.28, 32.83),
        "lm1b": (51.25, 68.20, 67.01),
        "lambada": (51.28, 49.86, 47.52),
        "ag_news": (52.09, 62.09, 61.15),
        "pubmed": (49.01, 44.53, 41.89),
        "arxiv": (41.73, 38.48, 37.37),
    }


@given(
    st.lists(st.text("abé ", min_size=1, max_size=30), min_size=1, max_size=4),
    st.integers(4, 12),
    st.sampled_from(["none", "begin", "both"]),
)
@settings(max_examples=60)
def test_a_long_document_goes_on_in_further_rows(texts: list[str], length: int, anchor: Any) -> None:
    """Joined without their frames the rows are the documents, each byte once; nothing is cut."""
    tokenizer = load_tokenizer("bytes")
    rows = pack_texts(texts, tokenizer, "pad", length, anchor, go_on=True)
    batch = rows.take(np.arange(len(rows)))
    joined = []
    for x, valid, prefix in zip(batch.x.tolist(), batch.valid_len, batch.prefix_len, strict=True):
        assert valid > prefix + rows.suffix
        joined += x[prefix : valid - rows.suffix]
    chain = [token for text in texts for token in [*text.encode(), tokenizer.eot_id]]
    assert joined == chain
    assert rows.report.tokens == len(chain)
    assert rows.report.bytes == sum(len(text.encode()) for text in texts)
    assert rows.report.cut_tokens == 0


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["wrap", "pad"])
def test_every_token_and_byte_is_scored(ar_model: Model, data: Path, packing: Any) -> None:
    for name, outcome in measure(ar_model, data, packing=packing).items():
        got = numbers(outcome)
        size = sum(len(text.encode()) for text in TEXTS[name])
        assert got["bytes"] == got["text_bytes"] == size, name
        assert got["tokens"] == size + len(TEXTS[name]), name  # bytes are tokens; end-of-text after each
        assert got["tokens_cut"] == got["tokens_not_chosen"] == got["bytes_dropped"] == 0
        assert got["bits_per_byte"] == pytest.approx(got["nats"] / math.log(2) / size)
        assert got["ppl"] == pytest.approx(math.exp(got["nats"] / got["tokens"]))
        assert got["documents"] - got["empty_documents"] == len(TEXTS[name])
        assert (got["kind"], got["sign"]) == ("exact", "=")


def test_the_number_is_that_of_score(ar_model: Model, data: Path) -> None:
    """Another way to the same rows: `Model.score`, window by window, of an exact model."""
    for name, outcome in measure(ar_model, data, packing="pad").items():
        assert numbers(outcome)["nats"] == pytest.approx(ar_model.score(TEXTS[name]).nats, rel=1e-5), name


@pytest.mark.parametrize("packing", ["wrap", "pad"])
def test_the_batch_size_changes_nothing(model: Model, data: Path, packing: Any) -> None:
    """Rows of many lengths, so that batches are padded in other places."""
    sets = ["ptb", "wikitext", "ag_news"]
    ways = [measure(model, data, sets, packing=packing, metric=Perplexity(batch=batch)) for batch in (1, 2, 16)]
    for name in sets:
        first, *others = (numbers(way[name]) for way in ways)
        for other in others:
            for key in ("nats", "ppl", "bits_per_byte", "nats_per_token_ci95"):
                assert other[key] == pytest.approx(first[key], rel=1e-5), (name, key)
            assert other["identity"] == first["identity"]


def test_ptb_is_not_empty_at_1024(model: Model, data: Path) -> None:
    got = numbers(measure(with_length(model, 1024), data, ["ptb"])["ptb"])
    assert got["sequences"] == 1
    assert got["tokens"] == sum(len(text.encode()) + 1 for text in TEXTS["ptb"])


def test_what_is_not_chosen_is_counted(model: Model, data: Path) -> None:
    got = numbers(measure(model, data, ["pubmed"], metric=Perplexity(max_rows=1, num_samples=2))["pubmed"])
    assert got["sequences"] == 1
    assert got["tokens"] + got["tokens_not_chosen"] == sum(len(text) + 1 for text in TEXTS["pubmed"])
    assert got["bytes"] + got["bytes_not_chosen"] == got["text_bytes"]
    assert got["nats_per_token_ci95"] is not None  # two draws of the one row


def test_a_pseudo_likelihood_stands_in_no_ppl_column(model: Model, data: Path) -> None:
    masked = with_length(model, 32, objective=MLM())
    outcome = measure(masked, data, ["ptb"], metric=Perplexity(estimator="pseudo"))["ptb"]
    got = numbers(outcome)
    assert "ppl" not in got
    assert got["sign"] == "≈"
    bound = measure(model, data, ["pubmed"])["pubmed"]
    for outcomes in ([outcome], [outcome, bound]):
        rows = SUITE.layout.markdown(SUITE, "m", outcomes).split("\n")[2:]
        columns = [cell.strip() for cell in rows[0].split("|")]
        cells = [cell.strip() for cell in rows[2].split("|")]
        assert cells[columns.index("pseudo-PPL")] == f"≈ {got['pseudo_ppl']:.2f}"
        assert "PPL" not in columns or cells[columns.index("PPL")] == "—"


def test_a_table_fits_80_columns(model: Model, data: Path) -> None:
    for outcome in measure(model, data).values():
        got = numbers(outcome) | {"ppl": 999_999.0, "ppl_ci95": [899_999.0, 999_999.0], "tokens": 9_999_999}
        (line,) = SUITE.layout.lines(Outcome(set=outcome.set, numbers=got | {"tokens_cut": 99_999_999}))
        assert len(line) <= 80


# --- what fails, what goes on -----------------------------------------------------------------------------------------


def test_a_set_that_fails_stops_no_other(model: Model, data: Path) -> None:
    (data / "ptb/ptb.test.txt.xz").unlink()
    (data / "pubmed/abstracts.txt").write_text(" \n\n", encoding="utf-8")
    (data / "openwebtext/sample.jsonl").write_text("", encoding="utf-8")
    (data / "ag_news/test.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    found = measure(model, data)
    failures = {name: one.failure for name, one in found.items() if one.failure}
    assert failures.keys() == {"ptb", "pubmed", "openwebtext", "ag_news"}
    assert "ptb/ptb.test.txt is not in" in failures["ptb"]
    assert "blank" in failures["pubmed"]
    assert "empty" in failures["openwebtext"]
    assert "names no column 'description'" in failures["ag_news"]
    assert all(math.isfinite(numbers(found[name])["ppl"]) for name in ("wikitext", "lambada", "arxiv"))


def test_nan_in_one_set(fresh_model: Model, data: Path) -> None:
    """A network that breaks on one byte, which one set alone holds."""
    with torch.no_grad():
        embedding = next(p for p in fresh_model.denoiser.parameters() if p.shape[0] == fresh_model.tokenizer.num_ids)
        embedding[ord("@")] = math.nan
    metric = Perplexity(num_samples=8)
    found = measure(fresh_model, data, ["arxiv", "pubmed"], metric=metric)
    assert "no finite number" in found["arxiv"].failure
    assert math.isfinite(numbers(found["pubmed"])["ppl"])


def counted(monkeypatch: pytest.MonkeyPatch, stop_at: str = "") -> list[str]:
    """The sets that are measured from here on, by name; a kill before the one at `stop_at`."""
    begun: list[str] = []

    def evaluate(*args: Any, about: dict[str, Any], **options: Any) -> Any:
        begun.append(str(about["data"]).split("/")[0])
        if begun[-1] == stop_at:
            raise KeyboardInterrupt
        return unmask.evaluate(*args, about=about, **options)

    monkeypatch.setattr("unmask.evaluation.suites.likelihood.evaluate", evaluate)
    return begun


def test_a_killed_suite_goes_on(model: Model, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, sets = tmp_path / "out", ["ptb", "pubmed", "arxiv"]
    with monkeypatch.context() as patch:
        begun = counted(patch, stop_at="pubmed")
        with pytest.raises(KeyboardInterrupt):
            measure(model, data, sets, out=out)
        assert begun == ["ptb", "pubmed"]
    assert [path.name for path in out.iterdir()] == ["ptb.json"]
    kept = (out / "ptb.json").read_bytes()
    begun = counted(monkeypatch)
    said: list[str] = []
    found = measure(model, data, sets, out=out, say=said.append, metric=Perplexity(num_samples=2, batch=3))
    assert begun == ["pubmed", "arxiv"]
    assert (out / "ptb.json").read_bytes() == kept
    assert found["ptb"].taken
    assert said == ["PTB: measured already, its numbers are taken from ptb.json"]
    assert numbers(found["ptb"]) == json.loads(kept)


def test_what_has_changed_is_measured_again(
    fresh_model: Model, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, said = counted(monkeypatch), list[str]()
    how: dict[str, Any] = {"out": tmp_path / "out", "say": said.append}
    measure(fresh_model, data, ["ptb"], **how)
    measure(fresh_model, data, ["ptb"], **how, seed=1)
    assert said.pop().endswith("has changed: seed")
    with torch.no_grad():
        next(fresh_model.denoiser.parameters()).view(-1)[0] += 1e-3
    measure(fresh_model, data, ["ptb"], **how, seed=1, packing="pad")
    assert said.pop().endswith("has changed: model, packing")
    (data / "ptb/ptb.test.txt.xz").write_bytes(lzma.compress(b" a rat \n"))
    measure(fresh_model, data, ["ptb"], **how, seed=1, packing="pad")
    assert said.pop().endswith("has changed: data")
    assert begun == ["ptb"] * 4
    measure(fresh_model, data, ["ptb"], **how, seed=1, packing="pad")
    assert begun == ["ptb"] * 4


# --- the hub ----------------------------------------------------------------------------------------------------------


def test_by_name_without_the_package(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    way = SuiteRun(suite=SUITE)
    found = list(way.outcomes(model, SUITE.chosen(["lm1b", "openwebtext"], None)))
    assert "unmask[hf]" in found[0].failure
    assert "give --data-dir" in found[1].failure


def test_by_name(model: Model, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Datasets:
        @staticmethod
        def load_dataset(
            name: str, config: Any, *, split: str, streaming: bool, **more: str
        ) -> Iterator[dict[str, str]]:
            if "lambada" in name:
                raise ConnectionError("no network")
            assert (name, split, more) == ("billion-word-benchmark/lm1b", "test", {"revision": "refs/convert/parquet"})
            yield {"text": "The cat , who sat , ate ."}

    api = SimpleNamespace(dataset_info=lambda name, **more: SimpleNamespace(sha=f"{name} {more}"))
    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=lambda: api))
    assert [one.name for one in SUITE.chosen(None, None)] == [*LOCAL[:2], "lm1b", *LOCAL[2:-1]]
    got = numbers(measure(model, data, ["lm1b"])["lm1b"])  # by name also beside a folder, which never holds it
    assert got["text_bytes"] == len("The cat, who sat, ate.")
    failed = next(SuiteRun(suite=SUITE).outcomes(model, SUITE.chosen(["lambada"], None))).failure
    assert "EleutherAI/lambada_openai" in failed
    assert "no network" in failed


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(trained: Any, data: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    words = ["eval", str(trained.folder), "--suite", "zero-shot", "--data-dir", str(data), "--num-samples", "1"]
    words += ["--device", "cpu", "--out", str(out)]
    assert run(words) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [row[:11].strip() for row in shown[1:8]] == [SUITE.sets[name].title for name in LOCAL]
    assert all("≤" in row for row in shown[1:8])
    assert all(len(row) <= 80 or str(out) in row for row in shown)
    assert {path.name for path in out.iterdir()} == {*(f"{name}.json" for name in LOCAL), "zero-shot.md"}
    table = (out / "zero-shot.md").read_text(encoding="utf-8")
    assert "MDLM, quoted" in table
    assert "| = 82.05 | ≤ 100.09 | ≤ 95.26 |" in table
    assert "524B" in table
    assert table.count(f"Command: `{shlex.join(['unmask', *words])}`\n") == 1
    assert f"Made with unmask {unmask.__version__}" in table
    (data / "arxiv/arxiv.txt").unlink()
    assert run([*words, "--json"]) == 1
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert list(answer["failed"]) == ["arxiv"]
    assert answer["sets"].keys() == {*LOCAL} - {"arxiv"}
    assert answer["sets"]["ptb"]["made_with"]["command"] == shlex.join(["unmask", *words])  # not that of this call
    assert answer["sets"]["ptb"] == json.loads((out / "ptb.json").read_text(encoding="utf-8"))
    assert said.err.splitlines()[-1] == "unmask: 1 of 7 sets not measured: arXiv"
    assert "PTB: measured already" in said.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--suite", "zeroshot"], "did you mean 'zero-shot'?"),
        (["--suite", "zero-shot", "--sets", "ptb", "wikitxt"], "did you mean 'wikitext'?"),
        (["--suite", "zero-shot", "--data-dir", "nowhere"], "there is no folder nowhere"),
        (["--suite", "zero-shot", "--data", "a.txt"], "leave out --data"),
        (["--suite", "zero-shot", "--metric", "masked_accuracy"], "leave out --metric"),
        (["--suite", "zero-shot", "--field", "text"], "leave out --field"),
        (["--suite", "zero-shot", "--packing", "sentence"], "cuts lines"),
        (["--sets", "ptb"], "--sets belongs to a suite"),
        (["--out", "here"], "--out belongs to a suite"),
        (["--suite", "zero-shot", "--estimator", "T=1001x"], "estimator"),
        (["--suite", "zero-shot", "--length", "9999"], "beyond the model's window"),
    ],
)  # fmt: skip
def test_wrong_use_writes_nothing(
    words: list[str], sentence: str, trained: Any, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = [] if "--out" in words or "--suite" not in words else ["--out", "results"]
    assert run(["eval", str(trained.folder), *words, *out, "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert not said.out
    assert not list(tmp_path.iterdir())


def test_files_of_somebody_else_are_left_alone(trained: Any, data: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "ptb.json").write_text('{"mine": 1}', encoding="utf-8")
    words = ["eval", str(trained.folder), "--suite", "zero-shot", "--data-dir", str(data), "--device", "cpu"]
    assert run([*words, "--out", str(tmp_path)]) == 2
    assert "is no result of the suite" in capsys.readouterr().err
    assert run([*words, "--out", str(tmp_path / "ptb.json")]) == 2
    assert (tmp_path / "ptb.json").read_text(encoding="utf-8") == '{"mine": 1}'
    assert {path.name for path in tmp_path.iterdir()} == {"data", "ptb.json"}


def test_the_example_of_the_docs_runs(
    model: Model, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(data.parent)
    data.rename("sets")
    page = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {"model": model})
    assert capsys.readouterr().out.startswith("PTB ")
    assert Path("results/ptb.json").is_file()


def test_the_docs_have_every_set() -> None:
    page = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text(encoding="utf-8")
    for one in SUITE.sets.values():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{one.name}` |"))
        paths = [str(getattr(one.local.corpus, "path", ""))] if one.local else []
        names = [str(getattr(one.hub.corpus, "dataset", ""))] if one.hub else []
        assert all(f"`{word}`" in row for word in paths + names), one.name


def test_an_unknown_suite() -> None:
    with pytest.raises(UsageError, match="did you mean 'zero-shot'"):
        find_suite("zero-shots")


@pytest.mark.skipif("UNMASK_SETS" not in os.environ, reason="UNMASK_SETS names no folder with the sets' files")
def test_the_real_sets(model: Model) -> None:
    folder = Path(os.environ["UNMASK_SETS"])
    metric = Perplexity(max_rows=2, num_samples=1)
    found = measure(with_length(model, 1024), folder, metric=metric)
    for name in ("ptb", "wikitext", "lambada", "ag_news"):
        got = numbers(found[name])
        assert got["bytes_dropped"] == got["tokens_cut"] == 0
        assert got["text_bytes"] > 400_000, name
    assert numbers(found["wikitext"])["documents"] == 60
