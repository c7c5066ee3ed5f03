"""Reads a run's metrics.jsonl: one line per logged step, validation, note or sample. `MetricsFile` writes it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unmask.errors import DataError

METRICS = "metrics.jsonl"
_MOST = 1 << 53  # larger steps, tokens or seconds are invalid: no run has written such a line


@dataclass
class Point:
    """A logged step, or a validation. tokens: trained on so far, according to the logged steps; 0 if unknown."""

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
    last = Point(name, 0)
    before = 0.0  # seconds of earlier processes: each counts from 0
    for record in records:
        step: int = record["step"]
        if "loss" in record:
            seconds = _count(record.get("seconds"))
            before = last.seconds if before + seconds < last.seconds else before
            tokens = last.tokens + round(_count(record.get("tokens")) * (step - last.step))
            loss, lr = _number(record["loss"]), _number(record.get("lr"))
            last = Point(name, step, tokens, before + seconds, loss=loss, lr=lr)
            found.points.append(last)
        elif "valid_nats_per_token" in record:
            point = Point(name, step, last.tokens, last.seconds, valid=_number(record["valid_nats_per_token"]))
            point.valid_bits_per_byte = _number(record.get("valid_bits_per_byte"))
            point.valid_low, point.valid_high = _interval(record.get("valid_nats_per_token_ci95"))
            point.valid_bits_low, point.valid_bits_high = _interval(record.get("valid_bits_per_byte_ci95"))
            found.points.append(point)
            found.validations.append(record)
        elif isinstance(record.get("sample"), str):
            found.samples.append(record)
        elif isinstance(record.get("note"), str):
            found.notes.append((step, record["note"]))


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
