"""A JSON value that a schema allows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unmask.constraints import Constraint
from unmask.constraints._automaton import Automaton, join
from unmask.constraints.regex import regex_dfa
from unmask.errors import MissingExtraError, UsageError, did_you_mean
from unmask.tokens import Tokenizer

# What says nothing about the value, and for each form of a schema what is held. All else is refused: a keyword that is
# read over would give values that the schema does not allow.
_NOTES = {"$schema", "$id", "$defs", "definitions", "$comment", "title", "description", "default", "examples"}
_HELD = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum"},
    "number": set[str](),
    "boolean": set[str](),
    "null": set[str](),
}
# Real dates only, in ASCII digits; the 29th of February is left out, which depends on the year.
_DATE = (
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_FORMATS = {
    "date": _DATE,
    "date-time": f"({_DATE})T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}
_MAX_RANGE = 1000  # integers between a minimum and a maximum, which are listed one by one
_ONE_OF = ("$ref", "anyOf", "oneOf", "enum", "const")
WORDS = frozenset({*_NOTES, *_ONE_OF, *_FORMATS, *_HELD}.union(*_HELD.values()))  # of a schema's own language


@dataclass(frozen=True, kw_only=True)
class JsonSchema(Constraint):
    """JSON text that the schema (itself a JSON text) allows; properties come in the schema's order.

    >>> JsonSchema.of({"type": "boolean"}).schema
    '{"type": "boolean"}'
    """

    schema: str

    @classmethod
    def of(cls, schema: Mapping[str, Any], **options: Any) -> JsonSchema:
        """From the schema as plain data."""
        return cls(schema=json.dumps(schema), **options)

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        return join(regex_dfa(schema_regex(self.schema)), tokenizer, over=self.over, may_end=may_end)


def schema_regex(schema: str) -> str:
    """The regular expression of a schema's values.

    >>> schema_regex('{"type": "null"}')  # doctest: +SKIP
    'null'
    """
    try:
        data = json.loads(schema)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"the schema is not valid JSON: {e}") from None
    _check(data, "schema")
    try:
        return str(outlines().json_schema.build_regex_from_schema(json.dumps(_spelled_out(data), ensure_ascii=False)))
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise UsageError(f"the schema cannot be held: {reason[:120]}") from None


def _spelled_out(data: Any) -> Any:
    """Formats as patterns and ranges of integers as lists: what the package does not do, in what it does."""
    if isinstance(data, list):
        return [_spelled_out(part) for part in data]
    if not isinstance(data, dict) or "enum" in data or "const" in data:
        return data
    if data.get("type") == "string" and "format" in data:
        return {"type": "string", "pattern": _FORMATS[data["format"]]}
    if data.get("type") == "integer" and "minimum" in data:
        return {"enum": list(range(data["minimum"], data["maximum"] + 1))}
    return {key: _spelled_out(part) for key, part in data.items()}


def _check(data: Any, where: str) -> None:
    """Refuse, by name, what would not be held."""
    if not isinstance(data, dict):
        raise UsageError(f"{where}: expected a JSON object that describes a value, got {json.dumps(data)[:40]}")
    keys = data.keys() - _NOTES
    for shelf in (data.get("$defs", {}), data.get("definitions", {})):
        for name, inner in _table(shelf, f"{where}.$defs").items():
            _check(inner, f"{where}.{name}")
    form = next((key for key in _ONE_OF if key in keys), None)
    if form is not None:
        if others := sorted(keys - {form} - ({"type"} if form in ("enum", "const") else set())):
            raise UsageError(f"{where}: {form} beside {others[0]} cannot be held; keep one of them")
        _check_one_of(data, form, where)
        return
    kinds = data.get("type")
    if isinstance(kinds, list) and keys == {"type"} and kinds and all(isinstance(k, str) and k in _HELD for k in kinds):
        return
    if not isinstance(kinds, str) or kinds not in _HELD:
        raise UsageError(f"{where}: needs a type, {did_you_mean(str(kinds), _HELD)}")
    if others := sorted(keys - _HELD[kinds] - {"type"}):
        raise UsageError(f"{where}: {others[0]} of {kinds} cannot be held; leave it out or use a regex")
    check = {"object": _check_object, "array": _check_array, "string": _check_string, "integer": _check_integer}
    if kinds in check:
        check[kinds](data, where)


def _table(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UsageError(f"{where}: expected an object of schemas, got {json.dumps(data)[:40]}")
    return data


def _check_one_of(data: dict[str, Any], form: str, where: str) -> None:
    if form == "$ref":
        if not str(data["$ref"]).startswith("#/"):
            raise UsageError(f"{where}: the reference {str(data['$ref'])[:40]!r} leads out of the schema")
    elif form in ("enum", "const"):
        values = data["enum"] if form == "enum" else [data["const"]]
        if not isinstance(values, list) or not values:
            raise UsageError(f"{where}: enum needs a list of at least one value")
        if any(not _is(value, data["type"]) for value in values if "type" in data):
            raise UsageError(f"{where}: a value of {form} is not of its type {data['type']!r}")
    else:
        if not isinstance(data[form], list) or not data[form]:
            raise UsageError(f"{where}: {form} needs a list of at least one schema")
        for i, inner in enumerate(data[form]):
            _check(inner, f"{where}.{form}[{i}]")
        kinds = [inner.get("type") for inner in data[form]]
        names = {"number" if kind == "integer" else str(kind) for kind in kinds if isinstance(kind, str)}
        if form == "oneOf" and len(names) < len(kinds):
            raise UsageError(f"{where}: oneOf is held only where its types all differ; use anyOf")


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return bool(kind == ("null" if value is None else "boolean"))
    kinds = {str: ("string",), int: ("integer", "number"), float: ("number",), list: ("array",), dict: ("object",)}
    return kind in kinds[type(value)]


def _check_object(data: dict[str, Any], where: str) -> None:
    properties = _table(data.get("properties", {}), f"{where}.properties")
    for name, inner in properties.items():
        _check(inner, f"{where}.{name}")
    if missing := [name for name in data.get("required", []) if name not in properties]:
        raise UsageError(f"{where}: {missing[0]!r} is required and has no schema under properties")
    if isinstance(extra := data.get("additionalProperties", False), dict) and not properties:
        _check(extra, f"{where}.additionalProperties")


def _check_array(data: dict[str, Any], where: str) -> None:
    if "prefixItems" in data and data.keys() & {"items", "minItems", "maxItems"}:
        raise UsageError(f"{where}: prefixItems beside items or a number of items cannot be held; keep one of them")
    for i, inner in enumerate(data.get("prefixItems", [])):
        _check(inner, f"{where}.prefixItems[{i}]")
    if "items" in data:
        _check(data["items"], f"{where}.items")


def _check_string(data: dict[str, Any], where: str) -> None:
    if len(data.keys() & {"pattern", "format"}) + bool(data.keys() & {"minLength", "maxLength"}) > 1:
        raise UsageError(f"{where}: pattern, format and a length cannot be held together; keep one of them")
    if "format" in data and str(data["format"]) not in _FORMATS:
        raise UsageError(f"{where}: the format {data['format']!r} cannot be held; {did_you_mean('', _FORMATS)}")
    if "pattern" in data:
        next_SB = regex_dfa(str(data["pattern"])).next_SB
        if (next_SB[:, [*range(0x20), ord('"'), ord("\\")]] >= 0).any():
            raise UsageError(f"{where}: the pattern may match quotes, backslashes or line ends; exclude them")


def _check_integer(data: dict[str, Any], where: str) -> None:
    bounds = [data[key] for key in ("minimum", "maximum") if key in data]
    if not bounds:
        return
    if (
        len(bounds) < 2
        or any(type(bound) is not int for bound in bounds)
        or not 0 <= bounds[1] - bounds[0] < _MAX_RANGE
    ):
        raise UsageError(f"{where}: integers are held between a minimum and a maximum less than {_MAX_RANGE} apart")


def outlines() -> Any:
    """The optional package behind schemas."""
    try:
        import outlines_core
    except ImportError:
        raise MissingExtraError("outlines-core", "constrain", "a schema") from None
    return outlines_core
