"""The command line of sampling: what is written beside the texts never costs a text, hints name what is there."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from unmask.cli import run
from unmask.errors import UsageError
from unmask.model import Model


@pytest.fixture
def folder(trained: Any) -> str:
    return str(trained.folder)


def test_a_text_is_printed_though_its_view_cannot_be_saved(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    words = ["generate", folder, "--length", "12", "--steps", "3", "--device", "cpu"]
    assert run(words) == 0
    plain = capsys.readouterr().out
    monkeypatch.setattr("unmask.reporting.replay.atomic_text", full)
    assert run([*words, "--html", str(tmp_path / "a.html")]) == 1
    captured = capsys.readouterr()
    assert captured.out == plain
    assert "No space left" in captured.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_trace_that_breaks_off_is_told_behind_the_text(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", folder, "--length", "12", "--device", "cpu", "--trace", "/dev/full"]) == 1
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert "cannot write /dev/full: No space left on device" in captured.err


@pytest.mark.parametrize("flag", ["trace", "html", "svg"])
def test_a_file_that_cannot_be_is_told_before_the_work(
    flag: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "generate", lambda *_, **__: pytest.fail("worked"))
    for name, message in (
        ("", f"--{flag} needs the name of a file"),
        (str(tmp_path), "it is a folder"),
        (str(tmp_path / "no" / "a"), "there is no folder"),
    ):
        assert run(["generate", folder, "--device", "cpu", f"--{flag}", name]) == 2
        assert message in capsys.readouterr().err


def test_hints_are_of_this_command(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    def hint(*words: str) -> str:
        assert run([*words, "--device", "cpu"]) == 2
        return capsys.readouterr().err

    assert "did you mean 'must-contain'?" in hint("generate", folder, "--must-contian", "cat")
    assert "did you mean 'regex'?" in hint("fill", folder, "[MASK]", "--reggex", "a")
    assert "did you mean 'occurrence'?" in hint(
        "edit", folder, "--text", "the cat", "--replace", "cat", "--occurence", "1"
    )
    assert "'occurrence'" not in hint("generate", folder, "--occurence", "1")
    assert "did you mean 'top-k'?" in hint("generate", folder, "--top-kk", "1")


def test_a_bound_without_end_is_allowed_where_the_sampler_allows_it(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", folder, "--length", "8", "--sampler", "entropy_bounded", "--device", "cpu", "--gamma"]
    assert run([*words, "inf"]) == 0
    assert run([*words, "nan"]) == 2
    assert run(["generate", folder, "--temperature-end", "inf", "--device", "cpu"]) == 2


def test_fill_tells_the_bounds_of_the_lengths_it_tried(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "a.html"
    words = ["fill", folder, "the [MASK:1..3] sat", "a [MASK:2]", "--json", "--device", "cpu", "--html", str(page)]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    ranked = found["ranked"][0]
    assert found["ranked"][1] is None
    assert len(ranked) == 3
    assert [way["nats"] for way in ranked] == sorted(way["nats"] for way in ranked)
    assert ranked[0]["text"] == found["texts"][0]
    data = json.loads(re.findall(r'id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)[0])
    assert len(data["rows"]) == 4
    assert len(data["chosen"]) == 2
    assert data["chosen"][1] == 3


def test_the_page_of_an_edit_marks_the_best_row(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "a.html"
    words = ["edit", folder, "--text", "the cat sat", "--replace", "cat", "--with-length", "2..4", "--num", "2"]
    assert run([*words, "--json", "--device", "cpu", "--html", str(page)]) == 0
    edits = json.loads(capsys.readouterr().out)["edits"]
    data = json.loads(re.findall(r'id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)[0])
    masks = [data["rows"][row].count(data["mask"]) for row in data["chosen"]]
    assert masks == [edit["length"] for edit in edits]
    assert len(data["rows"]) == 6


@pytest.mark.parametrize("pattern", ["[ab]*a[ab]{30}", "(a|b)*a(a|b){40}"])
def test_a_pattern_of_astronomic_size_is_refused_soon(pattern: str) -> None:
    began = time.perf_counter()
    with pytest.raises(UsageError, match="too many states"):
        unmask.constraints.Regex(pattern=pattern).automaton(unmask.load_tokenizer("bytes"))
    assert time.perf_counter() - began < 30  # without a limit it takes all memory first


def test_a_models_particles_follow_the_score(model: Model) -> None:
    e = ord("e")

    def liked(z_BL: torch.Tensor) -> torch.Tensor:
        return 2.0 * (z_BL == e).sum(dim=1)

    plain = model.generate(6, 16, "th", seed=3)
    steered = model.particles(liked, 6, 16, "th", seed=3, crowd=16)
    assert all(text.startswith("th") for text in steered)
    assert sum(text.count("e") for text in steered) > sum(text.count("e") for text in plain)
    assert steered == model.particles(liked, 6, 16, "th", seed=3, crowd=16)
    ends = model.particles(liked, 2, 16, ["a", "b"], "!", crowd=4, greedy=True)
    assert [text[0] + text[-1] for text in ends] == ["a!", "a!", "b!", "b!"]
    with pytest.raises(UsageError, match="within one window"):
        model.particles(liked, length=model.length + 1)


# --- which model ---


@pytest.fixture
def loaded(trained: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that commands ask for; all get the small one."""
    names: list[str] = []

    def load(name: str, **_: Any) -> Model:
        names.append(name)
        return trained.model  # type: ignore[no-any-return]

    monkeypatch.setattr("unmask.model.load", load)
    return names


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--length", "8"],
        ["fill", "the [MASK] sat"],
        ["fill", "the [MASK] sat", "a [MASK:2]"],
        ["fill", "--seed", "1", "the [MASK] sat", "--json"],
        ["refine", "the cat sat"],
        ["edit", "--text", "the cat sat", "--replace", "cat"],
        ["eval", "--data", "CORPUS", "--max-rows", "2", "--batch", "2"],
    ],
)
def test_where_no_model_is_named_it_is_stories(
    words: list[str], loaded: list[str], corpus_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(corpus_file) if word == "CORPUS" else word for word in words] + ["--device", "cpu"]) == 0
    assert loaded == ["stories"]
    assert capsys.readouterr().out.strip()


def test_a_model_that_is_named_comes_first(
    folder: str, loaded: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["the [MASK] sat", "a [MASK:2]"]
    for given in ([folder, *texts], [folder, texts[0], "--json", texts[1]], ["stories", *texts], ["no-such", *texts]):
        assert run(["fill", *given, "--seed", "3"]) == 0
    assert loaded == [folder, folder, "stories", "no-such"]
    printed = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("the [MASK] sat"))
    assert run(["fill", "-", "--seed", "3"]) == 0
    assert loaded[-1] == "stories"
    assert printed.startswith(capsys.readouterr().out.strip())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fill"], 'give a text with a gap, as in unmask fill "The [MASK:2] sat."'),
        (["fill", "stories"], "give a text with a gap"),
        (["fill", "--json"], "give a text with a gap"),
        (["fill", "."], "give a text with a gap"),
        (["fill", "once upon a time"], "no gap in 'once upon a time': write [MASK]"),
        (["fill", "x" * 5000], "no gap in"),
        (["refine"], "give a finished text"),
        (["refine", "stories"], "give a finished text"),
        (["generate", "once upon a time"], "give the text as --prompt"),
        (["edit", "the cat sat", "--text", "x", "--replace", "x"], "give the text as --text"),
    ],
)
def test_a_missing_text_is_one_friendly_line(
    words: list[str], said: str, loaded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
