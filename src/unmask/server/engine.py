"""Continuous batching for diffusion: one thread, one network, and rows that join and leave at any step.

At each step the engine selects rows of the requests by fair shares of its work (see fair_queue.py), calls the network
once for each bucket of lengths, and gives every row its own answer. Rows are independent, so a text does not depend on
what else is being generated; an error in a row's step ends only its request.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from unmask.devices import make_current
from unmask.errors import UnmaskError
from unmask.model import Model
from unmask.samplers import Step
from unmask.sampling.predictor import Query
from unmask.server.batching import answer, groups
from unmask.server.fair_queue import Shares
from unmask.server.metrics import Metrics
from unmask.server.next_tokens import NextQuery, answer_next, next_groups
from unmask.server.rows import Work, Writing, draw_together

T = TypeVar("T")
LOOK = 0.1  # seconds between checks whether the client still waits
NICENESS = 5  # niceness of the second thread, beside the engine's
Progress = list[tuple[int, Step | None]]  # (index of a row that took a step, what was written)


class Cancelled(UnmaskError):
    """The client has disconnected; its work stops before the next step."""


class Closed(UnmaskError):
    """The engine has stopped."""


class Call:
    """One request in the engine: its cost so far, and a way to cancel it. It may run several works."""

    def __init__(self) -> None:
        self.cancelled = False
        self.steps = 0  # engine steps that it took part in
        self.steps_reported = 0  # of these, the steps up to the last reported one
        self.steps_at_end: int | None = None  # of these, the steps before it was cancelled
        self.tokens = 0
        self.spent = 0.0  # share of the engine's work, relative to an origin common to all requests
        self._ticket: _Ticket | None = None
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """May be called from any thread. Waiting callers get Cancelled at once."""
        with self._lock:
            if self.cancelled:
                return
            self.cancelled, self.steps_at_end = True, self.steps
            if self._ticket is not None:
                self._ticket.events.put(Cancelled("the request was cancelled"))

    def check(self) -> None:
        """Raise Cancelled if the request is cancelled."""
        if self.cancelled:
            raise Cancelled("the request was cancelled")

    def attach(self, ticket: _Ticket) -> None:
        with self._lock:
            self.check()
            self._ticket = ticket

    def detach(self) -> None:
        """Drop the rows, so that they are freed with their last user rather than by Python's cycle collector."""
        with self._lock:
            self._ticket = None


@dataclass
class _Ticket:
    """A request's rows, the queue of those that wait for their next step, and the events for its owner."""

    call: Call
    works: Sequence[Work]
    waiting: deque[int]
    left: int  # number of unfinished rows
    quiet: bool  # its owner only waits for the end
    over: bool = False  # failed, or its owner has left
    events: queue.SimpleQueue[tuple[Progress, int] | BaseException | None] = field(default_factory=queue.SimpleQueue)

    @property
    def spent(self) -> float:
        return self.call.spent

    @spent.setter
    def spent(self, work: float) -> None:
        self.call.spent = work

    @property
    def next_work(self) -> Work | None:
        return self.works[self.waiting[0]] if self.waiting else None

    def take_next(self) -> int:
        return self.waiting.popleft()

    def drop_stopped(self) -> None:
        """Remove rows that their owner has stopped; if none is left, the owner is notified of the end."""
        kept = deque(i for i in self.waiting if not self.works[i].stopped)
        if len(kept) < len(self.waiting):
            self.left -= len(self.waiting) - len(kept)
            self.waiting = kept
            if self.left == 0 and not self.over:
                self.events.put(None)


def _num_tokens(progress: Progress) -> int:
    return sum(len(step.token_N) for _, step in progress if step is not None)


