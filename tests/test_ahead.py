"""Reading ahead: the same items in the same order, errors in their place, and no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from unmask.data.ahead import Ahead
from unmask.errors import UsageError


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("unmask-numbers")]


class Source:
    """Counts what was asked of it, and knows when it was closed."""

    def __init__(self, num: int, breaks: int | None = None) -> None:
        self.made: list[int] = []
        self.closed = False
        self._items = self._count(num, breaks)

    def _count(self, num: int, breaks: int | None) -> Iterator[int]:
        for i in range(num):
            if i == breaks:
                raise ValueError(f"no {i}")
            self.made.append(i)
            yield i

    def __iter__(self) -> Iterator[int]:
        return self._items

    def __next__(self) -> int:
        return next(self._items)

    def close(self) -> None:
        self.closed = True


def ahead(source: Iterator[int], depth: int = 2) -> Ahead[int]:
    return Ahead(source, depth=depth, name="numbers")


@pytest.mark.parametrize("depth", [1, 2, 50])
def test_the_items_are_those_of_the_source(depth: int) -> None:
    source = Source(20)
    assert list(ahead(source, depth)) == list(range(20))
    assert source.closed
    assert not threads()
    assert list(ahead(Source(0), depth)) == []


def test_no_more_is_made_than_the_depth() -> None:
    source = Source(100)
    with ahead(source, 3) as items:
        assert [next(items) for _ in range(5)] == list(range(5))
        for _ in range(100):
            if len(source.made) == 8:  # five that were taken and three ahead
                break
            time.sleep(0.02)
        time.sleep(0.05)
        assert len(source.made) == 8
    assert source.closed
    assert not threads()
    assert next(items, None) is None
    items.close()  # again


def test_an_error_comes_where_its_item_would_have() -> None:
    source = Source(10, breaks=4)
    items = ahead(source)
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="no 4"):
        next(items)
    assert source.closed
    assert not threads()
    assert next(items, None) is None


def test_one_ahead_of_another() -> None:
    inner = Source(30)
    with ahead(inner) as first, ahead(i * i for i in first) as second:
        assert [next(second) for _ in range(10)] == [i * i for i in range(10)]
    assert inner.closed
    assert not threads()


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="a depth of at least 1, got 0"):
        ahead(iter(range(3)), 0)
