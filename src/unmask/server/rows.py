"""The engine's units of work: rows, each with its own queries to the network, independent of all others."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from unmask.objectives.score_queries import ScoreQuery
from unmask.samplers import Sampler, Step
from unmask.samplers.drawing import Drawing
from unmask.sampling.canvas import Canvas
from unmask.sampling.guidance import Guidance, Guided
from unmask.sampling.loop import begun
from unmask.sampling.observe import with_runners_up
from unmask.sampling.predictor import Predictor, Query
from unmask.sampling.query import lines_of
from unmask.server.batching import bucket
from unmask.server.next_tokens import NextQuery, RowCache

Drawn = tuple[Tensor, Tensor]  # tokens and their log-probabilities
LONG = 128  # work, in tokens that the network could read meanwhile, from which a row counts as lengthy
AT_ONCE = 8  # draws of a bound per step, which are independent of each other
AT_ONCE_TOKENS = 256  # maximum tokens of these on a CPU, where a step of many tokens delays everybody


class Work(ABC):
    """One row in the engine, which advances step by step until it is done.

    If it has `questions`, they are answered together with those of others and `take` receives the answers; otherwise it
    has the network `alone` for a step.
    """

    questions: list[Query]
    done: bool = False
    stopped: bool = False  # its owner wants no more of it; set from any thread, takes effect before the next step
    extra: int = 0  # cost of a step besides the network call, in tokens that the network could read meanwhile

    @property
    def beside(self) -> bool:
        """Whether its work on the answers is so lengthy that it runs in the second thread."""
        return bool(self.questions) and self.extra > LONG

    @abstractmethod
    def take(self, predictions: list[Tensor]) -> Step | None:
        """The answers to all questions; says what was written and sets the next questions."""

    def alone(self) -> Step | None:
        raise NotImplementedError


class _Relay:
    """Stands in for the network while a predictor around it runs: first it records the queries, then it returns the
    answers."""

    def __init__(self, predictor: Predictor) -> None:
        self.process, self.gives = predictor.process, predictor.gives
        self.left_to_right = predictor.left_to_right
        self._cache = RowCache()  # for the tokens before, if the network runs from left to right
        self.asked: list[Query] = []
        self.answers: list[Tensor] = []

    def __call__(self, query: Query) -> Tensor:
        if self.answers:
            return self.answers.pop(0)
        if self.left_to_right:
            parts = {field.name: getattr(query, field.name) for field in fields(query)}
            query = NextQuery(**parts, cache=self._cache)
        self.asked.append(query)
        return torch.zeros(int(query.wanted_RK.sum()), 1)


class Writing(Work):
    """A row of a canvas that a sampler writes."""

    def __init__(
        self,
        canvas: Canvas,
        sampler: Sampler,
        predictor: Predictor,
        *,
        guidance: Guidance | None = None,
        runners_up: int = 0,
        extra: int = 0,
    ) -> None:
        self.canvas, self.sampler, self.runners_up, self.extra = canvas, sampler, runners_up, extra
        self._relay = _Relay(predictor)
        self._predictor: Predictor = self._relay if guidance is None else Guided(self._relay, canvas, guidance)
        self.tokens_1L = canvas.tokens
        self._state = sampler.start(begun(predictor, canvas))
        self._ask()

    @property
    def law(self) -> tuple[Drawing, tuple[int, ...]] | None:
        """Rows with equal values draw their tokens in the same way; None: in a way of its own."""
        plain = isinstance(self._predictor, _Relay)
        if not plain or not self.sampler.planned or self.sampler.drawing.temperature_end is not None:
            return None
        return self.sampler.drawing, self.canvas.never

    @property
    def lines(self) -> tuple[Tensor, Tensor]:
        """The keys and positions of this step's draws."""
        assert self._query is not None
        row_N, position_N = lines_of(self._query)
        return self.canvas.key_B[row_N], position_N + self.canvas.offset

    def _ask(self) -> None:
        self._query = self.sampler.ask(self._state)
        self._relay.asked = []
        self.done = self._query is None
        if self._query is not None:
            self._predictor(self._query)  # guidance turns one query into two
        self.questions = self._relay.asked

    def take(self, predictions: list[Tensor], drawn: Drawn | None = None) -> Step:
        """drawn: the tokens, if they were drawn together with those of other rows."""
        assert self._query is not None
        self._relay.answers = list(predictions)
        prediction = self._predictor(self._query)
        if drawn is not None:
            step = self.sampler.write(self._state, self.sampler.select(self._state, prediction), *drawn)
        else:
            step = self.sampler.tell(self._state, prediction)
        if self.runners_up:
            before_1L, mask_id = self.tokens_1L, self.canvas.mask_id
            step = with_runners_up(step, self._query, prediction, self._relay, before_1L, mask_id, self.runners_up)
        self.tokens_1L = step.tokens_BL
        self._ask()
        return step


