"""Autoregression in our Llama as transformers' own classes: same logits, same texts, and back to the last weight."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from matrix import environment
from pretrained_llamas import KINDS, held, of_transformers, ours
from tiny import WORDS
from unmask.cli import run as unmask_command
from unmask.data.subwords import train_bpe
from unmask.denoisers.llama import Llama
from unmask.denoisers.llama.rope import RopeScaling
from unmask.errors import ModelFolderError
from unmask.model import Model
from unmask.objectives.ar import AR
from unmask.pretrained import llama, read_pretrained
from unmask.pretrained.card import card_of
from unmask.pretrained.export import write_transformers
from unmask.samplers.drawing import Drawing
from unmask.text.bulk import identity

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"hidden": 32, "blocks": 2, "heads": 4, "groups": 2, "inner": 40, "causal": True}
NETWORKS: dict[str, tuple[dict[str, Any], str, str]] = {
    "plain": ({}, "bpe", "LlamaForCausalLM"),
    "begin-eot": ({"begin": 0, "tied": True}, "bpe", "LlamaForCausalLM"),
    "bytes": ({"tied": True, "eps": 1e-4}, "bytes", "LlamaForCausalLM"),
    "chars-begin-eot": ({"begin": "eot"}, "chars", "LlamaForCausalLM"),
    "biases": ({"qkv_bias": True, "out_bias": True, "mlp_bias": True, "head_dim": 6}, "bpe", "LlamaForCausalLM"),
    "far": ({"scaling": RopeScaling(factor=4.0, length=16), "theta": 500.0}, "bpe", "LlamaForCausalLM"),
    "qwen2": ({"qkv_bias": True, "head_dim": 6, "begin": 0}, "bpe", "Qwen2ForCausalLM"),
    "qwen3": ({"qk_norm": True, "scaling": RopeScaling(kind="linear", factor=2.0)}, "bpe", "Qwen3ForCausalLM"),
    "qwen3-biases": ({"qk_norm": True, "qkv_bias": True, "out_bias": True}, "bpe", "Qwen3ForCausalLM"),
}
TEXT = "the cat sat on the mat"


def model_of(options: dict[str, Any], vocabulary: str = "bpe", **more: Any) -> Model:
    corpus = unmask.corpora.Memory(texts=(*WORDS, *["it is a cat or a dog or a rat"] * 4))
    tokenizer = train_bpe(300, corpus) if vocabulary == "bpe" else unmask.load_tokenizer(vocabulary)
    options = {**SMALL, **options}
    if options.get("begin") == "eot":
        options["begin"] = tokenizer.eot_id
    torch.manual_seed(1)
    network = Llama(**options).build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(torch.randn_like(p) * 0.15)
    return Model(denoiser=network, tokenizer=tokenizer, objective=AR(), length=64, **more)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("case", NETWORKS)
@torch.no_grad()
def test_the_same_there_and_back(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, vocabulary, name = NETWORKS[case]
    model = model_of(options, vocabulary)
    model.save(tmp_path / "ours")
    assert unmask_command(["export", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--format", "hf"]) == 0
    assert capsys.readouterr().err.startswith(f"{name}: there a text begins with ")
    there, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert type(there).__name__ == name
    assert not [*loading["missing_keys"], *loading["unexpected_keys"]]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ids, begin = model.tokenizer.encode(TEXT), model.denoiser.begin_id  # type: ignore[attr-defined]
    assert tokenizer(TEXT)["input_ids"] == [begin, *ids]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (begin, model.tokenizer.eot_id)
    assert tokenizer.decode([begin, *ids], skip_special_tokens=True) == model.tokenizer.decode(ids)
    got = there.eval()(torch.tensor([[begin, *ids]])).logits[0, :-1]
    want = model.logits(ids)
    written = [id for id in range(model.tokenizer.num_ids) if id != model.tokenizer.mask_id]
    assert want[:, written].std() > 0.3
    torch.testing.assert_close(got[:, written], want[:, written], rtol=1e-5, atol=1e-5)
    # The mask has a row there only where a text begins with it, or where the vocabulary itself has one.
    kept = vocabulary != "bpe" or options.get("begin") is None
    assert got.shape[1] == model.tokenizer.num_ids - (not kept)
    assert (tokenizer.mask_token is not None) == kept

    assert unmask_command(["import", f"hf:{tmp_path / 'theirs'}", str(tmp_path / "back")]) == 0
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "ours" / file).read_bytes(), file
    assert identity(unmask.load(f"hf:{tmp_path / 'theirs'}", device="cpu")) == identity(model)
    read = read_pretrained(f"hf:{tmp_path / 'theirs'}")  # what --init begins with
    assert (read.denoiser, read.length) == (model.denoiser.config, model.length)
    for weight, tensor in read.state.items():
        assert tensor.equal(model.denoiser.state_dict()[weight]), weight
    there.save_pretrained(tmp_path / "again")  # what transformers writes reads as well
    tokenizer.save_pretrained(tmp_path / "again")
    again = unmask.load(f"hf:{tmp_path / 'again'}", device="cpu")
    torch.testing.assert_close(again.logits(ids)[:, written], want[:, written], rtol=0, atol=0)


def test_the_pipeline_of_a_process_without_unmask(tmp_path: Path) -> None:
    models = [model_of({"begin": begin}, drawing=Drawing(temperature=0.0)) for begin in (None, 0)]
    for k, model in enumerate(models):
        write_transformers(model, tmp_path / str(k))
    program = (
        "import json, sys, transformers\n"
        "for folder in sys.argv[1:]:\n"
        "    write = transformers.pipeline('text-generation', model=folder, device='cpu')\n"
        "    text = write('the cat', max_new_tokens=12)[0]['generated_text']\n"
        "    print(json.dumps([text, 'unmask' in sys.modules]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "0"), str(tmp_path / "1")],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"),
    )
    assert ran.returncode == 0, ran.stderr
    for model, line in zip(models, ran.stdout.splitlines()[-2:], strict=True):
        length = len(model.tokenizer.encode("the cat")) + 12
        [text] = model.generate(prompt="the cat", length=length)
        assert json.loads(line) == [text, False]


@torch.no_grad()
def test_rows_with_a_token_before_them_and_batches(tmp_path: Path) -> None:
    model = model_of({}, packing="pad", anchor="begin", typical_length=9)
    write_transformers(model, tmp_path / "theirs")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    ids = model.tokenizer.encode("the cat")
    assert tokenizer("the cat")["input_ids"] == [300, 0, *ids]  # the mask, which is the begin, and the anchor
    got = there(torch.tensor([[300, 0, *ids]])).logits[0, :-1, :300]
    torch.testing.assert_close(got, model.logits([0, *ids])[:, :300], rtol=1e-5, atol=1e-5)
    batch = tokenizer(["the cat sat on", "a"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist()[1][-1] == 1  # padding stands before
    together = there.generate(**batch, max_new_tokens=6, do_sample=False)[1, -6:]
    alone = there.generate(**tokenizer(["a"], return_tensors="pt"), max_new_tokens=6, do_sample=False)[0, -6:]
    assert together.tolist() == alone.tolist()


def test_the_law_it_writes_by(tmp_path: Path) -> None:
    write_transformers(model_of({}, drawing=Drawing(temperature=0.8, top_p=0.9)), tmp_path / "theirs")
    said = json.loads((tmp_path / "theirs" / "generation_config.json").read_text())
    assert {key: said[key] for key in ("do_sample", "temperature", "top_k", "top_p", "suppress_tokens")} == {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 0.9,
        "suppress_tokens": [300],
    }


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_others_go_back_as_they_came(kind: str, tmp_path: Path) -> None:
    network = of_transformers(kind)
    model = ours(llama.read(held(network)))
    write_transformers(model, tmp_path / "theirs")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert type(there) is type(network)
    for (name, a), b in zip(there.named_parameters(), network.parameters(), strict=True):
        assert a.equal(b), name
    assert identity(unmask.load(f"hf:{tmp_path / 'theirs'}", device="cpu")) == identity(model)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "odd biases": ({"out_bias": True}, "has its biases and no others"),
    "normed with biases": ({"qk_norm": True, "mlp_bias": True}, "with normed queries and keys"),
    "a word begins": ({"begin": 40}, "which texts hold, too"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_fits_no_class_of_theirs_takes_ours(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, said = OTHERS[case]
    model_of(options).save(tmp_path / "ours")
    assert unmask_command(["export", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--format", "hf"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("UnmaskForCausalLM, a class of ours that import unmask.hf registers: ")
    assert said in err
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == "unmask"


def test_both_sides_take_ours_and_the_card_says_what_to_import(tmp_path: Path) -> None:
    causal = model_of({})
    config: Any = causal.denoiser.config
    both = dataclasses.replace(config, causal=False).build(num_ids=301, mask_id=300)
    other = Model(denoiser=both, tokenizer=causal.tokenizer, objective=unmask.objectives.MDLM(), length=64)
    assert write_transformers(other, tmp_path / "theirs").startswith("UnmaskForMaskedLM")
    assert "import unmask.hf" in card_of(other, "me/both", layout="hf")
    assert "unmask.hf" not in card_of(causal, "me/one", layout="hf")


def test_nothing_of_such_a_folder_is_believed(tmp_path: Path) -> None:
    write_transformers(model_of({"begin": 0}), tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    whole = json.loads(path.read_text())
    for change, said in (
        ({"unmask": {**whole["unmask"], "denoiser": {"name": "dit", "size": "nano"}}}, "belongs to another model"),
        ({"unmask": {**whole["unmask"], "denoiser": {**whole["unmask"]["denoiser"], "blocks": 1 << 30}}}, "far more"),
        ({"unmask": {**whole["unmask"], "num_ids": 999}}, "do not belong together"),
        ({"unmask": ["code"]}, "format_version is None"),
        ({"num_hidden_layers": 1 << 20}, "the weights are"),
        ({"vocab_size": 200}, "do not belong together|has shape"),
    ):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(ModelFolderError, match=said) as caught:
            unmask.load(f"hf:{tmp_path / 'theirs'}")
        assert "\n" not in str(caught.value)
    path.write_text(json.dumps(whole))
    (tmp_path / "theirs" / "unmask.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")
    unmask.load(f"hf:{tmp_path / 'theirs'}")  # no rows: the mean of all others
    (tmp_path / "theirs" / "unmask.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelFolderError, match=r"unmask\.safetensors"):
        unmask.load(f"hf:{tmp_path / 'theirs'}")
