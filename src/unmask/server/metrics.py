"""The server's metrics, for Prometheus."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
WINDOW = 10.0  # seconds over which rates are averaged
MEDIA_TYPE = "text/plain; version=0.0.4"


class Rates:
    """Steps and tokens per second over the last few seconds."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()  # end time of each step, and the tokens it wrote
        self._lock = threading.Lock()

    def observe(self, tokens: int) -> None:
        """Record the end of a step."""
        now = time.monotonic()
        with self._lock:
            self._steps.append((now, tokens))
            self._drop_old(now)

    def _drop_old(self, now: float) -> None:
        while self._steps and self._steps[0][0] < now - WINDOW:
            self._steps.popleft()

    def read(self) -> tuple[float, float]:
        """Steps per second, tokens per second."""
        with self._lock:
            self._drop_old(time.monotonic())
            return len(self._steps) / WINDOW, sum(tokens for _, tokens in self._steps) / WINDOW


class Metrics:
    """All metrics of one app, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rates = Rates()
        self.requests = self._counter("unmask_requests_total", "Answers, by route and status.", "route", "status")
        self.latency = self._histogram(
            "unmask_request_seconds", "From a request's arrival to its answer's end.", LATENCIES, "route"
        )
        self.steps = self._counter("unmask_steps_total", "Steps of the engine.")
        self.calls = self._counter(
            "unmask_network_calls_total", "Network calls; one for each bucket of lengths in a step."
        )
        self.rows = self._counter("unmask_row_steps_total", "Rows that went a step.")
        self.tokens = self._counter("unmask_tokens_total", "Tokens written.")
        self.cancelled = self._counter(
            "unmask_cancelled_total", "Requests that left the batch because their client had gone."
        )
        self.late = self._counter(
            "unmask_late_steps_total", "Steps of cancelled requests that ended after the client's going."
        )
        self.late_most = 0
        self.occupancy = self._histogram(
            "unmask_batch_occupancy", "Rows of a step as a share of the largest batch.", SHARES
        )
        self.step_seconds = self._histogram("unmask_step_seconds", "One step of the engine.", STEP_SECONDS)
        over = f"Over the last {WINDOW:.0f} seconds."
        self.add_gauge("unmask_steps_per_second", over, lambda: self.rates.read()[0])
        self.add_gauge("unmask_tokens_per_second", over, lambda: self.rates.read()[1])
        self.add_gauge("unmask_late_steps_most", "The most such steps of one request.", lambda: self.late_most)
        self._lock = threading.Lock()
        self._answers, self._seconds = 0, 0.0  # excluding /health

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, limits: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, about, labels, registry=self.registry, buckets=limits)

    def add_gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read when the metrics are."""
        Gauge(name, about, registry=self.registry).set_function(read)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Record that a request has been answered completely."""
        self.requests.labels(route, str(status)).inc()
        self.latency.labels(route).observe(seconds)
        if route != "/health":
            with self._lock:
                self._answers, self._seconds = self._answers + 1, self._seconds + seconds

    @property
    def mean_seconds(self) -> float:
        """The mean duration of requests; 0 before the first."""
        with self._lock:
            return self._seconds / max(1, self._answers)

    def stepped(self, *, rows: int, room: int, tokens: int, seconds: float) -> None:
        """Record a step of the engine."""
        self.steps.inc()
        self.rows.inc(rows)
        self.tokens.inc(tokens)
        self.occupancy.observe(rows / room)
        self.step_seconds.observe(seconds)
        self.rates.observe(tokens)

    def stopped(self, late_steps: int) -> None:
        """Record that a cancelled request has left the batch, `late_steps` steps after it was cancelled."""
        self.cancelled.inc()
        self.late.inc(late_steps)
        self.late_most = max(self.late_most, late_steps)

    def value(self, name: str, **labels: str) -> float:
        """The current value of a metric; 0 if nothing was counted with these labels.

        >>> Metrics().value("unmask_steps_total")
        0.0
        """
        return self.registry.get_sample_value(name, labels) or 0.0

    def text(self) -> str:
        """All metrics in Prometheus's text format.

        >>> Metrics().text().splitlines()[0]
        '# HELP unmask_requests_total Answers, by route and status.'
        """
        return generate_latest(self.registry).decode()
