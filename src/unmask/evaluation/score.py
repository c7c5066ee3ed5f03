"""Scoring: the bound of each text, alone or given a prompt and a class."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unmask.errors import Public, UsageError
from unmask.evaluation import SCORE_DRAWS
from unmask.evaluation.bound import Bound, TokenNats, join
from unmask.evaluation.explain import mean_position_nats
from unmask.text.arguments import check_texts, check_whole

if TYPE_CHECKING:
    from unmask.data.tokenizers import Tokenizer
    from unmask.model import Model
    from unmask.sampling.canvas import Canvas

BATCH = 32  # rows per network call


def score(
    model: Model,
    texts: str | Sequence[str],
    *,
    seed: int = 0,
    num_samples: int = SCORE_DRAWS,
    estimator: str | None = None,
    label: int | str | None = None,
    prompts: str | Sequence[str] | None = None,
    labels: Sequence[int | str | None] | None = None,
    separator: str | None = None,
) -> Bound:
    """The bound of each text including its end-of-text; a text longer than the window is scored window by window.

    This is `Model.score`. prompts: one for all texts or one for each. The text is scored given its prompt, which is
    neither noised nor scored and precedes every window of a long text. separator: as in `generate`. label: the class of
    all texts; labels: one for each text, None for no class.

    Diffusion sees where a row ends, so its bound is conditioned on the number of tokens; an autoregressive value is
    not.

    >>> model.score(["import os", "import sys"], num_samples=16).nats_B  # doctest: +SKIP
    >>> model.score("bonjour", prompts="hello").nats  # of -log p(bonjour | hello)  # doctest: +SKIP
    """
    check_whole(seed=seed, num_samples=num_samples)
    texts = check_texts(texts, "texts")
    prompts = prompts if prompts is None or isinstance(prompts, str) else check_texts(prompts, "prompts")
    if not texts:
        raise UsageError("nothing to score: give at least one text")
    each = _labels(label, labels, len(texts))
    rows, owner, prefix_lengths = [], [], []
    for i, (text, head) in enumerate(zip(texts, _heads(model, prompts, separator, len(texts)), strict=True)):
        for row in _windows(model, text, head):
            rows.append(row)
            owner.append(i)
            prefix_lengths.append(len(head or ()))
    how: dict[str, Any] = {"seed": seed, "num_samples": num_samples, "estimator": estimator}
    batches: list[tuple[int, Canvas, Tensor]] = []
    for lo in range(0, len(rows), BATCH):
        some = slice(lo, lo + BATCH)
        canvas = model.canvas(rows[some], may_end=True, label=[each[i] for i in owner[some]])
        batches.append((lo, canvas, scored_positions(canvas, prefix_lengths[some], model.tokenizer.fixed_ids)))
    windows = join([model.canvas_bound(canvas, scored_BL, first_row=lo, **how) for lo, canvas, scored_BL in batches])
    owner_B = torch.tensor(owner)
    draws_BS = torch.zeros(len(texts), windows.draws_BS.shape[1], dtype=windows.draws_BS.dtype)
    return Bound(
        draws_BS=draws_BS.index_add(0, owner_B, windows.draws_BS),
        tokens_B=torch.zeros(len(texts), dtype=torch.long).index_add(0, owner_B, windows.tokens_B),
        num_bytes=sum(_scored_bytes(model.tokenizer, texts)),
        kind=windows.kind,
        explained=partial(_explained, model, batches, owner, how),
    )


def _explained(
    model: Model, batches: list[tuple[int, Canvas, Tensor]], owner: list[int], how: dict[str, Any]
) -> list[list[TokenNats]]:
    """The scored tokens of each text with their nats; windows are concatenated."""
    texts: list[list[TokenNats]] = [[] for _ in range(max(owner) + 1)]
    for lo, canvas, scored_BL in batches:
        nats_BL = mean_position_nats(
            model.objective,
            model.denoiser,
            canvas.tokens,
            canvas.valid_BL,
            scored_BL=scored_BL,
            label_B=canvas.label_B,
            first_row=lo,
            **how,
        )
        for row, (tokens_L, nats_L, scored_L) in enumerate(zip(canvas.tokens, nats_BL, scored_BL, strict=True)):
            for token, nats in zip(tokens_L[scored_L].tolist(), nats_L[scored_L.cpu()].tolist(), strict=True):
                texts[owner[lo + row]].append(TokenNats(model.tokenizer.token_text(token), nats))
    return texts


def _heads(
    model: Model, prompts: str | Sequence[str] | None, separator: str | None, num: int
) -> list[list[int]] | list[None]:
    """The prompt of each text as ids, not scored and tokenized separately, as in packing; None: empty."""
    if prompts is None:
        return [None] * num if model.anchor == "none" else [list(model.begin)] * num
    prompts = [prompts] * num if isinstance(prompts, str) else list(prompts)
    if len(prompts) != num:
        raise UsageError(
            "{prompts} prompts for {num} texts: give one for all, or one for each",
            prompts=Public(len(prompts)),
            num=Public(num),
        )
    end = model.separator if separator is None else separator
    return [[*model.begin, *ids] for ids in model.tokenizer.encode_batch([prompt + end for prompt in prompts])]


def _labels(label: int | str | None, labels: Sequence[int | str | None] | None, num: int) -> list[int | str | None]:
    if labels is None:
        return [label] * num
    if label is not None or isinstance(labels, str) or len(labels) != num:
        raise UsageError("give one label for all texts, or as many labels as texts")
    return list(labels)


def _windows(model: Model, text: str, head: list[int] | None) -> list[list[int]]:
    """The rows of a text, each with its prompt and anchors."""
    end = [model.tokenizer.eot_id] if model.tokenizer.ends_texts else []
    ids = [*([] if head else model.begin), *model.tokenizer.encode(text), *end]
    head = head or []
    room = model.length - len(head) - len(model.end)
    if room < 1:
        raise UsageError(
            "the prompt takes {tokens} tokens, the model's window holds {window}: give a shorter prompt",
            tokens=Public(len(head)),
            window=Public(model.length),
        )
    if model.packing == "fill":  # rows are full in training, so such a model sees where a text ends
        ids += [model.tokenizer.eot_id] * (-len(ids) % room)
    return [[*head, *ids[lo : lo + room], *model.end] for lo in range(0, max(1, len(ids)), room)]


def _scored_bytes(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """The bytes of each text, without those of tokens that are conditioned on because no model writes them."""
    if not tokenizer.fixed_ids:
        return [len(text.encode()) for text in texts]
    return [
        int((np.diff(ends, prepend=0) * ~np.isin(ids, tokenizer.fixed_ids)).sum())
        for ids, ends in tokenizer.encode_spans(texts)
    ]


def scored_positions(canvas: Canvas, prefix_lengths: list[int], fixed_ids: tuple[int, ...] = ()) -> Tensor:
    """True everywhere except at the prompt, the anchors, padding, and tokens of fixed ids."""
    position_L = torch.arange(canvas.tokens.shape[1], device=canvas.tokens.device)
    first_B1 = torch.tensor(prefix_lengths, device=canvas.tokens.device)[:, None]
    scored_BL = (position_L >= first_B1) & (position_L < canvas.length_B[:, None] - canvas.frame[1])
    return scored_BL & ~torch.isin(canvas.tokens, torch.tensor(fixed_ids, device=scored_BL.device, dtype=torch.long))
