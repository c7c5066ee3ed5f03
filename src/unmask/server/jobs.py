"""Requests as jobs between event loop and engine: one thread each, cancelled when the client disconnects."""

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
from unmask.server.errors import HTTPError, from_error, internal
from unmask.server.limits import Limits
from unmask.server.metrics import Metrics
from unmask.server.served_model import Served
from unmask.server.turns import Turns

T = TypeVar("T")
Job = Callable[[Served], T]
Emit = Callable[[str], None]


class Jobs:
    """State shared by the routes: the engine, and one thread for each admitted request."""

    def __init__(self, model: Model, name: str, limits: Limits, *, max_batch: int = 64) -> None:
        self.model, self.name, self.limits = model, name, limits
        self.metrics = Metrics()
        self.engine = Engine(model, max_batch=max_batch, metrics=self.metrics)
        self.compiler = Compiler(model.tokenizer)
        self.active = 0
        self._turns = Turns()
        self._pool = ThreadPoolExecutor(limits.requests, thread_name_prefix="unmask-request")
        add_gauge = self.metrics.add_gauge
        add_gauge("unmask_requests_active", "Requests at work.", lambda: self.active)
        add_gauge("unmask_queue_rows", "Rows in the engine.", lambda: self.engine.waiting)
        add_gauge("unmask_tasks", "Tasks of the event loop; it is read in one.", lambda: len(asyncio.all_tasks()))

    def close(self) -> None:
        """Stop; running jobs end with an error."""
        self.engine.close()
        self.compiler.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def check_room(self) -> None:
        """Raise 429 if the maximum number of jobs is running."""
        if self.active >= self.limits.requests:
            raise HTTPError(
                429, "the server is busy: try again later", "busy", {"retry-after": str(self._retry_seconds())}
            )

    def _retry_seconds(self) -> int:
        """An estimate of when a job will end: half the mean duration of requests, at least one second."""
        return max(1, min(60, round(self.metrics.mean_seconds / 2)))

    async def run(self, request: Request, job: Job[T]) -> T:
        """The job's result; it is cancelled when the client disconnects."""
        call, work = self._begin(request, job)
        watch = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            await _end(call, work)
        return cast(T, _result(work))

    async def stream(self, request: Request, job: Callable[[Served, Emit], str]) -> AsyncGenerator[str]:
        """Yield what the job emits, followed by its result. Closing the iterator cancels the job.

        The job does not wait for its reader. Unread events are buffered up to `limits.unread` bytes; a slower reader
        receives these and then an error.
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
                raise HTTPError(408, "the answer was read too slowly: read it while it is written", "slow_reader")
            yield _result(work)
        finally:
            await _end(call, work)

    def _begin(self, request: Request, job: Job[Any]) -> tuple[Call, asyncio.Future[Any]]:
        """Start the job, or raise 429.

        It counts as active until it is done, however long its answer takes to be read.
        """
        self.check_room()
        call = Call()
        served = Served(self.engine, self.compiler, self.limits, call, self._turns)
        work = asyncio.get_running_loop().run_in_executor(self._pool, _outcome, served, job)
        self.active += 1
        work.add_done_callback(self._free)
        return call, work

    def _free(self, work: asyncio.Future[Any]) -> None:
        self.active -= 1
        if not work.cancelled():
            work.exception()  # nobody else retrieves it where the client has disconnected; asyncio would complain


async def _end(call: Call, work: asyncio.Future[Any]) -> None:
    """Cancel the job unless it is done."""
    if not work.done():
        call.cancel()
        with suppress(Exception):
            await asyncio.shield(work)


def _outcome(served: Served, job: Job[Any]) -> Any:
    """The job's result, or the error to answer with.

    Exceptions end here, in the job's own thread, so that the rows in their frames are freed.
    """
    try:
        return served.in_turn(job)
    except Cancelled:
        error = HTTPError(499, "the client has gone", "cancelled")  # this answer is never read
    except Closed:
        error = HTTPError(503, "the server is stopping", "stopping", {"retry-after": "5"})
    except Busy as e:
        error = HTTPError(429, str(e), "busy", {"retry-after": "5"})
    except UnmaskError as e:
        error = from_error(e)
    except Exception:
        traceback.print_exc()
        error = internal()
    return error


def _result(work: asyncio.Future[Any]) -> Any:
    result = work.result()
    if isinstance(result, HTTPError):
        raise result
    return result


async def disconnected(request: Request) -> None:
    """Returns when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
