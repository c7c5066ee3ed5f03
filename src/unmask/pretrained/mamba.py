"""Mamba in transformers' format, such as mamba-130m-hf: config and tensors converted to `denoisers.mamba`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from unmask.denoisers.mamba import Mamba
from unmask.pretrained.base import Pretrained, Source
from unmask.pretrained.llama import _vocabulary, with_rows
from unmask.pretrained.renaming import Renamed, Their, check_ordinary, tied_or_own, whole

MODEL_TYPES = ("mamba",)
DENOISER = "mamba"

LENGTH = 2048  # of the rows in its training; it has no position embeddings and also reads longer ones
ORDINARY = {
    "use_bias": (False,),
    "use_conv_bias": (True,),
    "hidden_act": ("silu",),
    "layer_norm_epsilon": (1e-5,),
    "rms_norm": (True,),
}
DIRECTION = {
    "log_rates": "A_log",
    "skip": "D",
    "conv_weight": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "select.weight": "x_proj.weight",
    "step_weight": "dt_proj.weight",
    "step_bias": "dt_proj.bias",
}


def read(source: Source) -> Pretrained:
    """An autoregressive model, with its vocabulary plus a mask.

    >>> from unmask.pretrained import read_pretrained
    >>> read_pretrained("models/mamba-130m-hf").denoiser.hidden  # doctest: +SKIP
    768
    """
    config = source.config
    check_ordinary(source, config, ORDINARY)
    hidden, expand = whole(source, config, "hidden_size"), whole(source, config, "expand", 2)
    check_ordinary(source, config, {"intermediate_size": (expand * hidden,)})
    known = {name.replace("backbone.embedding.", "backbone.embeddings."): name for name in source.shapes()}
    tied = tied_or_own("lm_head.weight", known, source)
    tokenizer, begin = _vocabulary(source, whole(source, config, "vocab_size"))
    rank = config.get("time_step_rank", "auto")
    denoiser = Mamba(
        hidden=hidden,
        blocks=whole(source, config, "num_hidden_layers"),
        expand=expand,
        states=whole(source, config, "state_size", 16),
        taps=whole(source, config, "conv_kernel", 4),
        rank=0 if rank == "auto" else whole(source, config, "time_step_rank"),
        tied=tied,
        begin=begin,
    )
    widened = partial(with_rows, num_ids=tokenizer.num_ids)
    heads = ("lm_head.weight",)
    theirs = {"embed.weight": Their("backbone.embeddings.weight", widened, heads if tied else ())}
    for n in range(denoiser.blocks):
        theirs |= dict(_block(f"blocks.{n}.branches.0.", f"backbone.layers.{n}."))
    theirs["norm.weight"] = Their("backbone.norm_f.weight")
    if not tied:
        theirs["output.weight"] = Their("lm_head.weight", widened)
    state = Renamed(source, denoiser, tokenizer, theirs, known=known)
    return Pretrained(denoiser=denoiser, state=state, tokenizer=tokenizer, length=LENGTH, causal=True)


def _block(ours: str, theirs: str) -> Iterator[tuple[str, Their]]:
    yield f"{ours}norm.weight", Their(f"{theirs}norm.weight")
    yield f"{ours}layer.into.weight", Their(f"{theirs}mixer.in_proj.weight")
    yield f"{ours}layer.out.weight", Their(f"{theirs}mixer.out_proj.weight")
    yield from direction(f"{ours}layer.ahead.", f"{theirs}mixer.")


def direction(ours: str, theirs: str) -> Iterator[tuple[str, Their]]:
    """The tensors between the projections, for one direction."""
    turned: dict[str, Callable[[Tensor], Tensor]]
    turned = {"log_rates": Tensor.flatten, "conv_weight": partial(Tensor.squeeze, dim=1)}
    for own, other in DIRECTION.items():
        yield f"{ours}{own}", Their(f"{theirs}{other}", turned[own]) if own in turned else Their(f"{theirs}{other}")
