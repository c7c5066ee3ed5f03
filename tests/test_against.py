"""Two models on the same texts: the difference is theirs, paired, and what cannot be compared is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from tiny import Trained
from tiny_encoders import TEXTS as ENCODER_TEXTS
from tiny_encoders import save_encoder
from unmask.cli import run
from unmask.data.packing import pack_texts
from unmask.data.tokenizers import load_tokenizer
from unmask.errors import UsageError
from unmask.evaluation.against import Other, Pair, difference, evaluate_against, shared_by
from unmask.evaluation.bound import Bound
from unmask.metrics.perplexity import Perplexity
from unmask.model import Model
from unmask.objectives.mlm import MLM
from unmask.pretrained import read_pretrained

TEXTS = ["the cat sat on the mat", "a dog ran", "no rat ate the oat cake", "the sun set"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["eval", *words, "--json", "--device", "cpu"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_is_the_difference_of_what_each_gives_alone(
    trained: Trained, trained_ar: Trained, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = str(trained.folder), str(trained_ar.folder)
    how = ["--data", str(texts), "--packing", "pad", "--num-samples", "8"]
    found = told(capsys, mine, "--against", other, *how)
    alone = [told(capsys, name, *how) for name in (mine, other)]
    apart = found["difference"]
    assert found["ppl"] == alone[0]["ppl"]
    assert found["against"].pop("model") == other
    assert found["against"] == {key: alone[1][key] for key in alone[1].keys() - {"made_with"}}
    assert apart["value"] == pytest.approx(alone[0]["nats_per_token"] - alone[1]["nats_per_token"])
    assert (apart["unit"], apart["kinds"]) == ("nats per token", ["upper bound", "exact"])
    # of the exact value nothing is drawn: given the texts all of the spread is the bound's own
    width = apart["ci95_given_texts"][1] - apart["ci95_given_texts"][0]
    lo, hi = alone[0]["nats_per_token_ci95_given_texts"]
    assert width == pytest.approx(hi - lo)
    back = told(capsys, other, "--against", mine, *how)["difference"]
    assert back["value"] == pytest.approx(-apart["value"])
    assert run(["eval", mine, "--against", other, *how, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"against     {other}" in said
    assert f"difference  ≤ {apart['value']:+.4f} nats/token" in said
    assert "an upper bound, of" in said


def test_draws_go_on_until_the_difference_is_narrow(trained: Trained, model: Model, trained_ar: Trained) -> None:
    """What two bounds have in common cancels: so narrow a difference takes fewer draws than so narrow a bound."""
    rows = pack_texts(TEXTS, model.tokenizer, "pad", 32)
    other, exact = unmask.load(trained.folder), unmask.load(trained_ar.folder)
    with torch.no_grad():
        for parameter in other.denoiser.parameters():
            parameter.mul_(1.02)
    first = unmask.load(trained.folder)
    own = rows, first.tokenizer
    asked = Perplexity(precision=0.04)
    ours, theirs, apart = evaluate_against(first, rows, Other.of(other, rows, own), asked)
    assert apart.draws_half <= 0.04
    for one in (ours, theirs):
        assert (one.protocol["precision_of"], one.protocol["precision_reached"]) == ("the difference", True)
    alone = unmask.evaluate(first, rows, metric=asked)
    assert ours.protocol["draws_per_row"] == theirs.protocol["draws_per_row"] < alone.protocol["draws_per_row"]
    # of a model of which nothing is drawn there is one reading, however many the other one takes
    ours, theirs, apart = evaluate_against(first, rows, Other.of(exact, rows, own), Perplexity(precision=0.1))
    assert theirs.bound is not None
    assert ours.bound is not None
    assert theirs.bound.draws_BS.shape[1] == theirs.protocol["draws_per_row"] == 1
    assert apart.draws_half == pytest.approx(ours.bound.draws_half)
    assert apart.draws_half <= 0.1
    assert unmask.evaluate(exact, rows).value == theirs.value


def test_further_groups_leave_what_is_read_once_as_it_is() -> None:
    """An exact value has one column however many draws the other one has."""
    tokens_B = torch.tensor([3, 4])
    exact = Bound(draws_BS=torch.tensor([[5.0], [6.0]]), tokens_B=tokens_B, kind="exact")
    first, more = (Bound(draws_BS=torch.rand(2, k), tokens_B=tokens_B) for k in (2, 3))
    pair = Pair(exact, first, once=(True, False)).with_more(Pair(exact, more, once=(True, False)))
    assert (pair.ours.draws_BS.shape, pair.theirs.draws_BS.shape) == ((2, 1), (2, 5))
    assert pair.draws_half == pytest.approx(first.with_more(more).draws_half)
    pair = Pair(first, exact, once=(False, True)).with_larger(Pair(first, exact, once=(False, True)))
    assert (pair.ours.draws_BS.shape, pair.theirs.draws_BS.shape) == ((2, 2), (2, 1))


def test_an_estimator_is_of_the_model_that_has_it(
    trained: Trained, trained_ar: Trained, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = str(trained.folder), str(trained_ar.folder)
    how = ["--data", str(texts), "--packing", "pad", "--estimator", "T=4"]
    both = told(capsys, mine, "--against", other, *how)
    assert both["ppl"] == told(capsys, mine, *how)["ppl"]
    assert both["against"]["ppl"] == told(capsys, other, *how[:-2])["ppl"]
    assert run(["eval", other, "--against", other, *how, "--device", "cpu"]) == 2
    assert "none of AR" in capsys.readouterr().err


def test_a_model_is_as_good_as_itself(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(trained.folder)
    apart = told(capsys, name, "--against", name, "--max-rows", "4")["difference"]
    assert (apart["value"], apart["ci95"], apart["visible"]) == (0.0, [0.0, 0.0], False)
    assert apart["ci95_given_texts"] == [0.0, 0.0]


def test_other_tokens_are_compared_in_bits_per_byte_of_whole_texts(
    trained: Trained, model: Model, corpus_file: Path, tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spells = load_tokenizer("bpe:280", unmask.corpora.Text(path=str(corpus_file)))
    network = unmask.denoisers.DiT(hidden=16, blocks=1, heads=2).build(num_ids=spells.num_ids, mask_id=spells.mask_id)
    other = Model(denoiser=network, tokenizer=spells, objective=model.objective, length=model.length)
    other.save(tmp_path / "other")
    mine, theirs = str(trained.folder), str(tmp_path / "other")
    found = told(capsys, mine, "--against", theirs, "--data", str(texts), "--packing", "pad")
    apart = found["difference"]
    assert apart["unit"] == "bits per byte"
    assert apart["value"] == pytest.approx(found["bits_per_byte"] - found["against"]["bits_per_byte"])
    for words, sentence in (
        (["--data", str(texts), "--packing", "wrap", "--length", "8"], "text 1 is not the same for both models"),
        ([], "give both the same --data"),
    ):
        assert run(["eval", mine, "--against", theirs, *words, "--device", "cpu"]) == 2
        assert sentence in capsys.readouterr().err


def test_rows_that_differ_are_refused(model: Model) -> None:
    one, two = (pack_texts(texts, model.tokenizer, "pad", 32) for texts in (TEXTS, TEXTS[:3]))
    three = pack_texts(TEXTS[::-1], model.tokenizer, "pad", 32)
    assert shared_by((one, model.tokenizer), (one, model.tokenizer)).unit == "nats per token"
    for other, row in ((two, 4), (three, 1)):
        with pytest.raises(UsageError, match=f"row {row} is not the same"):
            shared_by((one, model.tokenizer), (other, model.tokenizer))


def test_texts_that_end_in_no_token_of_their_own_are_compared(tmp_path: Path) -> None:
    """Of an encoder's vocabulary, whose rows have an end that is given: where a text goes on is found in the texts."""
    pytest.importorskip("transformers")
    save_encoder("roberta", tmp_path / "roberta")
    spells, letters = read_pretrained(str(tmp_path / "roberta")).tokenizer, load_tokenizer("bytes")
    assert not spells.ends_texts
    texts = [f"{text} é{number}" for number, text in enumerate(ENCODER_TEXTS)]
    for length, on in ((96, False), (96, True), (12, True)):
        ours = pack_texts(texts, letters, "pad", length, go_on=on)
        theirs = pack_texts(texts, spells, "pad", length, "both", go_on=on)
        shared = shared_by((ours, letters), (theirs, spells))
        assert shared.texts is not None
        assert shared.count_B is not None
        assert shared.count_B.tolist() == [len(text.encode()) for text in texts]
        assert [len(of_B) for of_B in shared.texts] == [len(ours), len(theirs)]
        back = shared_by((theirs, spells), (ours, letters))
        assert back.count_B is not None
        assert back.count_B.tolist() == shared.count_B.tolist()
        assert "Of the first model the end of a text is a token that counts" in shared.note
        assert "Of the second model the end" in back.note
        for other in (texts[1:], [*texts[:-1], "the cat"], texts[:-1]):
            with pytest.raises(UsageError, match="is not the same for both models"):
                shared_by((ours, letters), (pack_texts(other, spells, "pad", length, "both", go_on=on), spells))


