"""Reads a run's metrics.jsonl: one line per logged step, validation, note or sample. `MetricsFile` writes it."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unmask.errors import DataError

METRICS = "metrics.jsonl"
_MOST = 1 << 53  # larger steps, tokens or seconds are invalid: no run has written such a line


@dataclass
class Point:
    """A logged step, or a validation. tokens: trained on so far, according to the logged steps; 0 if unknown.

    seconds: since the run began, with validations; those of a validation end with the step before it.
    """

    run: str
    step: int
    tokens: int = 0
    seconds: float = 0.0
    loss: float | None = None
    valid: float | None = None  # nats per token
    valid_bits_per_byte: float | None = None
    lr: float | None = None
    valid_low: float | None = None  # the ends of 95% intervals
    valid_high: float | None = None
    valid_bits_low: float | None = None
    valid_bits_high: float | None = None


@dataclass
class Metrics:
    """The content of the file, in order.

    validations: the content of each. notes: remarks of the run on unusual steps. damage: what is wrong with the file,
    in sentences.
    """

    points: list[Point] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)


class TokenCount:
    """The tokens of a run after any step, where only some steps are logged, each with its own number of tokens.

    A step that is not logged counts like the next one that is; after the last, like the last.

    >>> count = TokenCount()
    >>> count.add(10, 256)
    >>> count.add(20, 128)
    >>> count.at(8), count.at(20), count.at(22)
    (2048.0, 3840.0, 4096.0)
    """

    def __init__(self) -> None:
        self.steps, self.sums, self.each = [0], [0.0], [0.0]

    def add(self, step: int, tokens: float) -> None:
        """Of a later step; one that comes again replaces what was told of it and of those after it."""
        while len(self.steps) > 1 and self.steps[-1] >= step:
            for told in (self.steps, self.sums, self.each):
                told.pop()
        self.sums.append(self.sums[-1] + tokens * (step - self.steps[-1]))
        self.steps.append(step)
        self.each.append(float(tokens))

    def at(self, step: int) -> float | None:
        """Tokens trained on up to this step; None if no step was logged that tells."""
        if step and len(self.steps) == 1:
            return None
        i = min(bisect_left(self.steps, step), len(self.steps) - 1)
        return self.sums[i] + self.each[i] * (step - self.steps[i])


def read_metrics(where: Path, name: str) -> Metrics:
    """What a run has recorded; lines that cannot be read are skipped and reported.

    >>> read_metrics(Path("runs/demo"), "demo").points[-1].valid  # doctest: +SKIP
    """
    path = where / METRICS if where.is_dir() else where
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not text"
        raise DataError(f"cannot read {path}: {reason}; give the folder of a training run") from None
    found = Metrics()
    records = [(number, _parsed(line)) for number, line in enumerate(lines, 1) if line.strip()]
    _read_points(found, [record for _, record in records if record is not None], name)
    bad = [number for number, record in records if record is None]
    if bad and bad[-1] == len(lines):
        found.damage.append(f"The last line of {METRICS} is cut off; it is left out.")
        bad = bad[:-1]
    if bad:
        found.damage.append(f"{len(bad)} lines of {METRICS} cannot be read and are left out, line {bad[0]} first.")
    if odd := [point.step for point in found.points if point.loss is None and point.valid is None]:
        found.damage.append(f"The loss or bound is not a finite number in {len(odd)} lines, step {odd[0]:,} first.")
    if not found.points:
        raise DataError(
            f"{path} tells no loss yet: wait for the run's first logged step, or give a training run's folder"
        )
    return found


def _read_points(found: Metrics, records: list[dict[str, Any]], name: str) -> None:
    count, last = TokenCount(), Point(name, 0)
    before = trained = 0.0  # seconds of earlier processes, each of which counts from 0; of training, at the last point
    for record in records:
        step: int = record["step"]
        if "loss" in record:
            seconds = _count(record.get("seconds"))
            before = last.seconds if before + seconds < last.seconds else before
            count.add(step, _count(record.get("tokens")))
            loss, lr = _number(record["loss"]), _number(record.get("lr"))
            last = Point(name, step, seconds=before + seconds, loss=loss, lr=lr)
            trained = _count(record.get("train_seconds"))
            found.points.append(last)
        elif "valid_nats_per_token" in record:
            since = max(0.0, _count(record.get("train_seconds")) - trained)  # the steps since the last logged one
            last = Point(name, step, seconds=last.seconds + since, valid=_number(record["valid_nats_per_token"]))
            trained += since
            last.valid_bits_per_byte = _number(record.get("valid_bits_per_byte"))
            last.valid_low, last.valid_high = _interval(record.get("valid_nats_per_token_ci95"))
            last.valid_bits_low, last.valid_bits_high = _interval(record.get("valid_bits_per_byte_ci95"))
            found.points.append(last)
            found.validations.append(record)
        elif isinstance(record.get("sample"), str):
            found.samples.append(record)
        elif isinstance(record.get("note"), str):
            found.notes.append((step, record["note"]))
    for point in found.points:
        point.tokens = round(count.at(point.step) or 0)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # truncated by a kill, or being written
        return None
    good = isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] < _MOST
    return record if good else None


def _interval(value: Any) -> tuple[float | None, float | None]:
    if not isinstance(value, list) or len(value) != 2:
        return None, None
    low, high = map(_number, value)
    return (None, None) if low is None or high is None else (low, high)


def _count(value: Any) -> float:
    number = _number(value)
    return number if number is not None and 0 <= number < _MOST else 0.0


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30
    return float(value) if good and math.isfinite(value) else None
