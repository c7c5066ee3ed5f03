"""Editing: the rest stays letter by letter, lengths are tried side by side, the bound ranks them."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unmask
import unmask.text.editing
from unmask.cli import run
from unmask.corpora.text import Text
from unmask.data.tokenizers import Tokenizer, load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.errors import UsageError
from unmask.model import Model
from unmask.objectives.d3pm import D3PM
from unmask.objectives.mdlm import MDLM
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.posterior import Posterior
from unmask.text.editing import NUM_SAMPLES, find_span, length_range
from unmask.text.prompts import known_lengths, parse_gaps

Capture = pytest.CaptureFixture[str]
TEXT = "the cat sat on the mat"


def random_model(tokenizer: Tokenizer, length: int = 48, objective: Any = None) -> Model:
    """Random weights, the head's too: anything may be written."""
    torch.manual_seed(0)
    network = DiT(size="nano", hidden=16, blocks=1, heads=2).build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return Model(denoiser=network, tokenizer=tokenizer, objective=objective or MDLM(), length=length)


@pytest.fixture(scope="module")
def bpe(corpus_file: Path) -> Tokenizer:
    tokenizer = load_tokenizer("bpe:320", Text(path=str(corpus_file)))
    assert len(tokenizer.encode(" the")) == 1  # words bring their space
    return tokenizer


@pytest.fixture(scope="module")
def bpe_model(bpe: Tokenizer) -> Model:
    return random_model(bpe)


# --- where the span stands --------------------------------------------------------------------------------------------


def test_the_span_is_found_by_its_occurrence() -> None:
    assert find_span(TEXT, "cat") == (4, 7)
    assert [find_span(TEXT, "at", n)[0] for n in (1, 2, 3)] == [5, 9, 20]
    assert find_span("aaa", "aa", 2) == (1, 3)  # overlapping ones count
    with pytest.raises(UsageError, match="'at' occurs 3 times in the text: say which, occurrence 1 to 3"):
        find_span(TEXT, "at")
    with pytest.raises(UsageError, match="does not contain 'dog'"):
        find_span(TEXT, "dog")
    with pytest.raises(UsageError, match="nothing to replace"):
        find_span(TEXT, "")
    for n in (0, 4, -1):
        with pytest.raises(UsageError, match=f"there is no occurrence {n}"):
            find_span(TEXT, "at", n)


def test_the_range_of_lengths() -> None:
    assert list(length_range(None, 4)) == [4]
    assert list(length_range(5, 4)) == [5]
    assert list(length_range((3, 5), 4)) == [3, 4, 5]
    for bad in (0, (0, 3), (5, 3), (1, 10**9)):
        with pytest.raises(UsageError, match="the smaller number first"):
            length_range(bad, 4)


# --- what is kept -----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    before=st.text(st.characters(codec="utf-8"), max_size=5),  # at most 44 tokens in all, of a window of 48
    span=st.text(st.characters(codec="utf-8"), min_size=1, max_size=3),
    after=st.text(st.characters(codec="utf-8"), max_size=5),
    seed=st.integers(0, 3),
)
def test_the_rest_stays_byte_for_byte(bpe_model: Model, before: str, span: str, after: str, seed: int) -> None:
    """Whatever is written, also halves of characters, around any text."""
    text = before + span + after
    start, stop = find_span(text, span, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unmask.text.editing, "NUM_SAMPLES", 1)  # how they are ranked is no matter here
        edits = bpe_model.edit(text, span, occurrence=1, with_length=(1, 3), num=2, seed=seed)
    assert edits
    for edit in edits:
        assert edit.text == text[:start] + edit.replacement + text[stop:]
        assert 1 <= edit.length <= 3


