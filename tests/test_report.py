"""`unmask report`: what runs have written down as one page that loads nothing and trusts no text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import unmask
from unmask.cli import run
from unmask.evaluation.suites import find_suite
from unmask.evaluation.suites.differences import difference_of
from unmask.evaluation.suites.results import model_fingerprint
from unmask.model import load
from unmask.reporting.as_html import as_html
from unmask.reporting.as_markdown import as_markdown
from unmask.reporting.blocks import Block, Code, Document, Replay, Table, Text, Title
from unmask.reporting.metrics_file import read_metrics

Capture = pytest.CaptureFixture[str]
NASTY = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`|\x00\ud800"


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def tags(self) -> list[str]:
        return [tag for tag, _ in self.found]


@pytest.fixture
def copied(trained: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained.folder, tmp_path / "mdlm"))


def report(*words: str) -> int:
    return run(["report", *words, "--device", "cpu"])


def test_a_run_and_its_page(copied: Path, capsys: Capture) -> None:
    assert report(str(copied), "--format", "both", "--samples", "2", "--length", "8") == 0
    assert capsys.readouterr().out.split() == [str(copied / "report.html"), str(copied / "report.md")]
    page, text = ((copied / f"report.{ending}").read_text() for ending in ("html", "md"))
    best = min(p.valid for p in read_metrics(copied, "mdlm").points if p.valid is not None)
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    ppl = next(line["valid_ppl"] for line in lines if line.get("valid_nats_per_token") == best)
    for written in (page, text):
        assert f"≤ {ppl:,.2f}" in written
        assert "≤ 27.04" in written
        assert "quoted: Table 1" in written
        assert "≤ 23.21" in written
        assert "not measured here" in written
        assert f"unmask eval {copied} --num-samples 1 --max-rows 8" in written
        assert f"training: Made with unmask {unmask.__version__}" in written
    elements = Elements(page)
    assert elements.tags().count("iframe") == 1
    assert elements.tags().count("svg") == 16  # four figures of three panels, each with its key
    assert len(re.findall(r'class="c0 bar"', page)) == 2 * 3 * 4  # intervals of four validations
    assert set(re.findall(r"(?:against) (\w+):", page)) == {"steps", "tokens", "seconds"}
    ET.fromstring((copied / "report.svg").read_text())
    assert "![Learning curves](report.svg)" in text
    assert not list(copied.glob(".report*"))


def test_the_page_loads_nothing(copied: Path) -> None:
    assert report(str(copied), "--samples", "1", "--length", "8") == 0
    page = (copied / "report.html").read_text()
    elements = Elements(page)
    assert not {"link", "script", "img", "object", "embed", "base", "form"} & set(elements.tags())
    for _, attrs in elements.found:
        assert not {"src", "href", "style", "srcset", "action"} & attrs.keys()
        assert not [name for name in attrs if name.startswith("on")]
    outside = page.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?://|@import|url\((?!#)", outside)
    policy = next(a["content"] for t, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    frame = next(attrs for tag, attrs in elements.found if tag == "iframe")
    assert frame["sandbox"] == "allow-scripts"


def test_nothing_that_is_said_is_taken_for_markup() -> None:
    blocks: list[Block] = [
        Title(NASTY),
        Text(NASTY),
        Table([NASTY], [[NASTY]], NASTY),
        Code(NASTY, NASTY),
        Code("```\n", NASTY, True),
    ]
    page = as_html(Document(NASTY, [*blocks, Replay(NASTY, f"<script>1</script><style>2</style>{NASTY}")]))
    assert not {"script", "img"} & set(Elements(page).tags())
    page.encode("utf-8")
    assert "\x00" not in page
    text = as_markdown(Document(NASTY, blocks), "report.svg")
    text.encode("utf-8")
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "alert" in outside
    assert not re.search(r"<script|<img", outside)
    assert "````text\n```\n\n````" in text  # a fence that the text cannot end


def test_names_and_samples_that_are_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("<script>alert(1)<") / "script>"
    folder.mkdir(parents=True)
    lines = [
        {"step": 0, "valid_nats_per_token": 5.0, "valid_ppl": 148.4, "valid_ppl_ci95": NASTY},
        {"step": 2, "loss": 3.0, "lr": NASTY, "seconds": -1, "tokens": 10**400},
        {"step": 2, "sample": NASTY},
        {"step": 2, "note": NASTY},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.json").write_text(json.dumps({"tokenizer": NASTY, "objective": NASTY, "data": {"train": NASTY}}))
    assert report(str(folder), "--format", "both", "--out", "out") == 0
    page = Path("out/report.html").read_text()
    assert not {"script", "img", "iframe"} & set(Elements(page).tags())
    assert "&lt;script&gt;alert(1)" in page
    assert "The recipe cannot be read" in page
    assert "The model cannot be read" in page
    assert "script-src 'none'" in page
    ET.fromstring(Path("out/report.svg").read_text())


def test_damage_is_said_in_its_place(copied: Path) -> None:
    metrics = copied / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 61, "loss": NaN, "lr": 1e-3, "seconds": 9.0}\nnot json\n[1]\n{"step": 62, "lo')
    (copied / "model" / "model.safetensors").write_bytes(b"cut")
    assert report(str(copied)) == 0
    page = (copied / "report.html").read_text()
    for said in (
        "is cut off",
        "2 lines of metrics.jsonl",
        "not a finite number in 1 lines",
        "The model cannot be read",
    ):
        assert said in page
    metrics.unlink()
    (copied / "recipe.json").write_text("{")
    assert report(str(copied), "--format", "both") == 0
    page = (copied / "report.html").read_text()
    for said in ("There are no curves of this run", "The recipe cannot be read", "no validation"):
        assert said in page


def test_what_intervals_are_over_is_said(tmp_path: Path) -> None:
    def page(**counts: dict[str, Any]) -> str:
        for name, more in counts.items():
            (tmp_path / name).mkdir(exist_ok=True)
            line = {"step": 1, "valid_nats_per_token": 2.0, "valid_nats_per_token_ci95": [1.5, 2.5]} | more
            (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        folders = [str(tmp_path / name) for name in counts]
        assert report(*folders, "--out", str(tmp_path / "out")) == 0
        return (tmp_path / "out" / "report.html").read_text()

    rows, texts = {"valid_sequences": 8}, {"valid_sequences": 8, "valid_texts": 3}
    for counts, said in (
        ({"one_document": rows}, "over rows"),
        ({"texts": texts}, "over the 3 texts in which rows begin"),
        ({"row": {"valid_sequences": 1, "valid_nats_per_token_ci95": None}}, "none (one row, drawn once)"),
        ({"a": rows, "b": rows, "c": texts}, "a, b over rows; c over the 3 texts in which rows begin"),
        ({"a": {"valid_sequences": True}}, "over what is not recorded"),
    ):
        text = page(**counts)
        assert text.count(f"95% intervals: {said}") == 2  # beside the numbers and under the curve
        assert "over texts" not in text


def test_no_run_is_one_sentence(tmp_path: Path, trained: Any, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    good = str(trained.folder)
    wrong: list[list[str]] = [[str(tmp_path / "none")], [str(tmp_path / "empty")], [str(trained.folder / "model")], []]
    wrong += [[good, "--samples", "5"], [good, "--length", "0"], [good, str(tmp_path / "file")]]
    for words in wrong:
        assert report(*words, "--out", str(tmp_path / "out")) == 2, words
        said = capsys.readouterr().err
        assert said.startswith("unmask: ")
        assert said.count("\n") == 1
        assert not (tmp_path / "out").exists()
    assert report(good, "--out", str(tmp_path / "file")) == 2
    assert report(good, "--out", str(tmp_path / "page.html")) == 2


def test_several_runs_share_their_pictures(trained: Any, trained_ar: Any, tmp_path: Path) -> None:
    assert report(str(trained.folder), str(trained_ar.folder), "--samples", "0", "--out", str(tmp_path)) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<iframe" not in page
    assert 'class="c1 line" stroke-dasharray="7 3"' in page
    assert "mdlm" in page
    assert re.search(r"<th scope=\"row\">ar \(ar\)</th><td>= \d", page)  # exact, and the other is a bound
    assert re.search(r"<th scope=\"row\">mdlm \(mdlm\)</th><td>≤ \d", page)


def suite_results(folder: Path, fingerprint: str) -> Path:
    """As a suite keeps them."""
    folder.mkdir()
    protocol = {"packing": "wrap", "anchor": "none", "given": "nothing", "length": 32, "estimator": "count"}
    protocol |= {"draws_per_row": 4, "seed": 0, "tokenizer": "bytes", "device": "cpu", "dtype": "float32"}
    protocol |= {"unmask": "0", "differs": ""}
    numbers = {"suite": "zero-shot", "kind": "upper bound", "sign": "≤", "ppl": 77.25, "ppl_ci95": [70.0, 80.0]}
    numbers |= {"nats_per_token": 4.3, "bits_per_byte": None, "tokens": 9, "tokens_cut": 0, "tokens_not_chosen": 0}
    identity = {"model": fingerprint, "max_rows": None, "seed": 0, "num_samples": 4, "estimator": "count", "length": 32}
    made = {"command": "unmask eval mdlm --suite zero-shot --data-dir 'my sets'", "unmask": "0", "machine": "an H200"}
    numbers |= {"protocol": protocol, "identity": identity, "made_with": made}
    (folder / "ptb.json").write_text(json.dumps(numbers))
    (folder / "lambada.json").write_text(json.dumps({"suite": "zero-shot", "ppl": "x", "made_with": {"command": 3}}))
    return folder


def test_results_of_a_suite(copied: Path, tmp_path: Path) -> None:
    given = suite_results(tmp_path / "given", model_fingerprint(load(copied, device="cpu")))
    # lambada.json is damaged and of no model, so that the folder is not the model's as a whole
    (given / "lambada.json").unlink()
    suite_results(copied / "zero-shot", "another model's")
    other = suite_results(tmp_path / "other", "another model's")
    words = ["--samples", "0", "--results", str(given), str(other), str(tmp_path / "none")]
    assert report(str(copied), *words) == 0
    page = (copied / "report.html").read_text()
    assert page.count("≤ 77.25") == 2
    assert page.count("of other weights than the run&#x27;s model has now") == 1
    assert f"The results in {other} are of other weights" in page
    assert f"The results in {tmp_path / 'none'} are not there" in page
    assert "LAMBADA was not measured: lambada.json is damaged" in page
    assert page.count("unmask eval mdlm --suite zero-shot --data-dir &#x27;my sets&#x27;") == 1  # as it was called
    assert "Made with unmask 0 on an H200." in page
    assert f"{find_suite('zero-shot').sets['ptb'].quoted['MDLM']:.2f}" in page


def test_differences_of_a_suite(copied: Path, tmp_path: Path) -> None:
    given = suite_results(tmp_path / "given", model_fingerprint(load(copied, device="cpu")))
    (given / "lambada.json").unlink()
    kept = json.loads((given / "ptb.json").read_text())
    apart = difference_of("nats per token", "nats per token", 4.0, 3.5, (0.25, 0.75), sign="≤")
    both = {"against": {}, "differences": [apart]}
    for identity, there in (({"against": {"model": "f" * 64}}, True), ({}, False)):
        identity = {**kept["identity"], **identity}
        (given / "ptb.json").write_text(json.dumps(kept | both | {"identity": identity}))
        assert report(str(copied), "--samples", "0", "--results", str(given), "--format", "md") == 0
        page = (copied / "report.md").read_text()
        assert ("− the model of sha256 ffffffffffff" in page) == there
        assert ("| 4.0000 | 3.5000 | ≤ +0.5000 | +0.2500 – +0.7500 | visible |" in page) == there
        assert ("ptb.json is damaged" in page) != there


def test_results_of_a_suite_of_written_texts(copied: Path, tmp_path: Path) -> None:
    fingerprint = model_fingerprint(load(copied, device="cpu"))
    protocol = {"asked": "The source is given", "source": "a.de → a.en", "sampler": "Ancestral(steps=4)", "seed": 0}
    protocol |= {"device": "cpu", "dtype": "float32", "unmask": "0", "notes": ["A note on style"]}
    score = {"of": "all", "name": "BLEU", "value": 31.25, "ci95": [30.0, 32.5], "n": 1000, "signature": "nrefs:1"}
    identity = {"model": fingerprint, "asked": '{"name": "ancestral"}', "lengths": 3, "draws": 8, "seed": 0}
    kept = {"suite": "translation", "texts": 1000, "left_out": "", "scores": [score], "protocol": protocol}
    (copied / "bleu").mkdir()
    (copied / "bleu/flickr2016.json").write_text(json.dumps(kept | {"identity": identity}))
    (copied / "bleu/flickr2017.json").write_text(json.dumps({"suite": "translation", "scores": 3}))
    assert report(str(copied), "--samples", "0", "--format", "md") == 0
    page = (copied / "report.md").read_text()
    assert "| Flickr 2016 | all | BLEU | 31.25 | 30.00 – 32.50 | 1,000 |" in page
    assert "BLEU is sacrebleu's: nrefs:1" in page
    assert "A note on style." in page
    assert "flickr2017.json is damaged" in page


def test_the_replay_plays_in_a_browser(copied: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if chromium is None:
        pytest.skip("NO BROWSER: the report was NOT looked at; install chromium to run this test")
    assert report(str(copied), "--samples", "1", "--length", "8") == 0
    page = copied / "report.html"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={copied.parent / 'profile'}"]
    command += ["--enable-logging=stderr", "--v=0", "--window-size=390,8000", f"--screenshot={copied / 'page.png'}"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Content Security Policy" not in done.stderr  # it complains on the console where anything is refused
    assert (copied / "page.png").stat().st_size > 10_000
