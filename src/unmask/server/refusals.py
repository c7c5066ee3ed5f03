"""What is said when something is refused: one short sentence, never the request's own words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from unmask.errors import NonFiniteError, UnmaskError, did_you_mean

MOST = 300  # characters of a message
_ECHO = 10  # so many letters of the request in a row are an echo


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, code: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it.

        >>> Refused(404, "no such route", "not_found").body["error"]["type"]
        'invalid_request_error'
        """
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


def from_error(error: UnmaskError, body: bytes) -> Refused:
    """The library's own sentence, without what it quotes of the request.

    >>> from unmask.errors import UsageError
    >>> from_error(UsageError("no gap in 'once upon a time': write [MASK]"), b'{"text": "once upon a time"}').message
    "no gap in '…': write [MASK]"
    """
    if isinstance(error, NonFiniteError):
        return Refused(500, "the model's prediction is not a number", "model_error")
    return Refused(400, hide(str(error), body), "bad_request")


def hide(message: str, body: bytes) -> str:
    """The message with … for every quoted word and every longer run of letters that also stands in the request."""
    message = " ".join(message.split())[:MOST]
    given = body.decode("utf-8", errors="replace")
    if "\\" in given:  # letters that were spelled as escapes
        given += "\n" + "\n".join(_words(parse_json(body)))
    given = " ".join(given.split())
    message = re.sub(r"'([^']+)'", lambda quoted: "'…'" if quoted[1] in given else quoted[0], message)  # however short
    kept, at = [], 0
    while at < len(message):
        end = at + _ECHO
        if end <= len(message) and message[at:end] in given:
            while end < len(message) and message[at : end + 1] in given:
                end += 1
            kept.append("…")
            at = end
        else:
            kept.append(message[at])
            at += 1
    return "".join(kept)


def _words(data: Any) -> Iterator[str]:
    """Every text in it."""
    if isinstance(data, str):
        yield data
    for inner in (*data, *data.values()) if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _words(inner)


def from_validation(errors: Sequence[Any], fields: Sequence[str]) -> Refused:
    """What a field must be; fields that are not known are not repeated."""
    first = errors[0]
    where = [str(part) for part in first.get("loc", ()) if part in fields or isinstance(part, int)]
    if first["type"] == "extra_forbidden":
        name = str(first.get("loc", ("",))[-1])
        hint = did_you_mean(name[:40], fields)
        message = f"unknown field; {hint}" if "did you mean" in hint else "unknown field; see /openapi.json"
    elif first["type"] == "missing":
        message = f"the field {first['loc'][-1]!r} is missing" if first["loc"][-1] in fields else "a body is needed"
        where = where[:-1]
    else:
        message = first["msg"] if len(first["msg"]) < MOST else "this is not valid"
    said = ".".join(where)
    return Refused(400, f"{said}: {message}" if said else message, "invalid_value")


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN, no infinity however it is spelled, no half characters, no depth beyond reason.

    >>> parse_json(b'{"a": 1}')
    {'a': 1}
    """
    bad = Refused(400, "the body is not valid JSON", "invalid_json")
    try:
        data = json.loads(body.decode("utf-8"), parse_constant=_no_number, parse_float=_finite)
        if b"\\ud" in body.lower():
            json.dumps(data, ensure_ascii=False).encode("utf-8")  # half a character has no bytes
    except (ValueError, RecursionError):  # UnicodeError and JSONDecodeError are ValueErrors
        raise bad from None
    if _depth(data) > 64:
        raise Refused(400, "the body is nested too deeply", "invalid_json")
    return data


def _no_number(spelled: str) -> Any:
    raise ValueError(spelled)


def _finite(spelled: str) -> float:
    number = float(spelled)
    if number in (float("inf"), float("-inf")):
        raise ValueError("infinite")
    return number


def _depth(data: Any) -> int:
    """How deeply it is nested, found without recursion."""
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
