"""The steps as lines of JSON, one a step, each written at once: a file that can be followed while it grows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unmask.data.tokenizers import Tokenizer
from unmask.errors import UnmaskError
from unmask.samplers import Step


def as_dict(step: Step, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """A step as plain data. The lists stand side by side: entry i of each is one token that was written.

    >>> import torch
    >>> from unmask.data.tokenizers import load_tokenizer
    >>> one, log_p = torch.tensor([0]), torch.tensor([-0.5])
    >>> step = Step(one, one, torch.tensor([104]), log_p, torch.tensor([[104]]))
    >>> as_dict(step, 1, load_tokenizer("bytes"))["text"]
    ['h']
    """
    tokens = step.token_N.tolist()
    line: dict[str, Any] = {
        "step": number,
        "row": step.row_N.tolist(),
        "position": step.position_N.tolist(),
        "token": tokens,
        "text": [tokenizer.token_text(token) for token in tokens],
        "log_prob": [round(x, 6) if math.isfinite(x) else None for x in step.log_prob_N.tolist()],
    }
    if step.others is not None:
        others = step.others
        line["model_prob"] = [round(x, 6) for x in others.prob_N.tolist()]
        line["others"] = [
            [
                {"token": token, "text": tokenizer.token_text(token), "model_prob": round(prob, 6)}
                for token, prob in zip(*pair, strict=True)
            ]
            for pair in zip(others.token_NK.tolist(), others.prob_NK.tolist(), strict=True)
        ]
    row_M, position_M = step.remasked if step.remasked is not None else ((), ())
    line["remasked"] = [[int(row), int(position)] for row, position in zip(row_M, position_M, strict=True)]
    return line


class Trace:
    """An observer that writes to the file. What cannot be written is reported at the end: the texts are worth more."""

    def __init__(self, tokenizer: Tokenizer, path: str) -> None:
        self.tokenizer, self.path, self.number = tokenizer, path, 0
        self.error: UnmaskError | None = None
        try:
            self.file = open(path, "wb", buffering=0)  # noqa: SIM115
        except OSError as e:
            raise UnmaskError(f"cannot write {path}: {e.strerror}") from None

    def __call__(self, step: Step) -> None:
        self.number += 1
        line = (json.dumps(as_dict(step, self.number, self.tokenizer)) + "\n").encode("ascii")
        rest = memoryview(line)  # unbuffered: a line is one write, so that a reader does not meet half of one
        try:
            while rest and self.error is None:
                rest = rest[self.file.write(rest) :]
        except OSError as e:
            self.error = UnmaskError(f"cannot write {self.path}: {e.strerror}; it ends before step {self.number}")


@contextmanager
def tracing(tokenizer: Tokenizer, path: str | None) -> Iterator[Trace | None]:
    """The observer while its file is open; None without one."""
    if path is None:
        yield None
        return
    trace = Trace(tokenizer, path)
    with trace.file:
        yield trace
