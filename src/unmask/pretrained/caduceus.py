"""Caduceus-Ph and -PS as their authors save them: config and tensors as those of `denoisers.caduceus`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from unmask.denoisers.caduceus import Caduceus
from unmask.errors import ModelFolderError
from unmask.pretrained.base import Pretrained, Source
from unmask.pretrained.letters import letters
from unmask.pretrained.mamba import direction
from unmask.pretrained.renaming import Renamed, Their, check_ordinary, tied_or_own, whole

MODEL_TYPES = ("caduceus",)
DENOISER = "caduceus"

LENGTH = 1 << 17  # of the longest rows that one was trained on; it has no positions
ORDINARY = {
    "bidirectional": (True,),
    "bidirectional_strategy": ("add", None),
    "bidirectional_weight_tie": (True,),
    "rms_norm": (True,),
    "norm_epsilon": (1e-5,),
}
ORDINARY_MIXER = {"bias": (False,), "conv_bias": (True,)}


def read(source: Source) -> Pretrained:
    """A masked language model of both strands (PS), or one to be used on the average of both (Ph).

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
    tied = tied_or_own("lm_head.weight", known, source)
    denoiser = Caduceus(
        hidden=whole(source, config, "d_model"),
        blocks=whole(source, config, "n_layer"),
        expand=whole(source, mixer, "expand", 2),
        states=whole(source, mixer, "d_state", 16),
        taps=whole(source, mixer, "d_conv", 4),
        rank=0 if mixer.get("dt_rank", "auto") == "auto" else whole(source, mixer, "dt_rank"),
        tied=tied,
        equivariance="ps" if config.get("rcps") is True else "ph",
        complement=_complement(source, config, tokenizer.num_ids),
    )
    embedding, head = "backbone.embeddings.word_embeddings.weight", "lm_head.weight"
    theirs = {"embed.weight": Their(embedding, equals=(head,) if tied else ())}
    for n in range(denoiser.blocks):
        theirs |= dict(_block(f"blocks.{n}.branches.0.", f"backbone.layers.{n}."))
    theirs["norm.weight"] = Their("backbone.norm_f.weight")
    if not tied:
        theirs["output.weight"] = Their(head)
    unused = frozenset(name for name in known if name.endswith("complement_map"))
    state = Renamed(source, denoiser, tokenizer, theirs, known=known, unused=unused)
    return Pretrained(denoiser=denoiser, state=state, tokenizer=tokenizer, length=LENGTH)


def _plain(name: str) -> str:
    """Without the wrappers in which what is read on both strands stands.

    >>> _plain("caduceus.backbone.layers.0.mixer.submodule.mamba_fwd.D")
    'backbone.layers.0.mixer.mamba_fwd.D'
    """
    name = name.removeprefix("caduceus.").replace(".submodule.", ".")
    name = name.replace("word_embeddings.embedding.", "word_embeddings.")
    return re.sub(r"^lm_head\.lm_head\.", "lm_head.", name)


def _block(ours: str, theirs: str) -> Iterator[tuple[str, Their]]:
    """Both directions have the same projections, of which a file may hold one or both."""
    yield f"{ours}norm.weight", Their(f"{theirs}norm.weight")
    for own, other in (("into", "in_proj"), ("out", "out_proj")):
        ahead, back = (f"{theirs}mixer.mamba_{way}.{other}.weight" for way in ("fwd", "rev"))
        yield f"{ours}layer.{own}.weight", Their(ahead, equals=(back,))
    yield from direction(f"{ours}layer.ahead.", f"{theirs}mixer.mamba_fwd.")
    yield from direction(f"{ours}layer.back.", f"{theirs}mixer.mamba_rev.")


def _complement(source: Source, config: Mapping[str, Any], num_ids: int) -> tuple[int, ...]:
    """As the config says; what it does not name is its own."""
    said = config.get("complement_map") or {"7": 10, "8": 9, "9": 8, "10": 7}
    if not isinstance(said, dict) or any(type(id) is not int for id in said.values()):
        raise ModelFolderError(f"{source.where}: complement_map of config.json is no table of ids")
    return tuple(said.get(str(id), id) for id in range(num_ids))
