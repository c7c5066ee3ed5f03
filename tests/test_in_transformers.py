"""Models without an architecture of transformers' own go there and back: same ids, same logits, same weights."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from matrix import environment
from tiny import WORDS
from unmask.cli import run as unmask_command
from unmask.data.subwords import train_bpe
from unmask.errors import ModelFolderError, UsageError
from unmask.model import Model
from unmask.pretrained import read_pretrained
from unmask.pretrained.export import write_transformers
from unmask.pretrained.registered import config_of
from unmask.text.bulk import identity
from unmask.text.prompts import spaces_lead

transformers = pytest.importorskip("transformers")
hf: Any = importlib.import_module("unmask.hf")

TEXT = "the cat sat on the mat"
SMALL: dict[str, Any] = {"hidden": 32, "blocks": 1}
NETWORKS: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "dit-bytes-level": (lambda: unmask.denoisers.DiT(**SMALL, heads=2, conditioning="sigma"), "bytes", {}),
    "dit-chars-framed": (
        lambda: unmask.denoisers.DiT(**SMALL, heads=2, tied=True),
        "chars",
        {"packing": "pad", "anchor": "both", "typical_length": 9},
    ),
    "llama-bpe": (lambda: unmask.denoisers.Llama(**SMALL, heads=2, causal=False), "bpe", {}),
    "caduceus-dna": (lambda: unmask.denoisers.Caduceus(**SMALL), "dna", {}),
}


def model_of(case: str) -> Model:
    describe, vocabulary, more = NETWORKS[case]
    corpus = unmask.corpora.Memory(texts=(*WORDS, *["it is a cat or a dog or a rat"] * 4))
    tokenizer = train_bpe(320, corpus) if vocabulary == "bpe" else unmask.load_tokenizer(vocabulary)
    torch.manual_seed(1)
    description = describe().for_tokenizer(tokenizer)
    network = description.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    description.describe(network)
    with torch.no_grad():
        for p in network.parameters():  # what starts at zero would hide what is not read
            p.add_(torch.randn_like(p) * 0.1)
    return Model(denoiser=network, tokenizer=tokenizer, objective=unmask.objectives.MDLM(), length=64, **more)


def text_of(model: Model) -> str:
    return "ACGTNacgtnGGC" if model.tokenizer.num_ids == 7 else TEXT


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("case", NETWORKS)
@torch.no_grad()
def test_the_same_there_and_back(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(case)
    model.save(tmp_path / "ours")
    assert unmask_command(["export", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--format", "hf"]) == 0
    there = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs")
    assert isinstance(there, hf.UnmaskForMaskedLM)
    assert not there.training
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    text = text_of(model)
    row = [*model.begin, *model.tokenizer.encode(text), *model.end]
    assert tokenizer(text)["input_ids"] == row
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id) == (model.tokenizer.mask_id, model.tokenizer.eot_id)
    # Two rows, one of them padded; a third of the masks each row has decides the level.
    masked = [model.tokenizer.mask_id if k % 3 == 1 else id for k, id in enumerate(row)]
    batch = torch.tensor([masked, [*row[:4], model.tokenizer.mask_id, *[model.tokenizer.eot_id] * (len(row) - 5)]])
    valid = torch.ones_like(batch)
    valid[1, 5:] = 0
    logits = there(input_ids=batch, attention_mask=valid).logits
    written = [id for id in range(model.tokenizer.num_ids) if id != model.tokenizer.mask_id]
    assert torch.allclose(logits[0][:, written], model.logits(masked)[:, written], atol=1e-5)
    assert torch.allclose(logits[1, :5][:, written], model.logits(batch[1, :5].tolist())[:, written], atol=1e-5)
    assert (torch.softmax(logits, -1)[..., model.tokenizer.mask_id] == 0).all()

    assert unmask_command(["import", f"hf:{tmp_path / 'theirs'}", str(tmp_path / "back")]) == 0
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes(), name
    there.save_pretrained(tmp_path / "again")  # and what transformers writes reads as well
    tokenizer.save_pretrained(tmp_path / "again")
    again = unmask.load(f"hf:{tmp_path / 'again'}", device="cpu")
    assert identity(again) == identity(model)
    assert repr(again) == repr(model)
    assert read_pretrained(f"hf:{tmp_path / 'theirs'}").length == model.length


@torch.no_grad()
def test_vectors_of_the_network_without_its_head(ar_model: Model, tmp_path: Path) -> None:
    model = model_of("dit-bytes-level")
    write_transformers(model, tmp_path / "masked")
    there = transformers.AutoModel.from_pretrained(tmp_path / "masked")
    assert isinstance(there, hf.UnmaskModel)
    row = [97, model.tokenizer.mask_id, 98]
    batch, valid = torch.tensor([row, [97, 98, 99]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    found = there(input_ids=batch, attention_mask=valid).last_hidden_state
    assert torch.allclose(found[0], model.hidden(row), atol=1e-5)
    assert torch.allclose(found[1, :2], model.hidden([97, 98]), atol=1e-5)
    features: Any = transformers.pipeline("feature-extraction", model=str(tmp_path / "masked"), device="cpu")
    whole = [*model.begin, *model.tokenizer.encode("abc"), *model.end]
    assert torch.allclose(torch.tensor(features("abc")[0]), model.hidden(whole), atol=1e-5)
    there.save_pretrained(tmp_path / "again")  # the whole network
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again.network.state_dict()["embed.weight"], there.network.state_dict()["embed.weight"])

    write_transformers(ar_model, tmp_path / "causal")
    there = transformers.AutoModel.from_pretrained(tmp_path / "causal")
    row = ar_model.tokenizer.encode("the cat")
    found = there(input_ids=torch.tensor([row])).last_hidden_state[0]
    assert torch.allclose(found[:-1], ar_model.hidden(row)[1:], atol=1e-5)


@pytest.mark.parametrize("case", NETWORKS)
@torch.no_grad()
def test_hidden_states_are_the_embedding_and_each_blocks_output(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SMALL, "blocks", 3)
    model = model_of(case)
    network: Any = model.denoiser
    there = hf.UnmaskForMaskedLM(hf.UnmaskConfig(**config_of(model)[0]), network).eval()
    batch = torch.tensor([[0, 1, 2, model.tokenizer.mask_id], [3, 2, 1, 0]])
    asked = {"input_ids": batch, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
    read: list[Any] = []
    hooks = [block.register_forward_pre_hook(lambda _, given: read.append(given[0])) for block in network.blocks]
    plain = there(**asked)
    for hook in hooks:
        hook.remove()
    assert plain.hidden_states is None
    out = there(**asked, output_hidden_states=True)
    assert torch.equal(plain.logits, out.logits)
    assert [h.shape for h in out.hidden_states] == [(2, 4, 32)] * 4
    assert torch.equal(out.hidden_states[0], network.embed(batch))
    assert all(map(torch.equal, out.hidden_states[:3], read))  # what a block writes is what the next one reads
    assert torch.equal(there.logits(out.hidden_states[3]), out.logits)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in network.blocks)
    bare = hf.UnmaskModel(there.config, network).eval()(**asked, output_hidden_states=True)
    assert torch.equal(bare.hidden_states[-1], bare.last_hidden_state)
    assert all(map(torch.equal, bare.hidden_states, out.hidden_states))
    there.config.output_hidden_states = True
    assert len(there(**asked).hidden_states) == 4
    assert there(**asked, output_hidden_states=False).hidden_states is None


@torch.no_grad()
def test_hidden_states_of_an_autoregressive_one(ar_model: Model, tmp_path: Path) -> None:
    """At l they have read the tokens up to l, as in transformers."""
    write_transformers(ar_model, tmp_path / "theirs")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    ids = torch.tensor([ar_model.tokenizer.encode("the cat")])
    out = there(input_ids=ids, output_hidden_states=True)
    assert len(out.hidden_states) == len(there.network.parts()) + 1
    assert torch.equal(out.hidden_states[0], there.network.embed(ids))
    assert torch.equal(there.logits(out.hidden_states[-1]), out.logits)
    shorter = there(input_ids=ids[:, :-2], output_hidden_states=True)
    for whole, part in zip(out.hidden_states, shorter.hidden_states, strict=True):
        assert torch.allclose(whole[:, :-2], part, atol=1e-5)
    how = {"do_sample": False, "return_dict_in_generate": True, "output_hidden_states": True}
    assert len(there.generate(ids, max_new_tokens=2, **how).hidden_states) == 2


def test_hidden_states_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of this network reads a row and its reverse complement at once."""
    monkeypatch.setitem(NETWORKS, "both", (lambda: unmask.denoisers.Caduceus(**SMALL, equivariance="ps"), "dna", {}))
    model = model_of("both")
    there = hf.UnmaskForMaskedLM(hf.UnmaskConfig(**config_of(model)[0]), model.denoiser).eval()
    ids = torch.tensor([model.tokenizer.encode("ACGT")])
    assert there(input_ids=ids).logits.shape == (1, 4, 7)
    with pytest.raises(UsageError, match=r"CaduceusNetwork has no vector per block .*: leave out output_hidden_states"):
        there(input_ids=ids, output_hidden_states=True)


