"""What the server counts, in the text format that Prometheus reads."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator

LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
WINDOW = 10.0  # seconds over which a rate is taken


class Counter:
    """A number that only grows, one for each set of labels.

    >>> requests = Counter("requests_total", "requests", ("route",))
    >>> requests.add(1, "/fill")
    >>> list(requests.lines())[-1]
    'requests_total{route="/fill"} 1'
    """

    kind = "counter"

    def __init__(self, name: str, about: str, labels: tuple[str, ...] = ()) -> None:
        self.name, self.about, self.labels = name, about, labels
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0}
        self._lock = threading.Lock()

    def add(self, amount: float, *labels: str) -> None:
        with self._lock:
            self.values[labels] = self.values.get(labels, 0) + amount

    def lines(self) -> Iterator[str]:
        with self._lock:
            found = sorted(self.values.items())
        for labels, value in found:
            yield f"{self.name}{_braces(self.labels, labels)} {_number(value)}"


class Histogram:
    """How often a value fell below each limit, with the sum and the count.

    >>> seconds = Histogram("seconds", "latency", (1.0, 2.0))
    >>> seconds.see(1.5)
    >>> list(seconds.lines())[:2]
    ['seconds_bucket{le="1"} 0', 'seconds_bucket{le="2"} 1']
    """

    kind = "histogram"

    def __init__(self, name: str, about: str, limits: tuple[float, ...], labels: tuple[str, ...] = ()) -> None:
        self.name, self.about, self.limits, self.labels = name, about, limits, labels
        self._lock = threading.Lock()
        self.values: dict[tuple[str, ...], list[float]] = {}  # a count for each limit and above, then the sum
        if not labels:
            self.values[()] = [0.0] * (len(limits) + 2)

    def see(self, value: float, *labels: str) -> None:
        with self._lock:
            row = self.values.setdefault(labels, [0.0] * (len(self.limits) + 2))
            row[bisect_left(self.limits, value)] += 1
            row[-1] += value

    def lines(self) -> Iterator[str]:
        with self._lock:
            found = sorted((labels, list(row)) for labels, row in self.values.items())
        for labels, row in found:
            total = 0.0
            for limit, count in zip((*map(_number, self.limits), "+Inf"), row[:-1], strict=True):
                total += count
                yield f"{self.name}_bucket{_braces((*self.labels, 'le'), (*labels, limit))} {_number(total)}"
            yield f"{self.name}_sum{_braces(self.labels, labels)} {row[-1]:.9g}"
            yield f"{self.name}_count{_braces(self.labels, labels)} {_number(total)}"


class Gauge:
    """A number that is read when somebody asks."""

    kind = "gauge"

    def __init__(self, name: str, about: str, read: Callable[[], float]) -> None:
        self.name, self.about, self.read = name, about, read

    def lines(self) -> Iterator[str]:
        yield f"{self.name} {self.read():.6g}"


class Rates:
    """Steps and tokens a second over the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def see(self, tokens: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._seen.append((now, tokens))
            self._forget(now)

    def _forget(self, now: float) -> None:
        while self._seen and self._seen[0][0] < now - WINDOW:
            self._seen.popleft()

    def read(self) -> tuple[float, float]:
        """Steps a second, tokens a second."""
        with self._lock:
            self._forget(time.monotonic())
            return len(self._seen) / WINDOW, sum(tokens for _, tokens in self._seen) / WINDOW


class Metrics:
    """Everything that is counted. The app adds gauges of its own."""

    def __init__(self) -> None:
        self.rates = Rates()
        self.requests = Counter("unmask_requests_total", "Answers, by route and status.", ("route", "status"))
        self.latency = Histogram(
            "unmask_request_seconds", "From a request's arrival to its answer's end.", LATENCIES, ("route",)
        )
        self.steps = Counter("unmask_steps_total", "Steps of the engine.")
        self.calls = Counter("unmask_network_calls_total", "Network calls; one for each bucket of lengths in a step.")
        self.rows = Counter("unmask_row_steps_total", "Rows that went a step.")
        self.tokens = Counter("unmask_tokens_total", "Tokens written.")
        self.cancelled = Counter(
            "unmask_cancelled_total", "Requests that left the batch because their client had gone."
        )
        self.late = Counter(
            "unmask_late_steps_total", "Steps of cancelled requests that ended after the client's going."
        )
        self.late_most = 0
        self.occupancy = Histogram("unmask_batch_occupancy", "Rows of a step as a share of the largest batch.", SHARES)
        self.step_seconds = Histogram("unmask_step_seconds", "One step of the engine.", STEP_SECONDS)
        self.gauges = [
            Gauge("unmask_steps_per_second", f"Over the last {WINDOW:.0f} seconds.", lambda: self.rates.read()[0]),
            Gauge("unmask_tokens_per_second", f"Over the last {WINDOW:.0f} seconds.", lambda: self.rates.read()[1]),
            Gauge("unmask_late_steps_most", "The most such steps of one request.", lambda: self.late_most),
        ]

    def stepped(self, *, rows: int, room: int, tokens: int, seconds: float) -> None:
        """The engine has made a step."""
        self.steps.add(1)
        self.rows.add(rows)
        self.tokens.add(tokens)
        self.occupancy.see(rows / room)
        self.step_seconds.see(seconds)
        self.rates.see(tokens)

    def stopped(self, late_steps: int) -> None:
        """A cancelled request has left the batch; so many steps of it ended behind the moment of cancelling."""
        self.cancelled.add(1)
        self.late.add(late_steps)
        self.late_most = max(self.late_most, late_steps)

    def text(self) -> str:
        """All of it, as Prometheus reads it.

        >>> Metrics().text().splitlines()[0]
        '# HELP unmask_requests_total Answers, by route and status.'
        """
        lines = []
        for value in (*(v for v in vars(self).values() if isinstance(v, Counter | Histogram)), *self.gauges):
            lines += [f"# HELP {value.name} {value.about}", f"# TYPE {value.name} {value.kind}", *value.lines()]
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.9g}"


def _braces(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return "{" + ",".join(f'{n}="{v}"' for n, v in zip(names, values, strict=True)) + "}" if names else ""
