"""unmask: masked diffusion language models. Train, measure, fill and generate.

>>> import unmask
>>> model = unmask.load("runs/demo")          # doctest: +SKIP
>>> model.fill("The [MASK:5] sat on the [MASK:3].")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unmask import constraints as constraints
    from unmask import corpora as corpora
    from unmask import denoisers as denoisers
    from unmask import noise as noise
    from unmask import objectives as objectives
    from unmask import samplers as samplers
    from unmask.batch import Batch as Batch
    from unmask.batch import make_batch as make_batch
    from unmask.bound import Bound as Bound
    from unmask.canvas import Canvas as Canvas
    from unmask.config import RunConfig as RunConfig
    from unmask.config import load_config as load_config
    from unmask.denoisers._network import as_denoiser as as_denoiser
    from unmask.editing import Edit as Edit
    from unmask.errors import UnmaskError as UnmaskError
    from unmask.errors import UsageError as UsageError
    from unmask.generate import sample as sample
    from unmask.generate import steps as steps
    from unmask.guidance import Guidance as Guidance
    from unmask.guidance import particles as particles
    from unmask.model import Model as Model
    from unmask.model import load as load
    from unmask.samplers._drawing import Drawing as Drawing
    from unmask.tokens import load_tokenizer as load_tokenizer
    from unmask.training import train as train

__version__ = "0.1.0"

# name → module; nothing is imported before it is used, so that `import unmask` does not import torch.
_PUBLIC = {
    "Batch": "unmask.batch",
    "Bound": "unmask.bound",
    "Canvas": "unmask.canvas",
    "Drawing": "unmask.samplers._drawing",
    "Edit": "unmask.editing",
    "Guidance": "unmask.guidance",
    "Model": "unmask.model",
    "RunConfig": "unmask.config",
    "UnmaskError": "unmask.errors",
    "UsageError": "unmask.errors",
    "as_denoiser": "unmask.denoisers._network",
    "load": "unmask.model",
    "load_config": "unmask.config",
    "load_tokenizer": "unmask.tokens",
    "make_batch": "unmask.batch",
    "particles": "unmask.guidance",
    "sample": "unmask.generate",
    "steps": "unmask.generate",
    "train": "unmask.training",
}
_ROOMS = ("constraints", "corpora", "denoisers", "noise", "objectives", "samplers")

__all__ = sorted([*_PUBLIC, *_ROOMS, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"unmask.{name}")
    raise AttributeError(f"module 'unmask' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
