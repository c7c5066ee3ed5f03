"""Metrics and samples on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from unmask.data.packing import Rows
from unmask.distributed.world import World
from unmask.errors import UsageError
from unmask.evaluation.evaluate import measure
from unmask.evaluation.measurement import Measurement
from unmask.metrics import Metric
from unmask.model import Model
from unmask.rng import row_keys
from unmask.training.callbacks import Sample


def held_out_sample(model: Model, rows: Rows, seed: int) -> Sample:
    """Generate a text; if rows have prompts or classes, with those of one row, chosen by the seed.

    >>> held_out_sample(model, rows, seed=1000).prompt  # doctest: +SKIP
    """
    row = np.array([int(row_keys(seed, torch.tensor(0))) % len(rows)])
    held_out = rows.take(row)
    tokenizer, classes = model.tokenizer, held_out.label if model.denoiser.num_classes else None
    label = None if classes is None or classes[0] < 0 else int(classes[0])
    prefix = held_out.x[0, : held_out.prefix_len[0]].tolist()
    prompt = tokenizer.decode(
        [id for id in prefix if id not in (tokenizer.bos_id, tokenizer.eot_id)]
    )  # and its separator
    length = max(int(held_out.valid_len[0]), len(model.begin) + len(tokenizer.encode(prompt)) + 1 + len(model.end))
    try:
        text = model.generate(1, length if prompt else None, prompt, seed=seed, label=label, separator="")[0]
    except UsageError:  # an unusable prompt, such as one that spells a mask, must not end the run
        prompt, text = "", model.generate(1, seed=seed, label=label, separator="")[0]
    word = model.labels[label] if label is not None and label < len(model.labels) else label
    return Sample(text, prompt=prompt, label=word)


def measure_all(
    metrics: Sequence[Metric], model: Model, rows: Rows, *, max_rows: int, world: World
) -> list[Measurement]:
    """Measure each metric on the rows, or on `max_rows` of them if the metric does not set a number itself.

    >>> measure_all([MaskedAccuracy()], model, rows, max_rows=256, world=World())  # doctest: +SKIP
    """
    found = []
    for metric in metrics:
        if getattr(metric, "max_rows", 0) is None:
            metric = replace(cast(Any, metric), max_rows=max_rows)
        try:
            found.append(measure(metric, model, rows, seed=0, world=world))
        except UsageError as e:
            raise UsageError("valid_metrics, {metric}: {reason}", metric=type(metric).__name__, reason=e) from None
    return found
