"""Caduceus and HyenaDNA as their papers and published folders have them, re-stated: names, layouts and equations.

Written step by step and row by row, without a line of ours, so that what maps them onto ours has something to be held
to. It was held to the authors' code itself, on random weights (docs/recurrent.md says how far).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


def draw(*shape: int, std: float = 0.3) -> Tensor:
    return std * torch.randn(*shape)


# --- Caduceus ---------------------------------------------------------------------------------------------------------

D, STATES, TAPS, RANK, BLOCKS, ROWS = 8, 4, 4, 1, 2, 16
COMPLEMENT = {str(i): i for i in range(12)} | {"7": 10, "10": 7, "8": 9, "9": 8}


def caduceus_config(*, rcps: bool, fused: bool = True, blocks: int = BLOCKS) -> dict[str, Any]:
    mixer = {"d_state": STATES, "d_conv": TAPS, "expand": 2, "dt_rank": "auto", "conv_bias": True, "bias": False}
    return {
        "model_type": "caduceus",
        "d_model": D,
        "n_layer": blocks,
        "vocab_size": 12,
        "fused_add_norm": fused,
        "ssm_cfg": mixer,
        "rms_norm": True,
        "norm_epsilon": 1e-5,
        "pad_vocab_size_multiple": 8,
        "bidirectional": True,
        "bidirectional_strategy": "add",
        "bidirectional_weight_tie": True,
        "rcps": rcps,
        "complement_map": COMPLEMENT,
    }


def caduceus_tensors(*, rcps: bool, fused: bool = True, blocks: int = BLOCKS) -> Tensors:
    """As saved: what is shared stands under one of its names; norms are wrapped where they are no part of a kernel."""
    torch.manual_seed(0)
    E, wrapped, around_norm = 2 * D, ".submodule" if rcps else "", ".submodule" if rcps and not fused else ""
    embedding = "word_embeddings.embedding" if rcps else "word_embeddings"
    made = {f"caduceus.backbone.embeddings.{embedding}.weight": draw(ROWS, D)}
    for n in range(blocks):
        layer = f"caduceus.backbone.layers.{n}"
        made[f"{layer}.norm{around_norm}.weight"] = 1 + draw(D)
        mixer = f"{layer}.mixer{wrapped}.mamba"
        made[f"{mixer}_fwd.in_proj.weight"], made[f"{mixer}_fwd.out_proj.weight"] = draw(2 * E, D), draw(D, E)
        for way in ("fwd", "rev"):
            made |= {
                f"{mixer}_{way}.A_log": draw(E, STATES),
                f"{mixer}_{way}.D": draw(E),
                f"{mixer}_{way}.conv1d.weight": draw(E, 1, TAPS),
                f"{mixer}_{way}.conv1d.bias": draw(E),
                f"{mixer}_{way}.x_proj.weight": draw(RANK + 2 * STATES, E),
                f"{mixer}_{way}.dt_proj.weight": draw(E, RANK),
                f"{mixer}_{way}.dt_proj.bias": draw(E),
            }
    made[f"caduceus.backbone.norm_f{around_norm}.weight"] = 1 + draw(D)
    if rcps:
        made["lm_head.complement_map"] = torch.tensor([COMPLEMENT.get(str(i), i) for i in range(ROWS)])
    return made


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def mamba(x_LD: Tensor, t: Tensors, own: str, shared: str) -> Tensor:
    """One row through one mixer."""
    E = 2 * D
    x_LE, z_LE = (x_LD @ t[f"{shared}.in_proj.weight"].T).split(E, dim=-1)
    taps = t[f"{own}.conv1d.weight"][:, 0]
    padded = torch.cat([torch.zeros(TAPS - 1, E), x_LE])
    x_LE = torch.stack(
        [
            F.silu(sum(taps[:, j] * padded[i + j] for j in range(TAPS)) + t[f"{own}.conv1d.bias"])
            for i in range(len(x_LD))
        ]
    )
    h, each = torch.zeros(E, STATES), []
    for x_E in x_LE:
        low, B, C = (t[f"{own}.x_proj.weight"] @ x_E).split([RANK, STATES, STATES])
        step = F.softplus(t[f"{own}.dt_proj.weight"] @ low + t[f"{own}.dt_proj.bias"])[:, None]
        h = torch.exp(step * -torch.exp(t[f"{own}.A_log"])) * h + step * B * x_E[:, None]
        each.append(h @ C + t[f"{own}.D"] * x_E)
    return (torch.stack(each) * F.silu(z_LE)) @ t[f"{shared}.out_proj.weight"].T


def bidirectional(x_LD: Tensor, t: Tensors, mixer: str) -> Tensor:
    ahead = mamba(x_LD, t, f"{mixer}_fwd", f"{mixer}_fwd")
    return ahead + mamba(x_LD.flip(0), t, f"{mixer}_rev", f"{mixer}_fwd").flip(0)


def caduceus_ph(ids_L: Tensor, t: Tensors) -> Tensor:
    """Logits of a row, by the network of one strand."""
    weight = t["caduceus.backbone.embeddings.word_embeddings.weight"]
    x_LD = weight[ids_L]
    for n in range(BLOCKS):
        layer = f"caduceus.backbone.layers.{n}"
        x_LD = x_LD + bidirectional(rms_norm(x_LD, t[f"{layer}.norm.weight"]), t, f"{layer}.mixer.mamba")
    return rms_norm(x_LD, t["caduceus.backbone.norm_f.weight"]) @ weight.T


def caduceus_ps(ids_L: Tensor, t: Tensors, *, fused: bool, blocks: int) -> Tensor:
    """Twice the channels; the second half is kept reversed in length and in channels, as it is published.

    fused: sum and norm are one kernel, and each block begins by letting the halves change places, as they are kept.
    """
    weight = t["caduceus.backbone.embeddings.word_embeddings.embedding.weight"]
    complement, wrapped = t["lm_head.complement_map"], "" if fused else ".submodule"
    x_L2D = torch.cat([weight[ids_L], weight[complement[ids_L].flip(0)].flip(0, 1)], dim=-1)

    def halves(f: Any, x: Tensor) -> Tensor:
        return torch.cat([f(x[:, :D]), f(x[:, D:].flip(0, 1)).flip(0, 1)], dim=-1)

    for n in range(blocks):
        layer = f"caduceus.backbone.layers.{n}"
        norm, mixer = t[f"{layer}.norm{wrapped}.weight"], f"{layer}.mixer.submodule.mamba"
        if fused:
            x_L2D = x_L2D.roll(D, dims=1)
        normed = halves(lambda x, norm=norm: rms_norm(x, norm), x_L2D)
        x_L2D = x_L2D + halves(lambda x, mixer=mixer: bidirectional(x, t, mixer), normed)
    last = t[f"caduceus.backbone.norm_f{wrapped}.weight"]
    x_L2D = halves(lambda x: rms_norm(x, last), x_L2D)
    return x_L2D[:, :D] @ weight.T + x_L2D[:, D:].flip(-1) @ weight[complement].T


# --- HyenaDNA ---------------------------------------------------------------------------------------------------------

WIDTH, FILTER, PLACES, MOST = 8, 6, 5, 24


def hyena_config() -> dict[str, Any]:
    return {
        "model_type": "hyenadna",
        "d_model": WIDTH,
        "d_inner": 4 * WIDTH,
        "n_layer": 2,
        "vocab_size": 12,
        "pad_vocab_size_multiple": 8,
        "max_seq_len": MOST,
        "hyena_order": 2,
        "filter_order": FILTER,
        "short_filter_order": 3,
        "emb_dim": PLACES,
        "activation_freq": 10,
        "num_inner_mlps": 2,
        "use_bias": True,
        "layer_norm_epsilon": 1e-5,
    }


def hyena_tensors() -> Tensors:
    torch.manual_seed(0)
    made = {"hyena.backbone.embeddings.word_embeddings.weight": draw(ROWS, WIDTH)}
    place = torch.arange(MOST, dtype=torch.float32)[None, :, None]
    waves = torch.exp(-1j * torch.linspace(1e-4, 1, 2) * 2 * math.pi * place / MOST)
    shapes = {
        "in_proj": (3 * WIDTH, WIDTH),
        "out_proj": (WIDTH, WIDTH),
        "filter_fn.implicit_filter.0": (FILTER, PLACES),
        "filter_fn.implicit_filter.2": (FILTER, FILTER),
        "filter_fn.implicit_filter.4": (FILTER, FILTER),
    }
    for n in range(2):
        layer = f"hyena.backbone.layers.{n}"
        made |= {f"{layer}.{norm}.weight": 1 + draw(WIDTH) for norm in ("norm1", "norm2")}
        made |= {f"{layer}.{norm}.bias": draw(WIDTH) for norm in ("norm1", "norm2")}
        for name, shape in shapes.items():
            made |= {f"{layer}.mixer.{name}.weight": draw(*shape), f"{layer}.mixer.{name}.bias": draw(shape[0])}
        for name, shape in {"fc1": (4 * WIDTH, WIDTH), "fc2": (WIDTH, 4 * WIDTH)}.items():
            made |= {f"{layer}.mlp.{name}.weight": draw(*shape), f"{layer}.mlp.{name}.bias": draw(shape[0])}
        made |= {
            f"{layer}.mixer.short_filter.weight": draw(3 * WIDTH, 1, 3),
            f"{layer}.mixer.short_filter.bias": draw(3 * WIDTH),
            f"{layer}.mixer.filter_fn.implicit_filter.6.weight": draw(WIDTH, FILTER),
            f"{layer}.mixer.filter_fn.bias": draw(WIDTH),
            f"{layer}.mixer.filter_fn.pos_emb.t": place / (MOST - 1),
            f"{layer}.mixer.filter_fn.pos_emb.z": torch.cat([place / (MOST - 1), waves.real, waves.imag], dim=-1),
            f"{layer}.mixer.filter_fn.modulation.deltas": torch.linspace(
                math.log(1e-2) / 1.5, math.log(1e-2) / 0.3, WIDTH
            ).view(1, 1, -1),
        }
        freq = 10 + draw(1, FILTER)
        made |= {f"{layer}.mixer.filter_fn.implicit_filter.{i}.freq": freq.clone() for i in (1, 3, 5)}
    made |= {"hyena.backbone.ln_f.weight": 1 + draw(WIDTH), "hyena.backbone.ln_f.bias": draw(WIDTH)}
    return made


def hyena(ids_L: Tensor, t: Tensors) -> Tensor:
    """Logits of the token after each position; the long convolution as a sum."""
    weight, L = t["hyena.backbone.embeddings.word_embeddings.weight"], len(ids_L)
    x = weight[ids_L]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    for n in range(2):
        layer = f"hyena.backbone.layers.{n}"
        mixer, fn = f"{layer}.mixer", f"{layer}.mixer.filter_fn"
        u = linear(norm(x, f"{layer}.norm1"), f"{mixer}.in_proj")
        taps, padded = t[f"{mixer}.short_filter.weight"][:, 0], torch.cat([torch.zeros(2, 3 * WIDTH), u])
        u = torch.stack([sum(taps[:, j] * padded[i + j] for j in range(3)) for i in range(L)])
        first, second, v = (u + t[f"{mixer}.short_filter.bias"]).split(WIDTH, dim=-1)
        k = t[f"{fn}.pos_emb.z"][0, :L]
        for i in (0, 2, 4):
            k = torch.sin(t[f"{fn}.implicit_filter.{i + 1}.freq"] * linear(k, f"{fn}.implicit_filter.{i}"))
        k = k @ t[f"{fn}.implicit_filter.6.weight"].T
        k = k * (torch.exp(-t[f"{fn}.pos_emb.t"][0, :L] * t[f"{fn}.modulation.deltas"][0].abs()) + 0.05)
        v = v * second
        v = torch.stack([sum(k[j] * v[i - j] for j in range(i + 1)) for i in range(L)]) + v * t[f"{fn}.bias"]
        x = x + linear(v * first, f"{mixer}.out_proj")
        h = F.gelu(linear(norm(x, f"{layer}.norm2"), f"{layer}.mlp.fc1"), approximate="tanh")
        x = x + linear(h, f"{layer}.mlp.fc2")
    return norm(x, "hyena.backbone.ln_f") @ weight.T
