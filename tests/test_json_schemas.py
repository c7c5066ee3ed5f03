"""Schemas: all that is held is valid by another judge, and what is no schema is refused in one sentence."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_automata import accepts
from unmask.config import from_dict
from unmask.constraints import Constraint, JsonSchema
from unmask.constraints._dfa import Dfa
from unmask.constraints._numbers import integers, numbers
from unmask.constraints._schema_check import FORMATS, NOTES, ONE_OF, SUPPORTED
from unmask.constraints.json_schema import schema_dfa
from unmask.constraints.regex import regex_dfa
from unmask.errors import UsageError


def walks(dfa: Dfa, num: int, most: int) -> Iterator[str]:
    """Texts at random: some bytes in any direction, then the shortest way to an end."""
    g = random.Random(0)
    far_S = np.where(dfa.accept_S, 0, len(dfa.accept_S) + 1)
    for _ in far_S:
        far_S = np.minimum(far_S, np.where(dfa.next_SB < 0, len(far_S) + 1, far_S[dfa.next_SB]).min(axis=1) + 1)
    for _ in range(num):
        state, spelled, free = 0, [], g.randrange(most)
        while (ways := np.flatnonzero(dfa.next_SB[state] >= 0)).size and not (
            dfa.accept_S[state] and len(spelled) >= free
        ):
            if len(spelled) >= free:
                ways = ways[far_S[dfa.next_SB[state, ways]] < far_S[state]]
            spelled.append(int(g.choice(ways)))
            state = int(dfa.next_SB[state, spelled[-1]])
        yield bytes(spelled).decode()


HELD: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": ["string", "null"]}, ["null", '"a"'], ["1"]),
    ({"type": ["string", "null"], "maxLength": 2}, ["null", '"ab"'], ['"abc"']),
    ({"type": ["integer", "null"], "minimum": 3}, ["null", "3", "12345"], ["2", "-4"]),
    (
        {"type": ["object", "null"], "properties": {"type": {"type": "boolean"}}},
        ["null", '{"type":true}'],
        ['{"type":1}'],
    ),
    ({"enum": [1, "a"], "type": ["integer", "string"]}, ["1", '"a"'], ["2"]),
    ({"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 12}, ["-2", "0", "11"], ["-3", "12", "-0"]),
    ({"type": "integer", "exclusiveMinimum": 2.5}, ["3", "100"], ["2"]),
    ({"type": "integer", "minimum": 5, "exclusiveMinimum": 5}, ["6"], ["5"]),
    ({"type": "integer", "minimum": 0, "maximum": 1000000}, ["0", "999999", "1000000"], ["1000001"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.1", "3", "20.50"], ["0", "-1", "0.00", "-0.1"]),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25}, ["-1.5", "2.249", "0"], ["-1.51", "2.25"]),
    ({"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True}, ["[]", '["b", 1]'], ["[1, 1]"]),
    (
        {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2, "maxItems": 2},
        ["[3,1]"],
        ["[1]", "[1,1]", "[1,2,3]"],
    ),
    ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, ["[true,false]"], ["[true,true]"]),
    ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": False}, ["[true,true]"], ["[1]"]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 2.0, "maxItems": 2}, ["[null,null]"], ["[null]"]),
    ({"type": "string", "pattern": "a|b"}, ['"a"', '"b"'], ['"a', 'b"']),
    ({"type": "string", "pattern": "(?i)(^ab|c)$"}, ['"AB"', '"c"'], ['"xc"']),
    ({"type": "array", "items": {"type": "string", "pattern": "(?P<x>x)+"}, "minItems": 2}, ['["x","xx"]'], ['["x"]']),
    ({"enum": ["\U000f0000", "b"]}, ['"\U000f0000"', '"b"'], ['"a"']),
    (
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2}, "b": {"const": "\U000f0000"}}},
        ['{"a": 2, "b": "\U000f0000"}'],
        ['{"a": 1}'],
    ),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer", "exclusiveMaximum": 3}}}, ["2", "-7"], ["3"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), HELD, ids=[json.dumps(schema)[:60] for schema, *_ in HELD])
def test_what_is_held_is_valid(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    judge = jsonschema.Draft202012Validator(schema)
    dfa = schema_dfa(json.dumps(schema))
    texts = [*walks(dfa, 40, 40), *good]
    assert [text for text in texts if not judge.is_valid(json.loads(text))] == []
    assert [text for text in good if not accepts(dfa, text)] == []
    assert [text for text in bad if accepts(dfa, text)] == []


def test_a_schema_may_be_given_as_data() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "null"}}}
    one = JsonSchema(schema=schema)
    assert one == JsonSchema.of(schema) == JsonSchema(schema=json.dumps(schema))
    assert hash(one) == hash(JsonSchema.of(schema))
    assert from_dict(Constraint, {"name": "json_schema", "schema": schema}) == one
    assert from_dict(Constraint, {"name": "json_schema", "schema": json.dumps(schema)}) == one
    for wrong in ({"const": {1, 2}}, {"const": float("nan")}):
        with pytest.raises(UsageError, match="the schema cannot be written as JSON"):
            JsonSchema(schema=wrong)


MALFORMED: list[tuple[Any, str]] = [
    ({"type": "object", "required": 5}, "schema: required needs a list of names, got 5"),
    ({"type": "object", "required": [5]}, "required needs a list of names"),
    ({"type": "object", "properties": []}, "expected an object of schemas"),
    ({"type": "object", "additionalProperties": 5}, "additionalProperties needs true, false or a schema"),
    ({"enum": 3}, "enum needs a list"),
    ({"type": 7}, "needs a type"),
    ({"type": []}, "type needs a name, or a list of different names"),
    ({"type": ["null", "null"]}, "type needs a name, or a list of different names"),
    ({"type": ["string", {}]}, "needs a type"),
    ({"type": ["string", "null"], "minimum": 3}, "minimum of string cannot be held"),
    ({"type": "array", "items": 1}, "schema.items: expected a JSON object"),
    ({"type": "array", "prefixItems": 1}, "prefixItems needs a list of schemas"),
    ({"type": "array", "minItems": -1}, "minItems needs a whole number from 0 on"),
    ({"type": "array", "uniqueItems": 1}, "uniqueItems needs true or false"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems of array is held for an enum"),
    ({"type": "array", "items": {"enum": [1, 1.0]}, "uniqueItems": True, "minItems": 2}, "uniqueItems leaves 1 item"),
    ({"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True}, "an enum of up to 8 values"),
    ({"type": "string", "minLength": "x"}, "minLength needs a whole number from 0 on"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength is more than maxLength"),
    ({"type": "string", "pattern": 7}, "pattern needs a regular expression"),
    ({"type": "string", "pattern": "a(?=b)b"}, "has look-around"),
    ({"type": "string", "format": []}, "the format [] cannot be held"),
    ({"type": "integer", "minimum": "a"}, "minimum needs a number"),
    ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum needs a number"),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "no integer meets exclusiveMinimum and"),
    ({"type": "number", "minimum": 5, "exclusiveMaximum": 5}, "no number meets minimum and exclusiveMaximum"),
    ({"type": "number", "minimum": 0.12345678901234567}, "minimum has more than 15 digits"),
    ({"$ref": 5}, "leads out of the schema"),
    ({"$defs": 5, "type": "null"}, "expected an object of schemas"),
    ({"anyOf": 5}, "anyOf needs a list of schemas"),
]


@pytest.mark.parametrize(("schema", "message"), MALFORMED, ids=[json.dumps(schema) for schema, _ in MALFORMED])
def test_what_is_no_schema_is_refused_in_one_sentence(schema: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        schema_dfa(json.dumps(schema))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema", ["{", '{"const": NaN}', '{"const": 1e999}', '{"a":' * 5000 + "1" + "}" * 5000, "5", '"x"']
)
def test_what_is_not_json_is_refused_too(schema: str) -> None:
    with pytest.raises(UsageError, match=r"not valid JSON|nested too deeply|expected a JSON object"):
        schema_dfa(schema)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.floats(-3, 3),
    st.sampled_from(["", "a", "null", "#/$defs/a", "[", "date"]),
)
WORDS = {*NOTES, *ONE_OF, *FORMATS, *SUPPORTED}.union(*SUPPORTED.values())  # of a schema's own language
KEYS = st.sampled_from([*sorted(WORDS - {"$id", "$schema"}), "a", "not"])  # of those two the judge wants to know more
VALUES = st.recursive(
    SCALARS | st.sampled_from(["string", "integer", "array", "object", "number"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly of words that belong together, with values that mostly do not."""
    kind = draw(st.sampled_from(sorted(SUPPORTED)))
    own = st.dictionaries(st.sampled_from(sorted(SUPPORTED[kind])) if SUPPORTED[kind] else KEYS, VALUES, max_size=3)
    found = {"type": kind} | draw(own) | draw(st.just({}) | st.dictionaries(KEYS, VALUES, max_size=1))
    return {key: part for key, part in found.items() if key != "type" or draw(st.integers(0, 9))}


