"""Published Mamba, Caduceus and HyenaDNA by name onto our networks: the same logits; what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import published_dna as published
import unmask
from pretrained_llamas import Held, vocabulary
from tiny import MakeConfig
from unmask.cli import run
from unmask.denoisers.network import Network
from unmask.errors import ModelFolderError, UsageError
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.pretrained import Pretrained, read_pretrained
from unmask.storage.model_folder import load_weights

IDS = torch.tensor([[7, 8, 3, 10, 11, 9, 3, 7, 10, 8, 1], [9, 9, 7, 3, 8, 10, 6, 11, 7, 3, 10]])


def network_of(read: Pretrained) -> Network:
    network = read.denoiser.build(num_ids=read.tokenizer.num_ids, mask_id=read.tokenizer.mask_id)
    load_weights(network, dict(read.state), "tiny")
    return network.eval()


def caduceus(*, rcps: bool, fused: bool = True, blocks: int = published.BLOCKS, **changes: Any) -> Held:
    how: dict[str, Any] = {"rcps": rcps, "fused": fused, "blocks": blocks}
    return Held(published.caduceus_config(**how) | changes, published.caduceus_tensors(**how), vocabulary())


def hyena(**changes: Any) -> Held:
    return Held(published.hyena_config() | changes, published.hyena_tensors(), vocabulary())


def of_transformers(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 280, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 2}
    torch.manual_seed(0)
    network = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes | options)).float().eval()
    for name, p in network.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return network


def mamba(network: Any, **changes: Any) -> Held:
    config = json.loads(network.config.to_json_string()) | changes
    return Held(config, {name: t.clone() for name, t in network.state_dict().items()}, vocabulary())


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_mamba_has_the_logits_of_transformers(tied: bool) -> None:
    theirs = of_transformers(tie_word_embeddings=tied, time_step_rank=3)
    read = read_pretrained(mamba(theirs))
    assert (read.causal, read.denoiser.tied) == (True, tied)  # type: ignore[attr-defined]
    z_BL = torch.randint(0, 256, (2, 19))
    begun = torch.nn.functional.pad(z_BL, (1, 0), value=read.denoiser.begin)  # type: ignore[attr-defined]
    want = theirs(begun, use_cache=False).logits[:, :-1]
    got = network_of(read)(z_BL)[..., : want.shape[-1]]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_caduceus_ph_has_the_logits_of_its_authors() -> None:
    """In training; in use it is the average of both strands, as its paper has it."""
    source = caduceus(rcps=False)
    network = network_of(read_pretrained(source)).train()
    want = torch.stack([published.caduceus_ph(row, source.held) for row in IDS])
    torch.testing.assert_close(network(IDS), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("fused", "blocks"), [(True, 2), (True, 3), (False, 2), (False, 3)])
@torch.no_grad()
def test_caduceus_ps_has_the_logits_of_its_authors(fused: bool, blocks: int) -> None:
    """With sum and norm as one kernel the strands change places in each block, which is another function."""
    source = caduceus(rcps=True, fused=fused, blocks=blocks)
    read = read_pretrained(source)
    assert read.denoiser.tied is not (fused and blocks == 3)  # type: ignore[attr-defined]
    network, complement_I = network_of(read), torch.tensor(read.denoiser.complement)  # type: ignore[attr-defined]
    want = torch.stack([published.caduceus_ps(row, source.held, fused=fused, blocks=blocks) for row in IDS])
    torch.testing.assert_close(network(IDS), want, rtol=1e-5, atol=1e-5)
    other = network(complement_I[IDS].flip(1))[..., complement_I].flip(1)
    torch.testing.assert_close(other, network(IDS), rtol=1e-5, atol=1e-5)


def test_a_fused_norm_is_what_a_config_that_is_silent_means() -> None:
    source = caduceus(rcps=True)
    want = dict(read_pretrained(source).state)
    del source.config["fused_add_norm"]
    assert all(tensor.equal(want[name]) for name, tensor in read_pretrained(source).state.items())


@torch.no_grad()
def test_hyena_has_the_logits_of_its_authors() -> None:
    source = hyena()
    network = network_of(read_pretrained(source))
    begun = torch.nn.functional.pad(IDS, (1, 0), value=network.config.begin)  # type: ignore[union-attr]
    want = torch.stack([published.hyena(row, source.held)[:-1] for row in begun])
    torch.testing.assert_close(network(IDS), want, rtol=1e-4, atol=1e-5)


def test_shared_weights_may_stand_under_either_name_or_both() -> None:
    source = caduceus(rcps=True)
    moved = "caduceus.backbone.layers.1.mixer.submodule.mamba_{}.in_proj.weight"
    want = dict(read_pretrained(source).state)
    source.held[moved.format("rev")] = source.held[moved.format("fwd")].clone()
    assert dict(read_pretrained(source).state).keys() == want.keys()
    del source.held[moved.format("fwd")]
    assert (
        read_pretrained(source)
        .state["blocks.1.branches.0.layer.into.weight"]
        .equal(want["blocks.1.branches.0.layer.into.weight"])
    )


def test_the_letters_are_a_vocabulary() -> None:
    read = read_pretrained(caduceus(rcps=True))
    assert read.tokenizer.encode("ACGTN") == [7, 8, 9, 10, 11]
    assert (read.tokenizer.mask_id, read.tokenizer.num_ids) == (3, 16)
    assert read.denoiser.complement == (0, 1, 2, 3, 4, 5, 6, 10, 9, 8, 7, 11, 12, 13, 14, 15)  # type: ignore[attr-defined]
    assert read.tokenizer.decode([7, 3, 10]) == "A[MASK]T"


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bidirectional": False}, "bidirectional = False"),
        ({"bidirectional_weight_tie": False}, "bidirectional_weight_tie = False"),
        ({"ssm_cfg": {"bias": True}}, "bias = True"),
        ({"ssm_cfg": "none"}, "ssm_cfg"),
        ({"d_model": 12}, "has shape"),
        ({"d_model": -1}, "no size of a network"),
        ({"d_model": 1 << 24}, "has shape"),
        ({"n_layer": 3}, "lacks the tensor backbone.layers.2"),
        ({"n_layer": 1}, "says nothing"),
        ({"vocab_size": 4096}, "letters ACGTN"),
        ({"complement_map": {"7": "x"}}, "no table of ids"),
        ({"complement_map": {"7": 8}}, "is not the complement_map"),
        ({"complement_map": {"7": 8, "8": 7, "9": 10, "10": 9}}, "is not the complement_map"),
        ({"fused_add_norm": "yes"}, "neither true nor false"),
    ],
)
def test_a_config_that_is_no_caduceus_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ModelFolderError, UsageError), match=said):
        read_pretrained(caduceus(rcps=True, **changes))


def test_a_vocabulary_without_rows_is_refused_before_its_ids_are_made() -> None:
    with pytest.raises(ModelFolderError, match="is 16777216, no tensor has so many rows"):
        read_pretrained(mamba(of_transformers(), vocab_size=1 << 24))


def test_weights_that_are_another_kind_are_refused() -> None:
    source = hyena()
    source.held["hyena.backbone.layers.1.mixer.filter_fn.modulation.deltas"] *= 2
    with pytest.raises(UsageError, match="deltas is not what its sizes make it"):
        read_pretrained(source)
    source = hyena()
    source.held["hyena.backbone.layers.0.mixer.filter_fn.implicit_filter.3.freq"] += 1
    with pytest.raises(UsageError, match="differ"):
        dict(read_pretrained(source).state)
    source = caduceus(rcps=False)
    source.held["caduceus.backbone.norm_f.weight"][0] = torch.nan
    with pytest.raises(ModelFolderError, match="not finite"):
        dict(read_pretrained(source).state)
    with pytest.raises(ModelFolderError, match="describes no network"):
        read_pretrained(caduceus(rcps=False, complement_map={"7": 8}))
    with pytest.raises(UsageError, match="hyena_order = 3"):
        read_pretrained(hyena(hyena_order=3))
    with pytest.raises(UsageError, match="short_filter_order = 4"):
        read_pretrained(hyena(short_filter_order=4))
    with pytest.raises(ModelFolderError, match="emb_dim"):
        read_pretrained(hyena(emb_dim=4))
    with pytest.raises(UsageError, match="use_bias = True"):
        read_pretrained(mamba(of_transformers(), use_bias=True))


# --- the ordinary doors -----------------------------------------------------------------------------------------------


def test_caduceus_from_a_folder_is_trained_on_and_written_with(tmp_path: Path, make_config: MakeConfig) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(published.caduceus_config(rcps=True)))
    save_file(published.caduceus_tensors(rcps=True), tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "dna.txt").write_text("ACGTTGCAAC\n" * 200)
    corpus = unmask.corpora.Text(path=str(tmp_path / "dna.txt"))
    config = make_config(tmp_path / "run", objective=MDLM(form="count"), data={"train": corpus}, steps=3)
    model = unmask.train(config, init=f"hf:{tmp_path / 'theirs'}", device="cpu")
    [text] = unmask.load(tmp_path / "run", device="cpu").generate(1, 12, seed=1)
    assert set(text) <= set("ACGTN")
    assert model.score("ACGT", seed=1, num_samples=2).nats > 0


def test_hyena_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(published.hyena_config()))
    save_file(published.hyena_tensors(), tmp_path / "theirs" / "model.safetensors")
    assert run(["import", f"hf:{tmp_path / 'theirs'}", str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    model = unmask.load(tmp_path / "ours", device="cpu")
    assert isinstance(model.objective, AR)
    assert model.length == published.MOST
    assert set(model.generate(1, 8, seed=2)[0]) <= set("ACGTN")
