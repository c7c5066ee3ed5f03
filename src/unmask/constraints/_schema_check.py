"""Checks that a JSON schema is valid and can be enforced completely; anything else is refused by name."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

from unmask.constraints._numbers import DIGITS
from unmask.constraints.regex import regex_dfa
from unmask.errors import Public, UsageError, did_you_mean

# Keywords that do not restrict the value, and for each form of a schema those that are enforced. All others are
# refused: ignoring a keyword would give values that the schema does not allow.
NOTES = {"$schema", "$id", "$defs", "definitions", "$comment", "title", "description", "default", "examples"}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SUPPORTED = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {*BOUNDS},
    "number": {*BOUNDS},
    "boolean": set[str](),
    "null": set[str](),
}
# Real dates only, in ASCII digits; the 29th of February is left out, which depends on the year.
_DATE = (
    "[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
FORMATS = {
    "date": _DATE,
    "date-time": f"({_DATE})T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}
ONE_OF = ("$ref", "anyOf", "oneOf", "enum", "const")


def check(data: Any, where: str = "schema") -> None:
    """Refuse, by name, keywords that would not be enforced."""
    if not isinstance(data, dict):
        raise UsageError(
            "{where}: expected a JSON object that describes a value, got {value}",
            where=schema_path(where),
            value=_quoted(data),
        )
    keys = data.keys() - NOTES
    for shelf in ("$defs", "definitions"):
        for name, inner in _table(data.get(shelf, {}), f"{where}.{shelf}").items():
            check(inner, f"{where}.{name}")
    form = next((key for key in ONE_OF if key in keys), None)
    if form is not None:
        if others := sorted(keys - {form} - ({"type"} if form in ("enum", "const") else set())):
            raise UsageError(
                "{where}: {form} beside {other} cannot be held; keep one of them",
                where=schema_path(where),
                form=Public(form),
                other=others[0],
            )
        _check_one_of(data, form, where)
        return
    kinds = types_of(data, where)
    if others := sorted(keys - {"type"}.union(*(SUPPORTED[kind] for kind in kinds))):
        raise UsageError(
            "{where}: {other} of {kind} cannot be held; leave it out or use a regex",
            where=schema_path(where),
            other=others[0],
            kind=Public(kinds[0]),
        )
    checks = {
        "object": _check_object,
        "array": _check_array,
        "string": _check_string,
        "integer": _check_bounds,
        "number": _check_bounds,
    }
    for kind in kinds:
        if kind in checks:
            checks[kind](data, where)


def types_of(data: dict[str, Any], where: str = "schema") -> list[str]:
    """The names under "type", one or several.

    >>> types_of({"type": ["string", "null"]})
    ['string', 'null']
    """
    declared = data.get("type")
    kinds: list[Any] = declared if isinstance(declared, list) else [declared]
    if wrong := [kind for kind in kinds if not isinstance(kind, str) or kind not in SUPPORTED]:
        raise UsageError(
            "{where}: needs a type, {hint}",
            where=schema_path(where),
            hint=Public(did_you_mean(str(wrong[0]), SUPPORTED)),
        )
    if not kinds or len({*kinds}) < len(kinds):
        raise UsageError("{where}: type needs a name, or a list of different names", where=schema_path(where))
    return kinds


def _table(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UsageError(
            "{where}: expected an object of schemas, got {value}", where=schema_path(where), value=_quoted(data)
        )
    return data


def _list(data: dict[str, Any], key: str, where: str, of: str) -> list[Any]:
    values = data.get(key, [])
    if not isinstance(values, list):
        raise UsageError(
            "{where}: {key} needs a list of {of}, got {value}",
            where=schema_path(where),
            key=Public(key),
            of=Public(of),
            value=_quoted(values),
        )
    return values


def schema_path(where: str) -> Public:
    """A location in a schema, for a message; the names of its properties are not public."""
    return Public(where, "schema" if where == "schema" else "schema.…")


def _quoted(data: Any) -> str:
    return json.dumps(data)[:40]


def _check_one_of(data: dict[str, Any], form: str, where: str) -> None:
    if form == "$ref":
        if not isinstance(data["$ref"], str) or not data["$ref"].startswith("#/"):
            raise UsageError(
                "{where}: the reference {reference!r} leads out of the schema",
                where=schema_path(where),
                reference=str(data["$ref"])[:40],
            )
    elif form in ("enum", "const"):
        values = data["enum"] if form == "enum" else [data["const"]]
        if not isinstance(values, list) or not values:
            raise UsageError("{where}: enum needs a list of at least one value", where=schema_path(where))
        if "type" in data:
            kinds = types_of(data, where)
            if not all(any(_is(value, kind) for kind in kinds) for value in values):
                raise UsageError(
                    "{where}: a value of {form} is not of its type {kind!r}",
                    where=schema_path(where),
                    form=Public(form),
                    kind=data["type"],
                )
    else:
        if not _list(data, form, where, "schemas"):
            raise UsageError(
                "{where}: {form} needs a list of at least one schema", where=schema_path(where), form=Public(form)
            )
        for i, inner in enumerate(data[form]):
            check(inner, f"{where}.{form}[{i}]")
        kinds = [inner.get("type") for inner in data[form]]
        names = {"number" if kind == "integer" else str(kind) for kind in kinds if isinstance(kind, str)}
        if form == "oneOf" and len(names) < len(kinds):
            raise UsageError(
                "{where}: oneOf is held only where its types all differ; use anyOf", where=schema_path(where)
            )


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    kinds = {str: ("string",), int: ("integer", "number"), float: ("number",), list: ("array",), dict: ("object",)}
    return kind in kinds[type(value)]


def _check_object(data: dict[str, Any], where: str) -> None:
    properties = _table(data.get("properties", {}), f"{where}.properties")
    for name, inner in properties.items():
        check(inner, f"{where}.{name}")
    required = _list(data, "required", where, "names")
    if any(not isinstance(name, str) for name in required):
        raise UsageError(
            "{where}: required needs a list of names, got {value}", where=schema_path(where), value=_quoted(required)
        )
    if missing := [name for name in required if name not in properties]:
        raise UsageError(
            "{where}: {name!r} is required and has no schema under properties",
            where=schema_path(where),
            name=missing[0],
        )
    extra = data.get("additionalProperties", False)
    if not isinstance(extra, bool | dict):
        raise UsageError(
            "{where}: additionalProperties needs true, false or a schema, got {value}",
            where=schema_path(where),
            value=_quoted(extra),
        )
    if isinstance(extra, dict) and not properties:
        check(extra, f"{where}.additionalProperties")


def _check_counts(data: dict[str, Any], least: str, most: str, where: str) -> None:
    for key in (least, most):
        count = data.get(key, 0)
        if isinstance(count, bool) or not isinstance(count, int | float) or count != int(count) or count < 0:
            raise UsageError(
                "{where}: {key} needs a whole number from 0 on, got {value}",
                where=schema_path(where),
                key=Public(key),
                value=_quoted(count),
            )
    if data.get(least, 0) > data.get(most, math.inf):
        raise UsageError(
            "{where}: {least} is more than {most}", where=schema_path(where), least=Public(least), most=Public(most)
        )


def _check_array(data: dict[str, Any], where: str) -> None:
    _check_counts(data, "minItems", "maxItems", where)
    if "prefixItems" in data and data.keys() & {"items", "minItems", "maxItems"}:
        raise UsageError(
            "{where}: prefixItems beside items or a number of items cannot be held; keep one of them",
            where=schema_path(where),
        )
    for i, inner in enumerate(_list(data, "prefixItems", where, "schemas")):
        check(inner, f"{where}.prefixItems[{i}]")
    if "items" in data:
        check(data["items"], f"{where}.items")
    unique = data.get("uniqueItems", False)
    if not isinstance(unique, bool):
        raise UsageError(
            "{where}: uniqueItems needs true or false, got {value}", where=schema_path(where), value=_quoted(unique)
        )


def _check_string(data: dict[str, Any], where: str) -> None:
    _check_counts(data, "minLength", "maxLength", where)
    if len(data.keys() & {"pattern", "format"}) + bool(data.keys() & {"minLength", "maxLength"}) > 1:
        raise UsageError(
            "{where}: pattern, format and a length cannot be held together; keep one of them", where=schema_path(where)
        )
    if "format" in data and (not isinstance(data["format"], str) or data["format"] not in FORMATS):
        raise UsageError(
            "{where}: the format {format!r} cannot be held; {hint}",
            where=schema_path(where),
            format=data["format"],
            hint=Public(did_you_mean("", FORMATS)),
        )
    if "pattern" in data:
        if not isinstance(data["pattern"], str):
            raise UsageError(
                "{where}: pattern needs a regular expression, got {value}",
                where=schema_path(where),
                value=_quoted(data["pattern"]),
            )
        next_SB = regex_dfa(data["pattern"]).next_SB
        if (next_SB[:, [*range(0x20), ord('"'), ord("\\")]] >= 0).any():
            raise UsageError(
                "{where}: the pattern may match quotes, backslashes or line ends; exclude them",
                where=schema_path(where),
            )


def _check_bounds(data: dict[str, Any], where: str) -> None:
    for key in BOUNDS:
        bound = data.get(key, 0)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise UsageError(
                "{where}: {key} needs a number, got {value}",
                where=schema_path(where),
                key=Public(key),
                value=_quoted(bound),
            )
        spelled = Decimal(str(bound)).normalize()
        if abs(spelled.adjusted()) >= DIGITS or len(spelled.as_tuple().digits) > DIGITS:
            raise UsageError(
                "{where}: {key} has more than {digits} digits, which cannot be held",
                where=schema_path(where),
                key=Public(key),
                digits=Public(DIGITS),
            )