def _lower_priority() -> None:
    """Lower this thread's priority; only possible on Linux, no effect elsewhere."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Engine:
    """The only thread that calls the network.

    >>> engine = Engine(model, max_batch=32)  # doctest: +SKIP
    >>> for progress in engine.run(works, Call()):  # doctest: +SKIP
    ...     ...
    """

    def __init__(self, model: Model, *, max_batch: int = 64, metrics: Metrics | None = None) -> None:
        self.model, self.max_batch = model, max_batch
        self.metrics = metrics or Metrics()
        self.predictor = model.objective.predictor(model.denoiser)
        self._ring: deque[_Ticket] = deque()
        self._work = 0  # work of the current step
        self._shares = Shares(model.denoiser.num_ids)
        self._wake = threading.Condition()
        self._closed = False
        # Runs lengthy work after a row's answers or before its first query, one at a time, so that it
        # needs memory once, and no more CPU time than the engine.
        self.beside = ThreadPoolExecutor(1, thread_name_prefix="unmask-beside", initializer=_lower_priority)
        self._beside_is_free = True
        self._thread = threading.Thread(target=self._loop, name="unmask-engine", daemon=True)
        self._thread.start()

    def run(self, works: Sequence[Work], call: Call, *, quiet: bool = False) -> Iterator[Progress]:
        """Run the works; yields after each engine step what it did for them, or nothing if `quiet`. Blocks."""
        unfinished = [i for i, work in enumerate(works) if not work.done]
        if not unfinished:
            return
        ticket = _Ticket(call, works, deque(unfinished), len(unfinished), quiet)
        call.attach(ticket)
        event: tuple[Progress, int] | BaseException | None = None
        try:
            with self._wake:
                if self._closed:
                    raise Closed("the server is stopping")
                self._shares.joins(ticket)
                self._ring.append(ticket)
                self._wake.notify()
            while (event := ticket.events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                progress, call.steps_reported = event
                yield progress
            call.check()
        finally:
            ticket.over = True
            call.detach()
            event = None  # an error that this frame refers to would refer to this frame, and its rows

    def do_beside(self, job: Callable[[], T], call: Call) -> T:
        """Run a lengthy job that does not call the network in the second thread. Blocks."""
        with self._wake:
            if self._closed:
                raise Closed("the server is stopping")
            future = self.beside.submit(job)
        while True:
            wait([future], timeout=LOOK)
            if future.done() and not future.cancelled():
                return future.result()
            try:
                call.check()
                if future.cancelled():
                    raise Closed("the server is stopping")
            except UnmaskError:
                future.cancel()
                raise

    def close(self) -> None:
        """Stop the engine; waiting callers get Closed."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout=30)
        self.beside.shutdown(wait=True, cancel_futures=True)

    @property
    def waiting(self) -> int:
        """The number of rows in the engine."""
        with self._wake:
            return sum(ticket.left for ticket in self._ring)

    # --- the thread ---

    def _loop(self) -> None:
        make_current(self.model.device)
        while True:
            with self._wake:
                while not (batch := self._pick()) and not self._closed:
                    self._wake.wait()
                if self._closed:
                    for ticket in self._ring:
                        ticket.events.put(Closed("the server is stopping"))
                    self._ring.clear()
                    return
            try:
                self._step(batch)
            except Exception as e:  # no request may stop the engine
                for ticket in {id(t): t for t, _ in batch}.values():
                    self._fail(ticket, e)
            batch = []  # a waiting thread must not keep references to rows and their caches

    def _pick(self) -> list[tuple[_Ticket, int]]:
        self._sweep()
        batch, self._work = self._shares.pick(self._ring, self.max_batch, beside=self._beside_is_free)
        return batch

    def _sweep(self) -> None:
        """Remove finished, failed and cancelled requests."""
        for _ in range(len(self._ring)):
            ticket = self._ring.popleft()
            ticket.drop_stopped()
            call = ticket.call
            if call.cancelled:
                self.metrics.stopped(call.steps - (call.steps_at_end or 0))
            elif ticket.left and not ticket.over:
                self._ring.append(ticket)

    def _step(self, batch: list[tuple[_Ticket, int]]) -> None:
        began = time.perf_counter()
        progress: dict[int, tuple[_Ticket, Progress]] = {}
        answers = self._answers(batch)
        drawn = draw_together(
            [ticket.works[i] for ticket, i in batch],
            [None if isinstance(predictions, Exception) else predictions for predictions in answers],
        )
        for k, ((ticket, i), predictions) in enumerate(zip(batch, answers, strict=True)):
            if ticket.over:
                continue  # another row of the request has failed in this step
            try:
                if isinstance(predictions, Exception):
                    raise predictions
                work = ticket.works[i]
                if predictions is None:
                    step = work.alone()
                elif work.beside:
                    self._beside_is_free = False
                    self.beside.submit(self._take_beside, ticket, i, predictions)
                    continue
                elif k in drawn:
                    assert isinstance(work, Writing)
                    step = work.take(predictions, drawn[k])
                else:
                    step = work.take(predictions)
            except Exception as e:
                self._fail(ticket, e)
                continue
            progress.setdefault(id(ticket), (ticket, []))[1].append((i, step))
        seconds = time.perf_counter() - began
        self._shares.took(self._work, seconds)
        written = sum(_num_tokens(event) for _, event in progress.values())
        # Counted first, so that metrics include the steps of every answer already received.
        self.metrics.stepped(rows=len(batch), room=self.max_batch, tokens=written, seconds=seconds)
        with self._wake:
            for ticket, event in progress.values():
                self._report(ticket, event)

    def _take_beside(self, ticket: _Ticket, i: int, predictions: list[Tensor]) -> None:
        """In the second thread: lengthy work after an answer. Then the row waits for its next step."""
        error: Exception | None = None
        step: Step | None = None
        try:
            if not ticket.over:
                step = ticket.works[i].take(predictions)
        except Exception as e:
            error = e
        with self._wake:
            self._beside_is_free = True
            if error is not None:
                self._fail(ticket, error)
            elif not ticket.over:
                self.metrics.tokens.inc(_num_tokens([(i, step)]))
                self._report(ticket, [(i, step)])
            self._wake.notify()

    def _report(self, ticket: _Ticket, progress: Progress) -> None:
        """Notify the owner of rows that took a step; they then wait for the next one."""
        ticket.call.tokens += _num_tokens(progress)
        ticket.call.steps += 1
        for i, _ in progress:
            if ticket.works[i].done:
                ticket.left -= 1
            else:
                ticket.waiting.append(i)
        if not ticket.over and not ticket.quiet:
            ticket.events.put((progress, ticket.call.steps))
        if ticket.left == 0:
            ticket.events.put(None)

    def _fail(self, ticket: _Ticket, error: Exception) -> None:
        ticket.over = True
        ticket.events.put(error)

    def _answers(self, batch: list[tuple[_Ticket, int]]) -> list[list[Tensor] | Exception | None]:
        """Each row's predictions; None if it needs the network alone, or the error."""
        queries = [(k, query) for k, (ticket, i) in enumerate(batch) for query in ticket.works[i].questions]
        answers: list[list[Tensor] | Exception | None] = [
            [] if ticket.works[i].questions else None for ticket, i in batch
        ]
        results: list[Tensor | Exception] = [Closed("no answer")] * len(queries)
        for part in self._parts([query for _, query in queries]):
            for j, result in zip(part, self._ask([queries[j][1] for j in part]), strict=True):
                results[j] = result
        for (k, _), result in zip(queries, results, strict=True):
            row = answers[k]
            if isinstance(result, Exception):
                answers[k] = result
            elif isinstance(row, list):
                row.append(result)
        return answers

    def _parts(self, queries: list[Query]) -> Iterator[list[int]]:
        """Which queries share a call."""
        denoiser = self.model.denoiser
        steps = [j for j, query in enumerate(queries) if isinstance(query, NextQuery)]
        for part in next_groups([queries[j] for j in steps], denoiser):
            yield [steps[k] for k in part]
        others = [j for j, query in enumerate(queries) if not isinstance(query, NextQuery)]
        lengths = [queries[j].tokens_BL.shape[1] for j in others]
        wanted = [queries[j].at_RK.shape[1] for j in others]
        for part in groups(lengths, wanted, denoiser.num_ids, padded=denoiser.takes_padding):
            yield [others[k] for k in part]

    def _ask(self, queries: list[Query]) -> Sequence[Tensor | Exception]:
        self.metrics.calls.inc()
        denoiser, device = self.model.denoiser, self.model.device
        try:
            with torch.no_grad():
                if isinstance(queries[0], NextQuery):
                    return answer_next(denoiser, queries, device)
                return answer(self.predictor, queries, device, padded=denoiser.takes_padding)
        except Exception as e:
            if len(queries) == 1:
                return [e]
            # One of them failed: running each by itself shows which.
            return [self._ask([query])[0] for query in queries]