@given(schema=schemas())
@settings(max_examples=80)
def test_no_schema_however_malformed_raises_anything_else(schema: dict[str, Any]) -> None:
    try:
        dfa = schema_dfa(json.dumps(schema))
    except UsageError as e:
        assert "\n" not in str(e)  # noqa: PT017
        return
    judge = jsonschema.Draft202012Validator(schema)
    assert all(judge.is_valid(json.loads(text)) for text in walks(dfa, 3, 20))


BOUND = st.none() | st.decimals(-200, 200, places=1, allow_nan=False)


@given(least=BOUND, most=BOUND, above=st.booleans(), below=st.booleans(), others=st.lists(BOUND, max_size=8))
def test_numbers_between_bounds(
    least: Decimal | None, most: Decimal | None, above: bool, below: bool, others: list[Decimal | None]
) -> None:
    ends = [x for x in (least, most) if x is not None]
    tried = {x + d for x in ends for d in (Decimal(0), Decimal("0.01"), Decimal("-0.01"), 1, -1)}
    tried |= {-x for x in ends} | {x for x in others if x is not None} | {Decimal(0)}
    dfa = numbers(least, most, above=above, below=below)
    pattern = integers(least, most)
    whole = None if pattern is None else regex_dfa(pattern)
    for x in tried:
        low = least is None or x > least or (x == least and not above)
        high = most is None or x < most or (x == most and not below)
        assert (dfa is not None and accepts(dfa, f"{x:f}")) == (low and high)
        if x == int(x):
            inside = (least is None or x >= least) and (most is None or x <= most)
            assert (whole is not None and accepts(whole, str(int(x)))) == inside
