"""Llama, SmolLM2, Qwen2, Qwen2.5 and Qwen3: configs and tensors converted to `unmask.denoisers.llama`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.denoisers.llama import Llama
from unmask.denoisers.llama.rope import RopeScaling
from unmask.errors import ModelFolderError, UsageError
from unmask.pretrained.base import Pretrained, Source
from unmask.pretrained.renaming import FLOATS, check_rows
from unmask.storage.model_folder import Weights
from unmask.storage.untrusted import printable

if TYPE_CHECKING:
    import tokenizers

    from unmask.data.tokenizers import Tokenizer

MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3"})
DENOISER = "llama"

# Keys that change what the network computes, each with the values that we support.
ORDINARY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "num_experts": (0, 1, None),
    "num_local_experts": (0, 1, None),
    "n_routed_experts": (0, None),
    "no_rope_layers": (None,),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "attention_multiplier": (None,),
}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
LEAST_END = "<|endoftext|>"  # if a vocabulary has it, documents followed it in pretraining


def read(source: Source) -> Pretrained:
    """An autoregressive model; config and tensor names are checked before any tensor is read.

    If the tokenizer has no mask, one is added, and a row for it in the network: the mean of all others.

    >>> from unmask.pretrained import read_pretrained
    >>> read_pretrained("models/SmolLM2-135M").denoiser.dims.groups  # doctest: +SKIP
    3
    """
    described, prefix, _ = _held(source)
    tokenizer, begin = _vocabulary(source, source.config["vocab_size"])
    return Pretrained(
        denoiser=Llama(**{**vars(described), "begin": begin}),
        state=_state(source, described, prefix, tokenizer.num_ids),
        tokenizer=tokenizer,
        length=_whole(source, source.config, "max_position_embeddings", 2048),
        causal=True,
    )


def weights_of(source: Source, num_ids: int) -> Weights:
    """The tensors of such a folder under our names, if the network is described elsewhere.

    >>> weights_of(open_source("smollm2-hf"), 49153).shapes["norm.weight"].shape  # doctest: +SKIP
    torch.Size([576])
    """
    described, prefix, shapes = _held(source)
    if not 0 <= num_ids - source.config["vocab_size"] <= 1:
        raise ModelFolderError(
            f"{source.where}: the tokenizer has {num_ids} ids, the embedding {source.config['vocab_size']} rows; they "
            "do not belong together"
        )

    def shape(*names: str) -> Tensor:
        parts = [shapes[name].to("meta") for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    ours = _assembled(shape, described, prefix, num_ids)
    return Weights(source.where, ours, lambda: _state(source, described, prefix, num_ids))


def _held(source: Source) -> tuple[Llama, str, dict[str, Tensor]]:
    """The network's description, the prefix of its tensors' names, and their shapes, checked against the network."""
    config = _checked(source)
    described = _described(source, config)
    shapes = {name: t for name, t in source.shapes().items() if not name.endswith("rotary_emb.inv_freq")}
    prefix = "" if "embed_tokens.weight" in shapes else "model."
    if described.dims.blocks > len(shapes):  # never build a list as long as a config claims
        raise ModelFolderError(
            f"{source.where}: config.json says {described.dims.blocks:,} layers, the weights are {len(shapes)} tensors"
        )
    wanted = dict(_names(described, config["vocab_size"], prefix))
    if described.tied:
        shapes.pop("lm_head.weight", None)  # some folders contain the head anyway; it is not used
    _check_names(source, shapes, wanted)
    return described, prefix, shapes


# --- the config
# ---------------------------------------------------------------------------------------------------------


def _checked(source: Source) -> dict[str, Any]:
    config = source.config
    for key, ordinary in ORDINARY.items():
        if key in config and config[key] not in ordinary:
            raise _unsupported(source, key, config[key])
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        raise _unsupported(source, "sliding_window", config["sliding_window"])
    layers = config.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or {*map(str, layers)} - {"full_attention"}):
        raise _unsupported(source, "layer_types", layers)
    for key in SIZES:
        if key not in config:
            raise ModelFolderError(f"{source.where}: config.json does not say {key}")
        _whole(source, config, key, 0)
    return config


def _described(source: Source, config: Mapping[str, Any]) -> Llama:
    """Our description of the denoiser, with the family's defaults for missing keys."""
    kind, heads = source.model_type, config["num_attention_heads"]
    theta, scaling = _rope(source, config)
    bias = config.get("attention_bias") is True
    head_dim = config.get("head_dim") or (128 if kind == "qwen3" else None)
    try:
        return Llama(
            hidden=config["hidden_size"],
            blocks=config["num_hidden_layers"],
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            inner=config["intermediate_size"],
            theta=theta,
            scaling=scaling,
            eps=float(config.get("rms_norm_eps", 1e-6)),
            qkv_bias=kind == "qwen2" or bias,
            out_bias=kind != "qwen2" and bias,
            mlp_bias=kind == "llama" and config.get("mlp_bias") is True,
            qk_norm=kind == "qwen3",
            tied=config.get("tie_word_embeddings") is True,
            causal=True,
            shifted=True,  # so they are read where a recipe has both sides seen and says no more
        )
    except (UsageError, TypeError, ValueError) as e:
        raise ModelFolderError(f"{source.where}: config.json describes no network: {printable(e, 200)}") from None


