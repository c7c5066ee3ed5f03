"""How a model writes for a suite: sampler, guidance, length of the output, batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unmask.distributed.world import World
from unmask.errors import DataError, UnmaskError, UsageError
from unmask.evaluation.suites.base import Identity
from unmask.rng import fold, row_keys
from unmask.samplers import Sampler
from unmask.sampling.factory import UnknownOption
from unmask.text.editing import NUM_SAMPLES, write
from unmask.text.prompts import spelled, until_end

if TYPE_CHECKING:
    from unmask.evaluation.evaluate import Progress
    from unmask.model import Model


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How to generate texts. sampler and options: as in `Model.make_sampler`; decoding is greedy unless they say
    otherwise.

    lengths: try this many target lengths, around the source's own number of tokens, and keep the one with the lowest
    bound (draws: per candidate). None: the canvas extends to the end of the window, and end-of-text decides, as the
    packing `fill` teaches. max_rows: number of texts, spread evenly over the set; None: all.

    >>> Writing(sampler="confidence", options={"tokens": 1}).batch
    16
    """

    sampler: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    guidance: float | None = None
    lengths: int | None = None
    draws: int = NUM_SAMPLES
    max_rows: int | None = None
    batch: int = 16

    def __post_init__(self) -> None:
        for name in ("lengths", "draws", "max_rows", "batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")

    def make(self, model: Model) -> Sampler:
        """The sampler, greedy if it supports that and the options do not say otherwise."""
        try:
            return model.make_sampler(self.sampler, **({"temperature": 0.0} | dict(self.options)))
        except UnknownOption as e:
            if e.option != "temperature" or "temperature" in self.options:
                raise
            return model.make_sampler(self.sampler, **self.options)

    def fits(self, model: Model) -> Writing:
        """The same for a model without this sampler, or one that ends its texts itself: its default way of writing."""
        way = self
        if self.sampler is not None and self.sampler not in model.sampler_names():
            way = replace(way, sampler=None, options={})
        return replace(way, lengths=None) if model.process is None else way

    def identity(self, model: Model) -> Identity:
        """What determines the output, besides model and seed."""
        if self.lengths is not None and model.process is None:
            raise UsageError("an autoregressive model ends its texts itself: leave out --lengths")
        ranked = {} if self.lengths is None else {"lengths": self.lengths, "draws": self.draws}
        given = {} if self.sampler is None else {"name": self.sampler}
        asked = json.dumps(given | dict(self.options)) if given or self.options else None
        sampler = repr(self.make(model))
        return {"sampler": sampler, "asked": asked, "guidance": self.guidance, "max_rows": self.max_rows, **ranked}

    def chosen(self, num: int) -> list[int]:
        """The indices of the texts to use, out of `num`.

        >>> Writing(max_rows=3).chosen(7)
        [0, 3, 6]
        """
        if self.max_rows is None or self.max_rows >= num:
            return list(range(num))
        most = self.max_rows
        return [i * (num - 1) // max(1, most - 1) for i in range(most)]


def check_prompts(model: Model, way: Writing) -> None:
    """Refuse a model that was trained without prompts, because it cannot know where a source ends and a target begins.

    Also refuse one that cannot tell where a target ends.
    """
    if model.packing not in ("pad", "fill") or not model.separator:
        raise UsageError(
            "this model was trained without prompts (its folder names no separator), so it cannot write a target for "
            'a source: train it on pairs, as in benchmarks/conditional, with packing = "fill" and a separator'
        )
    if model.packing == "pad" and model.process is not None and way.lengths is None:
        raise UsageError(
            'this model was trained on rows of their own length (packing = "pad"), so it writes as many tokens as '
            'there is room for: train it with packing = "fill", or give --lengths'
        )


def in_batches(
    world: World, numbers: Sequence[int], batch: int, work: Callable[[list[int]], list[Any]], progress: Progress | None
) -> list[Any]:
    """Apply `work` to the items in batches shared among processes; every process receives all results.

    >>> in_batches(World(), [1, 2, 3], 2, lambda some: [n * n for n in some], None)
    [1, 4, 9]
    """
    parts = [list(numbers[lo : lo + batch]) for lo in range(0, len(numbers), batch)]
    made: list[Any] = []
    for turn in range(0, len(parts), world.size):
        place = turn + world.rank
        mine = partial(work, parts[place]) if place < len(parts) else list[Any]
        try:
            made += [one for part in world.agree(mine) for one in part]
        except UnmaskError as e:
            if type(e) is not UnmaskError:
                raise
            raise DataError(str(e)) from None  # a failure in another process fails this set as a local one would
        if progress is not None:
            progress(min(len(numbers), len(made)), len(numbers))
    return made


def targets(
    model: Model, way: Writing, prompts: Sequence[str], seed: int, world: World, progress: Progress | None = None
) -> list[str | None]:
    """A target for each prompt, determined by its number and the seed; None if the prompt leaves no room for one.

    >>> targets(model, Writing(), ["Ein Hund rennt."], 0, World())  # doctest: +SKIP
    ['A dog is running.']
    """
    room = model.length - len(model.begin) - len(model.end) - 1
    sizes = [len(ids) for ids in model.tokenizer.encode_batch([prompt + model.separator for prompt in prompts])]
    able = [i for i, size in enumerate(sizes) if size < room]
    how: dict[str, Any] = {"sampler": way.make(model), "guidance": way.guidance}

    def padded(some: list[int]) -> list[str]:
        return model.generate(1, model.length, prompts, only=some, seed=seed, continuation_only=True, **how)

    def ranked(some: list[int]) -> list[str]:
        return [_of_least_bound(model, way, prompts[i], i, seed, how) for i in some]

    batch = way.batch if way.lengths is None else 1
    written = in_batches(world, able, batch, padded if way.lengths is None else ranked, progress)
    texts: list[str | None] = [None] * len(prompts)
    for i, text in zip(able, written, strict=True):
        texts[i] = text
    return texts


def _of_least_bound(model: Model, way: Writing, prompt: str, number: int, seed: int, how: dict[str, Any]) -> str:
    """Write the target in several lengths side by side; return the one with the lowest bound given the prompt and its
    length."""
    assert way.lengths is not None
    tokenizer, head = model.tokenizer, prompt + model.separator
    ids = tokenizer.encode(head)
    room = model.length - len(model.begin) - len(ids) - len(model.end) - 1
    first = len(tokenizer.encode(prompt)) - way.lengths // 2
    sizes = list(dict.fromkeys(min(max(1, size), room) for size in range(first, first + way.lengths)))
    ends = [1 + (room - n if model.packing == "fill" else 0) for n in sizes]
    rows = [
        [*model.begin, *ids, *[tokenizer.mask_id] * n, *[tokenizer.eot_id] * end, *model.end]
        for n, end in zip(sizes, ends, strict=True)
    ]
    key = row_keys(seed, torch.tensor(number))
    key_B = torch.stack([fold(key, size) for size in sizes])
    finished = write(model, rows, key_B, list(range(len(rows))), constraint=None, **how)
    start, texts = len(model.begin) + len(ids), list[str]()
    for size, row in zip(sizes, finished, strict=True):
        texts.append(spelled(tokenizer, ids, until_end((row or [])[start : start + size], tokenizer), head))
    texts = list(dict.fromkeys(texts))
    nats_B = model.score(texts, prompts=prompt, seed=0, num_samples=way.draws).nats_B
    return texts[int(nats_B.argmin())]
