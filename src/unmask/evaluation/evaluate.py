"""Measuring a model on data with any metric, together with the protocol of the measurement."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import unmask
from unmask.corpora import Corpus, Document
from unmask.corpora.memory import Memory
from unmask.corpora.reading import read_like
from unmask.data.batch import Batch, batch_of
from unmask.data.packing import Policy, Rows, build_rows, pack_texts
from unmask.data.rows import Ints
from unmask.denoisers.network import Network
from unmask.distributed.world import World
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound, join
from unmask.evaluation.measurement import Measurement
from unmask.metrics import Metric
from unmask.metrics.perplexity import Perplexity
from unmask.objectives import Objective
from unmask.objectives.draws import Draws
from unmask.reader import from_dict

if TYPE_CHECKING:
    from unmask.model import Model

Progress = Callable[[int, int], None]
Data = Rows | Corpus | str | Path | Sequence[str | Document]


def evaluate(
    model: Model,
    data: Data,
    *,
    metric: Metric | str | None = None,
    seed: int = 0,
    packing: Policy | None = None,
    length: int | None = None,
    about: Mapping[str, Any] | None = None,
    world: World | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Measurement:
    """Measure a model: its perplexity, or another metric given by its name or as an object.

    data: texts, a corpus, a file or folder (as in `unmask eval --data`), or packed rows. packing, length: default: as
    in training. options: those of the metric, if it is given by its name. about: further entries of the protocol, such
    as the name of the data. world, progress: share the work among processes, if the metric can, and show a bar.

    >>> print(unmask.evaluate(model, ["the cat sat", "on the mat"], num_samples=16))  # doctest: +SKIP
    perplexity ≤ 9.4210 (95% interval 7.9034 – 11.2300, n = 23)
    """
    metric = make_metric(metric, options)
    rows, source = _packed(model, data, packing, length)
    rows = rows.classed(model.labels) if model.denoiser.num_classes else rows
    measured = measure(metric, model, rows, seed=seed, world=world, progress=progress)
    return with_protocol(measured, metric, model, rows, seed=seed, about=source | dict(about or {}))


def with_protocol(
    measured: Measurement, metric: Metric, model: Model, rows: Rows, *, seed: int, about: Mapping[str, Any]
) -> Measurement:
    """Add to a measurement everything that its value depends on. about: further entries of the protocol, such as the
    data.

    >>> with_protocol(measured, metric, model, rows, seed=0, about={"data": "texts"}).protocol  # doctest: +SKIP
    """
    exact = measured.kind == "exact"
    protocol = {
        "metric": repr(metric),
        "data": "rows",
        "split": "all",
        "fingerprint": rows.key or None,
        "corpus": rows.report.sentence(),
        "packing": rows.report.policy,
        "anchor": rows.report.anchor,
        "length": rows.length,
        "tokenizer": f"{type(model.tokenizer).__name__.lower()} of {model.tokenizer.num_ids} ids",
        "seed": seed,
        "kind": measured.kind,
        # Diffusion sees where padding begins, so a padded row is bounded given its length; autoregression does not.
        "given": "row lengths" if not exact and rows.report.policy not in ("wrap", "fill") else "nothing",
        "device": model.device.type,
        "dtype": str(next((p.dtype for p in model.denoiser.parameters()), torch.float32)).removeprefix("torch."),
        "unmask": unmask.__version__,
    }
    return dataclasses.replace(measured, protocol=protocol | dict(measured.protocol) | dict(about))


def measure(
    metric: Metric,
    model: Model,
    rows: Rows,
    *,
    seed: int,
    world: World | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Apply a metric to packed rows. `world` and `progress` are passed only to metrics whose `measure` accepts them.

    >>> measure(Perplexity(), model, rows, seed=0).value  # doctest: +SKIP
    """
    takes = inspect.signature(metric.measure).parameters
    shared = {"world": world, "progress": progress}
    supported: dict[str, Any] = {name: value for name, value in shared.items() if name in takes}
    return metric.measure(model, rows, seed=seed, **supported)


def make_metric(metric: Metric | str | None, options: Mapping[str, Any]) -> Metric:
    """A metric from its name and options; None is perplexity.

    >>> make_metric("masked_accuracy", {"rate": 0.5})
    MaskedAccuracy(rate=0.5, max_rows=None, batch=16)
    """
    if isinstance(metric, Metric):
        if options:
            raise UsageError(f"{min(options)}: options belong into the metric where it is given as an object")
        return metric
    if metric is None:
        metric = Metric.room.name_of(Perplexity)
    if not isinstance(metric, str):
        raise UsageError(f"metric must be a metric such as unmask.metrics.Perplexity() or its name, got {metric!r}")
    made: Metric = from_dict(Metric, {"name": metric} | dict(options), "metric")
    return made


