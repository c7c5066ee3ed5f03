"""What is refused when a model of others is read: one sentence each, nothing executed, nothing half-written."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import unmask
from tiny_encoders import TEXTS, save_encoder
from unmask.cli import run as unmask_command
from unmask.data.subwords import from_bert_vocab
from unmask.errors import UnmaskError
from unmask.pretrained import open_source, read_pretrained

pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_encoder("bert", tmp_path / "bert")
    return tmp_path / "bert"


def edit_json(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return attack


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))


def indexed(name: str) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))

    return attack


def no_mask(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", mask_token=...)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("[MASK]", "[HIDE]"))


def one_more_word(folder: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_tokens([f"word{i}" for i in range(9)])
    inner.save(str(folder / "tokenizer.json"))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pickle alone": (pickled, "holds its weights as pytorch_model.bin alone, which can run code and is not read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
    "an index that leads away": (indexed("../../secret.safetensors"), "names '../../secret.safetensors', which is no"),
    "an index of pickles": (indexed("pytorch_model.bin"), "names 'pytorch_model.bin', which is no safetensors file"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "another model": (config(model_type="t5"), "has the model_type 't5', which is not among those that can be read"),
    "code of its own": (
        config(model_type="evil", auto_map={"AutoModelForMaskedLM": "evil.Evil"}),
        "has the model_type 'evil', which is not among those that can be read",
    ),
    "a decoder": (config(model_type="gpt2"), "is a decoder ('gpt2'), which has no mask and sees one side"),
    "an encoder as decoder": (config(is_decoder=True), "is set up as a decoder"),
    "no model_type": (config(model_type=...), "config.json has no model_type"),
    "no mask token": (no_mask, "its vocabulary has no mask token"),
    "ids beyond the embedding": (one_more_word, "the tokenizer has ids up to 78, the network only 73"),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        "holds no tokenizer.json, no vocab.json with merges.txt",
    ),
    "a size that is text": (config(hidden_size="64"), "settings.hidden_size must be a whole number"),
    "an activation of its own": (config(hidden_act="os.system"), "settings.hidden_act is 'os.system'"),
    "sizes that do not fit": (config(hidden_size=64), "embeddings.word_embeddings.weight has shape (73, 32)"),
    "more blocks than there are": (config(num_hidden_layers=3), "layer.2"),
    "a billion blocks": (config(num_hidden_layers=10**9), "settings.num_hidden_layers must be"),
    "too many blocks": (
        config(num_hidden_layers=10**6),
        "num_hidden_layers is 1000000, far more than its weights file holds",
    ),
    "a trillion ids": (config(vocab_size=10**12), "vocab_size of config.json is 1000000000000, no tensor has so many"),
    "relative positions": (config(position_embedding_type="relative_key"), "its positions are 'relative_key'"),
    "no head": (
        weights(lambda t: [t.pop(name) for name in list(t) if name.startswith("cls.")]),
        "holds an encoder without the head that predicts tokens",
    ),
    "numbers that are none": (
        weights(lambda t: t["bert.embeddings.LayerNorm.weight"].fill_(torch.nan)),
        "holds numbers that are not finite",
    ),
    "whole numbers for weights": (
        weights(lambda t: t.update({name: value.to(torch.int32) for name, value in t.items()})),
        "holds torch.int32, no floating-point numbers",
    ),
    "a damaged file": (lambda f: (f / "model.safetensors").write_bytes(b"{}"), "damaged or no safetensors file"),
}


def hostile_version(folder: Path) -> None:
    edit_json(folder / "tokenizer.json", version="2\x1b[2J\n")


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (config(hidden_size="a" * 5000), "settings.hidden_size must be a whole number"),
        (config(hidden_act=["a" * 5000]), "settings.hidden_act is"),
        (hostile_version, "the tokenizer cannot be read: Unknown tokenizer version '2?[2J"),
    ],
)
def test_sentences_quote_strangers_briefly_and_without_control_characters(
    attack: Callable[[Path], Any], said: str, folder: Path
) -> None:
    attack(folder)
    with pytest.raises(UnmaskError) as error:
        read_pretrained(str(folder))
    sentence = str(error.value)
    assert said in sentence
    assert sentence.isprintable()
    assert len(sentence) < len(str(folder)) + 300


@pytest.mark.parametrize("name", REFUSED)
def test_one_sentence_and_nothing_written(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attack, sentence = REFUSED[name]
    attack(folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    out = tmp_path / "run"
    train = ["train", "demo", "--init", f"hf:{folder}", "--data.train", "text", "--data.train.path", "text.txt"]
    code = unmask_command([*train, "--out", str(out), "--data.cache", str(tmp_path / "cache"), "--device", "cpu"])
    said = capsys.readouterr().err
    assert sentence in said
    assert said.strip().count("\n") == 0
    assert "Traceback" not in said
    assert code in (1, 2)
    assert not (out / "recipe.json").exists()
    assert not (out / "model").exists()
    assert not (tmp_path / "executed").exists()


def test_older_names_and_what_other_tasks_left(folder: Path) -> None:
    """Norms called gamma and beta, a bias stored twice, a pooler, and a head for pairs of sentences."""
    before = dict(read_pretrained(str(folder)).state)
    tensors = load_file(folder / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for name, t in tensors.items()
    }
    old |= {"bert.pooler.dense.weight": torch.ones(32, 32), "cls.seq_relationship.bias": torch.ones(2)}
    old |= {"bert.embeddings.position_ids": torch.arange(40)[None]}
    old["cls.predictions.decoder.bias"] = old.pop("cls.predictions.bias")
    parts = [{name: t for i, (name, t) in enumerate(sorted(old.items())) if i % 2 == part} for part in range(2)]
    (folder / "model.safetensors").unlink()
    for i, part in enumerate(parts):
        save_file(part, folder / f"model-{i}.safetensors")
    placed = {name: f"model-{i}.safetensors" for i, part in enumerate(parts) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    after = dict(read_pretrained(str(folder)).state)
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_an_index_beside_the_single_file_is_ignored_as_in_transformers(folder: Path) -> None:
    import transformers

    tensors = load_file(folder / "model.safetensors")
    save_file({name: t + 1 for name, t in tensors.items()}, folder / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).state_dict()
    name = "bert.embeddings.word_embeddings.weight"
    assert read_pretrained(str(folder)).state["encoder." + name].equal(theirs[name])


def test_half_precision_is_widened(folder: Path) -> None:
    weights(lambda t: t.update({name: one.half() for name, one in t.items()}))(folder)
    assert {tensor.dtype for tensor in read_pretrained(str(folder)).state.values()} == {torch.float32}


def test_vocabularies_of_older_files(folder: Path, tmp_path: Path) -> None:
    tokenizer = read_pretrained(str(folder)).tokenizer
    words = [tokenizer.token_text(id) for id in range(70)]
    words[4] = "[MASK]"
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(words))
    older = read_pretrained(str(folder)).tokenizer
    for text in TEXTS[:3]:
        assert older.encode(text) == tokenizer.encode(text) == from_bert_vocab(folder / "vocab.txt").encode(text)
    assert older.fixed_ids == tokenizer.fixed_ids
    assert older.mask_id == 4
    save_encoder("roberta", tmp_path / "roberta")
    tokenizer = read_pretrained(str(tmp_path / "roberta")).tokenizer
    model = json.loads((tmp_path / "roberta" / "tokenizer.json").read_text())["model"]
    (tmp_path / "roberta" / "tokenizer.json").unlink()
    (tmp_path / "roberta" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (tmp_path / "roberta" / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    older = read_pretrained(str(tmp_path / "roberta")).tokenizer
    text = "The <mask> of a dog.\n  Two  blanks, é ☃ </s>"
    assert older.encode(text) == tokenizer.encode(text)
    assert older.decode(older.encode(text)) == text
    assert not {older.mask_id, *older.fixed_ids} & {*older.encode(text)}


def test_a_tokenizer_by_name(folder: Path) -> None:
    from unmask.data.tokenizers import load_tokenizer

    assert load_tokenizer(f"hf:{folder}").fixed_ids == read_pretrained(str(folder)).tokenizer.fixed_ids


def test_the_recipes_own_tokenizer_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    run = unmask.load_config("demo", {"tokenizer": "chars", "out": str(tmp_path / "run")})
    with pytest.raises(UnmaskError, match=r"the recipe names the tokenizer 'chars', hf:.* comes with its own"):
        unmask.train(run, init=f"hf:{folder}", device="cpu")


def test_the_hub_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def nowhere(*args: Any, **how: Any) -> Any:
        assert not [
            pattern
            for pattern in how["allow_patterns"]
            if not pattern.endswith((".json", ".safetensors", ".txt", "spm.model", "tokenizer.model"))
        ]
        raise ConnectionError("no route to host\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", nowhere)
    with pytest.raises(UnmaskError) as caught:
        open_source("hf:some/model")
    assert str(caught.value) == (
        "some/model is no folder here, and the hub gives nothing by that name (no route to host): without a "
        "network, name a folder"
    )
    with pytest.raises(UnmaskError, match=r"models/of mine is missing"):
        open_source("models/of mine")


def test_without_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(
        UnmaskError, match=r"needs the package transformers; install it with: pip install 'unmask\[hf\]'"
    ):
        read_pretrained(str(folder))


def _settings(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda config, tokenizer: config["denoiser"]["settings"].update(changes)


def _denoiser(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda config, tokenizer: config["denoiser"].update(changes)


def _roles(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda config, tokenizer: tokenizer["roles"].update(changes)


OURS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = {
    "a million blocks": (_settings(num_hidden_layers=10**6), "num_hidden_layers is 1000000, far more than"),
    "a wide embedding": (_settings(type_vocab_size=4 * 10**6), "type_vocab_size is 4000000, far more than"),
    "an unknown setting": (_settings(auto_map="evil.Evil"), "settings.auto_map is unknown"),
    "an activation of its own": (_settings(hidden_act="os.system"), "settings.hidden_act is 'os.system'"),
    "another family": (_denoiser(family="evil"), "denoiser.family: 'evil' is not a choice"),
    "a fixed id beyond": (_denoiser(fixed=[10**6]), "names the id 1000000, the vocabulary has 73"),
    "a mask that is fixed": (_denoiser(fixed=[4]), "the mask's id 4 is among the encoder's fixed ids"),
    "settings that are text": (_denoiser(settings="{}"), "denoiser.settings"),
    "ids that are text": (_roles(mask="4"), "the tokenizer's roles are damaged: '4' is no id"),
    "too few ids": (_roles(num_ids=20), "the tokenizer has ids up to 69, the network only 20"),
    "a mask in two roles": (_roles(fixed=[0, 1, 2, 3, 4]), "the id 4 is the mask and something else"),
    "an id below 0": (_roles(fixed=[-1]), "the tokenizer's roles name the id -1"),
    "roles of another kind": (_roles(more=1), "the tokenizer's roles are damaged"),
    "no vocabulary": (lambda config, tokenizer: tokenizer.pop("tokenizer"), "its roles are damaged"),
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from unmask.objectives.mdlm import MDLM
    from unmask.storage.model_folder import load_weights

    folder = tmp_path_factory.mktemp("ours")
    save_encoder("bert", folder / "theirs")
    found = read_pretrained(str(folder / "theirs"))
    network = found.denoiser.build(num_ids=found.tokenizer.num_ids, mask_id=found.tokenizer.mask_id)
    found.denoiser.describe(network)
    load_weights(network, dict(found.state), "")
    how: dict[str, Any] = {"objective": MDLM(), "length": 20, "anchor": "both"}
    unmask.Model(denoiser=network, tokenizer=found.tokenizer, **how).save(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("name", OURS)
def test_a_folder_of_ours_by_a_stranger(name: str, ours: Path, tmp_path: Path) -> None:
    change, sentence = OURS[name]
    config, tokenizer = (json.loads((ours / file).read_text()) for file in ("config.json", "tokenizer.json"))
    change(config, tokenizer)
    for file, data in (("config.json", config), ("tokenizer.json", tokenizer)):
        (tmp_path / file).write_text(json.dumps(data))
    (tmp_path / "model.safetensors").write_bytes((ours / "model.safetensors").read_bytes())
    with pytest.raises(UnmaskError) as caught:
        unmask.load(tmp_path)
    assert sentence in str(caught.value)
    assert str(tmp_path) in str(caught.value)
