"""Pairs of texts in encoders that were pretrained on pairs: token types as transformers' own tokenizer gives them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from made_tasks import QUICK, write_tsv
from tiny_encoders import FAMILIES, save_encoder
from unmask.cli import run as command
from unmask.denoisers.encoder import EncoderNetwork
from unmask.denoisers.ragged import vectors_at
from unmask.finetuning.classifier import load_classifier
from unmask.finetuning.config import FinetuneConfig, TaskData
from unmask.finetuning.examples import Example
from unmask.finetuning.rows import TaskBatch, make_rows
from unmask.finetuning.run import finetune
from unmask.heads.task import Task
from unmask.model import Model, load

transformers: Any = pytest.importorskip("transformers")

PAIRS = [("the cat sat on the mat", "a dog ran"), ("a hat", "the sun had set and the day was done")]
TASK = Task(labels=("no", "yes"), pairs=True, length=40)


def opened(family: str, folder: Path, **changes: Any) -> tuple[Model, Any]:
    """The encoder as a model of ours, and as transformers has it."""
    theirs = save_encoder(family, folder / family, **changes)
    assert command(["import", f"hf:{folder / family}", str(folder / "model")]) == 0
    return load(folder / "model", device="cpu"), theirs


def batch_of(model: Model, *pairs: tuple[str, str], **changes: Any) -> TaskBatch:
    task = dataclasses.replace(TASK, **changes)
    rows = make_rows([Example(a, b if task.pairs else None, None, "") for a, b in pairs], task, model)
    return rows.batch(range(len(rows)))


def logits_of(network: Any, batch: TaskBatch, second_BL: Tensor | None) -> Tensor:
    """[N, I] of all positions that are no padding, for the ids that are ever predicted."""
    flat_N = batch.valid_BL.flatten().nonzero().squeeze(1)
    h_ND = vectors_at(network, batch.ids_BL, None, flat_N, valid_BL=batch.valid_BL, second_BL=second_BL)
    assert isinstance(network, EncoderNetwork)
    return network.head(h_ND)[:, network.closed_I == 0]


@pytest.mark.parametrize("family", ["bert", "electra"])
@torch.no_grad()
def test_pairs_are_read_as_by_transformers(family: str, tmp_path: Path) -> None:
    model, theirs = opened(family, tmp_path)
    encoded = transformers.AutoTokenizer.from_pretrained(tmp_path / family)(
        *map(list, zip(*PAIRS, strict=True)), return_tensors="pt", padding=True
    )
    batch = batch_of(model, *PAIRS)
    assert torch.equal(batch.valid_BL.long(), encoded["attention_mask"])
    assert torch.equal(batch.ids_BL[batch.valid_BL], encoded["input_ids"][batch.valid_BL])
    assert torch.equal(batch.second_BL.long(), encoded["token_type_ids"])
    assert TASK.tells_pairs(model.denoiser)
    network: Any = model.denoiser
    want_NI = theirs(**encoded).logits[batch.valid_BL][:, network.closed_I == 0]
    torch.testing.assert_close(logits_of(network, batch, batch.second_BL), want_NI, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits_of(network, batch, None), want_NI, atol=1e-2)  # what both texts as one would give


@torch.no_grad()
def test_a_deberta_with_types_is_told_them(tmp_path: Path) -> None:
    """Published ones have none, as the tiny one, whose vocabulary transformers does not open."""
    model, theirs = opened("deberta-v2", tmp_path, type_vocab_size=2)
    batch = batch_of(model, *PAIRS)
    assert TASK.tells_pairs(model.denoiser)
    asked = {"input_ids": batch.ids_BL, "attention_mask": batch.valid_BL, "token_type_ids": batch.second_BL.long()}
    want_NI = theirs(**asked).logits[batch.valid_BL][:, model.denoiser.closed_I == 0]  # type: ignore[index]
    torch.testing.assert_close(logits_of(model.denoiser, batch, batch.second_BL), want_NI, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in ("bert", "electra")])
def test_the_other_families_tell_no_pairs(family: str, tmp_path: Path) -> None:
    """RoBERTa's tokenizer gives type 0 to both texts, also where its model has rows for more."""
    model, _ = opened(family, tmp_path)
    assert not TASK.tells_pairs(model.denoiser)


def test_one_type_cannot_tell_two_texts_and_single_texts_are_of_one(tmp_path: Path) -> None:
    assert not TASK.tells_pairs(opened("bert", tmp_path / "one", type_vocab_size=1)[0].denoiser)
    model, _ = opened("bert", tmp_path / "two")
    single = dataclasses.replace(TASK, pairs=False)
    assert not single.tells_pairs(model.denoiser)
    assert not batch_of(model, *PAIRS, pairs=False).second_BL.any()


