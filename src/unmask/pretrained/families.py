"""Which family reads a model, by the `model_type` of its config.

A family is a module with `MODEL_TYPES`, the types that it reads, `DENOISER`, the name of the resulting denoiser, and
`read(source) -> Pretrained`.
"""

from __future__ import annotations

import importlib
from typing import Any

from unmask.errors import ModelFolderError, UsageError, did_you_mean
from unmask.pretrained.base import Pretrained, Source
from unmask.pretrained.registered import is_ours
from unmask.pretrained.source import open_source
from unmask.storage.untrusted import printable

FAMILIES = ("caduceus", "encoders", "hyena", "llama", "mamba", "registered")  # modules of this package
DECODERS = ("falcon", "gemma", "gpt2", "gpt_neox", "mistral", "opt", "phi")


def read_pretrained(source: str | Source) -> Pretrained:
    """Read a third-party model with its family; `source` is a path, a hub name, or the result of `open_source`.

    >>> read_pretrained("bert-base-uncased").length  # doctest: +SKIP
    512
    """
    source = open_source(source) if isinstance(source, str) else source
    families = _families()
    kind = "unmask" if is_ours(source) else source.model_type  # ours may use one of their classes, or have no type
    if kind in families:
        made: Pretrained = families[kind].read(source)
        return made
    said, known = printable(repr(kind), 60), ", ".join(sorted(families))
    if not kind:
        raise ModelFolderError(f"{source.where}: config.json has no model_type, so nobody knows what network it is")
    if kind in DECODERS:
        raise UsageError(
            f"{source.where} is a decoder ({said}), which has no mask and sees one side; what can be read: {known}"
        )
    raise UsageError(
        f"{source.where} has the model_type {said}, which is not among those that can be read; "
        f"{did_you_mean(kind, families)}"
    )


def denoiser_of(source: Source) -> str:
    """The name of the denoiser that a source becomes, "" if no family reads it; only its config is read.

    >>> denoiser_of(open_source("hf:bert-base-uncased"))  # doctest: +SKIP
    'encoder'
    """
    if is_ours(source):
        said = source.config if "format_version" in source.config else source.config.get("unmask")
        described = said.get("denoiser") if isinstance(said, dict) else None
        name = described.get("name") if isinstance(described, dict) else None
        return name if isinstance(name, str) else ""
    family = _families().get(source.model_type)
    return "" if family is None else str(family.DENOISER)


def _families() -> dict[str, Any]:
    modules = [importlib.import_module(f"unmask.pretrained.{name}") for name in FAMILIES]
    return {kind: module for module in modules for kind in module.MODEL_TYPES}
