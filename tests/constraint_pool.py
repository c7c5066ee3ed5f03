"""Patterns, schemas and other constraints, each with its own judge, which shares no code with ours."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from unmask import constraints
from unmask.constraints import Constraint

Judge = Callable[[str], bool]


@dataclass(frozen=True)
class Entry:
    name: str
    constraint: Constraint
    judge: Judge
    length: int = 22


PATTERNS = [
    r"[0-9]+",
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    r"a|ab|abc",
    r"(a|ab)(c|bcd)*",
    r"(yes|no|maybe)( (yes|no|maybe))*",
    r"[a-z]+@[a-z]+\.(com|org|net)",
    r"#[0-9a-fA-F]{6}",
    r"\+?[0-9]{1,3}( [0-9]{2,4}){2,4}",
    r"([01][0-9]|2[0-3]):[0-5][0-9]",
    r"[^a-z]*",
    r"[^\n]{5,12}",
    r".*",
    r".+?!",
    r"é+à*|ü{2,3}",
    r"[α-ω]{2,6}",
    r"(ab)*",
    r"((a|b){2}c?){1,4}",
    r"[A-Z][a-z]* [A-Z][a-z]*",
    r"(?i)hello, world",
    r"(?:\d{1,3}\.){3}\d{1,3}",
    r"\$[1-9][0-9]{0,2}(,[0-9]{3})*(\.[0-9]{2})?",
    r"if [a-z]+ (==|!=|<|>) [0-9]+:",
    r"\((a|\(b\))*\)",
    r"x{17}",
    r"\s*\S+\s*",
    r"[\x20-\x7e]{1,30}",
    r"(0|1(01*0)*1)+",
    r"(the|a) (cat|dog|moon) (sat|ran|rose)\.",
    r"\\[nrt\\]{1,5}",
    r"^[a-c]+$",
    r"[\w]{1,3}",
    r"\w+(-\w+)*",
    r"[[&\]~^-]+",
    r"[]a]{2}[^]a]\W\D",
    r"(?s).{3,5}",
    r"a{,3}b{2,}c{4}",
    r"(?P<year>19|20)\d\d",
    r"(.a){6}.{3}",
    r"[^\W\d_]+[\]\-]",
    r"(^cat|^dog)s|\bmoon\b",
    r"",
]

SCHEMAS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "string"},
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 3, "maxLength": 8},
    {"type": "string", "pattern": "^[a-z]{2,5}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"enum": ["red", "green", "blüe"]},
    {"enum": ["a.*", 'quo"te', 1, None, True, {"a": [1, 2]}]},
    {"const": 2.5},
    {"const": {"k": "v"}},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["x", "y"]}]},
    {"type": ["integer", "null"]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}]},
    {"oneOf": [{"type": "boolean"}, {"type": "integer"}]},
    {"type": "integer", "minimum": -12, "maximum": 130},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "properties": {'k"e.y': {"type": "boolean"}, "é": {"enum": [1, 2]}}, "required": ["é"]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": ["string", "null"], "maxLength": 4},
    {"type": "number", "exclusiveMinimum": -1.5, "maximum": 20},
    {"type": "array", "items": {"enum": ["x", 1, None]}, "uniqueItems": True, "minItems": 1},
    {"$ref": "#/$defs/leaf", "$defs": {"leaf": {"type": "array", "items": {"type": "null"}, "maxItems": 2}}},
    {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "xs": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
        "required": ["on", "xs"],
    },
]


def matches(pattern: str) -> Judge:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "possible nested set"
        compiled = re.compile(pattern, re.ASCII)
    return lambda text: compiled.fullmatch(text) is not None


def valid(schema: dict[str, Any]) -> Judge:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    judge = jsonschema.Draft202012Validator(schema, format_checker=checker)
    jsonschema.Draft202012Validator.check_schema(schema)
    return lambda text: bool(judge.is_valid(json.loads(text)))


def words_of(text: str) -> list[str]:
    return re.findall(r"[^\W]+|[^\x00-\x7f]+", re.sub(r"[^\x00-\x7f]", "ü", text))


OTHERS = [
    Entry(
        "choices",
        constraints.Choices(options=("red", "dark red", "größer", "redder")),
        lambda text: text in ("red", "dark red", "größer", "redder"),
    ),
    Entry("contains one", constraints.Contains(phrases=("cat",)), lambda text: "cat" in text),
    Entry(
        "contains three that overlap",
        constraints.Contains(phrases=("aba", "bab", "é!")),
        lambda text: all(phrase in text for phrase in ("aba", "bab", "é!")),
    ),
    Entry(
        "forbidden words",
        constraints.Words(forbid=("a", "the", "cat"), ignore_case=True),
        lambda text: not {"a", "the", "cat"} & {word.lower() for word in words_of(text)},
    ),
    Entry(
        "allowed words",
        constraints.Words(allow=("the", "moon", "rose", "x1")),
        lambda text: set(words_of(text)) <= {"the", "moon", "rose", "x1"},
    ),
]

POOL = [
    *(Entry(f"regex {p!r}", constraints.Regex(pattern=p), matches(p)) for p in PATTERNS),
    *(
        Entry(f"schema {json.dumps(s)[:50]}", constraints.JsonSchema.of(s), valid(s), 40 if "uuid" in str(s) else 22)
        for s in SCHEMAS
    ),
    *OTHERS,
]
