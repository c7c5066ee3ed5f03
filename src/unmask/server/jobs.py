"""Between the event loop and the engine: who is let in, a thread for each request, its end when nobody waits."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar, cast

from starlette.requests import Request

from unmask.errors import UnmaskError
from unmask.model import Model
from unmask.server.compiling import Busy, Compiler
from unmask.server.engine import Call, Cancelled, Closed, Engine
from unmask.server.errors import Refused, from_error, internal
from unmask.server.limits import Limits
from unmask.server.metrics import Gauge, Metrics
from unmask.server.served_model import Served
from unmask.server.turns import Turns

T = TypeVar("T")
Job = Callable[[Served], T]
Emit = Callable[[str], None]


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

    def check_room(self) -> None:
        """Refuse where all places are taken."""
        if self.active >= self.limits.requests:
            raise Refused(429, "the server is busy: try again later", "busy", {"retry-after": str(self._patience())})

    def _patience(self) -> int:
        """Seconds in which a place may become free: half of what a request took of late, at least one."""
        rows = [row for labels, row in self.metrics.latency.values.items() if labels != ("/health",)]
        count, total = sum(sum(row[:-1]) for row in rows), sum(row[-1] for row in rows)
        return max(1, min(60, round(total / count / 2))) if count else 1

    async def work(self, request: Request, job: Job[T]) -> T:
        """The job's result; it is cancelled when the client goes."""
        call, work = self._begin(request, job)
        watch = asyncio.ensure_future(gone(request))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            await _end(call, work)
        return cast(T, _result(work))

    async def stream(self, request: Request, job: Callable[[Served, Emit], str]) -> AsyncGenerator[str]:
        """What the job emits, as it comes; the job's own result comes last. Closing it cancels the job.

        The job does not wait for its reader. What is not read yet is kept, `limits.unread` bytes at most: a reader
        further behind gets these and then an error.
        """
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[str | None] = asyncio.Queue()
        unread = 0
        too_slow = False

        def keep(line: str) -> None:
            nonlocal unread, too_slow
            too_slow = too_slow or unread + len(line) > self.limits.unread
            if too_slow:
                call.cancel()
            else:
                unread += len(line)
                lines.put_nowait(line)

        def emit(line: str) -> None:
            loop.call_soon_threadsafe(keep, line)

        call, work = self._begin(request, lambda served: job(served, emit))
        work.add_done_callback(lambda _: lines.put_nowait(None))
        try:
            while (line := await lines.get()) is not None:
                unread -= len(line)
                yield line
            if too_slow:
                raise Refused(408, "the answer was read too slowly: read it while it is written", "slow_reader")
            yield _result(work)
        finally:
            await _end(call, work)

    def _begin(self, request: Request, job: Job[Any]) -> tuple[Call, asyncio.Future[Any]]:
        """Take a place, or 429. It is free again when the job is done, however long its answer is being read."""
        self.check_room()
        call = Call()
        served = Served(self.engine, self.compiler, self.limits, call, self._turns)
        body = request.scope.get("unmask.body", b"")
        work = asyncio.get_running_loop().run_in_executor(self._pool, _outcome, served, job, body)
        self.active += 1
        work.add_done_callback(self._free)
        return call, work

    def _free(self, work: asyncio.Future[Any]) -> None:
        self.active -= 1
        if not work.cancelled():
            work.exception()  # of a job whose client has gone nobody asks how it ended; asyncio would complain


async def _end(call: Call, work: asyncio.Future[Any]) -> None:
    """Nobody waits any more: what is not done is cancelled."""
    if not work.done():
        call.cancel()
        with suppress(Exception):
            await asyncio.shield(work)


def _outcome(served: Served, job: Job[Any], body: bytes) -> Any:
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


async def gone(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