def draw_together(works: Sequence[Work], predictions: Sequence[list[Tensor] | None]) -> dict[int, Drawn]:
    """Draw the tokens of rows with equal `law`, returned by index of the work.

    Each draw depends only on its own line, so drawing together gives the same results at little more than the cost of
    one.
    """
    alike: dict[Any, list[int]] = {}
    for i, (work, prediction) in enumerate(zip(works, predictions, strict=True)):
        if prediction is not None and isinstance(work, Writing) and (law := work.law) is not None:
            alike.setdefault(law, []).append(i)
    drawn: dict[int, Drawn] = {}
    for (drawing, never), several in alike.items():
        lines = [predictions[i][0] for i in several]  # type: ignore[index]
        key_N, position_N = (torch.cat(parts) for parts in zip(*(works[i].lines for i in several), strict=True))  # type: ignore[attr-defined]
        try:
            token_N, log_prob_N = drawing.draw_tokens(torch.cat(lines), key_N, position_N, never)
        except Exception:  # caused by one row: running each by itself shows which
            continue
        counts = [len(part) for part in lines]
        both = zip(torch.split(token_N, counts), torch.split(log_prob_N, counts), strict=True)
        drawn |= dict(zip(several, both, strict=True))
    return drawn


def draws_at_once(length: int, device: torch.device) -> int:
    """How many independent queries of a row are asked in one step.

    >>> draws_at_once(128, torch.device("cpu")), draws_at_once(128, torch.device("cuda"))
    (2, 8)
    """
    return max(1, min(AT_ONCE, AT_ONCE_TOKENS // bucket(length))) if device.type == "cpu" else AT_ONCE


class Scoring(Work):
    """A row that is scored by the queries of its objective, in order, several at a time.

    nats_S: the row's independent estimates. nats_L: each token's contribution to the score, averaged over them.
    """

    def __init__(self, parts: Iterator[ScoreQuery], *, scored_1L: Tensor, num_groups: int, at_once: int) -> None:
        self.scored_1L = scored_1L
        self.nats_S = [0.0] * num_groups
        self.nats_L = torch.zeros(scored_1L.shape[1], dtype=torch.float64)
        self._parts, self._at_once = parts, at_once
        self._ask()

    def _ask(self) -> None:
        self._asked = list(itertools.islice(self._parts, self._at_once))
        self.questions = [part.query for part in self._asked]
        self.done = not self._asked

    def take(self, predictions: list[Tensor]) -> None:
        for part, prediction in zip(self._asked, predictions, strict=True):
            nats_N = part.nats(prediction) * part.share
            self.nats_S[part.group] += float(nats_N.sum())
            self.nats_L.index_add_(0, part.position_N, nats_N / len(self.nats_S))
        self._ask()


class Calling(Work):
    """Any other use of the network, in one step; tokens: how many it will read."""

    def __init__(self, function: Callable[[], Any], tokens: int) -> None:
        self.questions = []
        self.extra = tokens
        self.function = function
        self.result: Any = None

    def take(self, predictions: list[Tensor]) -> None:
        raise NotImplementedError

    def alone(self) -> None:
        self.result, self.done = self.function(), True


def row_of(canvas: Canvas, i: int) -> Canvas:
    """Row i as a canvas of its own, without padding.

    >>> row_of(Canvas.of_rows([[1, 9], [9]], mask_id=9, pad_id=0), 1).tokens
    tensor([[9]])
    """
    end = int(canvas.length_B[i])
    parts: dict[str, Any] = {}
    for field in fields(canvas):
        value = getattr(canvas, field.name)
        if isinstance(value, Tensor):
            parts[field.name] = value[i : i + 1, :end] if value.ndim == 2 else value[i : i + 1]
    return replace(canvas, **{**parts, "valid_BL": None})
