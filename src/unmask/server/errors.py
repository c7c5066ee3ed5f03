"""What is said when something is refused: one short sentence, never the request's own words."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache
from math import isfinite
from typing import Any

from unmask import constraints, noise, samplers
from unmask.constraints.json_schema import WORDS
from unmask.errors import NonFiniteError, UnmaskError, UsageError, did_you_mean
from unmask.server import schemas
from unmask.server.limits import MAX_DIGITS, MAX_PARTS, MAX_VALUES

MOST = 300  # characters of a message
_ECHO = 10  # so many letters of the request in a row are an echo
# Short words of our own sentences: a request that says them, too, is not repeated.
_LITTLE = (
    " a all an and any are as at be by can for got has how id ids if in is it its least less may more most no none "
    "not of on one or out own say see so than that the this to two use with x bool float int list str "
)
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


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


def internal() -> Refused:
    """Of what went wrong in here nobody outside is told."""
    return Refused(500, "something went wrong inside the server", "internal")


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
    """The message with … for every text of the request that it says, quoted or not, and every longer run of letters
    that also stands in the request. Our own names it may say, whoever else does."""
    message = " ".join(message.split())[:MOST]
    words = [" ".join(word.split()) for word in _words(json.loads(body) if body else None)]
    told = [word for word in words if word and word not in our_names()]
    told += [word.replace("_", "-") for word in told if "_" in word]  # as the command line spells its options
    for word in sorted({word for word in told if word in message}, key=len, reverse=True):
        message = _hide_word(message, word)
    message = _hide_quoted(message, "\n".join(words))
    return _hide_runs(message, ", ".join(told))  # as Python writes a list


def _hide_word(message: str, word: str) -> str:
    """Where it stands by itself; what may as well be ours, and what is no word, only as a part of a path."""
    ours = f" {word} " in _LITTLE or not any(c.isalpha() for c in word)
    before = r"(?<=[A-Za-z_…]\.)" if ours else r"(?<!\w)"
    return re.sub(rf"{before}{re.escape(word)}(?!\w)", "…", message)


def _hide_quoted(message: str, given: str) -> str:
    """However short. A backslash: it was spelled anew. A quotation cut at the message's end has one mark."""

    def shown(found: re.Match[str]) -> str:
        hint, mark, quoted = found[1], found[2], found[3]
        sent = "\\" in quoted or (quoted in given and not (hint and quoted in our_names()))
        return f"{hint}{mark}…{mark}" if sent else found[0]

    return re.sub(r"""(did you mean |(?<!\w))(['"])((?:\\.|(?!\2)[^\\])+)(?:\2|\\?$)""", shown, message)


def _hide_runs(message: str, given: str) -> str:
    kept, at = [], 0
    while at < len(message):
        end = at + _ECHO
        if end <= len(message) and message[at:end] in given:
            while end < len(message) and message[at : end + 1] in given:
                end += 1
            kept.append(message[at:end] if message[at:end] in our_names() else "…")
            at = end
        else:
            kept.append(message[at])
            at += 1
    return "".join(kept)


def _words(data: Any) -> Iterator[str]:
    """Every text and number in it."""
    if isinstance(data, dict | list):
        for inner in (*data, *data.values()) if isinstance(data, dict) else data:
            yield from _words(inner)
    elif data is not None and not isinstance(data, bool):
        yield str(data)


@cache
def our_names() -> frozenset[str]:
    """Fields, plug-ins, their options and choices, a schema's own words.

    >>> {"temperature", "temperature_end", "temperature-end", "left_to_right", "additionalProperties"} <= our_names()
    True
    """
    found = {*schemas.field_names(), *WORDS}
    for room in (samplers.room, constraints.room, noise.room):
        for name in room.names():
            found.add(name)
            with suppress(UsageError, ImportError):  # one that cannot be loaded has no options
                plugin = room.get(name)
                found |= {field.name for field in dataclasses.fields(plugin)}
                found |= {str(choice) for hint in typing.get_type_hints(plugin).values() for choice in _choices(hint)}
    return frozenset(found | {name.replace("_", "-") for name in found})


def _choices(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)


def from_validation(errors: Sequence[Any], fields: Collection[str]) -> Refused:
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
    elif first["type"] == "not_offered" and where:
        message, where = f"{where[-1]} {first['msg']}", []
    else:
        message = first["msg"] if len(first["msg"]) < MOST else "this is not valid"
    said = ".".join(where)
    return Refused(400, f"{said}: {message}" if said else message, "invalid_value")


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN, no infinity however it is spelled, no half characters, no depth beyond reason.

    >>> parse_json(b'{"a": 1}')
    {'a': 1}
    """
    _check_parts(body)
    bad = Refused(400, "the body is not valid JSON", "invalid_json")
    try:
        data = json.loads(body.decode("utf-8"), parse_constant=_no_number, parse_int=_whole, parse_float=_finite)
        if b"\\ud" in body.lower():
            json.dumps(data, ensure_ascii=False).encode("utf-8")  # half a character has no bytes
    except (ValueError, RecursionError):  # UnicodeError and JSONDecodeError are ValueErrors
        raise bad from None
    if _depth(data) > 64:
        raise Refused(400, "the body is nested too deeply", "invalid_json")
    return data


def _check_parts(body: bytes) -> None:
    """Refuse, before it is parsed, what the event loop could not do beside its other work."""
    if _are_few(body):
        return
    bare, texts = _STRINGS.subn(b"", body, MAX_VALUES + MAX_PARTS)  # inside texts the signs say nothing
    if texts == MAX_VALUES + MAX_PARTS or not _are_few(bare):
        raise Refused(400, "the body has too many values, lists or fields: send fewer", "invalid_json")


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
