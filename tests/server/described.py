"""Answers held to openapi.json: every field that is sent is described, and is what it is said to be."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

_made: dict[tuple[int, str], jsonschema.protocols.Validator] = {}


def fault(schema: dict[str, Any], part: dict[str, Any], data: Any) -> str | None:
    """How data is not what this part of the schema says."""
    key = (id(schema), json.dumps(part))
    if key not in _made:
        _made[key] = jsonschema.Draft202012Validator({**part, "components": schema["components"]})
    found = next(iter(_made[key].iter_errors(data)), None)
    return None if found is None else f"{list(found.absolute_path)}: {found.message[:300]}"


def wrong_answer(schema: dict[str, Any], path: str, status: int, body: bytes) -> str | None:
    """How an answer to a POST is not what the schema says; None: it is."""
    about = schema["paths"][path]["post"]
    if status >= 400:
        return fault(schema, {"$ref": "#/components/schemas/Error"}, json.loads(body))
    if not body.startswith((b"data:", b"event:")):
        return fault(schema, about["responses"]["200"]["content"]["application/json"]["schema"], json.loads(body))
    for kind, event in events(body):
        part = about["x-events"][kind] if "x-events" in about else {"$ref": "#/components/schemas/CompletionAnswer"}
        if found := fault(schema, part, event):
            return f"{kind}: {found}"
    return None


def events(body: bytes) -> list[tuple[str, Any]]:
    """The kind and the data of each server-sent event."""
    found = []
    for lines in filter(None, body.decode().split("\n\n")):
        *kind, data = lines.split("\n")
        if data != "data: [DONE]":
            found.append((kind[0].removeprefix("event: ") if kind else "", json.loads(data.removeprefix("data: "))))
    return found
