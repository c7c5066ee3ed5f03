"""The steps as lines of JSON, one a step, each written at once: a file that can be followed while it grows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from unmask.data.tokenizers import Tokenizer
from unmask.errors import UnmaskError
from unmask.samplers import Step
from unmask.sampling.observe import step_as_dict


class Trace:
    """A listener that writes to the file. What cannot be written is told at the end: the texts are worth more."""

    def __init__(self, tokenizer: Tokenizer, path: str) -> None:
        self.tokenizer, self.path, self.number = tokenizer, path, 0
        self.error: UnmaskError | None = None
        try:
            self.file = open(path, "wb", buffering=0)  # noqa: SIM115
        except OSError as e:
            raise UnmaskError(f"cannot write {path}: {e.strerror}") from None

    def __call__(self, step: Step) -> None:
        self.number += 1
        line = (json.dumps(step_as_dict(step, self.number, self.tokenizer)) + "\n").encode("ascii")
        rest = memoryview(line)  # unbuffered: a line is one write, so that a reader does not meet half of one
        try:
            while rest and self.error is None:
                rest = rest[self.file.write(rest) :]
        except OSError as e:
            self.error = UnmaskError(f"cannot write {self.path}: {e.strerror}; it ends before step {self.number}")


@contextmanager
def tracing(tokenizer: Tokenizer, path: str | None) -> Iterator[Trace | None]:
    """The listener while its file is open; None without one."""
    if path is None:
        yield None
        return
    trace = Trace(tokenizer, path)
    with trace.file:
        yield trace