@pytest.mark.parametrize("sampler", [None, Posterior(steps=8)], ids=["planned", "posterior"])
def test_the_decoded_row_begins_and_ends_with_the_rest(bpe_model: Model, sampler: Any) -> None:
    """Not by pasting alone: the ids of a byte-level vocabulary decode to the same text."""
    rows: list[list[int]] = []
    edits = bpe_model.edit(
        TEXT,
        "cat",
        with_length=(1, 4),
        num=3,
        sampler=sampler,
        watch=lambda step: rows.__setitem__(slice(None), step.tokens_BL.tolist()),
    )
    eot = bpe_model.tokenizer.eot_id
    decoded = [bpe_model.tokenizer.decode([id for id in row if id != eot]) for row in rows]
    assert len(decoded) == 12
    for text in decoded:
        assert text.startswith("the ")
        assert text.endswith(" sat on the mat")
    assert {edit.text for edit in edits} <= set(decoded)


def test_the_space_before_a_word_is_lent_to_the_gap(bpe_model: Model) -> None:
    """Else a word that brings its own space would stand behind two; the text keeps its space all the same."""
    seen: list[Any] = []
    bpe_model.edit(TEXT, "cat", with_length=2, watch=seen.append)
    tok = bpe_model.tokenizer
    before = tok.encode("the")
    written = {int(p): int(t) for step in seen for p, t in zip(step.position_N, step.token_N, strict=True)}
    assert min(written) == len(before)
    assert tok.decode([written[min(written)]]).startswith(" ")


