"""A model that routes every network call through the engine: the library's own generate, fill, edit and score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from unmask.constraints import Constraint
from unmask.data.batch import Batch
from unmask.evaluation.bound import Bound, join
from unmask.model import Model
from unmask.objectives.base import Kind
from unmask.objectives.draws import draws_of
from unmask.objectives.score_queries import defined_for
from unmask.rng import row_keys
from unmask.samplers import RunnersUp, Sampler, Step
from unmask.sampling.canvas import Canvas
from unmask.sampling.constrained import constrained, takes_likeliest
from unmask.sampling.guidance import Guidance
from unmask.sampling.loop import check_pair
from unmask.server.compiling import Compiler
from unmask.server.engine import Call, Engine, Progress
from unmask.server.limits import Holding, Limits
from unmask.server.rows import LONG, Calling, Scoring, Work, Writing, draws_at_once, row_of
from unmask.server.turns import Turns
from unmask.text.generation import Watch

T = TypeVar("T")


class Served(Model):
    """The engine's model for one request. Its methods block until the engine is done, and raise if it is cancelled.

    >>> Served(engine, compiler, Limits(), Call()).fill("The [MASK:3] sat.")  # doctest: +SKIP
    """

    def __init__(
        self, engine: Engine, compiler: Compiler, limits: Limits, call: Call, turns: Turns | None = None
    ) -> None:
        vars(self).update(vars(engine.model))  # shares all attributes of the model
        self.engine, self.compiler, self.limits, self.call = engine, compiler, limits, call
        # Of many busy threads one works at a time: all at once would starve the event loop and the
        # engine. Whoever waits for the engine gives up its turn.
        self.turns = turns or Turns()
        self.scorings: list[Scoring] = []  # those of the last score, window by window
        self._known: dict[str, tuple[Bound, list[Scoring]]] = {}
        self._has_turn = False
        self._looked = 0  # cost so far of checking whether constraints can hold
        self.rows: list[list[int]] = []  # rows that the last run wrote
        self.on_canvas: Callable[[Canvas], None] | None = None  # called with each canvas before it is written

    def canvas(
        self,
        rows: list[list[int]],
        constraint: Constraint | Any | None = None,
        **how: Any,
    ) -> Canvas:
        """Like the model's, but constraints are compiled in the separate process."""
        self.limits.check_length(max(map(len, rows)))
        canvas = super().canvas(rows, None, **how)
        if constraint is None:
            return canvas
        with self._waiting():
            automaton = self.compiler(constraint, may_end=how["may_end"], check=self.call.check)
        return replace(canvas, constraint=automaton)

    def run(
        self,
        canvas: Canvas,
        sampler: Sampler | None = None,
        *,
        guidance: float | None = None,
        watch: Watch | None = None,
        runners_up: int = 0,
        enough: Callable[[int, list[int]], bool] | None = None,
    ) -> list[list[int]]:
        """Like the model's, row by row through the engine. enough: called with a row and its tokens after each of its
        steps; if it returns True, the row is not continued and its remaining masks stay."""
        num, length = canvas.tokens.shape
        fitted = self.fit_sampler(sampler, length)
        holding = self._holding(canvas, fitted)
        self.limits.check(rows=num, length=length, calls=self.calls(fitted, length, guidance), holding=holding)
        check_pair(self.engine.predictor, fitted, canvas)
        runner = fitted if canvas.constraint is None else constrained(fitted)
        if fitted.planned:
            canvas = canvas.to("cpu")  # it is small, and a GPU is slow at small steps
        how: dict[str, Any] = {"guidance": guidance, "runners_up": runners_up if watch else 0}
        works = [self._begun(row_of(canvas, i), runner, holding, **how) for i in range(num)]
        if self.on_canvas is not None:
            self.on_canvas(canvas)
        tokens_BL = canvas.tokens.clone()
        ended: dict[int, list[int]] = {}
        for progress in self._done(works, quiet=watch is None and enough is None):
            progress = [(i, step) for i, step in progress if i not in ended]  # the engine may be one step ahead
            for i, step in progress:
                assert step is not None
                tokens_BL[i, : step.tokens_BL.shape[1]] = step.tokens_BL[0]
            if watch is not None and progress:
                watch(together(progress, tokens_BL.clone()))
            for i, step in progress:
                assert step is not None
                row = step.tokens_BL[0].tolist()
                if enough is not None and enough(i, row):
                    works[i].stopped, ended[i] = True, row
        self.rows = [ended.get(i) or work.tokens_1L[0].tolist() for i, work in enumerate(works)]
        return self.rows

    def calls(self, sampler: Sampler, length: int, guidance: float | None) -> int:
        """The maximum number of network calls for a row; with guidance there are two per step."""
        return self.fit_sampler(sampler, length).max_calls(length) * (1 if guidance is None else 2)

    def score(self, texts: str | Sequence[str], **how: Any) -> Bound:
        """Like the model's. Texts that this request has already scored, as when ranking, are not scored again."""
        key = repr((texts, sorted(how.items())))
        if key not in self._known:
            self._known[key] = super().score(texts, **how), self.scorings
        bound, self.scorings = self._known[key]
        return bound

    def check_possible(self, canvas: Canvas, sampler: Sampler | None = None) -> None:
        """Like the model's; the cost of all these checks is counted per request."""
        holding = self._holding(canvas, self.fit_sampler(sampler, canvas.tokens.shape[1]), steps=0)
        self._looked += len(canvas.tokens) * holding.text
        self.limits.check_step(holding)
        self.limits.check_looks(self._looked)
        self._maybe_beside(lambda: super(Served, self).check_possible(canvas, sampler), holding)

    def _holding(self, canvas: Canvas, sampler: Sampler, steps: int | None = None) -> Holding:
        """The maximum cost of the canvas's constraint for each row, for as many steps as the sampler may take."""
        if canvas.constraint is None:
            return Holding()
        length = canvas.tokens.shape[1]
        positions = int(canvas.masked_BL.sum(dim=1).max()) if canvas.constraint.over == "gap" else length
        steps = sampler.max_calls(length) if steps is None else steps
        return Holding.of(canvas.constraint, positions, steps, likeliest=takes_likeliest(sampler))

    def _begun(
        self, row: Canvas, sampler: Sampler, holding: Holding, *, guidance: float | None, runners_up: int
    ) -> Writing:
        how: dict[str, Any] = {"guidance": None if guidance is None else Guidance(guidance)}
        how |= {"runners_up": runners_up, "extra": holding.step}
        return self._maybe_beside(lambda: Writing(row, sampler, self.engine.predictor, **how), holding)

    def _maybe_beside(self, job: Callable[[], T], holding: Holding) -> T:
        """Run a lengthy job in the second thread, so that it does not hold this request's turn."""
        if holding.step <= LONG:
            if self._has_turn:
                self.turns.give_way()  # a request may have hundreds of rows
            self.call.check()
            return job()
        with self._waiting():
            return self.engine.do_beside(job, self.call)

    def canvas_bound(self, canvas: Canvas, scored_BL: Tensor, **how: Any) -> Bound:
        num, length = canvas.tokens.shape
        self.limits.check(rows=num, length=length, calls=how["num_samples"])
        rows = [row_of(canvas.to("cpu"), i).tokens for i in range(num)]
        scored = [scored_BL[i : i + 1, : x_1L.shape[1]].cpu() for i, x_1L in enumerate(rows)]
        form = self.objective.with_estimator(how["estimator"] or self.objective.estimator(self.denoiser))
        form.check(self.denoiser)
        num_samples, described = how["num_samples"], defined_for(form, "score_queries", "row_nats", "position_nats")
        works = []
        for i, x_1L in enumerate(rows):
            key_1 = row_keys(how["seed"], torch.tensor([how["first_row"] + i]))
            label_1 = None if canvas.label_B is None else canvas.label_B[i : i + 1].cpu()
            parts = (
                None
                if not described
                else form.score_queries(
                    self.denoiser, Batch(x_1L, None, scored[i], key_1, key_1.double(), label_1), num_samples=num_samples
                )
            )
            if parts is None:  # the objective cannot split the scoring of a row
                return self._bound_alone(canvas, scored, **how)
            groups = sum(1 for _ in draws_of(form, key_1, num_samples))
            at_once = draws_at_once(x_1L.shape[1], self.device)
            works.append(Scoring(parts, scored_1L=scored[i], num_groups=groups, at_once=at_once))
        return self._scored(works, how["first_row"], form.kind)

    def _bound_alone(self, canvas: Canvas, scored: list[Tensor], **how: Any) -> Bound:
        tokens = canvas.tokens.shape[1] * how["num_samples"]
        works = [
            Calling(self._bound_of_row(row_of(canvas, i), scored_1L, i, **how), tokens)
            for i, scored_1L in enumerate(scored)
        ]
        self._finish(works)
        return join([work.result for work in works])

    def _bound_of_row(self, row: Canvas, scored_1L: Tensor, i: int, **how: Any) -> Callable[[], Bound]:
        row_and_scored = (row, scored_1L.to(row.tokens.device))
        return lambda: super(Served, self).canvas_bound(*row_and_scored, **{**how, "first_row": how["first_row"] + i})

    def _scored(self, works: Sequence[Scoring], first_row: int, kind: Kind) -> Bound:
        self._finish(works)
        self.scorings = [*(self.scorings if first_row else ()), *works]
        nats_BS = torch.tensor([work.nats_S for work in works], dtype=torch.float64)
        tokens_B = torch.tensor([int(work.scored_1L.sum()) for work in works])
        return Bound(draws_BS=nats_BS, tokens_B=tokens_B, kind=kind)

    def _finish(self, works: Sequence[Work]) -> None:
        for _ in self._done(works, quiet=True):
            pass

    def _done(self, works: Sequence[Work], *, quiet: bool) -> Iterator[Progress]:
        events = self.engine.run(works, self.call, quiet=quiet)
        while True:
            with self._waiting():
                progress = next(events, None)
            if progress is None:
                return
            yield progress

    def in_turn(self, job: Callable[[Served], Any]) -> Any:
        """Run the job when it is this request's turn."""
        with self.turns:
            self._has_turn = True
            return job(self)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        if not self._has_turn:
            yield
            return
        self.turns.release()
        try:
            yield
        finally:
            self.turns.acquire()


def together(progress: Progress, tokens_BL: Tensor) -> Step:
    """Merge what several rows of one canvas wrote in the same engine step into one step of the canvas."""
    steps = [(i, step) for i, step in progress if step is not None]

    def cat(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.to(tokens_BL.device) for part in parts])

    others = [step.others for _, step in steps]
    remasked = [(torch.full_like(step.remasked[0], i), step.remasked[1]) for i, step in steps if step.remasked]
    return Step(
        row_N=cat([torch.full_like(step.row_N, i) for i, step in steps]),
        position_N=cat([step.position_N for _, step in steps]),
        token_N=cat([step.token_N for _, step in steps]),
        log_prob_N=cat([step.log_prob_N for _, step in steps]),
        tokens_BL=tokens_BL,
        remasked=(cat([r for r, _ in remasked]), cat([p for _, p in remasked])) if remasked else None,
        others=_beside([other for other in others if other is not None]) if all(others) and others else None,
    )


def _beside(others: list[RunnersUp]) -> RunnersUp:
    return RunnersUp(
        torch.cat([o.token_NK for o in others]),
        torch.cat([o.prob_NK for o in others]),
        torch.cat([o.prob_N for o in others]),
    )
