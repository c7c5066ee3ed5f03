"""An encoder goes back to transformers, whose own classes then predict what ours does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from test_encoders import model_of
from tiny_encoders import FAMILIES, save_encoder, texts_of
from unmask.cli import run as unmask_command
from unmask.denoisers.encoder.lora import is_low_rank
from unmask.pretrained import read_pretrained
from unmask.pretrained.export import write_transformers

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_it_predicts_there_what_it_predicts_here(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_encoder(family, tmp_path / "source")
    model = model_of(tmp_path / "source", lora_rank=2)
    for name, p in model.denoiser.named_parameters():  # it has been trained since
        p.add_(torch.randn(p.shape) * (0.1 if is_low_rank(name) else 0.01))
    model.save(tmp_path / "ours")
    assert unmask_command(["export", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--format", "hf"]) == 0
    capsys.readouterr()
    theirs, loading = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not [*loading["missing_keys"], *loading["unexpected_keys"]]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    text = texts_of(family)[0]
    ids = model.tokenizer.encode(text)
    row = [*model.begin, *ids[:4], model.tokenizer.mask_id, *ids[5:], *model.end]
    shown = text if family == "esm" else model.tokenizer.decode(ids)
    assert tokenizer(shown)["input_ids"] == [*model.begin, *ids, *model.end]
    ours_LI, theirs_LI = model.denoiser(torch.tensor([row]))[0], theirs.eval()(torch.tensor([row])).logits[0]
    written = [
        id for id in range(model.tokenizer.num_ids) if id not in (*model.tokenizer.fixed_ids, model.tokenizer.mask_id)
    ]
    assert torch.allclose(ours_LI[:, written], theirs_LI[:, written], atol=1e-4)
    again = read_pretrained(str(tmp_path / "theirs"))
    assert again.tokenizer.fixed_ids == model.tokenizer.fixed_ids
    assert again.length == read_pretrained(str(tmp_path / "source")).length


def test_the_pipeline_fills_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_encoder("bert", tmp_path / "source")
    model = model_of(tmp_path / "source")
    write_transformers(model, tmp_path / "theirs")
    fill: Any = transformers.pipeline("fill-mask", model=str(tmp_path / "theirs"), device="cpu")
    words = [guess["token"] for guess in fill("the cat [MASK] on the mat", top_k=30)]
    text = model.tokenizer.encode("the cat")
    row = [*model.begin, *text, model.tokenizer.mask_id, *model.tokenizer.encode("on the mat"), *model.end]
    with torch.no_grad():
        order = model.denoiser(torch.tensor([row]))[0, len(text) + 1].argsort(descending=True).tolist()
    never = {*model.tokenizer.fixed_ids, model.tokenizer.mask_id}
    assert [id for id in words if id not in never] == [id for id in order if id not in never][: len({*words} - never)]