def test_a_vocabulary_that_loses_letters_keeps_them_outside_the_span(tmp_path: Path) -> None:
    """BERT's lower-cases and drops spaces: the typed text is kept, not its decoding."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "dog", "##s", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    model = random_model(load_tokenizer(str(tmp_path)))
    for edit in model.edit("The  CAT sat.", "CAT", with_length=(1, 2), num=4):
        assert edit.text == f"The  {edit.replacement} sat."
        assert edit.replacement == edit.replacement.strip()


# --- how they are ranked ----------------------------------------------------------------------------------------------


def test_edits_are_ranked_by_the_bound_with_the_same_draws(model: Model) -> None:
    edits = model.edit(TEXT, "cat", with_length=(2, 5), num=4, seed=1)
    assert [e.nats for e in edits] == sorted(e.nats for e in edits)
    assert len({e.text for e in edits}) == len(edits) == 4
    for edit in edits:
        bound = model.score(edit.text, seed=0, num_samples=NUM_SAMPLES)
        assert (edit.nats, edit.tokens) == (bound.nats, bound.tokens)
    by_token = model.edit(TEXT, "cat", with_length=(2, 5), num=4, seed=1, rank="token")
    assert [e.nats_per_token for e in by_token] == sorted(e.nats_per_token for e in by_token)
    assert by_token[0].nats_per_token <= min(e.nats_per_token for e in edits)
    with pytest.raises(UsageError, match="unknown rank 'tokens'; did you mean 'token'"):
        model.edit(TEXT, "cat", rank="tokens")  # type: ignore[arg-type]


def test_a_candidate_does_not_depend_on_the_other_lengths(model: Model) -> None:
    """Row by row: what is written in 4 tokens is the same alone and among others."""
    alone = model.edit(TEXT, "cat", with_length=4, num=3, seed=2)
    among = model.edit(TEXT, "cat", with_length=(3, 5), num=9, seed=2)
    assert all(e.length == 4 for e in alone)
    first = model.edit(TEXT, "cat", with_length=4, num=1, seed=2)
    assert first[0].text in {e.text for e in alone}
    assert {e.text for e in alone} <= {e.text for e in model.edit(TEXT, "cat", with_length=4, num=9, seed=2)}
    assert {e.length for e in among} <= {3, 4, 5}


def test_a_model_without_zero_masking_edits_too() -> None:
    model = random_model(load_tokenizer("bytes"), objective=D3PM(steps=4))
    edit = model.edit(TEXT, "cat", with_length=(2, 3))[0]
    assert edit.text.startswith("the ")
    assert edit.text.endswith(" sat on the mat")


def test_a_constraint_holds_and_lengths_without_a_way_are_passed_over(model: Model) -> None:
    options = unmask.constraints.Choices(options=("dog", "mouse"))
    for seed in range(3):
        edits = model.edit(TEXT, "cat", with_length=(1, 8), num=4, constraint=options, seed=seed)
        assert {e.replacement for e in edits} == {"dog", "mouse"}
    with pytest.raises(UsageError, match="the constraint cannot hold in a gap of 2 tokens"):
        model.edit(TEXT, "cat", with_length=(1, 2), constraint=options)


def test_wrong_use_of_edit(model: Model, ar_model: Model) -> None:
    with pytest.raises(UsageError, match=r"the text takes 3\d tokens with a replacement of 13 .* window holds 32"):
        model.edit(TEXT, "cat", with_length=(2, 13))
    with pytest.raises(UsageError, match="at most 256 in all"):
        model.edit(TEXT, "cat", with_length=(1, 8), num=40)
    with pytest.raises(UsageError, match="give at least 1"):
        model.edit(TEXT, "cat", num=0)
    with pytest.raises(UsageError, match="cannot see what stands behind a gap"):
        ar_model.edit(TEXT, "cat")
    assert ar_model.edit(TEXT, "mat")[0].text.startswith("the cat sat on the ")


# --- gaps of unknown length -------------------------------------------------------------------------------------------


def test_known_lengths() -> None:
    assert known_lengths("no gap", 9) == ["no gap"]
    assert known_lengths("[MASK] and [MASK:2]", 9) == ["[MASK] and [MASK:2]"]
    assert known_lengths("[MASK:1..2]-[MASK:3..4]", 4) == [f"[MASK:{i}]-[MASK:{j}]" for i in (1, 2) for j in (3, 4)]
    with pytest.raises(UsageError, match="more than 3 texts"):
        known_lengths("[MASK:1..2]-[MASK:3..4]", 3)
    with pytest.raises(UsageError, match=r"\[MASK:4..3\]: the smaller number comes first"):
        known_lengths("[MASK:4..3]", 9)
    with pytest.raises(UsageError, match="a gap holds between 1"):
        known_lengths("[MASK:0..3]", 9)
    with pytest.raises(UsageError, match="more than 9 texts"):
        known_lengths("[MASK:1..1000000]" * 9, 9)
    with pytest.raises(UsageError, match="for fill alone"):
        parse_gaps("[MASK:2..3]", load_tokenizer("bytes"))
    with pytest.raises(UsageError, match="is no gap"):
        parse_gaps("[MASK:2..]", load_tokenizer("bytes"))
    with pytest.raises(UsageError, match="use fill for gaps"):
        Model.generate(random_model(load_tokenizer("bytes")), prompt="a [MASK:2..3]")


def test_a_gap_of_unknown_length_takes_the_smallest_bound(model: Model) -> None:
    seen: list[Any] = []
    filled = model.fill(["the [MASK:2..5] sat", "a [MASK:3]"], seed=3, watch=seen.append)
    candidates = {
        model.tokenizer.decode([id for id in row if id != model.tokenizer.eot_id])
        for row in seen[-1].tokens_BL[:4].tolist()
    }
    assert len(seen[-1].tokens_BL) == 5  # one batch
    assert filled[0] == min(candidates, key=lambda text: model.score(text, seed=0, num_samples=NUM_SAMPLES).nats)
    assert filled[0].startswith("the ")
    assert filled[0].endswith(" sat")
    # What stands beside it does not change a text of known lengths.
    assert filled[1] == model.fill(["x[MASK]", "a [MASK:3]"], seed=3)[1]
    assert model.fill("the [MASK:3..3] sat", seed=3) == model.fill("the [MASK:3] sat", seed=3)
    one_of = unmask.constraints.Choices(options=("cat", "horse"))
    assert model.fill("the [MASK:1..9] sat", constraint=one_of)[0] in ("the cat sat", "the horse sat")


def test_ways_that_are_alike_are_scored_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[Any] = []
    score = Model.score

    def noted(self: Model, texts: Any, **how: Any) -> Any:
        scored.append(texts)
        return score(self, texts, **how)

    monkeypatch.setattr(Model, "score", noted)
    greedy = unmask.samplers.LeftToRight(temperature=0)
    texts = model.fill(["the [MASK:2..3] sat"] * 3 + ["a [MASK:2]"], sampler=greedy)
    assert len(set(texts[:3])) == 1
    assert len(scored) == len(set(scored)) == 2


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_texts_or_the_scores(
    trained: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["edit", str(trained.folder), "--replace", "cat", "--with-length", "2..4", "--num", "3", "--device", "cpu"]
    assert run([*words, "--text", TEXT]) == 0
    expected = trained.model.edit(TEXT, "cat", with_length=(2, 4), num=3)
    assert capsys.readouterr() == ("\n\n".join(e.text for e in expected) + "\n", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXT))
    assert run([*words, "--text", "-", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [e["text"] for e in result["edits"]] == [e.text for e in expected]
    assert result["edits"][0].keys() == {"text", "replacement", "length", "nats", "tokens", "nats_per_token"}
    assert result["seed"] == 0
    words = ["edit", str(trained.folder), "--text", TEXT, "--replace", "at", "--occurrence", "2", "--device", "cpu"]
    assert run([*words, "--temperature", "0", "--steps", "inf"]) == 0
    greedy = trained.model.edit(TEXT, "at", occurrence=2, sampler=Ancestral(steps=None, temperature=0.0))
    assert capsys.readouterr().out == greedy[0].text + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replace", "dog"], "the text does not contain 'dog'"),
        (["--replace", "at"], "occurs 3 times in the text: say which"),
        (["--replace", "at", "--occurrence", "4"], "there is no occurrence 4"),
        (["--replace", ""], "nothing to replace"),
        (["--replace", "cat", "--with-length", "3..2"], "the smaller number first"),
        (["--replace", "cat", "--with-length", "few"], "'few' is no length: write 5, or 3..8"),
        (["--replace", "cat", "--with-length", "0"], "from 1 to"),
        (["--replace", "cat", "--with-length", "500"], "window holds 32"),
        (["--replace", "cat", "--rank", "best"], "'best' is not a choice"),
        (["--replace", "cat", "--trace", "no/such/folder/t"], "there is no folder no/such/folder"),
    ],
)
def test_errors_are_one_line(trained: Any, words: list[str], message: str, capsys: Capture) -> None:
    assert run(["edit", str(trained.folder), "--text", TEXT, "--device", "cpu", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


# --- a window around the gaps -----------------------------------------------------------------------------------------


def test_a_text_beyond_the_window_does_not_fail_the_others(model: Model) -> None:
    """Gaps are constrained in the window around them; the rest of a long text is kept."""
    digits = unmask.constraints.Regex(pattern="[0-9]+")
    long = "the cat sat. " * 6
    texts = [f"x = [MASK:3]{long}", "y = [MASK:2]", f"{long}z = [MASK:4], {long}", f"{long}[MASK:1..3]"]
    filled = model.fill(texts, constraint=digits)
    for asked, text in zip(texts, filled, strict=True):
        pattern = re.sub(r"\\\[MASK:.*?\\\]", "[0-9]+", re.escape(asked))
        assert re.fullmatch(pattern, text), (pattern, text)
    with pytest.raises(UsageError, match="held within one window"):
        model.fill(f"[MASK:2]{long}[MASK:2]", constraint=digits)


def test_the_gap_that_cannot_be_is_the_one_that_is_told(model: Model) -> None:
    two = unmask.constraints.Regex(pattern="[0-9]{2}")
    with pytest.raises(UsageError, match="a gap of 9 tokens"):
        model.fill("a[MASK:1..3]b[MASK:9]", constraint=two)