def test_the_second_text_begins_after_what_stands_between_them(tmp_path: Path) -> None:
    model, _ = opened("bert", tmp_path)
    pair, encode = ("the cat sat", "a dog"), model.tokenizer.encode
    batch = batch_of(model, pair, between="and then")
    first = len(model.begin) + len(encode(pair[0])) + len(encode("and then"))
    assert batch.second_BL[0].nonzero().flatten().tolist() == list(range(first, first + len(encode(pair[1])) + 1))
    short = batch_of(model, ("the cat sat on the mat", "a dog"), length=9)  # both texts are cut
    assert short.ids_BL.shape == (1, 9)
    begins = int(short.second_BL[0].nonzero()[0])
    assert int(short.ids_BL[0, begins - 1]) == model.end[0]
    assert short.ids_BL[0, begins:-1].tolist() == encode("a dog")[: 8 - begins]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, FinetuneConfig, Path]:
    """A fine-tuning on pairs: its folder, the encoder that it began from, its options, and the base model."""
    folder = tmp_path_factory.mktemp("tuned")
    _, theirs = opened("bert", folder)
    rows = [(a, b, "yes" if a == b else "no") for a in ("cat", "dog", "sun") for b in ("cat", "dog", "sun")] * 3
    data = TaskData(train=write_tsv(folder / "train.tsv", [("text", "other", "label"), *rows]), pair="other")
    config = FinetuneConfig(
        out=str(folder / "out"), data=data, optim=QUICK, batch=9, epochs=2, precision="fp32", seeds=1, length=40
    )
    return finetune(folder / "model", config, device="cpu").folder, theirs, config, folder / "model"


def their_answers(theirs: Any, folder: Path, *, types: bool) -> Tensor:
    """[2, 2] probabilities of a classifier's folder for PAIRS, by transformers' network and tokenizer with its weights;
    the head alone is ours."""
    model = load_classifier(folder, device="cpu").model
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.parent / "bert")
    weights: Any = model.denoiser.encoder  # type: ignore[union-attr]
    theirs.load_state_dict(weights.state_dict())
    out = []
    for pair in PAIRS:
        encoded = tokenizer(*pair, return_tensors="pt")
        if not types:
            encoded["token_type_ids"].zero_()
        h_BLD = theirs.cls.predictions.transform(theirs.bert(**encoded).last_hidden_state)
        text_BL = torch.ones_like(encoded["input_ids"], dtype=torch.bool)
        text_BL[:, 0] = False  # [CLS]
        assert model.denoiser.task is not None
        out.append(torch.softmax(model.denoiser.task(h_BLD * text_BL.unsqueeze(-1), text_BL), dim=-1))
    return torch.cat(out)


@torch.no_grad()
def test_a_trained_classifier_answers_as_transformers_network(
    tuned: tuple[Path, Any, FinetuneConfig, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out, theirs, _, _ = tuned
    want = their_answers(theirs, out, types=True)
    texts, pairs = zip(*PAIRS, strict=True)
    answers = load_classifier(out, device="cpu").classify(texts, pairs)
    found = torch.tensor([[one.probabilities[label] for label in ("no", "yes")] for one in answers])
    torch.testing.assert_close(found, want, atol=1e-5, rtol=0)
    assert not torch.allclose(found, their_answers(theirs, out, types=False), atol=1e-4)
    capsys.readouterr()
    words = ["classify", str(out), *texts, "--pair", pairs[0], "--pair", pairs[1], "--device", "cpu", "--json"]
    assert command(words) == 0
    said = json.loads(capsys.readouterr().out)["answers"]
    assert [one["probabilities"] for one in said] == [one.probabilities for one in answers]


def test_training_reaches_the_second_type(tuned: tuple[Path, Any, FinetuneConfig, Path]) -> None:
    out, _, _, base = tuned
    name = "encoder.bert.embeddings.token_type_embeddings.weight"
    before, after = (model.denoiser.state_dict()[name] for model in (load(base), load_classifier(out).model))
    change = (after - before).abs().amax(dim=1)
    assert change[0] > 1e-4
    assert change[1] > 1e-4


@torch.no_grad()
def test_a_classifier_of_an_older_version_answers_as_it_was_trained(
    tuned: tuple[Path, Any, FinetuneConfig, Path], tmp_path: Path
) -> None:
    """Its folder says nothing of types, because both texts were of type 0."""
    out, theirs, *_ = tuned
    want = their_answers(theirs, out, types=False)
    path = out / "model" / "config.json"
    whole = path.read_text()
    said = json.loads(whole)
    assert said["task"].pop("types") is True
    path.write_text(json.dumps(said))
    try:
        answers = load_classifier(out, device="cpu").classify(*zip(*PAIRS, strict=True))
    finally:
        path.write_text(whole)
    found = torch.tensor([[one.probabilities[label] for label in ("no", "yes")] for one in answers])
    torch.testing.assert_close(found, want, atol=1e-5, rtol=0)


def test_a_fine_tuning_that_an_older_version_began_goes_on_without_types(
    tuned: tuple[Path, Any, FinetuneConfig, Path], tmp_path: Path
) -> None:
    """Neither its finished seeds nor a classifier of both kinds would mean anything otherwise."""
    out, _, config, base = tuned
    about = json.loads((out / "finetune.json").read_text())
    assert about["identity"].pop("types") is True
    del about["task"]["types"]
    older = tmp_path / "older"
    older.mkdir()
    (older / "finetune.json").write_text(json.dumps(about))
    config = dataclasses.replace(config, out=str(older))
    for seeds in (1, 2):  # the second time it reads what the first one has written
        finetune(base, dataclasses.replace(config, seeds=seeds), device="cpu")
        assert not load_classifier(older, device="cpu").task.types
        said = json.loads((older / "finetune.json").read_text())
        assert (said["identity"], said["task"]["types"]) == (about["identity"], False)
    losses = [json.loads((folder / "seeds" / "model-0.json").read_text())["best"]["loss"] for folder in (out, older)]
    assert losses[0] != losses[1]
