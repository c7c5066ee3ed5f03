"""A client's connection: dropped if the client does not read its answer, or if its request never arrives."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from unmask.server.limits import Limits


class Connection(H11Protocol):
    """uvicorn's connection with timeouts.

    At most one message is buffered per client between server and system; the next one waits until it is sent
    (`set_write_buffer_limits`).

    >>> uvicorn.Config(app, http=connections(Limits(write_seconds=10)))  # doctest: +SKIP
    """

    limits: Limits
    _left = 0  # unsent bytes at the last check
    _reading: asyncio.TimerHandle | None = None  # timer while something is unsent
    _head: asyncio.TimerHandle | None = None  # timer while a request's head is incomplete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._reading)
        self._stop(self._head)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop(self._head)
            self._head = None
        elif self._head is None:
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        self._stop(self._reading)
        super().resume_writing()

    def _look(self) -> None:
        """Check repeatedly while something is unsent: a slow reader is tolerated, one that reads nothing is dropped."""
        self._left = self._unsent()
        self._reading = self.loop.call_later(self.limits.write_seconds, self._look_again)

    def _look_again(self) -> None:
        if self._unsent() < self._left:
            self._look()
        else:
            self.transport.abort()  # this cancels its work like any other disconnection

    def _unsent(self) -> int:
        """Bytes that have not reached the client, including those in the system's buffer.

        Those count because the system accepts new data only when much of its buffer is free, which a slow reader may
        not achieve in time.
        """
        unsent = self.transport.get_write_buffer_size()
        with suppress(ImportError, OSError):  # where the system does not tell
            import fcntl
            import termios

            kept = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            unsent += int.from_bytes(kept, sys.byteorder)
        return unsent

    def _await_head(self) -> None:
        self._head = self.loop.call_later(self.limits.body_seconds, self.transport.abort)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def connections(limits: Limits) -> type[Connection]:
    """The connection class with these limits, in the form that uvicorn instantiates."""
    return type("Connection", (Connection,), {"limits": limits})
