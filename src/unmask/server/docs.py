"""The documentation of the routes: openapi.json, and a plain page that loads nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from unmask.server import responses

REFS = "#/components/schemas/"
# OpenAPI can only describe server-sent events as text, so the schema of each event is given beside it.
TRACE_EVENTS = {
    "start": {"$ref": f"{REFS}TraceStart"},
    "step": {"$ref": f"{REFS}TraceStep"},
    "end": {"$ref": f"{REFS}FillAnswer"},
    "error": {"$ref": f"{REFS}Error"},
}
STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
_LEAST = {"minimum": "at least {}", "exclusiveMinimum": "above {}", "minLength": "{} characters or more"}
_MOST = {"maximum": "at most {}", "maxLength": "at most {} characters", "maxItems": "at most {} of them"}


def openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI schema, with our error bodies and events."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        content = {"application/json": {"schema": {"$ref": f"{REFS}Error"}}}
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        more = [(model, "serialization") for model in (responses.Error, responses.TraceStart, responses.TraceStep)]
        schemas |= models_json_schema(more, ref_template=REFS + "{model}")[1]["$defs"]  # type: ignore[arg-type]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for methods in schema["paths"].values():
            for about in methods.values():
                about["responses"].pop("422", None)
                about["responses"]["4XX"] = {"description": "Refused; the sentence says why.", "content": content}
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
    return app.openapi_schema


def docs_page(schema: dict[str, Any]) -> str:
    """The routes as a page: the fields of each request, an example, the answer.

    >>> "Routes" in docs_page({"paths": {}, "components": {"schemas": {}}})
    True
    """
    shelf = schema["components"]["schemas"]
    routes = [(path, method, about) for path, methods in schema["paths"].items() for method, about in methods.items()]
    rows = "".join(
        f'<tr><td><a href="#{_anchor(path)}"><code>{method.upper()} {escape(path)}</code></a></td>'
        f"<td>{escape(about['summary'])}</td></tr>"
        for path, method, about in routes
    )
    parts = "".join(_route(path, method, about, shelf) for path, method, about in routes)
    shapes = "".join(
        f'<section id="{escape(name)}"><h2>{escape(name)}</h2>{_shape(shelf[name])}</section>'
        for name in _inner(routes, shelf)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>unmask: routes</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="/page/icon.svg">'
        '<link rel="stylesheet" href="/page/style.css"><link rel="stylesheet" href="/page/docs.css"></head>'
        '<body class="docs"><main><h1>Routes</h1><p>All take and give JSON. The same for programs: '
        '<a href="/openapi.json">openapi.json</a>. To try the model: <a href="/">the page</a>.</p>'
        f"<table><tbody>{rows}</tbody></table>{parts}<h1>Parts of requests and answers</h1>{shapes}"
        "</main></body></html>"
    )


def _route(path: str, method: str, about: dict[str, Any], shelf: dict[str, Any]) -> str:
    parts = [f'<section id="{_anchor(path)}"><h2><code>{method.upper()} {escape(path)}</code></h2>']
    parts.append(f"<p>{escape(about['summary'])}.</p>")
    if "description" in about:
        parts.append(f"<p>{escape(about['description'])}</p>")
    if "requestBody" in about:
        asked = _resolved(about["requestBody"]["content"]["application/json"]["schema"], shelf)
        parts += ["<h3>Takes</h3>", _shape(asked)]
        for example in asked.get("examples", ()):
            parts += ["<h3>Example</h3>", f"<pre>{escape(_curl(path, example))}</pre>"]
    answered = about["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema")
    if answered:
        parts += ["<h3>Answers</h3>", _shape(_resolved(answered, shelf))]
    if "x-events" in about:
        events = ", ".join(f"<code>{escape(kind)}</code>: {_kind(inner)}" for kind, inner in about["x-events"].items())
        parts += ["<h3>Answers</h3>", f"<p>Server-sent events. {events}</p>"]
    return "".join([*parts, "</section>"])


def _curl(path: str, example: Any) -> str:
    body = json.dumps(example).replace("'", "'\\''")
    return f"curl localhost:8000{path} -H content-type:application/json -d '{body}'"


def _shape(schema: dict[str, Any]) -> str:
    """A model's fields as a table."""
    text = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    needed = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{_kind(field)}</td>"
        f"<td>{escape(_about(field, needed=name in needed))}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    )
    head = "<thead><tr><th>field</th><th>is</th><th>means</th></tr></thead>"
    return f"{text}<table>{head}<tbody>{rows}</tbody></table>" if rows else text


def _kind(schema: dict[str, Any]) -> str:
    """The type of a value, with links to parts that have fields of their own.

    >>> _kind({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]})
    'list of integer or null'
    """
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(REFS))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_kind, schema["anyOf"])))
    if "const" in schema or "enum" in schema:
        return " or ".join(escape(json.dumps(value)) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}" if "items" in schema else "list"
    return escape(str(schema.get("type", "anything")))


def _about(field: dict[str, Any], *, needed: bool) -> str:
    """The meaning of a field, its limits and its default."""
    notes = [field["description"]] if "description" in field else []
    for one in (field, *field.get("anyOf", ())):
        limits = [(text, one[key]) for key, text in (_LEAST | _MOST).items() if key in one]
        # A seed's limits are not informative.
        notes += [text.format(f"{limit:.15g}") for text, limit in limits if abs(limit) < 1 << 53]
    if field.get("default") not in (None, "", [], {}):
        notes.append(f"{json.dumps(field['default'])} if left out")
    if "examples" in field:
        notes.append(f"as {json.dumps(field['examples'][0])}")
    return "; ".join([*(["needed"] if needed and "default" not in field else []), *notes])


def _inner(routes: list[tuple[str, str, dict[str, Any]]], shelf: dict[str, Any]) -> list[str]:
    """The parts that a printed table links to, in order of appearance."""
    names: dict[str, None] = {}
    waiting: list[Any] = []
    for _, _, about in routes:
        waiting.append(about.get("x-events", {}))
        content = [about.get("requestBody", {}), *about["responses"].values()]
        waiting += [shelf[name] for name in _refs(content) if name != "Error"]
    waiting.append({"$ref": f"{REFS}Error"})
    while waiting:
        for name in _refs(waiting.pop(0)):
            if name in shelf and name not in names:
                names[name] = None
                waiting.append(shelf[name])
    return [*names]


def _refs(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        if isinstance(data.get("$ref"), str):
            yield data["$ref"].removeprefix(REFS)
        for inner in data.values():
            yield from _refs(inner)
    elif isinstance(data, list | tuple):
        for inner in data:
            yield from _refs(inner)


def _resolved(schema: dict[str, Any], shelf: dict[str, Any]) -> dict[str, Any]:
    resolved: dict[str, Any] = shelf[schema["$ref"].removeprefix(REFS)] if "$ref" in schema else schema
    return resolved


def _anchor(path: str) -> str:
    return escape(path.strip("/").replace("/", "-").replace("{", "").replace("}", "")) or "index"
