"""Between the event loop and the engine: who is let in, a thread for each request, its end when nobody waits."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from starlette.requests import Request

from unmask.errors import UnmaskError
from unmask.model import Model
from unmask.server.compiling import Busy, Compiler
from unmask.server.engine import Call, Cancelled, Closed, Engine
from unmask.server.limits import Limits
from unmask.server.metrics import Gauge, Metrics
from unmask.server.refusals import Refused, from_error, internal
from unmask.server.served import Served
from unmask.server.turns import Turns

Job = Callable[[Served], Any]
Emit = Callable[[Any], None]


class Desk:
    """Everything that the routes share."""

    def __init__(self, model: Model, name: str, limits: Limits, *, max_batch: int = 64) -> None:
        self.model, self.name, self.limits = model, name, limits
        self.metrics = Metrics()
        self.engine = Engine(model, max_batch=max_batch, metrics=self.metrics)
        self.compiler = Compiler(model.tokenizer)
        self.active = 0
        self._turns = Turns()
        self._pool = ThreadPoolExecutor(limits.requests, thread_name_prefix="unmask-request")
        self.metrics.gauges += [
            Gauge("unmask_requests_active", "Requests at work.", lambda: self.active),
            Gauge("unmask_queue_rows", "Rows in the engine.", lambda: self.engine.waiting),
            Gauge("unmask_tasks", "Tasks of the event loop; it is read in one.", lambda: len(asyncio.all_tasks())),
        ]

    def close(self) -> None:
        """The end: whoever is still at work is told."""
        self.engine.close()
        self.compiler.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    @contextmanager
    def _seat(self) -> Iterator[Call]:
        """A place among those at work, or 429."""
        self.check_room()
        self.active += 1
        try:
            yield Call()
        finally:
            self.active -= 1

    def check_room(self) -> None:
        """Refuse where all places are taken."""
        if self.active >= self.limits.requests:
            raise Refused(429, "the server is busy: try again later", "busy", {"retry-after": str(self._patience())})

    def _patience(self) -> int:
        """Seconds in which a place may become free: half of what a request took of late, at least one."""
        rows = [row for labels, row in self.metrics.latency.values.items() if labels != ("/health",)]
        count, total = sum(sum(row[:-1]) for row in rows), sum(row[-1] for row in rows)
        return max(1, min(60, round(total / count / 2))) if count else 1

    async def work(self, request: Request, job: Job) -> Any:
        """The job's result; it is cancelled when the client goes."""
        with self._seat() as call:
            work = self._begin(request, call, job)
            watch = asyncio.ensure_future(gone(request))
            try:
                await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                watch.cancel()
                if not work.done():
                    call.cancel()
                    with suppress(Exception):
                        await asyncio.shield(work)
            return _result(work)

    async def stream(self, request: Request, job: Callable[[Served, Emit], Any]) -> AsyncGenerator[Any]:
        """What the job emits, as it comes; the job's own result comes last. Closing it cancels the job."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Any] = asyncio.Queue()
        end = object()

        def emit(event: Any) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        with self._seat() as call:
            work = self._begin(request, call, lambda served: job(served, emit))
            work.add_done_callback(lambda _: events.put_nowait(end))
            try:
                while (event := await events.get()) is not end:
                    yield event
                yield _result(work)
            finally:
                if not work.done():
                    call.cancel()
                    with suppress(Exception):
                        await asyncio.shield(work)

    def _begin(self, request: Request, call: Call, job: Job) -> asyncio.Future[Any]:
        served = Served(self.engine, self.compiler, self.limits, call, self._turns)
        body = request.scope.get("unmask.body", b"")
        work = asyncio.get_running_loop().run_in_executor(self._pool, _outcome, served, job, body)
        work.add_done_callback(_looked_at)
        return work


def _outcome(served: Served, job: Job, body: bytes) -> Any:
    """The job's result, or how it is refused. In the job's own thread: to look for a large request's words in a message
    takes longer than the event loop may. And what was raised ends here, with the rows that its frames hold."""
    try:
        return served.in_turn(job)
    except Cancelled:
        refused = Refused(499, "the client has gone", "cancelled")  # nobody reads it
    except Closed:
        refused = Refused(503, "the server is stopping", "stopping", {"retry-after": "5"})
    except Busy as e:
        refused = Refused(429, str(e), "busy", {"retry-after": "5"})
    except UnmaskError as e:
        refused = from_error(e, body)
    except Exception:
        traceback.print_exc()
        refused = internal()
    return refused


def _result(work: asyncio.Future[Any]) -> Any:
    found = work.result()
    if isinstance(found, Refused):
        raise found
    return found


def _looked_at(work: asyncio.Future[Any]) -> None:
    """Of a job whose client has gone nobody asks how it ended; asyncio would complain."""
    if not work.cancelled():
        work.exception()


async def gone(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
