"""A model's card for the hub: metadata and Markdown, based only on what the model itself records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unmask.denoisers.encoder import EncoderNetwork
from unmask.heads.task import Task
from unmask.model import Model
from unmask.pretrained.native import native_of

Layout = Literal["unmask", "hf"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured value. name: for display; type: the hub's identifier; of: what it was measured on; sign: "≤" for a
    bound."""

    name: str
    type: str
    value: float
    of: str
    sign: str = "="


def card_of(
    model: Model,
    repo: str,
    *,
    task: Task | None = None,
    license: str | None = None,
    layout: Layout = "unmask",
    measured: Sequence[Measured] = (),
    text: str = "",
) -> str:
    """The README.md of a repository. text: additional Markdown, which replaces the hints about what the card does not
    know.

    >>> card_of(unmask.load("stories"), "me/stories").splitlines()[0]  # doctest: +SKIP
    '---'
    """
    parts = [_metadata(model, repo, task, license, layout, measured), _about(model, repo, task)]
    parts += [_use(model, repo, task, layout), _measured(measured)]
    parts.append(text.strip() or _UNKNOWN)
    return "\n\n".join(part for part in parts if part) + "\n"


_UNKNOWN = (
    "## What this card does not know\n\nIt was made from the model's folder, which says nothing of the data that the "
    "model learned from, of what it is meant for and of where it fails. Whoever knows should write it here."
)


def _names(model: Model) -> tuple[str, str]:
    """The names of objective and denoiser in recipes."""
    objective, denoiser = type(model.objective), type(model.denoiser.config)
    return objective.__name__, denoiser.__name__


def _metadata(
    model: Model, repo: str, task: Task | None, license: str | None, layout: Layout, measured: Sequence[Measured]
) -> str:
    objective, denoiser = _names(model)
    pipeline = "fill-mask" if layout == "hf" and model.process is not None else "text-generation"
    if task is not None:
        pipeline = "text-classification"
    kind = "autoregressive" if model.process is None else f"{model.process.name}-diffusion"
    tags = ["unmask", kind.replace("absorbing", "masked"), objective.lower(), denoiser.lower()]
    said = ["---", f"library_name: {'transformers' if layout == 'hf' else 'unmask'}"]
    said += [] if license is None else [f"license: {json.dumps(license)}"]
    said += [f"pipeline_tag: {pipeline}", "tags:", *(f"- {tag}" for tag in tags)]
    if measured:  # JSON is valid YAML
        results = [
            {
                "task": {"type": pipeline},
                "dataset": {"name": one.of, "type": "other"},
                "metrics": [{"type": one.type, "value": one.value, "name": f"{one.name} ({one.sign})"}],
            }
            for one in measured
        ]
        index = [{"name": repo.rpartition("/")[2], "results": results}]
        said.append(f"model-index: {json.dumps(index, ensure_ascii=False)}")
    return "\n".join([*said, "---"])


def _about(model: Model, repo: str, task: Task | None) -> str:
    objective, denoiser = _names(model)
    what = "An autoregressive language model" if model.process is None else "A diffusion language model"
    if model.process is not None and model.process.name == "absorbing":
        what = "A masked diffusion language model"
    what += "" if task is None else f", fine-tuned for a {task.kind}"
    rows = {
        "objective": objective,
        "denoiser": denoiser,
        "parameters": f"{model.num_parameters:,}",
        "vocabulary": f"{type(model.tokenizer).__name__}, {model.tokenizer.num_ids:,} ids, the mask among them",
        "window": f"{model.length:,} tokens",
    }
    table = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]
    return f"# {repo.rpartition('/')[2]}\n\n{what}, made with unmask.\n\n" + "\n".join(table)


def _use(model: Model, repo: str, task: Task | None, layout: Layout) -> str:
    if task is not None:
        lines = ["import unmask", "", f'classifier = unmask.load_classifier("hf:{repo}")']
    elif layout == "hf":
        job = "text-generation" if model.process is None else "fill-mask"
        known = isinstance(model.denoiser, EncoderNetwork) or native_of(model).model_type
        lines = ["import transformers", *([] if known else ["import unmask.hf"]), ""]
        lines += [f'pipe = transformers.pipeline("{job}", model="{repo}")']
    else:
        lines = ["import unmask", "", f'model = unmask.load("hf:{repo}")', "model.generate(num=2)"]
    return "\n".join(["## Use", "", "```python", *lines, "```"])


def _measured(measured: Sequence[Measured]) -> str:
    if not measured:
        return ""
    rows = [f"| {one.name} | {one.sign} {one.value:.5g} | {one.of} |" for one in measured]
    return "\n".join(["## Measured", "", "| | value | on |", "| --- | --- | --- |", *rows])
