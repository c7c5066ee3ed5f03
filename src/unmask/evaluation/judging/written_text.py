"""Texts that a model writes for a judge, in the requested number and lengths, with how they were written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unmask.errors import DataError, UsageError
from unmask.rng import row_keys
from unmask.samplers import Sampler
from unmask.storage.atomic import atomic_text
from unmask.text.prompts import until_end

if TYPE_CHECKING:
    from unmask.model import Model

BATCH = 50  # texts to write at a time


@dataclass(frozen=True)
class Written:
    """Texts and how they were written: seconds, maximum number of network calls, device, dtype, seed."""

    texts: list[str]
    how: dict[str, Any]


def write_texts(
    model: Model,
    sampler: Sampler,
    real: Sequence[str],
    *,
    length: int | None = None,
    full: bool = False,
    seed: int = 0,
    batch: int = BATCH,
    warm: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write as many texts as there are real ones, each with room for the tokens of its real text and an end.

    An autoregressive model gets its whole window, because it ends texts by itself. length: room for this many tokens
    instead, for all texts; beyond the model's window texts are written window by window. full: texts fill their room,
    and none may end earlier. warm: write the first batch once before, untimed. Text i depends only on the model, the
    sampler, the lengths in its batch and (seed, i).

    >>> write_texts(model, model.make_sampler(steps=64), real).how["seconds_per_text"]  # doctest: +SKIP
    """
    if full and length is None:
        raise UsageError("texts that do not end by themselves need a length: give --length with --full")
    tokenizer, begin = model.tokenizer, model.begin
    framed = len(begin) + len(model.end)
    room = _room(model, real, length, full=full)
    texts: list[str] = []
    seconds = processor = 0.0
    for lo in range(0, len(room), batch):
        part = [[*begin, *[tokenizer.mask_id] * n, *model.end] for n in room[lo : lo + batch]]
        canvas = model.canvas(part, may_end=not full, key_B=row_keys(seed, torch.arange(lo, lo + len(part))))
        if warm and not lo:
            model.run(canvas, sampler)
        began, busy = time.perf_counter(), time.process_time()
        finished = model.run(canvas, sampler)
        seconds, processor = seconds + time.perf_counter() - began, processor + time.process_time() - busy
        texts += [tokenizer.decode(until_end(model.unframed(row), tokenizer)) for row in finished]
        if progress is not None:
            progress(len(texts), len(room))
    weights = next(model.denoiser.parameters(), torch.empty(0))
    longest = max(room) + framed
    fitted = model.fit_sampler(sampler, longest)
    how = {
        "sampler": repr(fitted),
        "calls": fitted.max_calls(longest),
        "seconds_per_text": seconds / len(texts),
        "processor_seconds_per_text": processor / len(texts),  # CPU time of all threads of this process
        "timed": f"the sampler alone{', after a first batch that is not counted' if warm else ''}",
        "batch": min(batch, len(texts)),
        "lengths": _lengths(model, length, full=full),
        "seed": seed,
        "device": torch.cuda.get_device_name(weights.device) if weights.is_cuda else weights.device.type,
        "dtype": str(weights.dtype).removeprefix("torch."),
    }
    return Written(texts, how)


def _room(model: Model, real: Sequence[str], length: int | None, *, full: bool) -> list[int]:
    """The maximum number of tokens of each text, including its end."""
    window = model.length - len(model.begin) - len(model.end)
    if length is not None:  # a model that writes from left to right and ends by itself needs only its window
        return [length if full or model.process is not None else min(length, window)] * len(real)
    if model.process is None:
        return [window] * len(real)
    return [min(len(row) + 1, window) for row in model.tokenizer.encode_batch(list(real))]


def _lengths(model: Model, length: int | None, *, full: bool) -> str:
    if length is not None:
        return f"{'exactly' if full else 'at most'} {length} tokens"
    return "each ends by itself" if model.process is None else "each has room for the tokens of a real text"


def save_texts(path: Path, written: Written) -> None:
    lines = [{"index": i, "text": text} for i, text in enumerate(written.texts)]
    lines[0]["how"] = written.how  # stored in the first line, so that the file contains only texts
    atomic_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def saved_texts(path: Path) -> Written:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return Written([line["text"] for line in lines], dict(lines[0]["how"]))
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise DataError(f"{path} does not hold the texts of a point: remove it, and it is written anew") from None
