"""The published layout against a plain re-statement of the published network, and every way it can be wrong."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from unmask.data.batch import make_batch
from unmask.denoisers.dit import DiT
from unmask.errors import ModelFolderError, UnmaskError, UsageError
from unmask.objectives.ar import AR
from unmask.objectives.sedd import SEDD
from unmask.sampling.canvas import Canvas
from unmask.sampling.query import ask_about
from unmask.storage.published import published_names, read_published, write_published

V, D, C, H, N, L = 11, 24, 16, 3, 2, 10  # ids, width, conditioning width, heads, blocks, length


# --- the published network, stated over its tensors -------------------------------------------------------------------


def published_weights(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def r(*shape: int, scale: float = 0.3) -> Tensor:
        return torch.randn(*shape, generator=g) * scale

    w = {
        "vocab_embed.embedding": r(V, D, scale=1.0),
        "sigma_map.mlp.0.weight": r(C, 256, scale=0.1),
        "sigma_map.mlp.0.bias": r(C),
        "sigma_map.mlp.2.weight": r(C, C),
        "sigma_map.mlp.2.bias": r(C),
    }
    for n in range(N):
        w |= {
            f"blocks.{n}.norm1.weight": 1 + r(D),
            f"blocks.{n}.attn_qkv.weight": r(3 * D, D),
            f"blocks.{n}.attn_out.weight": r(D, D),
            f"blocks.{n}.norm2.weight": 1 + r(D),
            f"blocks.{n}.mlp.0.weight": r(4 * D, D),
            f"blocks.{n}.mlp.0.bias": r(4 * D),
            f"blocks.{n}.mlp.2.weight": r(D, 4 * D),
            f"blocks.{n}.mlp.2.bias": r(D),
            f"blocks.{n}.adaLN_modulation.weight": r(6 * D, C),
            f"blocks.{n}.adaLN_modulation.bias": r(6 * D),
        }
    return w | {
        "output_layer.norm_final.weight": 1 + r(D),
        "output_layer.linear.weight": r(V, D),
        "output_layer.linear.bias": r(V),
        "output_layer.adaLN_modulation.weight": r(2 * D, C),
        "output_layer.adaLN_modulation.bias": r(2 * D),
    }


def published_forward(w: dict[str, Tensor], tokens: Tensor, sigma: Tensor | None) -> Tensor:
    """Logits of the published network, one head and one position pair at a time where that is plainer.

    Without a sigma it is the autoregressive one: causal, and nothing is modulated.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def gelu_tanh(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]

    def rotated(x: Tensor) -> Tensor:  # [L, head size]
        half = x.shape[-1] // 2
        out = torch.empty_like(x)
        for position in range(x.shape[0]):
            for i in range(half):
                angle = position / 10000 ** (2 * i / x.shape[-1])
                re, im = x[position, i], x[position, i + half]
                out[position, i] = re * math.cos(angle) - im * math.sin(angle)
                out[position, i + half] = re * math.sin(angle) + im * math.cos(angle)
        return out

    def attention(x: Tensor, name: str) -> Tensor:  # [L, D]
        packed = linear(x, f"{name}.attn_qkv").reshape(-1, 3, H, D // H)
        heads = []
        for h in range(H):
            q, k, v = rotated(packed[:, 0, h]), rotated(packed[:, 1, h]), packed[:, 2, h]
            scores = q @ k.T / math.sqrt(D // H)
            if sigma is None:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            heads.append(torch.softmax(scores, dim=-1) @ v)
        return linear(torch.cat(heads, dim=-1), f"{name}.attn_out")

    def modulation(c: Tensor | None, name: str, parts: int) -> list[Tensor]:
        if c is None:  # shifts of 0; scales are 1 + 0 and gates 1
            return [torch.zeros(D), torch.zeros(D), torch.ones(D)] * (parts // 3) or [torch.zeros(D)] * parts
        return list(linear(c, f"{name}.adaLN_modulation").split(D))

    rows = []
    for number, row in enumerate(tokens):
        c = None
        if sigma is not None:
            angles = [sigma[number].item() * math.exp(-math.log(10000) * i / 128) for i in range(128)]
            waves = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
            c = silu(linear(silu(linear(waves, "sigma_map.mlp.0")), "sigma_map.mlp.2"))
        x = w["vocab_embed.embedding"][row]
        for n in range(N):
            b = f"blocks.{n}"
            shift1, scale1, gate1, shift2, scale2, gate2 = modulation(c, b, 6)
            x = x + gate1 * attention(norm(x, f"{b}.norm1") * (1 + scale1) + shift1, b)
            h = norm(x, f"{b}.norm2") * (1 + scale2) + shift2
            x = x + gate2 * linear(gelu_tanh(linear(h, f"{b}.mlp.0")), f"{b}.mlp.2")
        shift, scale = modulation(c, "output_layer", 2)
        x = norm(x, "output_layer.norm_final") * (1 + scale) + shift
        rows.append(linear(x, "output_layer.linear"))
    return torch.stack(rows)


def without_conditioning(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the published autoregressive network has."""
    return {name: t for name, t in weights.items() if "sigma_map" not in name and "adaLN" not in name}


SEDD_CONFIG: dict[str, Any] = {
    "ngpus": 8,
    "tokens": V - 1,
    "graph": {"type": "absorb", "file": "data", "report_all": False},
    "noise": {"type": "loglinear", "sigma_min": 1e-4, "sigma_max": 20},
    "model": {
        "name": "small",
        "type": "ddit",
        "hidden_size": D,
        "cond_dim": C,
        "length": L,
        "n_blocks": N,
        "n_heads": H,
        "scale_by_sigma": True,
        "dropout": 0.1,
    },
}
CONFIG: dict[str, Any] = {
    "model_type": "mdlm",
    "vocab_size": V,
    "model_length": L,
    "hidden_dim": D,
    "cond_dim": C,
    "n_blocks": N,
    "n_heads": H,
    "dropout": 0.1,
    "time_conditioning": False,
}
FLAGS: dict[str, Any] = {"n_heads": H, "model_length": L, "time_conditioning": False}


def folder(path: Path, weights: dict[str, Tensor], prefix: str = "backbone.", **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "return_dict": False, **changes}))
    save_file({prefix + name: t for name, t in weights.items()}, path / "model.safetensors")
    return path


def sedd_folder(path: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    path.mkdir()
    config = SEDD_CONFIG | {key: SEDD_CONFIG[key] | value for key, value in changes.items()}
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return path


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("time_conditioning", [False, True])
def test_logits_are_the_published_ones(tmp_path: Path, time_conditioning: bool) -> None:
    weights = published_weights()
    source = folder(tmp_path / "m", weights, time_conditioning=time_conditioning)
    published = read_published(source)
    net = published.build()
    assert net.uses_level == time_conditioning
    sigma = torch.tensor([0.0, 0.05, 0.7, 3.0, 6.9])
    tokens = torch.randint(V, (len(sigma), L), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = net(tokens, 1 - torch.exp(-sigma.double()) if time_conditioning else None)
    theirs = published_forward(weights, tokens, sigma if time_conditioning else torch.zeros_like(sigma))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert theirs.std() > 0.3  # not equal because all is zero
    if time_conditioning:  # nor because the noise level does not matter
        assert (published_forward(weights, tokens, torch.zeros_like(sigma)) - theirs)[3].abs().max() > 0.01


def test_the_score_is_the_published_one(tmp_path: Path) -> None:
    """log s = l - log(e^sigma - 1) - log V, and ours but for what the process knows, alpha / (1 - alpha)."""
    weights = published_weights(3)
    published = read_published(sedd_folder(tmp_path / "sedd", weights))
    assert (published.kind, published.num_ids, published.mask_id, published.length) == ("sedd", V, V - 1, L)
    network, objective = published.build(), SEDD()
    tokens = torch.randint(0, V - 1, (3, L), generator=torch.Generator().manual_seed(5))
    tokens[:, ::2] = V - 1
    for t in (0.1, 0.5, 0.9):
        level = objective.noise.level(torch.tensor([t], dtype=torch.float64)).expand(3)
        sigma = -torch.log1p(-level)
        theirs = published_forward(weights, tokens, sigma.float())
        theirs = theirs - torch.expm1(sigma).log().float()[:, None, None] - math.log(V - 1)
        where_BL = tokens == V - 1
        canvas = Canvas(tokens, V - 1, torch.arange(3))
        query = ask_about(canvas, tokens, where_BL, level)
        assert query is not None
        ours = objective.predictor(network)(query)
        ours = ours + (torch.log1p(-level) - level.log()).float()[where_BL.nonzero()[:, 0], None]
        torch.testing.assert_close(ours[:, : V - 1], theirs[where_BL][:, : V - 1], rtol=1e-4, atol=1e-4)


def test_autoregression_is_the_published_one(tmp_path: Path) -> None:
    weights, begin = without_conditioning(published_weights(4)), 2
    save_file({"backbone." + name: t for name, t in weights.items()}, tmp_path / "ar.safetensors")
    options = {"n_heads": H, "model_length": L}
    published = read_published(tmp_path / "ar.safetensors", overrides=options, begin_id=begin)
    assert (published.kind, published.denoiser.causal, published.denoiser.conditioning) == ("ar", True, "none")
    tokens = torch.randint(0, V - 1, (3, L), generator=torch.Generator().manual_seed(6))
    read = torch.cat([torch.full((3, 1), begin), tokens[:, :-1]], dim=1)
    logits = published_forward(weights, read, None)
    logits[..., V - 1] = -math.inf
    theirs = -logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    batch = make_batch(tokens, seed=0, step=0)
    torch.testing.assert_close(AR().position_nats(published.build(), batch).float(), theirs, rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match="say which id its rows begin with"):
        read_published(tmp_path / "ar.safetensors", overrides=options)


def test_a_checkpoint_of_sedd_is_said_to_be_one(tmp_path: Path) -> None:
    weights = published_weights(1)
    shadow = [weights[name] + 1 for name in published_names(N)]
    state = {"backbone." + name: t for name, t in weights.items()}
    torch.save({"state_dict": state, "ema": {"shadow_params": shadow}}, tmp_path / "last.ckpt")
    flags = {"n_heads": H, "model_length": L}
    published = read_published(tmp_path / "last.ckpt", overrides=flags, ema=True, kind="sedd")
    assert (published.kind, published.denoiser.conditioning) == ("sedd", "sigma")
    assert torch.equal(published.state["output.bias"], weights["output_layer.linear.bias"] + 1)
    causal = without_conditioning(weights)
    shadow = [causal[name] + 1 for name in published_names(N, "ar")]
    torch.save({"state_dict": causal, "ema": {"shadow_params": shadow}}, tmp_path / "ar.ckpt")
    published = read_published(tmp_path / "ar.ckpt", overrides=flags, ema=True, begin_id=0)
    assert torch.equal(published.state["blocks.1.out.weight"], weights["blocks.1.attn_out.weight"] + 1)


def test_a_score_network_is_written_and_read(tmp_path: Path) -> None:
    dit = DiT(hidden=D, blocks=N, heads=H, cond_dim=C, conditioning="sigma", qk_norm=False)
    network = dit.build(num_ids=V, mask_id=V - 1)
    write_published(network, tmp_path / "out", length=L, kind="sedd")
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert "vocab_embed.embedding" in names
    again = read_published(tmp_path / "out")
    assert again.kind == "sedd"
    for name, tensor in network.state_dict().items():
        assert torch.equal(again.state[name], tensor)
    constant = DiT(hidden=D, blocks=1, heads=H, conditioning="constant", qk_norm=False).build(num_ids=V, mask_id=V - 1)
    with pytest.raises(UsageError, match="conditioning 'sigma'"):
        write_published(constant, tmp_path / "no", length=L, kind="sedd")
    with pytest.raises(UsageError, match="no published form that is read without its code"):
        write_published(network, tmp_path / "no", length=L, kind="ar")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        ({"graph": {"type": "uniform"}}, None, "the network gives the score itself"),
        ({"noise": {"type": "geometric"}}, None, "only 'loglinear' is read"),
        ({"model": {"scale_by_sigma": False}}, None, "without scale_by_sigma"),
        ({"model": {"n_blocks": 3}}, None, "was said to have n_blocks 3, its tensors have 2"),
        ({}, "mdlm", "says that it is sedd, not mdlm"),
        ({}, "sed", "unknown kind 'sed'"),
    ],
)
def test_what_is_no_sedd_of_ours(tmp_path: Path, changes: Any, kind: Any, sentence: str) -> None:
    source = sedd_folder(tmp_path / "sedd", published_weights(), **changes)
    with pytest.raises(UnmaskError, match=sentence):
        read_published(source, kind=kind)


def test_sedd_and_ar_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from unmask import cli, load

    ids = {f"t{i}": i for i in range(V - 2)} | {"<|endoftext|>": V - 2}
    data = {"model": {"type": "WordLevel", "vocab": ids, "unk_token": "t0"}, "pre_tokenizer": {"type": "Whitespace"}}
    spec = str(tmp_path / "tokenizer.json")
    Path(spec).write_text(json.dumps(data))
    sedd = sedd_folder(tmp_path / "sedd", published_weights())
    assert cli.run(["import", str(sedd), str(tmp_path / "a"), "--tokenizer", spec, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "sedd"
    assert load(str(tmp_path / "a")).objective == SEDD()
    assert cli.run(["export", str(tmp_path / "a"), str(tmp_path / "back")]) == 0
    exported = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in published_weights().items())
    save_file(without_conditioning(published_weights()), tmp_path / "ar.safetensors")
    words = ["import", str(tmp_path / "ar.safetensors"), str(tmp_path / "b"), "--tokenizer", spec]
    assert cli.run([*words, "--model-length", str(L), "--n-heads", str(H)]) == 0
    model = load(str(tmp_path / "b"))
    assert model.objective == AR()
    embed = model.denoiser.embed.weight  # type: ignore[union-attr]
    assert torch.equal(embed[V - 1], embed[V - 2])  # it begins as its rows began
    assert len(model.generate(1, 4, seed=0)) == 1
    capsys.readouterr()
    assert cli.run(["export", str(tmp_path / "b"), str(tmp_path / "c")]) == 2


def test_what_is_read(tmp_path: Path) -> None:
    published = read_published(folder(tmp_path / "m", published_weights()))
    assert (published.num_ids, published.mask_id, published.length, published.notes) == (V, V - 1, L, [])
    d = published.denoiser
    assert (d.dims, d.cond_dim, d.conditioning, d.dropout) == ((D, N, H), C, "constant", 0.1)
    assert not d.tied
    assert not d.causal
    assert read_published(tmp_path / "m", overrides={"mask_id": 3}).mask_id == 3
    for name in ("small", "tiny"):  # the paper's sizes go by name
        dims = DiT(size=name).dims  # type: ignore[arg-type]
        assert dims[0] // dims[2] == 64


@pytest.mark.parametrize("conditioning", ["constant", "sigma"])
def test_export_and_import_are_inverse(tmp_path: Path, conditioning: Any) -> None:
    source = folder(tmp_path / "a", published_weights(), time_conditioning=conditioning == "sigma")
    first = read_published(source, overrides={"mask_id": 4, "dropout": 0.0})
    write_published(first.build(), tmp_path / "b", length=first.length)
    second = read_published(tmp_path / "b")
    assert (second.denoiser, second.mask_id, second.length) == (first.denoiser, 4, L)
    assert first.denoiser.conditioning == conditioning
    assert set(first.state) == set(second.state)
    assert all(first.state[k].numpy().tobytes() == second.state[k].numpy().tobytes() for k in first.state)
    theirs, ours = load_file(source / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    assert set(theirs) == set(ours)
    assert all(theirs[k].equal(ours[k]) for k in theirs)


def same(published: Any, weights: dict[str, Tensor]) -> bool:
    return all(published.state[ours].equal(weights[name]) for name, ours in published_names(N).items())


def test_without_the_prefix_and_with_rotary_tables(tmp_path: Path) -> None:
    weights = published_weights()
    extra = {"rotary_emb.inv_freq": torch.ones(4)}
    assert same(read_published(folder(tmp_path / "a", {**weights, **extra}, prefix="")), weights)
    assert same(read_published(folder(tmp_path / "b", {**weights, **extra})), weights)
    save_file({**weights, "backbone.output_layer.linear.bias": torch.zeros(V)}, tmp_path / "b" / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"output_layer\.linear\.bias twice"):
        read_published(tmp_path / "b")


def test_half_precision_is_widened(tmp_path: Path) -> None:
    weights = {k: v.bfloat16() for k, v in published_weights().items()}
    published = read_published(folder(tmp_path / "m", weights))
    assert published.state["embed.weight"].dtype == torch.float32
    assert same(published, {k: v.float() for k, v in weights.items()})


def sharded(path: Path, weights: dict[str, Tensor]) -> Path:
    folder(path, weights)
    (path / "model.safetensors").unlink()
    names = ["backbone." + name for name in weights]
    places = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: weights[name.removeprefix("backbone.")] for name in names if places[name] == file}
        save_file(part, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def test_shards(tmp_path: Path) -> None:
    weights = published_weights()
    source = sharded(tmp_path / "m", weights)
    assert same(read_published(source), weights)
    index = source / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    name = "backbone.vocab_embed.embedding"
    for bad, message in (
        ({**good, name: "../x.safetensors"}, "no safetensors file of its folder"),
        ({**good, "backbone.more": "a.safetensors"}, r"a\.safetensors is missing"),
        ({**good, name: "model-00002-of-00002.safetensors"}, name),
        ({**good, "backbone.more": "model-00002-of-00002.safetensors"}, r"lacks backbone\.more"),
        ({k: v for k, v in good.items() if k != name}, name),
        ([1], "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": bad}))
        with pytest.raises(ModelFolderError, match=message):
            read_published(source)
    index.unlink()  # without an index all files count
    assert same(read_published(source), weights)
    save_file({name: weights["vocab_embed.embedding"]}, source / "twice.safetensors")
    with pytest.raises(ModelFolderError, match=name):
        read_published(source)


def test_bare_file_with_flags(tmp_path: Path) -> None:
    weights = published_weights()
    path = tmp_path / "m.safetensors"
    save_file(weights, path)
    assert same(read_published(path, overrides=FLAGS), weights)
    for key in FLAGS:
        with pytest.raises(UsageError, match=key):
            read_published(path, overrides={k: v for k, v in FLAGS.items() if k != key})
    for flags, message in (
        ({"n_head": 3}, "did you mean 'n_heads'"),
        ({**FLAGS, "n_heads": 5}, "heads"),
        ({**FLAGS, "n_heads": 0}, "heads 0"),
        ({**FLAGS, "n_heads": "3"}, "n_heads"),
        ({**FLAGS, "time_conditioning": 1}, "time_conditioning"),
        ({**FLAGS, "mask_id": V}, "mask_id"),
        ({**FLAGS, "model_length": 0}, "model_length"),
        ({**FLAGS, "hidden_dim": 32}, r"hidden_dim 32.*vocab_embed\.embedding"),
        ({**FLAGS, "vocab_size": 50258}, r"vocab_size 50258.*vocab_embed\.embedding"),
        ({**FLAGS, "cond_dim": 128}, r"cond_dim 128.*sigma_map\.mlp\.0\.weight"),
        ({**FLAGS, "n_blocks": 3}, r"n_blocks 3.*backbone\.blocks\.2 is missing"),
        ({**FLAGS, "n_blocks": 10**12}, "n_blocks"),
    ):
        with pytest.raises(UnmaskError, match=message):
            read_published(path, overrides=flags)


def test_heads_of_64_by_default(tmp_path: Path) -> None:
    net = DiT(hidden=128, blocks=1, heads=2, conditioning="constant", cond_dim=8, qk_norm=False).build(
        num_ids=5, mask_id=4
    )
    write_published(net, tmp_path / "m", length=8)
    published = read_published(
        tmp_path / "m" / "model.safetensors", overrides={"model_length": 8, "time_conditioning": False}
    )
    assert published.denoiser.dims == (128, 1, 2)
    assert len(published.notes) == 1
    assert "took 2" in published.notes[0]


# --- pickles ----------------------------------------------------------------------------------------------------------


def test_lightning_checkpoint_with_ema(tmp_path: Path) -> None:
    weights, averaged = published_weights(0), published_weights(1)
    full = {"backbone." + k: v for k, v in weights.items()}
    shadow = [averaged[name] for name in averaged]
    path = tmp_path / "last.ckpt"

    def write(**parts: Any) -> None:
        torch.save({"epoch": 1, "state_dict": full, "optimizer_states": [{"step": torch.tensor(1.0)}], **parts}, path)

    write(ema={"decay": 0.9999, "num_updates": 7, "shadow_params": shadow})
    assert same(read_published(path, overrides=FLAGS), weights)
    assert same(read_published(path, overrides=FLAGS, ema=True), averaged)
    write()
    with pytest.raises(ModelFolderError, match="no averaged weights"):
        read_published(path, overrides=FLAGS, ema=True)
    write(ema={"shadow_params": shadow[:-1]})
    with pytest.raises(ModelFolderError, match=r"ends before backbone\.output_layer\.adaLN_modulation\.bias"):
        read_published(path, overrides=FLAGS, ema=True)
    write(ema={"shadow_params": [*shadow[:6], shadow[7], shadow[6], *shadow[8:]]})
    with pytest.raises(ModelFolderError, match=r"EMA of backbone\.blocks\.0\.attn_qkv\.weight has shape"):
        read_published(path, overrides=FLAGS, ema=True)
    with pytest.raises(ModelFolderError, match="no averaged weights"):
        read_published(folder(tmp_path / "m", weights), ema=True)


def test_bin_file(tmp_path: Path) -> None:
    weights = published_weights()
    torch.save({"backbone." + k: v for k, v in weights.items()}, tmp_path / "pytorch_model.bin")
    assert same(read_published(tmp_path / "pytorch_model.bin", overrides=FLAGS), weights)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("plain", [False, True])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, plain: bool) -> None:
    path, proof = tmp_path / "m.bin", tmp_path / "proof"
    content = {"state_dict": published_weights(), "hyper_parameters": Evil(proof)}
    if plain:
        path.write_bytes(pickle.dumps(Evil(proof)))
    else:
        torch.save(content, path)
    with pytest.raises(ModelFolderError, match=r"m\.bin (holds more than tensors.*safetensors|is damaged)") as caught:
        read_published(path, overrides=FLAGS)
    assert not proof.exists()
    assert "\n" not in str(caught.value)
    if not plain:  # the file really is loaded with intent: without the restriction it runs
        torch.load(path, weights_only=False)
        assert proof.exists()


def test_odd_pickles(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    weights: dict[str, Any] = published_weights()
    for content, message in (
        ([1, 2], "holds a list"),
        ({"state_dict": 3}, "no named tensors"),
        ({**weights, "sigma_map.mlp.0.bias": "text"}, r"sigma_map\.mlp\.0\.bias is a str"),
        ({**weights, "sigma_map.mlp.0.bias": torch.ones(C, dtype=torch.int64)}, r"sigma_map\.mlp\.0\.bias is no dense"),
        ({**weights, "vocab_embed.embedding": torch.zeros(1, 1).expand(10**6, 10**6)}, "less data than that"),
    ):
        torch.save(content, path)
        with pytest.raises(ModelFolderError, match=message):
            read_published(path, overrides=FLAGS)
    path.write_bytes(b"\x80garbage")
    with pytest.raises(ModelFolderError, match=r"m\.bin"):
        read_published(path, overrides=FLAGS)


# --- mismatches -------------------------------------------------------------------------------------------------------


def without(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {k: v for k, v in weights.items() if k != name}


def test_each_mismatch_names_the_tensor(tmp_path: Path) -> None:
    weights = published_weights()
    cases = [(without(weights, name), rf"lacks.* backbone\.{name}") for name in weights]
    cases += [({**weights, name: torch.zeros(3, 3, 3)}, rf"backbone\.{name} has shape \(3, 3, 3\)") for name in weights]
    cases += [
        ({**weights, "noise.x": torch.zeros(1)}, r"unexpected tensor backbone\.noise\.x"),
        ({**weights, "blocks.0.extra": torch.zeros(1)}, r"unexpected tensor backbone\.blocks\.0\.extra"),
        ({**weights, "sigma_map.mlp.0.bias": torch.full((C,), math.nan)}, r"sigma_map\.mlp\.0\.bias .*not finite"),
        ({**weights, "blocks.0.attn_qkv.weight": torch.zeros(D, 3 * D)}, r"attn_qkv\.weight has shape"),
    ]
    for i, (changed, message) in enumerate(cases):
        with pytest.raises(ModelFolderError, match=message) as caught:
            read_published(folder(tmp_path / str(i), changed))
        assert "\n" not in str(caught.value)


def test_a_lost_block_is_named(tmp_path: Path) -> None:
    weights = {k: v for k, v in published_weights().items() if not k.startswith("blocks.0.")}
    with pytest.raises(ModelFolderError, match=r"backbone\.blocks\.0 is missing"):
        read_published(folder(tmp_path / "m", weights))
    save_file(weights, tmp_path / "bare.safetensors")
    with pytest.raises(ModelFolderError, match=r"lacks tensor backbone\.blocks\.0\.norm1\.weight"):
        read_published(tmp_path / "bare.safetensors", overrides=FLAGS)


def test_odd_folders(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", published_weights(), model_type="gpt2")
    with pytest.raises(ModelFolderError, match="model_type 'gpt2'"):
        read_published(source)
    (source / "config.json").write_text("[")
    with pytest.raises(ModelFolderError, match=r"config\.json is damaged"):
        read_published(source)
    (source / "config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"config\.json is missing"):
        read_published(source)
    (source / "config.json").write_text(json.dumps(CONFIG))
    (source / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ModelFolderError, match=r"model\.safetensors is damaged"):
        read_published(source)
    (source / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"no \.safetensors"):
        read_published(source)
    (tmp_path / "m.txt").write_text("")
    with pytest.raises(UsageError, match=r"m\.txt"):
        read_published(tmp_path / "m.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conditioning": "none"}, "'none'"),
        ({"conditioning": "level"}, "'level'"),
        ({"conditioning": "constant", "causal": True}, "causal"),
        ({"conditioning": "constant", "tied": True}, "tied"),
        ({"conditioning": "constant", "qk_norm": True}, "qk_norm"),
    ],
)
def test_what_has_no_published_form(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    net = DiT(hidden=8, blocks=1, heads=2, **{"qk_norm": False, **options}).build(num_ids=5, mask_id=4)
    with pytest.raises(UsageError, match=message):
        write_published(net, tmp_path / "out", length=8)
    assert not (tmp_path / "out").exists()


def test_export_replaces_nothing(tmp_path: Path) -> None:
    net = DiT(hidden=8, blocks=1, heads=2, conditioning="constant", qk_norm=False).build(num_ids=5, mask_id=4)
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        write_published(net, tmp_path, length=8)
    assert (tmp_path / "mine").read_text() == "precious"


# --- the commands -----------------------------------------------------------------------------------------------------


def test_commands_import_no_torch_before_they_run() -> None:
    code = "import sys, unmask.cli.import_, unmask.cli.export; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_import_then_export_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from unmask.cli import run
    from unmask.model import load

    # 258 ids: the bytes, end of text and the mask
    dit = DiT(hidden=64, blocks=1, heads=1, conditioning="sigma", cond_dim=8, qk_norm=False)
    net = dit.build(num_ids=258, mask_id=257)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.1)
    theirs, ours, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    write_published(net, theirs, length=8)
    assert run(["import", str(theirs), str(ours), "--tokenizer", "bytes"]) == 0
    assert capsys.readouterr() == (f"{ours}\n", "")
    model = load(ours, device="cpu")
    z, level = torch.arange(16).view(2, 8), torch.tensor([0.1, 0.9])
    with torch.no_grad():
        assert model.denoiser(z, level).equal(net.eval()(z, level))
    assert model.length == 8
    assert run(["export", str(ours), str(back)]) == 0
    assert capsys.readouterr() == (f"{back}\n", "")
    for name in ("config.json", "model.safetensors"):
        assert (back / name).read_bytes() == (theirs / name).read_bytes()

    bare = ["import", str(theirs / "model.safetensors"), str(tmp_path / "bare"), "--tokenizer", "bytes", "--json"]
    assert run(bare) == 2
    assert "--time-conditioning" in capsys.readouterr().err
    assert run([*bare, "--time-conditioning", "--model-length", "8"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["length"] == 8
    assert "n_heads was not given: took 1" in err
    assert load(tmp_path / "bare", device="cpu").denoiser.uses_level

    for more, message in (
        (["--tokenizer", "chars"], "ids, the model 258"),
        (["--tokenizer", "bytes", "--mask-id", "3"], "add --mask-id 257"),
        (["--tokenizer", "bytes", "--n-heads", "7"], "heads"),
    ):
        assert run(["import", str(theirs), str(tmp_path / "new"), *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert not (tmp_path / "new").exists()
    assert run(["import", str(theirs), str(ours), "--tokenizer", "bytes"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert run(["export", str(ours), str(back)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert run(["export", str(tmp_path / "nowhere"), str(tmp_path / "new")]) == 1