@torch.no_grad()
def test_blocks_that_are_listened_to_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a GPU pass the blocks by, so that no hook would be called."""
    monkeypatch.setattr("unmask.kernels.fit", lambda x: True)
    network: Any = model_of("dit-chars-framed").denoiser.eval()
    assert network.can_fuse()
    with hf._heard(network):
        assert not network.can_fuse()
    assert network.can_fuse()


@torch.no_grad()
def test_a_compiled_model_gives_hidden_states_after_calls_without() -> None:
    """What was compiled for the first calls would call no hook."""
    model = model_of("dit-bytes-level")
    there = hf.UnmaskModel(hf.UnmaskConfig(**config_of(model)[0]), model.denoiser).eval()
    ids = torch.tensor([[97, 98]])
    want = there(input_ids=ids, output_hidden_states=True).hidden_states
    torch._dynamo.reset()
    compiled = torch.compile(there, backend="eager")
    for asks in (False, True, False, True):
        out = compiled(input_ids=ids, output_hidden_states=asks)
        assert torch.equal(out.last_hidden_state, want[-1])
        assert all(map(torch.equal, out.hidden_states, want)) if asks else out.hidden_states is None


@torch.no_grad()
def test_hidden_states_are_those_of_the_callers_own_text() -> None:
    """Another thread may ask the same network meanwhile: here after the last block, so that its states come later."""
    model = model_of("dit-bytes-level")
    there = hf.UnmaskModel(hf.UnmaskConfig(**config_of(model)[0]), model.denoiser).eval()
    ours, theirs = torch.tensor([[97, 98]]), torch.tensor([[99, 100]])
    last: Any = model.denoiser.parts()[-1]
    found: list[Any] = []

    def ask_theirs(*_: Any) -> None:
        hook.remove()
        other = threading.Thread(target=lambda: found.append(there(input_ids=theirs, output_hidden_states=True)))
        other.start()
        other.join()

    alone = [there(input_ids=ids, output_hidden_states=True).hidden_states for ids in (ours, theirs)]
    hook = last.register_forward_hook(ask_theirs)
    found.append(there(input_ids=ours, output_hidden_states=True))
    for want, made in zip(reversed(alone), found, strict=True):
        assert all(map(torch.equal, want, made.hidden_states))


def test_the_level_is_the_share_of_masks() -> None:
    model = model_of("dit-bytes-level")
    config = hf.UnmaskConfig(**config_of(model)[0])
    there = hf.UnmaskForMaskedLM(config, model.denoiser).eval()
    ids = torch.tensor([[257, 97, 257, 98]])
    told = there(input_ids=ids).logits
    assert torch.equal(told, there(input_ids=ids, level=torch.tensor([0.5])).logits)
    assert not torch.equal(told, there(input_ids=ids, level=torch.tensor([0.75])).logits)


def test_labels_give_a_loss_that_trains(tmp_path: Path) -> None:
    write_transformers(model_of("llama-bpe"), tmp_path / "theirs")
    there = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs")
    mask = there.config.mask_token_id
    ids = torch.tensor([[5, mask, 7, mask]])
    labels = torch.tensor([[-100, 6, -100, 8]])
    out = there(input_ids=ids, labels=labels)
    log_p = torch.log_softmax(out.logits, -1)
    assert torch.isclose(out.loss, -(log_p[0, 1, 6] + log_p[0, 3, 8]) / 2)
    out.loss.backward()
    assert all(p.grad is not None for p in there.parameters())
    assert isinstance(there(input_ids=ids, return_dict=False), tuple)
    fresh = transformers.AutoModelForMaskedLM.from_config(there.config)
    assert [p.shape for p in fresh.parameters()] == [p.shape for p in there.parameters()]


def test_the_pipeline_of_a_fresh_process(tmp_path: Path) -> None:
    model = model_of("llama-bpe")
    assert spaces_lead(model.tokenizer)  # so the mask takes the space before it, there as here
    write_transformers(model, tmp_path / "theirs")
    program = (
        "import json, sys, transformers, unmask.hf\n"
        "fill = transformers.pipeline('fill-mask', model=sys.argv[1], device='cpu')\n"
        "print(json.dumps(fill('the cat [MASK] on the mat', top_k=4)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "theirs")],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"),
    )
    assert ran.returncode == 0, ran.stderr
    (ours,) = model.predict("the cat [MASK] on the mat", top=4)
    theirs = json.loads(ran.stdout.splitlines()[-1])
    assert [one["token"] for one in theirs] == [one.token for one in ours.candidates]
    assert [one["score"] for one in theirs] == pytest.approx([one.prob for one in ours.candidates], rel=1e-3)


@torch.no_grad()
def test_an_autoregressive_one(ar_model: Model, tmp_path: Path) -> None:
    write_transformers(ar_model, tmp_path / "theirs")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert isinstance(there, hf.UnmaskForCausalLM)
    row = ar_model.tokenizer.encode("the cat")
    logits, ours = there(input_ids=torch.tensor([row])).logits[0], ar_model.logits(row)
    written = [id for id in range(ar_model.tokenizer.num_ids) if id != ar_model.tokenizer.mask_id]
    assert torch.allclose(logits[:-1, written], ours[1:, written], atol=1e-5)
    greedy = there.generate(torch.tensor([row]), max_new_tokens=4, do_sample=False)[0].tolist()
    for k in range(len(row), len(greedy)):
        assert greedy[k] == int(ar_model.logits([*greedy[:k], 0])[-1][written].argmax())
    write: Any = transformers.pipeline("text-generation", model=str(tmp_path / "theirs"), device="cpu")
    text = write("the cat", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert text == ar_model.tokenizer.decode(greedy)
    out = there(input_ids=torch.tensor([row]), labels=torch.tensor([row]))
    taken = torch.log_softmax(out.logits[0, :-1], -1)[torch.arange(len(row) - 1), row[1:]]
    assert torch.isclose(out.loss, -taken.mean())
    assert identity(unmask.load(f"hf:{tmp_path / 'theirs'}", device="cpu")) == identity(ar_model)
    with pytest.raises(UsageError, match="holds no UnmaskForMaskedLM"):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs")


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no description": (lambda c: c.pop("unmask"), "format_version is None"),
    "unknown denoiser": (lambda c: c["unmask"]["denoiser"].update(name="os.system"), "denoiser"),
    "unknown key": (lambda c: c["unmask"].update(code="import os"), "unknown key 'code'"),
    "huge": (lambda c: c["unmask"]["denoiser"].update(hidden=1 << 40), "denoiser.hidden is 1099511627776"),
    "other sizes": (lambda c: c["unmask"]["denoiser"].update(blocks=2), "is missing"),
    "other vocabulary": (lambda c: c["unmask"].update(num_ids=9), "do not belong together"),
    "no tokenizer": (lambda c: c.pop("unmask_tokenizer"), "unmask_tokenizer"),
    "odd tokenizer": (lambda c: c.update(unmask_tokenizer={"unmask": ["dna"]}), "unknown tokenizer"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_of_a_folder_is_believed(case: str, tmp_path: Path) -> None:
    change, said = HOSTILE[case]
    write_transformers(model_of("dit-bytes-level"), tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    for read in (
        lambda: transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs"),
        lambda: unmask.load(f"hf:{tmp_path / 'theirs'}"),
    ):
        with pytest.raises(ModelFolderError, match=said) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    write_transformers(model_of("dit-bytes-level"), tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "theirs" / "pytorch_model.bin")
    with pytest.raises(ModelFolderError, match="can run code and is not read"):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs")


def test_wrong_use_is_a_sentence(tmp_path: Path) -> None:
    model = model_of("dit-bytes-level")
    write_transformers(model, tmp_path / "theirs")
    there = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs")
    with pytest.raises(ModelFolderError, match="write hf: before its name"):
        unmask.load(tmp_path / "theirs")
    ids = torch.full((1, 3), 97)
    for wrong, said in (
        ({"input_ids": torch.full((1, 65), 97)}, "65 tokens do not fit"),
        ({"input_ids": torch.full((1, 3), 258)}, "ids lie in 0..257"),
        ({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1]])}, "padding stands at the end"),
        ({}, "reads input_ids"),
    ):
        with pytest.raises(UsageError, match=said):
            there(**wrong)
    uniform = Model(
        denoiser=model.denoiser, tokenizer=model.tokenizer, objective=unmask.objectives.UDLM(), length=model.length
    )
    with pytest.raises(UsageError, match="its process is uniform"):
        write_transformers(uniform, tmp_path / "uniform")
    assert not (tmp_path / "uniform").exists()
