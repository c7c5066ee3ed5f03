"""The bound of a model over packed rows, with the protocol that must stand beside the number."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from unmask.data.batch import batch_of
from unmask.data.packing import Rows
from unmask.denoisers.network import Network
from unmask.distributed.world import World
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound, join
from unmask.objectives import Objective


def evaluate_rows(
    denoiser: Network,
    objective: Objective,
    rows: Rows,
    *,
    seed: int = 0,
    num_samples: int = 4,
    max_rows: int | None = None,
    batch: int = 16,
    estimator: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    world: World | None = None,
) -> Bound:
    """The bound over the rows, or over `max_rows` of them spread evenly; rows are scored on the denoiser's device.

    Several processes take turns with the batches and each gets the whole bound, the same as one process gives.

    >>> evaluate_rows(model.denoiser, model.objective, rows, num_samples=4).ppl  # doctest: +SKIP
    """
    n = len(rows)
    if n == 0:
        raise UsageError("there are no rows to evaluate")
    indices = np.arange(n) if max_rows is None or max_rows >= n else np.linspace(0, n - 1, max_rows).astype(np.int64)
    if denoiser.num_classes and rows.labels_of(indices[:0]) is not None:
        rows.check_labels(denoiser.num_classes)
    device = next((p.device for p in denoiser.parameters()), torch.device("cpu"))
    world = world or World()
    lows = range(0, len(indices), batch)
    parts: dict[int, Bound] = {}
    for turn in range(0, len(lows), world.size):
        # Who has no batch left does the last one again: where weights are shared, all must make the same calls.
        lo = lows[min(turn + world.rank, len(lows) - 1)]
        # only its masks of what is valid and scored, and its labels
        packed = batch_of(rows.take(indices[lo : lo + batch]), seed=0, step=0, device=device)
        parts[lo] = objective.bound(
            denoiser,
            packed.x_BL,
            packed.valid_BL,
            scored_BL=packed.scored_BL,
            seed=seed,
            first_row=lo,
            num_samples=num_samples,
            estimator=estimator,
            label_B=packed.label_B if denoiser.num_classes else None,
        )
        world.barrier()  # who ran far ahead would wait so long at the end that it looks like a hang
        if progress is not None:
            progress(min(len(indices), (turn + world.size) * batch), len(indices))
    found = {lo: part for held in world.gather(parts) for lo, part in held.items()}
    return join([found[lo] for lo in lows], num_bytes=int(rows.bytes_of(indices).sum()))
