"""Continuous batching for diffusion: one thread, one network, rows that join and leave at any step.

At each step the engine takes rows of the requests by their shares of its work (see fair_queue.py), calls the network
once for each bucket of lengths, and gives every row its own answer. A row knows no other, so its text does not depend
on what else is being written; an error in a row's step ends its request and nothing else.
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
LOOK = 0.1  # seconds between two checks whether somebody still waits
NICENESS = 5  # of the thread beside the engine's
Progress = list[tuple[int, Step | None]]  # which of a request's rows took a step, and what it wrote


class Cancelled(UnmaskError):
    """The client has disconnected; its work stops before the next step."""


class Closed(UnmaskError):
    """The engine has stopped."""


class Call:
    """One request in the engine: what it has cost so far, and the way to end it. It may have work several times."""

    def __init__(self) -> None:
        self.cancelled = False
        self.steps = 0  # engine steps that it took part in
        self.steps_reported = 0  # of them up to the last one that its owner has received
        self.steps_at_end: int | None = None  # of them before it was cancelled
        self.tokens = 0
        self.spent = 0.0  # of the engine's work, from a beginning that all requests share
        self._ticket: _Ticket | None = None
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """From any thread. Whoever waits for the work gets Cancelled at once."""
        with self._lock:
            if self.cancelled:
                return
            self.cancelled, self.steps_at_end = True, self.steps
            if self._ticket is not None:
                self._ticket.events.put(Cancelled("the request was cancelled"))

    def check(self) -> None:
        """Raises when it is cancelled."""
        if self.cancelled:
            raise Cancelled("the request was cancelled")

    def attach(self, ticket: _Ticket) -> None:
        with self._lock:
            self.check()
            self._ticket = ticket

    def detach(self) -> None:
        """Drop the rows, so that they are freed with their last user, not whenever Python collects cycles."""
        with self._lock:
            self._ticket = None


@dataclass
class _Ticket:
    """A request's rows, those that wait for their next step in order, and the events that its owner gets."""

    call: Call
    works: Sequence[Work]
    waiting: deque[int]
    left: int  # rows that are not done
    quiet: bool  # its owner waits for the end alone
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
        """Remove rows that their owner has stopped; where none is left the owner gets the end."""
        kept = deque(i for i in self.waiting if not self.works[i].stopped)
        if len(kept) < len(self.waiting):
            self.left -= len(self.waiting) - len(kept)
            self.waiting = kept
            if self.left == 0 and not self.over:
                self.events.put(None)


def _num_tokens(progress: Progress) -> int:
    return sum(len(step.token_N) for _, step in progress if step is not None)


def _lower_priority() -> None:
    """On Linux a thread may have a niceness of its own; elsewhere nothing happens."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Engine:
    """The one thread that calls the network.

    >>> engine = Engine(model, max_batch=32)  # doctest: +SKIP
    >>> for progress in engine.run(works, Call()):  # doctest: +SKIP
    ...     ...
    """

    def __init__(self, model: Model, *, max_batch: int = 64, metrics: Metrics | None = None) -> None:
        self.model, self.max_batch = model, max_batch
        self.metrics = metrics or Metrics()
        self.predictor = model.objective.predictor(model.denoiser)
        self._ring: deque[_Ticket] = deque()
        self._work = 0  # of the step that is being made
        self._shares = Shares(model.denoiser.num_ids)
        self._wake = threading.Condition()
        self._closed = False
        # What takes a row long with its answers, and what takes long before its first question: one at a time, so that
        # it takes memory once, and no more of the processor than the engine.
        self.beside = ThreadPoolExecutor(1, thread_name_prefix="unmask-beside", initializer=_lower_priority)
        self._beside_is_free = True
        self._thread = threading.Thread(target=self._loop, name="unmask-engine", daemon=True)
        self._thread.start()

    def run(self, works: Sequence[Work], call: Call, *, quiet: bool = False) -> Iterator[Progress]:
        """Do the works; yields after each engine step what it did for them, or nothing if `quiet`. It blocks."""
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
        """Something that takes long and asks no network, in the thread beside the engine's. It blocks."""
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
        """Stop; whoever still waits gets Closed."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout=30)
        self.beside.shutdown(wait=True, cancel_futures=True)

    @property
    def waiting(self) -> int:
        """Rows in the engine."""
        with self._wake:
            return sum(ticket.left for ticket in self._ring)

    # --- the thread ---

    def _loop(self) -> None:
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
            except Exception as e:  # nothing that a request brings may end the engine
                for ticket in {id(t): t for t, _ in batch}.values():
                    self._fail(ticket, e)
            batch = []  # a thread that waits refers to no rows, nor their caches

    def _pick(self) -> list[tuple[_Ticket, int]]:
        self._sweep()
        batch, self._work = self._shares.pick(self._ring, self.max_batch, beside=self._beside_is_free)
        return batch

    def _sweep(self) -> None:
        """Drop what is done, failed or cancelled."""
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
                continue  # another of its rows has failed in this step
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
        # Counted first: whoever has its answer finds its steps in the metrics.
        self.metrics.stepped(rows=len(batch), room=self.max_batch, tokens=written, seconds=seconds)
        with self._wake:
            for ticket, event in progress.values():
                self._report(ticket, event)

    def _take_beside(self, ticket: _Ticket, i: int, predictions: list[Tensor]) -> None:
        """In the other thread: what takes long. The row waits for its next step afterwards."""
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
        """Report to the owner of rows that took a step; they wait for the next one."""
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
        """For each row its predictions; None where it must be alone with the network, or what went wrong."""
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
        """Which of them share a call."""
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
            # One of them is to blame: each by itself shows which.
            return [self._ask([query])[0] for query in queries]
