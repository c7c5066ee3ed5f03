"""A JSON value that a schema allows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

from unmask.constraints import Constraint
from unmask.constraints._dfa import Dfa
from unmask.constraints._distinct import MAX_VALUES, different, distinct
from unmask.constraints._numbers import integers, numbers
from unmask.constraints._schema_check import BOUNDS, FORMATS, NOTES, SUPPORTED, check, schema_path, types_of
from unmask.constraints.automaton import Automaton, join
from unmask.constraints.regex import regex_dfa, spliced_dfa
from unmask.data.tokenizers import Tokenizer
from unmask.errors import MissingExtraError, Public, UnmaskError, UsageError

_STANDS_FOR = range(0xF0000, 0x100000)  # private-use characters, each a placeholder for a part that is built here


@dataclass(frozen=True, kw_only=True)
class JsonSchema(Constraint):
    """JSON text that the schema allows; properties come in the schema's order. The schema: JSON text, or plain data.

    >>> JsonSchema(schema={"type": "boolean"}).schema
    '{"type": "boolean"}'
    """

    schema: str | dict[str, Any]  # kept as text

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.schema, str):
            return
        try:
            object.__setattr__(self, "schema", json.dumps(self.schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as e:
            raise UsageError("the schema cannot be written as JSON: {reason}", reason=e) from None

    @classmethod
    def of(cls, schema: Mapping[str, Any], **options: Any) -> JsonSchema:
        """Create the constraint from the schema as plain data."""
        return cls(schema=dict(schema), **options)

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        return join(schema_dfa(cast(str, self.schema)), tokenizer, over=self.over, may_end=may_end)


def schema_dfa(schema: str) -> Dfa:
    """The automaton over the bytes of a schema's values.

    >>> schema_dfa('{"type": "null"}').accept_S.tolist()  # doctest: +SKIP
    [False, False, False, False, True]
    """
    try:
        data = _loaded(schema)
        check(data)
        spelling = _Spelling(json.dumps(data, ensure_ascii=False))
        whole = spelling.spelled_out(data)
    except RecursionError:
        raise UsageError("the schema is nested too deeply: use $defs, or a simpler one") from None
    try:
        pattern = str(outlines().json_schema.build_regex_from_schema(json.dumps(whole, ensure_ascii=False)))
    except BaseException as e:
        if isinstance(e, UnmaskError) or not (isinstance(e, Exception) or type(e).__name__ == "PanicException"):
            raise
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise UsageError("the schema cannot be held: {reason}", reason=reason[:120]) from None
    for character in spelling.bare:
        pattern = pattern.replace(f'"{character}"', character)
    return spliced_dfa(pattern, spelling.parts, name="schema")


def _loaded(schema: str) -> Any:
    try:
        return json.loads(schema, parse_constant=_not_finite, parse_float=_finite)
    except ValueError as e:
        raise UsageError("the schema is not valid JSON: {reason}", reason=e) from None


def _finite(spelled: str) -> float:
    number = float(spelled)
    return number if math.isfinite(number) else _not_finite(spelled)


def _not_finite(spelled: str) -> float:
    raise ValueError(f"{spelled[:20]} is not finite")


class _Spelling:
    """Parts of a schema that the package does not support, or treats differently from `re`: each is replaced by a
    placeholder character while the package compiles the schema. bare: those that are not strings, so that the quotes
    around them are removed."""

    def __init__(self, schema: str) -> None:
        self._free = (chr(code) for code in _STANDS_FOR if chr(code) not in schema)
        self.parts: dict[str, Dfa] = {}
        self.bare: list[str] = []

    def spelled_out(self, data: Any, where: str = "schema") -> Any:
        """The checked schema, with placeholders, as input for the package."""
        if isinstance(data, list):
            return [self.spelled_out(part, where) for part in data]
        if not isinstance(data, dict):
            return data
        if data.keys() & {"enum", "const"}:
            return {key: part for key, part in data.items() if key != "type"}  # values were checked to have this type
        if not isinstance(data.get("type"), str | list):
            return {key: self._inner(key, part, where) for key, part in data.items()}
        kinds = types_of(data, where)
        if len(kinds) > 1:
            shared = {key: part for key, part in data.items() if key in NOTES}
            apart = [{k: v for k, v in data.items() if k in SUPPORTED[kind]} | {"type": kind} for kind in kinds]
            return shared | {"anyOf": [self.spelled_out(one, where) for one in apart]}
        data = data | {"type": kinds[0]}
        special = self._special(kinds[0], data, where)
        return {key: self._inner(key, part, where) for key, part in data.items()} if special is None else special

    def _inner(self, key: str, part: Any, where: str) -> Any:
        if key in ("$defs", "definitions", "properties"):
            return {name: self.spelled_out(inner, f"{where}.{name}") for name, inner in part.items()}
        if key in ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties"):
            return self.spelled_out(part, f"{where}.{key}")
        return int(part) if key in ("minItems", "maxItems", "minLength", "maxLength") else part

    def _special(self, kind: str, data: dict[str, Any], where: str) -> dict[str, Any] | None:
        if kind == "string" and data.keys() & {"format", "pattern"}:
            pattern = FORMATS[data["format"]] if "format" in data else data["pattern"]
            return self._stands_for(regex_dfa(pattern), bare=False)
        if kind in ("integer", "number") and data.keys() & {*BOUNDS}:
            return self._stands_for(_bounded(data, kind, where), bare=True)
        if kind == "array" and data.get("uniqueItems"):
            return self._stands_for(_unique(data, where), bare=True)
        if kind == "array":
            data.pop("uniqueItems", None)
        return None

    def _stands_for(self, dfa: Dfa, *, bare: bool) -> dict[str, Any]:
        character = next(self._free)
        self.parts[character] = dfa
        if bare:
            self.bare.append(character)
        return {"const": character}


def _bounded(data: dict[str, Any], kind: str, where: str) -> Dfa:
    """Integers or numbers between the schema's bounds; of two bounds on a side, the narrower one."""
    bounds = {key: Decimal(str(data[key])) for key in BOUNDS if key in data}
    least = max((bounds[key] for key in ("minimum", "exclusiveMinimum") if key in bounds), default=None)
    most = min((bounds[key] for key in ("maximum", "exclusiveMaximum") if key in bounds), default=None)
    above = least is not None and bounds.get("exclusiveMinimum") == least
    below = most is not None and bounds.get("exclusiveMaximum") == most
    if kind == "integer":
        first = least + 1 if least is not None and above and least == int(least) else least
        last = most - 1 if most is not None and below and most == int(most) else most
        pattern = integers(first, last)
        dfa = None if pattern is None else regex_dfa(pattern)
    else:
        dfa = numbers(least, most, above=above, below=below)
    if dfa is None:
        raise UsageError(
            "{where}: no {kind} meets {bounds}",
            where=schema_path(where),
            kind=Public(kind),
            bounds=Public(" and ".join(bounds)),
        )
    return dfa


def _unique(data: dict[str, Any], where: str) -> Dfa:
    items = data.get("items", {})
    known: dict[Any, list[Any]] = {"boolean": [True, False], "null": [None]}
    values = items.get("enum") or ([items["const"]] if "const" in items else None)
    values = values or (known.get(items.get("type")) if isinstance(items.get("type"), str) else None)
    if values is None or len(values := different(values)) > MAX_VALUES:
        raise UsageError(
            "{where}: uniqueItems of array is held for an enum of up to {most} values under items",
            where=schema_path(where),
            most=Public(MAX_VALUES),
        )
    least, most = int(data.get("minItems", 0)), int(data.get("maxItems", len(values)))
    if least > len(values):
        raise UsageError(
            "{where}: uniqueItems leaves {most} items at most, minItems asks for more",
            where=schema_path(where),
            most=Public(len(values)),
        )
    return distinct(values, least, min(most, len(values)))


def outlines() -> Any:
    """The optional package that compiles schemas."""
    try:
        import outlines_core
    except ImportError:
        raise MissingExtraError("outlines-core", "constrain", "a schema") from None
    return outlines_core
