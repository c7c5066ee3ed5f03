"""HyenaDNA in its authors' format: config and tensors converted to `denoisers.hyena`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from unmask.denoisers.hyena import Hyena
from unmask.errors import ModelFolderError, UsageError
from unmask.pretrained.base import Pretrained, Source
from unmask.pretrained.letters import END, letters
from unmask.pretrained.renaming import Renamed, Their, check_ordinary, tied_or_own, whole

MODEL_TYPES = ("hyenadna",)
DENOISER = "hyena"

ORDINARY = {
    "hyena_order": (2,),
    "num_inner_mlps": (2,),
    "short_filter_order": (3,),  # they always pad by 2: longer filters would see future tokens
    "train_freq": (True,),
    "use_bias": (True,),
    "layer_norm_epsilon": (1e-5,),
}
MIXER = {
    "into.weight": "in_proj.weight",
    "into.bias": "in_proj.bias",
    "conv_bias": "short_filter.bias",
    "filter.skip": "filter_fn.bias",
    "filter.into.weight": "filter_fn.implicit_filter.0.weight",
    "filter.into.bias": "filter_fn.implicit_filter.0.bias",
    "filter.inner.0.weight": "filter_fn.implicit_filter.2.weight",
    "filter.inner.0.bias": "filter_fn.implicit_filter.2.bias",
    "filter.inner.1.weight": "filter_fn.implicit_filter.4.weight",
    "filter.inner.1.bias": "filter_fn.implicit_filter.4.bias",
    "filter.out.weight": "filter_fn.implicit_filter.6.weight",
    "out.weight": "out_proj.weight",
    "out.bias": "out_proj.bias",
}
MADE = ("pos_emb.z", "pos_emb.t", "modulation.deltas")  # tensors of each filter_fn that we compute from the sizes


def read(source: Source) -> Pretrained:
    """An autoregressive model of single letters.

    >>> from unmask.pretrained import read_pretrained
    >>> read_pretrained("models/hyenadna-tiny-1k-seqlen-hf").length  # doctest: +SKIP
    1026
    """
    config = source.config
    check_ordinary(source, config, ORDINARY)
    hidden, length = whole(source, config, "d_model"), whole(source, config, "max_seq_len")
    if config.get("d_inner") is not None:
        check_ordinary(source, config, {"d_inner": (4 * hidden,)})
    tokenizer, known = letters(source), {name.removeprefix("hyena."): name for name in source.shapes()}
    tied = tied_or_own("lm_head.weight", known, source)
    frequency = config.get("activation_freq", 1)
    places = whole(source, config, "emb_dim", 3)
    if places % 2 == 0 or places < 3 or isinstance(frequency, bool) or not isinstance(frequency, int | float):
        raise ModelFolderError(f"{source.where}: emb_dim must be odd and activation_freq a number")
    try:
        denoiser = Hyena(
            hidden=hidden,
            blocks=whole(source, config, "n_layer"),
            length=length,
            taps=3,
            filter_width=whole(source, config, "filter_order", 64),
            waves=(places - 1) // 2,
            frequency=float(frequency),
            tied=tied,
            begin=END,
        )
    except UsageError as e:
        raise ModelFolderError(f"{source.where}: config.json describes no network: {e}") from None
    embedding, head = "backbone.embeddings.word_embeddings.weight", "lm_head.weight"
    theirs = {"embed.weight": Their(embedding, equals=(head,) if tied else ())}
    for n in range(denoiser.blocks):
        theirs |= dict(_block(f"blocks.{n}.branches.", f"backbone.layers.{n}."))
    theirs |= {f"norm.{part}": Their(f"backbone.ln_f.{part}") for part in ("weight", "bias")}
    if not tied:
        theirs["output.weight"] = Their(head)
    made = {f"backbone.layers.{n}.mixer.filter_fn.{name}" for n in range(denoiser.blocks) for name in MADE}
    state = Renamed(source, denoiser, tokenizer, theirs, known=known, unused=frozenset(made))
    _check_made(source, denoiser, known)
    return Pretrained(denoiser=denoiser, state=state, tokenizer=tokenizer, length=length, causal=True)


def _block(ours: str, theirs: str) -> Iterator[tuple[str, Their]]:
    for branch, norm in enumerate(("norm1", "norm2")):
        yield from ((f"{ours}{branch}.norm.{part}", Their(f"{theirs}{norm}.{part}")) for part in ("weight", "bias"))
    for own, other in MIXER.items():
        yield f"{ours}0.layer.{own}", Their(f"{theirs}mixer.{other}")
    squeezed = partial(Tensor.squeeze, dim=1)
    yield f"{ours}0.layer.conv_weight", Their(f"{theirs}mixer.short_filter.weight", squeezed)
    # One activation follows every layer of the filter's network, stored under as many names.
    first, *others = (f"{theirs}mixer.filter_fn.implicit_filter.{i}.freq" for i in (1, 3, 5))
    yield f"{ours}0.layer.filter.frequency", Their(first, Tensor.flatten, tuple(others))
    for own, other in (("mlp_in", "fc1"), ("mlp_out", "fc2")):
        yield from (
            (f"{ours}1.layer.{own}.{part}", Their(f"{theirs}mlp.{other}.{part}")) for part in ("weight", "bias")
        )


def _check_made(source: Source, denoiser: Hyena, known: dict[str, str]) -> None:
    """Check that stored positions and rates equal what we compute; otherwise the model is of another kind."""
    from unmask.denoisers.hyena import Filter

    own = Filter(denoiser)
    t_L1, place_LF = own.places(denoiser.length)
    want = {"pos_emb.z": place_LF, "pos_emb.t": t_L1, "modulation.deltas": own.rates().float()}
    for n in range(denoiser.blocks):
        for name, tensor in want.items():
            place = known.get(f"backbone.layers.{n}.mixer.filter_fn.{name}")
            if place is None:
                continue
            held = source.tensors[place].float().abs() if name == "modulation.deltas" else source.tensors[place].float()
            if held.numel() != tensor.numel() or not torch.allclose(held.flatten(), tensor.flatten(), atol=1e-3):
                raise UsageError(f"{source.where}: {place} is not what its sizes make it: this model is another kind")
