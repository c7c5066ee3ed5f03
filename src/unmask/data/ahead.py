"""An iterator whose next items are prepared by a thread while the current one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from unmask.errors import UsageError

T = TypeVar("T")


class Ahead(Iterator[T], Generic[T]):
    """The items of `source` in order, with `depth` of them prepared in advance by one thread.

    An exception of the source is raised in place of the item it concerns. The thread ends, and the source is closed,
    when the iterator is closed, leaves its `with`, or is exhausted.

    >>> with Ahead(iter("abc"), depth=2, name="letters") as letters:
    ...     list(letters)
    ['a', 'b', 'c']
    """

    def __init__(self, source: Iterator[T], *, depth: int, name: str) -> None:
        if depth < 1:
            raise UsageError(f"reading ahead needs a depth of at least 1, got {depth}")
        self._source = source
        self._pending: deque[Future[tuple[T] | None]] = deque()
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix=f"unmask-{name}")
        for _ in range(depth):
            self._ask()

    def __next__(self) -> T:
        if not self._pending:
            raise StopIteration
        try:
            made = self._pending.popleft().result()
        except BaseException:
            self.close()
            raise
        if made is None:
            self.close()
            raise StopIteration
        self._ask()
        return made[0]

    def close(self) -> None:
        """Wait for the thread and close the source; may be called repeatedly."""
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
            if (close := getattr(self._source, "close", None)) is not None:
                close()

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self) -> None:
        if self._pool is not None:
            self._pending.append(self._pool.submit(self._make))

    def _make(self) -> tuple[T] | None:
        for item in self._source:
            return (item,)
        return None
