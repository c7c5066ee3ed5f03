"""What a user says is done or refused in a sentence: nothing of it is replaced without a word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import unmask
from pretrained_llamas import of_transformers, save
from tiny_encoders import save_encoder
from unmask.cli import run
from unmask.config import DataConfig
from unmask.corpora.sources import from_path
from unmask.data.augment import augmentation
from unmask.denoisers.encoder import Encoder
from unmask.denoisers.llama import Llama
from unmask.denoisers.mamba import Mamba
from unmask.errors import DataError, UsageError
from unmask.objectives.ar import AR
from unmask.training.loop import train

LINES = '{"text": "the cat sat"}\n'


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("others")
    save_encoder("bert", folder / "bert")
    save(of_transformers("SmolLM2"), folder / "smol")
    unmask.load("stories", device="cpu").save(folder / "ours")
    return {name: f"hf:{folder / name}" for name in ("bert", "smol", "ours")}


SAID = {
    "another": ("bert", ["--denoiser", "dit"], "--denoiser dit does not fit hf:.*, whose network is encoder"),
    "another, by its name": ("smol", ["--denoiser.name", "dit"], "whose network is llama"),
    "ours": ("ours", ["--denoiser", "llama", "--denoiser.size", "nano"], "whose network is dit"),
    "sizes": ("bert", ["--denoiser.hidden", "32"], "denoiser.hidden comes with the weights"),
    "its own sizes": ("smol", ["--denoiser", "llama", "--denoiser.blocks", "1"], "may say its causal, shifted"),
    "another's": ("bert", ["--denoiser.dropout", "0.1"], "give --denoiser encoder beside it"),
}


@pytest.mark.parametrize("case", SAID)
def test_a_network_beside_one_with_weights(
    case: str, sources: dict[str, str], corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, words, said = SAID[case]
    data = ["--data.train", "text", "--data.train.path", str(corpus_file), "--out", str(tmp_path / "run")]
    assert run(["train", "demo", "--init", sources[source], *data, *words, "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert re.search(said, err), err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("source", "kind"), [("bert", "encoder"), ("smol", "llama")])
def test_who_names_what_is_loaded_gets_it(
    source: str, kind: str, sources: dict[str, str], corpus_file: Path, tmp_path: Path
) -> None:
    words = ["--data.train", "text", "--data.train.path", str(corpus_file), "--out", str(tmp_path / "run")]
    words += ["--denoiser", kind, "--steps", "1", "--batch", "2", "--data.length", "16", "--optim.muon", "false"]
    words += ["--valid_rows", "2", "--sample_every", "0", "--data.held_out", "0.2"]
    assert run(["train", "demo", "--init", sources[source], *words, "--device", "cpu"]) == 0
    model: Any = unmask.load(tmp_path / "run", device="cpu")
    assert type(model.denoiser.config) is (Encoder if kind == "encoder" else Llama)


def test_a_recipe_of_another_network(sources: dict[str, str], make_config: Any, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", objective=AR(), denoiser=Mamba(), steps=1)
    with pytest.raises(UsageError, match=r"the recipe's denoiser is mamba, .* holds llama"):
        train(config, init=sources["smol"], device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_large_encoder_is_not_begun_by_accident(make_config: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = make_config(tmp_path / "run", denoiser=Encoder())
    with pytest.raises(UsageError, match="a bert of 86 million parameters, begun from nothing: give --init"):
        train(config, device="cpu")
    assert not (tmp_path / "run").exists()
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    Encoder(settings=small).check_start(num_ids=258, mask_id=257)


def test_only_dna_has_another_strand() -> None:
    data = DataConfig(augment="reverse_complement")
    with pytest.raises(UsageError, match="is for DNA, this vocabulary has other letters, such as 'E'"):
        augmentation(data, unmask.load_tokenizer("bytes"), 0)
    assert augmentation(data, unmask.load_tokenizer("dna"), 0) is not None


FOLDERS = {
    "flat": (["train-0-of-2.jsonl", "train-1-of-2.jsonl", "test-0-of-1.jsonl"], "train*.jsonl"),
    "plain": (["train.jsonl", "validation.jsonl"], "train.jsonl"),
    "below": (["data/train-0.jsonl", "data/valid-0.jsonl"], "data/train*.jsonl"),
    "folders": (["train/a.jsonl", "test/a.jsonl"], "train/**"),
    "no training": (["dev.jsonl", "test.jsonl"], "dev.jsonl"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_splits_are_not_read_as_one(case: str, tmp_path: Path) -> None:
    names, pattern = FOLDERS[case]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LINES)
    for corpus in (from_path(str(tmp_path)), unmask.corpora.Jsonl(path=f"{tmp_path}/")):
        with pytest.raises(DataError, match="holds several splits") as caught:
            list(corpus.documents())
        assert str(caught.value).endswith(f"such as {tmp_path}/{pattern}")
    wanted = len([name for name in names if name.startswith(pattern.partition("*")[0])])
    assert len(list(from_path(f"{tmp_path}/{pattern}").documents())) == wanted


def test_splits_behind_a_url() -> None:
    fsspec: Any = pytest.importorskip("fsspec")
    names = ("/sets/data/train-0.jsonl", "/sets/data/test-0.jsonl")
    fsspec.filesystem("memory").pipe(dict.fromkeys(names, LINES.encode()))
    with pytest.raises(DataError, match=r"such as memory://sets/data/train\*\.jsonl"):
        list(from_path("memory://sets").documents())
    assert len(list(from_path("memory://sets/data/train*.jsonl").documents())) == 1


def test_other_names_are_no_splits(tmp_path: Path) -> None:
    for name in ("training-notes.jsonl", "testimony.jsonl", "dev-diary.jsonl", "train.jsonl", "valid/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LINES)
    assert len(list(unmask.corpora.Jsonl(path=str(tmp_path)).documents())) == 4
    (tmp_path / "val").mkdir()
    (tmp_path / "val.jsonl").write_text(LINES)
    (tmp_path / "train.jsonl").rename(tmp_path / "validation.jsonl")
    assert len(list(unmask.corpora.Jsonl(path=str(tmp_path)).documents())) == 5  # two names of one split
