"""Caduceus-Ph and -PS in their authors' format: config and tensors converted to `denoisers.caduceus`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from unmask.denoisers.caduceus import Caduceus
from unmask.errors import ModelFolderError, UsageError
from unmask.pretrained.base import Pretrained, Source
from unmask.pretrained.letters import letters
from unmask.pretrained.mamba import direction
from unmask.pretrained.renaming import Renamed, Their, as_it_is, check_ordinary, tied_or_own, whole

MODEL_TYPES = ("caduceus",)
DENOISER = "caduceus"

LENGTH = 1 << 17  # the longest rows used in its training; it has no position embeddings
ORDINARY = {
    "bidirectional": (True,),
    "bidirectional_strategy": ("add", None),
    "bidirectional_weight_tie": (True,),
    "rms_norm": (True,),
    "norm_epsilon": (1e-5,),
}
ORDINARY_MIXER = {"bias": (False,), "conv_bias": (True,)}


def read(source: Source) -> Pretrained:
    """A masked language model of both strands (PS), or one whose outputs for both are to be averaged (Ph).

    >>> from unmask.pretrained import read_pretrained
    >>> read_pretrained("models/caduceus-ps").denoiser.equivariance  # doctest: +SKIP
    'ps'
    """
    config, mixer = source.config, source.config.get("ssm_cfg") or {}
    if not isinstance(mixer, dict):
        raise ModelFolderError(f"{source.where}: ssm_cfg of config.json is no table")
    check_ordinary(source, config, ORDINARY)
    check_ordinary(source, mixer, ORDINARY_MIXER)
    tokenizer = letters(source)
    known = {_plain(name): name for name in source.shapes()}
    rcps, blocks = config.get("rcps") is True, whole(source, config, "n_layer")
    exchanging = rcps and _exchanges(source, config)
    last_exchanged = exchanging and blocks % 2 == 1
    shared = rcps or tied_or_own("lm_head.weight", known, source)  # the head of both strands is always the embedding
    tied = shared and not last_exchanged
    denoiser = Caduceus(
        hidden=whole(source, config, "d_model"),
        blocks=blocks,
        expand=whole(source, mixer, "expand", 2),
        states=whole(source, mixer, "d_state", 16),
        taps=whole(source, mixer, "d_conv", 4),
        rank=0 if mixer.get("dt_rank", "auto") == "auto" else whole(source, mixer, "dt_rank"),
        tied=tied,
        equivariance="ps" if rcps else "ph",
        complement=_complement(source, config, tokenizer.num_ids),
    )
    embedding, head = "backbone.embeddings.word_embeddings.weight", "lm_head.weight"
    theirs = {"embed.weight": Their(embedding, equals=(head,) if shared else ())}
    for n in range(blocks):
        way = _block(f"blocks.{n}.branches.0.", f"backbone.layers.{n}.", exchanged=exchanging and n % 2 == 0)
        theirs |= dict(way)
    theirs["norm.weight"] = Their("backbone.norm_f.weight", _flipped(0) if last_exchanged else as_it_is)
    if last_exchanged:
        of_others = partial(_head_of_others, complement=denoiser.complement)
        theirs["output.weight"] = Their(embedding, of_others, equals=(head,))
    elif not tied:
        theirs["output.weight"] = Their(head)
    unused = frozenset(name for name in known if name.endswith("complement_map"))
    for name in sorted(unused):
        if source.tensors[known[name]].tolist() != list(denoiser.complement):
            raise UsageError(f"{source.where}: {known[name]} is not the complement_map of config.json; repair either")
    state = Renamed(source, denoiser, tokenizer, theirs, known=known, unused=unused)
    return Pretrained(denoiser=denoiser, state=state, tokenizer=tokenizer, length=LENGTH)


def _plain(name: str) -> str:
    """A tensor's name without those of the wrappers that apply a module to both strands.

    >>> _plain("caduceus.backbone.layers.0.mixer.submodule.mamba_fwd.D")
    'backbone.layers.0.mixer.mamba_fwd.D'
    """
    name = name.removeprefix("caduceus.").replace(".submodule.", ".")
    name = name.replace("word_embeddings.embedding.", "word_embeddings.")
    return re.sub(r"^lm_head\.lm_head\.", "lm_head.", name)


def _exchanges(source: Source, config: Mapping[str, Any]) -> bool:
    """Whether the strands are exchanged in each block, as they are if its sum and norm are one fused kernel.

    That kernel's code path reads the first strand's half of the channels where the other path reads the second's. The
    learned function is a different one, but also equivariant: each strand, reversed in length and channels, takes the
    other's place. Two blocks undo the exchange, so our model computes the same with the weights of every second block
    reversed: channels from last to first, and the two reading directions swapped.
    """
    fused = config.get("fused_add_norm", True)
    if not isinstance(fused, bool):
        raise ModelFolderError(f"{source.where}: fused_add_norm of config.json is neither true nor false")
    return fused


def _flipped(dim: int) -> Callable[[Tensor], Tensor]:
    return partial(Tensor.flip, dims=(dim,))


def _head_of_others(weight_ID: Tensor, complement: tuple[int, ...]) -> Tensor:
    """The head for exchanged vectors: that of the complements, with reversed channels."""
    return weight_ID[list(complement)].flip(1)


def _block(ours: str, theirs: str, *, exchanged: bool) -> Iterator[tuple[str, Their]]:
    """Both directions share their projections, of which a file may contain one copy or both."""
    yield f"{ours}norm.weight", Their(f"{theirs}norm.weight", _flipped(0) if exchanged else as_it_is)
    for own, other, dim in (("into", "in_proj", 1), ("out", "out_proj", 0)):
        ahead, back = (f"{theirs}mixer.mamba_{way}.{other}.weight" for way in ("fwd", "rev"))
        yield f"{ours}layer.{own}.weight", Their(ahead, _flipped(dim) if exchanged else as_it_is, equals=(back,))
    first, second = ("rev", "fwd") if exchanged else ("fwd", "rev")
    yield from direction(f"{ours}layer.ahead.", f"{theirs}mixer.mamba_{first}.")
    yield from direction(f"{ours}layer.back.", f"{theirs}mixer.mamba_{second}.")


def _complement(source: Source, config: Mapping[str, Any], num_ids: int) -> tuple[int, ...]:
    """The complement according to the config; ids that it does not mention are their own."""
    said = config.get("complement_map") or {"7": 10, "8": 9, "9": 8, "10": 7}
    if not isinstance(said, dict) or any(type(id) is not int for id in said.values()):
        raise ModelFolderError(f"{source.where}: complement_map of config.json is no table of ids")
    return tuple(said.get(str(id), id) for id in range(num_ids))