def _packed(model: Model, data: Data, packing: Policy | None, length: int | None) -> tuple[Rows, dict[str, Any]]:
    """The packed rows, and the protocol's entries about where they come from."""
    if isinstance(data, Rows):
        if packing is not None or length is not None:
            raise UsageError("rows are packed already: leave out packing and length, or give the corpus")
        return data, {}
    policy = packing or model.packing
    anchor = model.anchor_of(policy)
    length = length or model.length
    if length > model.length:
        raise UsageError(f"length {length} is beyond the model's window of {model.length} tokens")
    if isinstance(data, str | Path):
        corpus: Corpus = read_like(str(data))
    else:
        corpus = data if isinstance(data, Corpus) else Memory(texts=tuple(data))
    source = {"data": type(corpus).__name__.lower(), "split": "all", "fingerprint": corpus.fingerprint()}
    source |= {"data": str(data)} if isinstance(data, str | Path) else {}
    if isinstance(corpus, Memory):
        return pack_texts(corpus.documents(), model.tokenizer, policy, length, anchor), source
    return build_rows(corpus, model.tokenizer, policy=policy, length=length, anchor=anchor), source


def batches_of(
    network: Network, rows: Rows, *, seed: int, max_rows: int | None = None, batch: int = 16
) -> Iterator[Batch]:
    """The rows, or `max_rows` of them spread evenly, in batches on the network's device; row i has the key (seed, i).

    >>> for batch in batches_of(model.denoiser, rows, seed=0):  # doctest: +SKIP
    ...     nats_B = model.objective.row_nats(model.denoiser, batch)
    """
    indices = chosen_rows(rows, max_rows)
    for lo in range(0, len(indices), batch):
        yield _batch(network, rows, indices[lo : lo + batch], seed, lo, len(indices))


def chosen_rows(rows: Rows, max_rows: int | None) -> Ints:
    """The indices of the rows to measure: all, or `max_rows` of them spread evenly."""
    n = len(rows)
    if n == 0:
        raise UsageError("there are no rows to evaluate")
    return np.arange(n) if max_rows is None or max_rows >= n else np.linspace(0, n - 1, max_rows).astype(np.int64)


def _batch(network: Network, rows: Rows, indices: Ints, seed: int, first_row: int, num_rows: int) -> Batch:
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    batch = batch_of(rows.take(indices), seed=seed, step=0, first_row=first_row, num_rows=num_rows, device=device)
    return batch if network.num_classes else dataclasses.replace(batch, label_B=None)


def evaluate_rows(
    denoiser: Network,
    objective: Objective,
    rows: Rows,
    *,
    seed: int = 0,
    num_samples: int | Draws = 4,
    max_rows: int | None = None,
    batch: int = 16,
    estimator: str | None = None,
    progress: Progress | None = None,
    world: World | None = None,
) -> Bound:
    """The bound over the rows, or over `max_rows` of them spread evenly; rows are scored on the denoiser's device.

    num_samples: draws per row, in the largest groups that still allow an interval over them.

    Several processes share the batches, and each receives the whole bound, identical to that of a single process.

    >>> evaluate_rows(model.denoiser, model.objective, rows, num_samples=4).ppl  # doctest: +SKIP
    """
    indices = chosen_rows(rows, max_rows)
    if denoiser.num_classes and rows.labels_of(indices[:0]) is not None:
        rows.check_labels(denoiser.num_classes)
    draws = Draws.of(num_samples, len(indices)) if isinstance(num_samples, int) else num_samples
    world = world or World()
    lows = range(0, len(indices), batch)
    parts: dict[int, Bound] = {}
    for turn in range(0, len(lows), world.size):
        # A process without a batch left repeats the last one: if weights are sharded, all must make the same calls.
        lo = lows[min(turn + world.rank, len(lows) - 1)]
        # only its masks of valid and scored positions: the bound draws from the seed itself
        packed = _batch(denoiser, rows, indices[lo : lo + batch], seed, lo, len(indices))
        parts[lo] = objective.bound(
            denoiser,
            packed.x_BL,
            packed.valid_BL,
            scored_BL=packed.scored_BL,
            seed=seed,
            first_row=lo,
            num_samples=draws,
            estimator=estimator,
            label_B=packed.label_B,
        )
        world.barrier()  # a process far ahead would otherwise wait at the end for so long that it looks hung
        if progress is not None:
            progress(min(len(indices), (turn + world.size) * batch), len(indices))
    all_parts = {lo: part for theirs in world.gather(parts) for lo, part in theirs.items()}
    return join([all_parts[lo] for lo in lows], num_bytes=int(rows.bytes_of(indices).sum()))
