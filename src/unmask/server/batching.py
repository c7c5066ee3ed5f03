"""Queries of many requests in one network call, such that no row's answer depends on the other rows.

On a CPU a matrix product of few rows uses other kernels than one of many, and sums in another order. From four rows on,
measurements show bitwise equal results in any batch; with AVX-512 after `ask_for_same_bits`. So a row is padded to a
length that depends only on its own length, and every call asks for several positions at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unmask.sampling.predictor import MAX_ANSWER, Predictor, Query

LEAST = 8  # minimum positions per row, and lines per call
MAX_POSITIONS = 1 << 15  # maximum rows × length per call


def bucket(length: int) -> int:
    """The padded length: 16, then powers of two and the numbers half-way between them.

    >>> [bucket(n) for n in (1, 16, 17, 50, 65, 256)]
    [16, 16, 24, 64, 96, 256]
    """
    power = max(16, 1 << (length - 1).bit_length())
    return power * 3 // 4 if power > 16 and length <= power * 3 // 4 else power


def groups(lengths: Sequence[int], wanted: Sequence[int], num_ids: int, *, padded: bool) -> Iterator[list[int]]:
    """Which queries share a call: those of one bucket (of one length, for networks without padding), split to fit in
    memory.

    >>> list(groups([5, 30, 9], [1, 1, 1], 100, padded=True))
    [[0, 2], [1]]
    """
    by_length: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        by_length.setdefault(bucket(length) if padded else length, []).append(i)
    for length, several in by_length.items():
        part: list[int] = []
        widest = 0
        for i in several:
            widest = max(widest, wanted[i])
            full = (len(part) + 1) * length > MAX_POSITIONS or (len(part) + 1) * widest * num_ids > MAX_ANSWER
            if part and full:
                yield part
                part, widest = [], wanted[i]
            part.append(i)
        yield part


def answer(predictor: Predictor, queries: Sequence[Query], device: torch.device, *, padded: bool) -> list[Tensor]:
    """Answer queries of one row each in a single call; answers are in the order of the queries."""
    rows = [_Row(query) for query in queries]
    length = max(len(row.z_L) for row in rows)
    length = bucket(length) if padded else length
    counts = [len(row.at_N) for row in rows]
    # If there are few positions, the last row is asked for more; these answers come last and are dropped.
    extra = max(0, LEAST - sum(counts))
    width = -(-max(*counts, counts[-1] + extra, LEAST) // LEAST) * LEAST
    z_BL = torch.zeros(len(rows), length, dtype=torch.long)
    valid_BL = torch.zeros(len(rows), length, dtype=torch.bool)
    at_BK = torch.zeros(len(rows), width, dtype=torch.long)
    wanted_BK = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        z_BL[i, : len(row.z_L)], valid_BL[i, : len(row.z_L)] = row.z_L, True
        at_BK[i, : counts[i]], wanted_BK[i, : counts[i]] = row.at_N, True
    wanted_BK[-1, counts[-1] : counts[-1] + extra] = True
    whole = Query(
        tokens_BL=z_BL.to(device),
        level_R=torch.cat([query.level_R.to("cpu", torch.float32) for query in queries]).to(device),
        at_RK=at_BK.to(device),
        wanted_RK=wanted_BK.to(device),
        reach=int(at_BK.max()) + 1,
        valid_BL=valid_BL.to(device) if padded else None,
        label_B=_labels(queries, device),
        writes=queries[0].writes,
        latent_NE=_latents(queries, device),
    )
    answers = torch.split(predictor(whole)[: sum(counts)], counts)
    moved = answers[0].device != queries[0].tokens_BL.device
    return [a.to(q.tokens_BL.device) if moved else a for a, q in zip(answers, queries, strict=True)]


class _Row:
    """A query about one row, on the host."""

    def __init__(self, query: Query) -> None:
        assert len(query.at_RK) == 1
        self.z_L = query.z_RL[0].cpu()
        self.at_N = query.at_RK[query.wanted_RK].cpu()


def _latents(queries: Sequence[Query], device: torch.device) -> Tensor | None:
    """The states of all rows, for processes whose states are vectors."""
    lines = [query.latent_NE for query in queries if query.latent_NE is not None]
    return torch.cat(lines).to(device) if lines else None


def _labels(queries: Sequence[Query], device: torch.device) -> Tensor | None:
    """The rows' classes, if the model has any; -1 for a row without one."""
    labels = [query.label_R for query in queries]
    if all(label is None for label in labels):
        return None
    none = torch.full((1,), -1)
    return torch.cat([none if label is None else label.cpu() for label in labels]).to(device)
