"""Errors as HTTP answers: one short sentence, without the request's own words; and strict parsing of bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from math import isfinite
from typing import Any

from unmask.errors import DataError, NonFiniteError, UnmaskError, UsageError, did_you_mean
from unmask.server.limits import MAX_DIGITS, MAX_PARTS, MAX_VALUES

MAX_MESSAGE = 300  # characters
_SENTENCES: dict[type[UnmaskError], str] = {  # for errors without a template; the first matching class counts
    UsageError: "the request cannot be met: see /docs for what may be asked",
    DataError: "the text cannot be read by this model's tokenizer: change it",
    UnmaskError: "the model cannot do this: ask for something else",
}
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class HTTPError(Exception):
    """An error with its HTTP answer: status, message and code."""

    def __init__(self, status: int, message: str, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The body in the form that OpenAI's clients read.

        >>> HTTPError(404, "no such route", "not_found").body["error"]["type"]
        'invalid_request_error'
        """
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


def internal() -> HTTPError:
    """An internal error of the server; its details are only logged."""
    return HTTPError(500, "something went wrong inside the server", "internal")


def from_error(error: UnmaskError) -> HTTPError:
    """The error's sentence without its values, which may come from the request; see `unmask.errors`.

    >>> from unmask.errors import UsageError
    >>> from_error(UsageError("no gap in {text!r}: write [MASK]", text="once upon a time")).message
    "no gap in '…': write [MASK]"
    """
    if isinstance(error, NonFiniteError):
        return HTTPError(500, "the model's prediction is not a number", "model_error")
    return HTTPError(400, public_message(error), "bad_request")


def public_message(error: UnmaskError) -> str:
    """The part of an error that may be shown to anyone; for an error without a template, its kind.

    >>> from unmask.errors import UsageError
    >>> public_message(UsageError(f"no gap in {'a secret'!r}"))
    'the request cannot be met: see /docs for what may be asked'
    """
    message = error.redacted()
    if message is None:
        message = next(sentence for kind, sentence in _SENTENCES.items() if isinstance(error, kind))
    return " ".join(message.split())[:MAX_MESSAGE]


def from_validation(errors: Sequence[Any], fields: Collection[str]) -> HTTPError:
    """What is required of a field; unknown field names are not repeated."""
    first = errors[0]
    where = [str(part) for part in first.get("loc", ()) if part in fields or isinstance(part, int)]
    if first["type"] == "extra_forbidden":
        name = str(first.get("loc", ("",))[-1])
        hint = did_you_mean(name[:40], fields)
        message = f"unknown field; {hint}" if "did you mean" in hint else "unknown field; see /openapi.json"
    elif first["type"] == "missing":
        message = f"the field {first['loc'][-1]!r} is missing" if first["loc"][-1] in fields else "a body is needed"
        where = where[:-1]
    elif first["type"] == "not_offered" and where:
        message, where = f"{where[-1]} {first['msg']}", []
    else:
        message = first["msg"] if len(first["msg"]) < MAX_MESSAGE else "this is not valid"
    path = ".".join(where)
    return HTTPError(400, f"{path}: {message}" if path else message, "invalid_value")


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN, no infinity in any spelling, no lone surrogates, limited nesting.

    >>> parse_json(b'{"a": 1}')
    {'a': 1}
    """
    _check_parts(body)
    try:
        data = json.loads(body.decode("utf-8"), parse_constant=_no_number, parse_int=_whole, parse_float=_finite)
        if b"\\ud" in body.lower():
            json.dumps(data, ensure_ascii=False).encode("utf-8")  # lone surrogates cannot be encoded
    except (ValueError, RecursionError):  # UnicodeError and JSONDecodeError are ValueErrors
        raise HTTPError(400, "the body is not valid JSON", "invalid_json") from None
    if _depth(data) > 64:
        raise HTTPError(400, "the body is nested too deeply", "invalid_json")
    return data


def _check_parts(body: bytes) -> None:
    """Refuse, before parsing, bodies that would block the event loop."""
    if _are_few(body):
        return
    bare, texts = _STRINGS.subn(b"", body, MAX_VALUES + MAX_PARTS)  # inside texts the signs say nothing
    if texts == MAX_VALUES + MAX_PARTS or not _are_few(bare):
        raise HTTPError(400, "the body has too many values, lists or fields: send fewer", "invalid_json")


def _are_few(body: bytes) -> bool:
    return body.count(b",") < MAX_VALUES and sum(map(body.count, (b"[", b"{", b":"))) <= MAX_PARTS


def _no_number(spelled: str) -> Any:
    raise ValueError(spelled)


def _whole(spelled: str) -> int:
    if len(spelled) > MAX_DIGITS:
        raise ValueError("too many digits")
    return int(spelled)


def _finite(spelled: str) -> float:
    number = float(spelled)
    if len(spelled) > MAX_DIGITS or not isfinite(number):
        raise ValueError("too many digits, or infinite")
    return number


def _depth(data: Any) -> int:
    """The depth of nesting, without recursion."""
    level, depth = [data], 0
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return depth