def test_a_long_text_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A book has thousands of rows; decoding it anew at each of them would take their square."""
    pytest.importorskip("transformers")
    save_encoder("roberta", tmp_path / "roberta")
    spells, letters = read_pretrained(str(tmp_path / "roberta")).tokenizer, load_tokenizer("bytes")
    texts = [" ".join(ENCODER_TEXTS) * 4, "é " * 40, ENCODER_TEXTS[0]]
    ours = pack_texts(texts, letters, "pad", 16, go_on=True)
    theirs = pack_texts(texts, spells, "pad", 12, "both", go_on=True)
    decoded: list[int] = []
    for tokenizer in (letters, spells):
        decode = tokenizer.decode

        def counted(ids: Any, decode: Any = decode) -> str:
            decoded.append(len(list(ids)))
            return str(decode(ids))

        monkeypatch.setattr(tokenizer, "decode", counted)
    shared = shared_by((ours, letters), (theirs, spells))
    assert shared.count_B is not None
    assert shared.count_B.tolist() == [len(text.encode()) for text in texts]
    assert len(decoded) == 2 * len(texts)
    assert sum(decoded) <= ours.report.tokens + theirs.report.tokens


def test_two_pseudo_likelihoods_have_no_noise_of_draws(
    model: Model, ar_model: Model, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objective = MLM()
    masked = Model(denoiser=model.denoiser, tokenizer=model.tokenizer, objective=objective, length=model.length)
    masked.save(tmp_path / "masked")
    ar_model.save(tmp_path / "ar")
    name, how = str(tmp_path / "masked"), ["--data", str(texts), "--estimator", "pseudo", "--precision", "0.1"]
    found = told(capsys, name, "--against", name, *how)
    assert found["difference"]["ci95_given_texts"] == [0.0, 0.0]
    assert found["protocol"]["precision_reached"]
    assert run(["eval", name, "--against", name, *how, "--device", "cpu"]) == 0
    assert "nan" not in capsys.readouterr().out
    measured: list[int] = []
    rows = pack_texts(TEXTS, model.tokenizer, "pad", 32)
    other = Other.of(ar_model, rows, (rows, model.tokenizer))
    with pytest.raises(UsageError, match="no bound"):  # at once, and not after both were read
        evaluate_against(masked, rows, other, Perplexity(estimator="pseudo"), progress=lambda *at: measured.append(1))
    assert measured == []


def test_numbers_that_are_not_finite_have_no_interval() -> None:
    tokens_B = torch.tensor([2, 2])
    fine = Bound(draws_BS=torch.ones(2, 2), tokens_B=tokens_B)
    broken = Bound(draws_BS=torch.full((2, 2), math.inf), tokens_B=tokens_B)
    told = difference(fine, broken, "nats per token").summary()
    assert (told["value"], told["ci95"], told["ci95_given_texts"], told["visible"]) == (None, None, None, False)
    one = difference(
        *(Bound(draws_BS=torch.tensor([[x]]), tokens_B=tokens_B[:1]) for x in (1.0, 2.0)), "nats per token"
    )
    assert (one.summary()["ci95"], one.summary()["ci95_given_texts"], one.visible) == (None, None, False)
    guess = Bound(draws_BS=torch.ones(2, 2), tokens_B=tokens_B, kind="pseudo")
    with pytest.raises(UsageError, match="pseudo"):
        difference(fine, guess, "nats per token")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--metric", "masked_accuracy"], "leave out --metric"),
        (["--length", "33", "--data", "stdlib"], "beyond the window of"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    trained: Trained, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["eval", str(trained.folder), "--against", str(trained.folder), *words]) == 2
    assert said in capsys.readouterr().err
