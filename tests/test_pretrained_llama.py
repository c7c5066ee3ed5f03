"""Weights of Llama, SmolLM2, Qwen2.5 and Qwen3: through our network they say what they say through transformers."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import unmask
from pretrained_llamas import END, KINDS, MERGES, ROWS, Held, held, of_transformers, ours, save, vocabulary
from tiny import TINY
from unmask.cli import run
from unmask.config import load_config
from unmask.denoisers.llama import Llama
from unmask.denoisers.network import Attend
from unmask.errors import MissingExtraError, ModelFolderError, UsageError
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.pretrained import llama
from unmask.pretrained.gguf import open_gguf, unpermuted
from unmask.samplers.left_to_right import LeftToRight
from unmask.storage.model_folder import load_weights
from unmask.training.loop import train

pytest.importorskip("transformers", reason="parity with transformers needs transformers: pip install 'unmask[hf]'")

EACH = pytest.mark.parametrize("kind", KINDS)
WORDS = vocabulary()
BEGIN = WORDS.token_to_id(END)
X = torch.randint(0, BEGIN, (3, 20), generator=torch.Generator().manual_seed(0))
VALID = torch.arange(20) < torch.tensor([20, 13, 1])[:, None]


@torch.no_grad()
def theirs(network: Any, x_BL: Tensor, valid_BL: Tensor | None = None) -> Tensor:
    """What transformers predicts at every position, given a begin before the first."""
    rows = torch.cat([torch.full((len(x_BL), 1), BEGIN), x_BL], dim=1)
    seen = None if valid_BL is None else torch.cat([torch.ones(len(x_BL), 1, dtype=torch.long), valid_BL], dim=1)
    logits: Tensor = network(rows, attention_mask=seen).logits[:, :-1]
    return logits


@EACH
def test_logits_are_those_of_transformers(kind: str) -> None:
    network = of_transformers(kind)
    model = ours(llama.read(held(network)))
    with torch.no_grad():
        got = model.denoiser(X)[..., :ROWS]
        padded = model.denoiser(X, valid_BL=VALID)[..., :ROWS]
    want = theirs(network, X)
    assert want.std() > 0.5
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded[VALID], theirs(network, X, VALID)[VALID], rtol=1e-5, atol=1e-5)


@EACH
def test_a_text_is_as_likely_and_goes_on_as_in_transformers(kind: str) -> None:
    network = of_transformers(kind)
    model = ours(llama.read(held(network)))
    text = "the cat on the cat"
    ids = torch.tensor([[*WORDS.encode(text).ids, BEGIN]])
    log_p = torch.log_softmax(theirs(network, ids), dim=-1)[0].gather(1, ids[0, :, None]).squeeze(1)
    nats = model.score(text, num_samples=1).nats
    assert nats == pytest.approx(-float(log_p.sum()), rel=1e-5)
    prompt = torch.tensor([[BEGIN, *WORDS.encode("the cat").ids]])
    network.generation_config.eos_token_id = BEGIN
    end = {"suppress_tokens": list(range(BEGIN + 1, ROWS))}  # ids without a word: nothing here ever writes them
    want = network.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=BEGIN, **end)
    row = want[0, prompt.shape[1] :].tolist()
    row = row[: row.index(BEGIN)] if BEGIN in row else row
    length = prompt.shape[1] - 1 + 12
    [got] = model.generate(
        length=length, prompt="the cat", sampler=LeftToRight(temperature=0.0), continuation_only=True
    )
    assert got == WORDS.decode(row)


@pytest.mark.parametrize("shifted", [True, False])
@torch.no_grad()
def test_as_a_denoiser_of_both_sides_the_weights_mean_what_they_meant(shifted: bool) -> None:
    """Told to look back alone, each position is read as it was: off the one before, or off its own where one reads
    there what comes next."""
    network = of_transformers("SmolLM2")
    read = llama.read(held(network))
    description = dataclasses.replace(read.denoiser, causal=False, shifted=shifted)  # type: ignore[type-var]
    net = description.build(num_ids=read.tokenizer.num_ids, mask_id=read.tokenizer.mask_id).eval()
    load_weights(net, dict(read.state), "tiny")
    rows = X if shifted else torch.cat([torch.full((3, 1), BEGIN), X], dim=1)
    got = net.head(net.trunk(rows, attend=Attend(causal=True)))[..., :ROWS]
    torch.testing.assert_close(got if shifted else got[:, :-1], theirs(network, X), rtol=1e-5, atol=1e-5)


def test_a_mask_is_one_id_more_and_ids_without_a_word_are_never_written() -> None:
    network = of_transformers("Qwen2.5")
    read = llama.read(held(network))
    assert (read.tokenizer.num_ids, read.tokenizer.mask_id, read.tokenizer.eot_id) == (ROWS + 1, ROWS, BEGIN)
    assert set(range(BEGIN + 1, ROWS)) <= set(read.tokenizer.never_ids())
    assert read.tokenizer.encode("the cat") == WORDS.encode("the cat").ids
    for name in ("embed.weight", "output.weight"):
        torch.testing.assert_close(read.state[name][ROWS], read.state[name][:ROWS].mean(dim=0))
    assert read.causal
    assert read.length == 64
    # a vocabulary with a mask of its own keeps it, and gets no row
    words = vocabulary()
    words.add_special_tokens(["<mask>"])
    known = llama.read(held(network, words)).tokenizer
    assert (known.num_ids, known.mask_id) == (ROWS, words.token_to_id("<mask>"))


@EACH
def test_saved_and_loaded_it_is_the_same(kind: str, tmp_path: Path) -> None:
    model = ours(llama.read(held(of_transformers(kind))))
    model.save(tmp_path / "model")
    again = unmask.load(tmp_path / "model", device="cpu")
    assert again.denoiser.config == model.denoiser.config
    with torch.no_grad():
        assert again.denoiser(X).equal(model.denoiser(X))


# --- what is no such model --------------------------------------------------------------------------------------------


def changed(kind: str, **config: Any) -> Held:
    source = held(of_transformers(kind))
    source.config |= config
    return source


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_type = yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = dynamic"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "rope of config.json cannot be read"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 3}, "lacks the tensor model.layers.2"),
        ({"num_hidden_layers": 1}, r"holds the tensor model\.layers\.1"),
        ({"intermediate_size": 48}, r"gate_proj\.weight has shape \(40, 32\), config.json asks for \(48, 32\)"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers .* no size"),
        ({"num_hidden_layers": 10**7}, "says 10,000,000 layers, the weights are 21 tensors"),
        ({"hidden_size": "wide"}, "hidden_size .* no size"),
        ({"num_key_value_heads": 3}, "describes no network"),
        ({"tie_word_embeddings": False}, "lacks the tensor lm_head.weight"),
    ],
    ids=str,
)
def test_a_config_of_another_network_is_refused_by_name(config: dict[str, Any], word: str) -> None:
    source = changed("SmolLM2", **config)
    if config.get("tie_word_embeddings") is False:
        del source.held["lm_head.weight"]
    with pytest.raises((UsageError, ModelFolderError), match=word):
        llama.read(source)


def test_old_spellings_of_a_config_are_read() -> None:
    source = changed("Qwen2.5", rope_parameters=None, rope_theta=123.0, sliding_window=9, use_sliding_window=False)
    source.held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    described: Any = llama.read(source).denoiser
    assert described.theta == 123.0
    assert described.qkv_bias


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size"])
def test_a_config_that_does_not_say_its_sizes(key: str) -> None:
    source = changed("SmolLM2")
    del source.config[key]
    with pytest.raises(ModelFolderError, match=f"does not say {key}"):
        llama.read(source)


def test_damaged_weights_are_refused_by_name() -> None:
    source, name = changed("Qwen3"), "model.layers.1.self_attn.k_proj.weight"
    whole = source.held[name]
    for wrong, word in (
        (torch.full_like(whole, torch.nan), "not finite"),
        (whole[:-1], "has shape"),
        (whole.to(torch.int8), "no floating-point"),
    ):
        source.held[name] = wrong
        with pytest.raises(ModelFolderError, match=word) as caught:
            llama.read(source)
        assert name in str(caught.value)
    del source.held[name]
    with pytest.raises(ModelFolderError, match=f"lacks the tensor {name}"):
        llama.read(source)


def test_a_vocabulary_that_does_not_fit() -> None:
    network = of_transformers("SmolLM2", vocab_size=200)
    with pytest.raises(ModelFolderError, match="tokenizer has 264 ids, the embedding 200 rows"):
        llama.read(held(network))
    words = vocabulary("<|stop|>")
    with pytest.raises(ModelFolderError, match="no token that ends a text"):
        llama.read(held(of_transformers("SmolLM2"), words))


# --- GGUF -------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, network: Any, *, few_bits: bool = False, **metadata: Any) -> Path:
    """The network as llama.cpp's converter writes it."""
    gguf = pytest.importorskip("gguf", reason="GGUF files need the package gguf")
    from unmask.pretrained.gguf import LAYER, TOP

    config, words = network.config, vocabulary()
    kind = config.model_type
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", kind))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(network.model.layers[0].self_attn.head_dim)
    writer.add_rope_dimension_count(network.model.layers[0].self_attn.head_dim)
    tokens = [words.id_to_token(i) for i in range(words.get_vocab_size())]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), ROWS)]
    writer.add_tokenizer_model(metadata.pop("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(metadata.pop("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t == END else 5 if t.startswith("[PAD") else 1 for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(BEGIN)
    for key, value in metadata.items():
        writer.add_uint32(f"{kind}.{key.replace('__', '.')}", value)
    back = {ours: own for own, ours in LAYER.items()}
    for name, tensor in network.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = name.split(".")
        own = next((a for a, b in TOP.items() if b == name), None)
        if own is None:
            own = f"blk.{parts[2]}.{back['.'.join(parts[3:-1])]}.{parts[-1]}"
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = permuted(tensor, heads)
        numbers = tensor.numpy()
        if few_bits and tensor.ndim == 2:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(own, gguf.quants.quantize(numbers, q8), raw_dtype=q8)
        else:
            writer.add_tensor(own, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(weight: Tensor, heads: int) -> Tensor:
    """As llama.cpp's converter turns the rows of queries and keys."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()


def test_rows_are_turned_back() -> None:
    weight = torch.randn(24, 5)
    assert not permuted(weight, 2).equal(weight)
    assert unpermuted(permuted(weight, 2), 2).equal(weight)


@pytest.mark.parametrize("kind", ["SmolLM2", "Qwen2.5", "Qwen3"])
def test_a_gguf_file_holds_the_same_model(kind: str, tmp_path: Path) -> None:
    network = of_transformers(kind)
    source = open_gguf(write_gguf(tmp_path / "tiny.gguf", network))
    model = ours(llama.read(source))
    with torch.no_grad():
        got = model.denoiser(X)[..., :ROWS]
    torch.testing.assert_close(got, theirs(network, X), rtol=1e-5, atol=1e-5)
    for text in ("the cat on", "Two  spaces, café – 12345\n\n\t日本"):
        assert model.tokenizer.encode(text) == WORDS.encode(text).ids


def test_a_gguf_file_in_few_bits_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    import transformers

    options = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = write_gguf(tmp_path / "tiny.gguf", of_transformers("SmolLM2", **options), few_bits=True)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    model = ours(llama.read(open_gguf(path)))
    with torch.no_grad():
        got = model.denoiser(X)[..., :ROWS]
    torch.testing.assert_close(got, theirs(other.eval(), X), rtol=1e-5, atol=1e-5)


def test_without_a_package_that_reads_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", of_transformers("SmolLM2"))
    import gguf.gguf_reader

    monkeypatch.delattr(gguf.gguf_reader.ReaderField, "contents")
    with pytest.raises(UsageError, match="too old"):
        open_gguf(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match="unmask\\[eval\\]"):
        open_gguf(path)


def test_what_is_no_gguf_file_of_ours(tmp_path: Path) -> None:
    network = of_transformers("SmolLM2")
    for metadata, word in (
        ({"architecture": "mamba"}, "architecture 'mamba'; llama, qwen2, qwen3"),
        ({"tokenizer": "llama"}, "vocabulary of the kind 'llama'"),
        ({"pre": "tekken"}, "split as 'tekken'"),
        ({"expert_count": 8}, "num_experts = 8"),
        ({"attention__sliding_window": 8}, "sliding_window = 8"),
    ):
        path = write_gguf(tmp_path / "tiny.gguf", network, **copy.copy(metadata))
        with pytest.raises(UsageError, match=word):
            llama.read(open_gguf(path))
    whole = write_gguf(tmp_path / "tiny.gguf", network).read_bytes()
    for cut in (whole[:100], whole[: len(whole) // 2], b"GGUF", b"", b"x" * 4000):
        (tmp_path / "cut.gguf").write_bytes(cut)
        with pytest.raises(ModelFolderError, match="damaged or no GGUF file"):
            llama.read(open_gguf(tmp_path / "cut.gguf"))


# --- by the command line, from others' folder to a diffusion model ----------------------------------------------------

ADAPT = """
out = "{out}"
steps = 8
batch = 4
valid_every = 4
save_every = 4
sample_every = 0
valid_rows = 8

[data]
train = {{ name = "text", path = "{text}" }}
held_out = 0.2
length = 24

[denoiser]
name = "llama"
causal = false
shifted = {shifted}

[objective]
name = "{objective}"
form = "count"

[optim]
lr = 1e-3
muon = false
ema = 0.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(of_transformers("SmolLM2"), tmp_path_factory.mktemp("others") / "smol")


@pytest.mark.parametrize("suffix", ["folder", "gguf"])
def test_imported_it_is_measured_and_writes(
    suffix: str, folder: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"hf:{folder}" if suffix == "folder" else str(write_gguf(tmp_path / "a.gguf", of_transformers("SmolLM2")))
    assert run(["import", source, str(tmp_path / "out"), "--model-length", "32", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["objective"] == "ar"
    assert about["length"] == 32
    assert run(["eval", str(tmp_path / "out"), "--data", str(corpus_file), "--max-rows", "4", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["kind"] == "exact"
    model = ours(llama.read(held(of_transformers("SmolLM2"))))
    again = unmask.load(tmp_path / "out", device="cpu")
    text = "the cat sat on the mat"
    assert again.score(text).nats == pytest.approx(model.score(text).nats, rel=1e-6)
    assert run(["generate", str(tmp_path / "out"), "--prompt", "the", "--length", "12", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the")


@pytest.mark.parametrize(("objective", "shifted"), [("mdlm_opening", True), ("mdlm_warm", True), ("mdlm_warm", False)])
def test_adapted_it_fills_gaps(
    objective: str, shifted: bool, folder: Path, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "adapt.toml"
    recipe.write_text(
        ADAPT.format(out=tmp_path / "run", text=corpus_file, objective=objective, shifted=str(shifted).lower())
    )
    assert run(["train", str(recipe), "--init", f"hf:{folder}", "--device", "cpu"]) == 0
    model = unmask.load(tmp_path / "run", device="cpu")
    assert model.process is not None
    described: Any = model.denoiser.config
    assert (described.shifted, described.causal, described.tied) == (shifted, False, True)
    reports = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    bounds = [report["valid_nats_per_token"] for report in reports if "valid_nats_per_token" in report]
    assert bounds[-1] < bounds[0]
    capsys.readouterr()
    assert run(["fill", str(tmp_path / "run"), "the [MASK:2] sat", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the ")
    assert run(["eval", str(tmp_path / "run"), "--max-rows", "4", "--json"]) == 0
    # through a model folder of ours it begins with the same weights
    assert run(["import", f"hf:{folder}", str(tmp_path / "ar")]) == 0
    own = load_config(
        tmp_path / "run" / "recipe.json", {"out": str(tmp_path / "own"), "tokenizer": str(tmp_path / "ar")}
    )
    train(own, init=tmp_path / "ar", device="cpu")
    again = unmask.load(tmp_path / "own", device="cpu")
    for (name, a), b in zip(model.denoiser.named_parameters(), again.denoiser.parameters(), strict=True):
        assert a.equal(b), name


def test_a_recipe_of_another_denoiser_says_which_sides_are_seen(folder: Path, make_config: Any, tmp_path: Path) -> None:
    for name, objective, causal in (("both", MDLM(form="count"), False), ("before", AR(), True)):
        denoiser = dataclasses.replace(TINY, causal=causal)
        config = make_config(tmp_path / name, objective=objective, denoiser=denoiser, steps=1)
        described: Any = train(config, init=f"hf:{folder}", device="cpu").denoiser.config
        assert (type(described), described.causal, described.shifted) == (Llama, causal, True)


def test_the_recipes_that_adapt() -> None:
    recipes = Path(__file__).parents[1] / "benchmarks" / "adapt"
    read = {path.stem: load_config(path) for path in sorted(recipes.glob("*.toml"))}
    assert {"smollm2", "tiny", "tiny_ar"} <= set(read)
    for name, config in read.items():
        described: Any = config.denoiser
        assert isinstance(described, Llama)
        assert described.causal != described.shifted, name
    before, after = read["tiny_ar"], read["tiny"]
    assert after.denoiser == dataclasses.replace(before.denoiser, causal=False, shifted=True)  # type: ignore[type-var]
    assert after.tokenizer.startswith(before.out)


def test_what_an_import_refuses(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ([f"hf:{folder}", "out", "--tokenizer", "bytes"], "leave out --tokenizer"),
        ([f"hf:{folder}", "out", "--ema"], "leave out --ema"),
        ([f"hf:{folder}", "out", "--model-length", "100"], "64 positions that it knows"),
        ([str(folder), "out"], "give --tokenizer"),
        ([str(folder), "out", "--tokenizer", "bytes"], f"one of transformers is hf:{folder}"),
        (["nowhere.gguf", "out"], "nowhere.gguf is missing"),
    ):
        assert run(["import", words[0], str(tmp_path / words[1]), *words[2:]]) in (1, 2)
        assert said in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