def _rope(source: Source, config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` as transformers 5 writes them or `rope_theta` and `rope_scaling`."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, dict):
        raise _unsupported(source, "rope_parameters", said)
    theta = said.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = said.get("rope_type", said.get("type", "default"))
    if said.get("partial_rotary_factor") not in (None, 1):
        raise _unsupported(source, "partial_rotary_factor", said["partial_rotary_factor"])
    try:
        theta = float(theta)
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, RopeScaling(kind="linear", factor=float(said["factor"]))
        if kind == "llama3":
            length = int(said["original_max_position_embeddings"])
            low, high = float(said["low_freq_factor"]), float(said["high_freq_factor"])
            return theta, RopeScaling(factor=float(said["factor"]), low=low, high=high, length=length)
    except (KeyError, TypeError, ValueError) as e:
        raise ModelFolderError(f"{source.where}: the rope of config.json cannot be read: {printable(e, 120)}") from None
    raise _unsupported(source, "rope_type", kind)


def _unsupported(source: Source, key: str, value: object) -> UsageError:
    said = printable(value if isinstance(value, str) else repr(value), 60)
    return UsageError(
        f"{source.where}: {key} = {said} in config.json is a network that the denoiser llama does not compute"
    )


def _whole(source: Source, config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if type(value) is not int or not 1 <= value <= 1 << 24:
        raise ModelFolderError(
            f"{source.where}: {key} of config.json is {printable(repr(value))}, no size of a network"
        )
    return value


# --- the tensors ------------------------------------------------------------------------------------------------------


def layer_tensors(described: Llama) -> dict[str, tuple[tuple[str, ...], list[tuple[int, ...]]]]:
    """Our name of each tensor of a block: theirs, one after another, and their shapes.

    >>> layer_tensors(Llama(size="nano"))["kv.weight"][0]
    ('self_attn.k_proj.weight', 'self_attn.v_proj.weight')
    """
    dims = described.dims
    D, F, Q, G, K = dims.hidden, dims.inner, dims.heads * dims.head_dim, dims.groups * dims.head_dim, dims.head_dim
    maps = {
        "q": (("self_attn.q_proj",), [(Q, D)], described.qkv_bias),
        "kv": (("self_attn.k_proj", "self_attn.v_proj"), [(G, D), (G, D)], described.qkv_bias),
        "out": (("self_attn.o_proj",), [(D, Q)], described.out_bias),
        "gate_up": (("mlp.gate_proj", "mlp.up_proj"), [(F, D), (F, D)], described.mlp_bias),
        "down": (("mlp.down_proj",), [(D, F)], described.mlp_bias),
    }
    table: dict[str, tuple[tuple[str, ...], list[tuple[int, ...]]]] = {
        "norm1.weight": (("input_layernorm.weight",), [(D,)]),
        "norm2.weight": (("post_attention_layernorm.weight",), [(D,)]),
    }
    for ours, (theirs, shapes, bias) in maps.items():
        table[f"{ours}.weight"] = tuple(f"{name}.weight" for name in theirs), [*shapes]
        if bias:
            table[f"{ours}.bias"] = tuple(f"{name}.bias" for name in theirs), [(shape[0],) for shape in shapes]
    if described.qk_norm:
        table |= {f"{x}_norm.weight": ((f"self_attn.{x}_norm.weight",), [(K,)]) for x in ("q", "k")}
    return table


def _names(described: Llama, rows: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that the config implies, with its shape."""
    hidden = described.dims.hidden
    yield f"{prefix}embed_tokens.weight", (rows, hidden)
    for n in range(described.dims.blocks):
        for theirs, shapes in layer_tensors(described).values():
            yield from ((f"{prefix}layers.{n}.{name}", shape) for name, shape in zip(theirs, shapes, strict=True))
    yield f"{prefix}norm.weight", (hidden,)
    if not described.tied:
        yield "lm_head.weight", (rows, hidden)


def _check_names(source: Source, shapes: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name in wanted:
        if name not in shapes:
            raise ModelFolderError(f"{source.where} lacks the tensor {name}, which its config.json promises")
    for name in sorted(shapes.keys() - wanted.keys()):
        raise ModelFolderError(
            f"{source.where} holds the tensor {printable(name)}, of which the config.json of a {source.model_type} "
            "says nothing"
        )
    for name, shape in wanted.items():
        if tuple(shapes[name].shape) != shape:
            raise ModelFolderError(
                f"{source.where}: {name} has shape {tuple(shapes[name].shape)}, config.json asks for {shape}"
            )
        if shapes[name].dtype not in FLOATS:
            raise ModelFolderError(f"{source.where}: {name} holds {shapes[name].dtype}, no floating-point numbers")


def _state(source: Source, described: Llama, prefix: str, num_ids: int) -> dict[str, Tensor]:
    """The weights under our names, in float32."""
    tensors = source.tensors

    def take(*names: str) -> Tensor:
        parts = [tensors[name].to(torch.float32) for name in names]
        for name, part in zip(names, parts, strict=True):
            if not bool(torch.isfinite(part).all()):
                raise ModelFolderError(f"{source.where}: {name} holds numbers that are not finite; it is damaged")
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return _assembled(take, described, prefix, num_ids)


def _assembled(take: Callable[..., Tensor], described: Llama, prefix: str, num_ids: int) -> dict[str, Tensor]:
    """Our tensors from theirs; `take` returns one tensor, or several concatenated."""
    state = {"embed.weight": with_rows(take(f"{prefix}embed_tokens.weight"), num_ids)}
    for n in range(described.dims.blocks):
        for ours, (theirs, _) in layer_tensors(described).items():
            state[f"blocks.{n}.{ours}"] = take(*(f"{prefix}layers.{n}.{name}" for name in theirs))
    state["norm.weight"] = take(f"{prefix}norm.weight")
    if not described.tied:
        state["output.weight"] = with_rows(take("lm_head.weight"), num_ids)
    return state


def with_rows(weight_ID: Tensor, num_ids: int) -> Tensor:
    """One row for each id; missing ones (the mask's) are the mean of all others.

    >>> with_rows(torch.tensor([[1.0], [3.0]]), 3).flatten()
    tensor([1., 3., 2.])
    """
    missing = num_ids - len(weight_ID)
    return torch.cat([weight_ID, weight_ID.mean(dim=0, keepdim=True).expand(missing, -1)]) if missing else weight_ID


# --- the vocabulary ---------------------------------------------------------------------------------------------------


def _vocabulary(source: Source, rows: int) -> tuple[Tokenizer, int]:
    """A tokenizer with a mask and as many ids as there are rows, or one more; and the id that begins a text.

    Weights often have unused rows that make their number round. These count in the softmax, so to keep probabilities
    equal to those elsewhere they are ids here too: special ones, which are never generated.
    """
    from unmask.data.subwords import Subwords

    check_rows(source, source.shapes(), rows)
    inner = source.tokenizer()
    most = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if most > rows:
        raise ModelFolderError(
            f"{source.where}: the tokenizer has {most} ids, the embedding {rows} rows; they do not belong together"
        )
    _fill(inner, rows)
    begin = _begin(source, inner)
    tokenizer = Subwords(inner)
    if tokenizer.num_ids not in (rows, rows + 1):
        raise ModelFolderError(f"{source.where}: the tokenizer has no token that ends a text, such as {LEAST_END}")
    return tokenizer, tokenizer.eot_id if begin is None else begin


def _fill(inner: tokenizers.Tokenizer, rows: int) -> None:
    """Special tokens that no text produces, for ids without a token."""
    from tokenizers import AddedToken

    missing = rows - inner.get_vocab_size(with_added_tokens=True)
    names = [f"<|unused:{rows - i}|>" for i in range(missing, 0, -1)]
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])


def _begin(source: Source, inner: tokenizers.Tokenizer) -> int | None:
    """The token that preceded texts in pretraining; None: the one that ends them."""
    end = inner.token_to_id(LEAST_END)
    if end is not None:
        return int(end)
    bos = source.special.get("bos_token")
    said = inner.token_to_id(bos) if bos is not None else source.config.get("bos_token_id")
    known = isinstance(said, int) and inner.id_to_token(said) is not None
    return said if known else None
