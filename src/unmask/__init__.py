"""unmask: masked diffusion language models. Train, evaluate, generate and fill gaps.

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
    from unmask import heads as heads
    from unmask import metrics as metrics
    from unmask import noise as noise
    from unmask import objectives as objectives
    from unmask import samplers as samplers
    from unmask.comparison.compare import Comparison as Comparison
    from unmask.comparison.compare import compare as compare
    from unmask.config import RunConfig as RunConfig
    from unmask.config import load_config as load_config
    from unmask.data.batch import Batch as Batch
    from unmask.data.batch import make_batch as make_batch
    from unmask.data.tokenizers import load_tokenizer as load_tokenizer
    from unmask.denoisers.network import Network as Network
    from unmask.denoisers.network import as_denoiser as as_denoiser
    from unmask.errors import UnmaskError as UnmaskError
    from unmask.errors import UsageError as UsageError
    from unmask.evaluation.bound import Bound as Bound
    from unmask.evaluation.evaluate import evaluate as evaluate
    from unmask.evaluation.measurement import Measurement as Measurement
    from unmask.finetuning.classifier import Classifier as Classifier
    from unmask.finetuning.classifier import load_classifier as load_classifier
    from unmask.finetuning.config import FinetuneConfig as FinetuneConfig
    from unmask.finetuning.config import load_finetune_config as load_finetune_config
    from unmask.finetuning.run import finetune as finetune
    from unmask.model import Model as Model
    from unmask.model import load as load
    from unmask.objectives.chunked_loss import LossSum as LossSum
    from unmask.processes.base import Process as Process
    from unmask.registry import register as register
    from unmask.samplers.base import Step as Step
    from unmask.samplers.drawing import Drawing as Drawing
    from unmask.sampling.canvas import Canvas as Canvas
    from unmask.sampling.guidance import Guidance as Guidance
    from unmask.sampling.loop import sample as sample
    from unmask.sampling.loop import steps as steps
    from unmask.sampling.particles import particles as particles
    from unmask.sampling.predictor import Predictor as Predictor
    from unmask.sampling.predictor import Query as Query
    from unmask.text.editing import Edit as Edit
    from unmask.training.callbacks import Callback as Callback
    from unmask.training.loop import train as train
    from unmask.training.run_view import RunView as RunView

__version__ = "0.1.0"

# name → module; everything is imported on first use, so that `import unmask` does not import torch.
_PUBLIC = {
    "Batch": "unmask.data.batch",
    "Bound": "unmask.evaluation.bound",
    "Callback": "unmask.training.callbacks",
    "Canvas": "unmask.sampling.canvas",
    "Classifier": "unmask.finetuning.classifier",
    "Comparison": "unmask.comparison.compare",
    "Drawing": "unmask.samplers.drawing",
    "Edit": "unmask.text.editing",
    "FinetuneConfig": "unmask.finetuning.config",
    "Guidance": "unmask.sampling.guidance",
    "LossSum": "unmask.objectives.chunked_loss",
    "Measurement": "unmask.evaluation.measurement",
    "Model": "unmask.model",
    "Network": "unmask.denoisers.network",
    "Predictor": "unmask.sampling.predictor",
    "Process": "unmask.processes.base",
    "Query": "unmask.sampling.predictor",
    "RunConfig": "unmask.config",
    "RunView": "unmask.training.run_view",
    "Step": "unmask.samplers.base",
    "UnmaskError": "unmask.errors",
    "UsageError": "unmask.errors",
    "as_denoiser": "unmask.denoisers.network",
    "compare": "unmask.comparison.compare",
    "evaluate": "unmask.evaluation.evaluate",
    "finetune": "unmask.finetuning.run",
    "load": "unmask.model",
    "load_classifier": "unmask.finetuning.classifier",
    "load_config": "unmask.config",
    "load_finetune_config": "unmask.finetuning.config",
    "load_tokenizer": "unmask.data.tokenizers",
    "make_batch": "unmask.data.batch",
    "particles": "unmask.sampling.particles",
    "register": "unmask.registry",
    "sample": "unmask.sampling.loop",
    "steps": "unmask.sampling.loop",
    "train": "unmask.training.loop",
}
_ROOMS = ("constraints", "corpora", "denoisers", "heads", "metrics", "noise", "objectives", "samplers")

__all__ = sorted([*_PUBLIC, *_ROOMS, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"unmask.{name}")
    raise AttributeError(f"module 'unmask' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
