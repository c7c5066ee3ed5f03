"""The routes, put together: OpenAI's and our own, the page, the metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

import unmask
from unmask.errors import UnmaskError
from unmask.model import Model
from unmask.server import native, schemas
from unmask.server.completions import complete
from unmask.server.desk import Desk, Emit, gone
from unmask.server.doors import Doors, Gate
from unmask.server.limits import MAX_TEXTS, Limits
from unmask.server.refusals import Refused, from_error, from_validation, internal, our_names
from unmask.server.served import Served

PAGE = Path(__file__).parent / "page"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def make_app(
    model: Model,
    *,
    name: str = "unmask",
    doors: Doors = Doors(),
    limits: Limits = Limits(),
    max_batch: int = 64,
) -> Gate:
    """The ASGI app around a model. It owns an engine, which ends with the app's lifespan.

    >>> app = make_app(unmask.load("runs/demo"))  # doctest: +SKIP
    """
    desk = Desk(model, name, limits, max_batch=max_batch)
    our_names()  # looked up now, not while the first is refused

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            desk.close()

    app = FastAPI(
        title="unmask",
        version=unmask.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.state.desk = desk
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(UnmaskError, _refused)
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _refused)  # which is raised again behind the answer, for the server to tell of
    _openai_routes(app, desk)
    _native_routes(app, desk)
    _other_routes(app, desk)
    app.openapi = partial(_schema, app)  # type: ignore[method-assign]
    return Gate(app, desk=desk, doors=doors)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        error = from_validation(error.errors(), schemas.field_names())
    elif isinstance(error, UnmaskError):
        error = from_error(error, request.scope.get("unmask.body", b""))
    elif isinstance(error, HTTPException):
        said = {404: "there is no such route", 405: "this route does not take that method"}
        error = Refused(
            error.status_code, said.get(error.status_code, "refused"), "not_found", dict(error.headers or {})
        )
    elif not isinstance(error, Refused):
        error = internal()
    return JSONResponse(error.body, error.status, error.headers)


def _openai_routes(app: FastAPI, desk: Desk) -> None:
    card = {"id": desk.name, "object": "model", "created": 0, "owned_by": "unmask", "window": desk.model.length}

    def check_name(given: str | None) -> None:
        if given not in (None, desk.name):
            raise Refused(404, "no such model here: see /v1/models", "model_not_found")

    @app.get("/v1/models", tags=["OpenAI"], summary="The model that is served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}", tags=["OpenAI"], summary="One model, by its name")
    async def model(name: str) -> dict[str, Any]:
        check_name(name)
        return card

    @app.post("/v1/completions", tags=["OpenAI"], summary="Write behind a prompt, or between prompt and suffix")
    async def completions(asked: schemas.Completion, request: Request) -> Response:
        check_name(asked.model)
        asked.model = desk.name
        if not asked.stream:
            return await desk.work(request, lambda served: JSONResponse(complete(served, asked)))

        def job(served: Served, emit: Emit) -> str:
            return _chunk(complete(served, asked, lambda chunk: emit(_chunk(chunk)))) + "data: [DONE]\n\n"

        return await _sse(request, desk.stream(request, job))

    @app.post("/v1/chat/completions", tags=["OpenAI"], summary="Only for models with a chat template")
    async def chat(asked: schemas.Chat) -> Response:
        check_name(asked.model)
        raise Refused(400, "this model has no chat template: use /v1/completions", "no_chat_template")


def _native_routes(app: FastAPI, desk: Desk) -> None:
    @app.post("/fill", tags=["unmask"], summary="Write every gap of a text")
    async def fill(asked: schemas.Fill, request: Request) -> Any:
        return await desk.work(request, lambda served: JSONResponse(native.fill(served, asked)))

    @app.post("/edit", tags=["unmask"], summary="Write a span of a text anew")
    async def edit(asked: schemas.EditSpan, request: Request) -> Any:
        return await desk.work(request, lambda served: JSONResponse(native.edit(served, asked)))

    @app.post("/score", tags=["unmask"], summary="The bound of texts, token by token")
    async def score(asked: schemas.Score, request: Request) -> Any:
        return await desk.work(request, lambda served: JSONResponse(native.score(served, asked)))

    @app.post("/fit", tags=["unmask"], summary="Can a constraint hold in a gap?")
    async def fit(asked: schemas.Fit, request: Request) -> Any:
        return await desk.work(request, lambda served: JSONResponse(native.fit(served, asked)))

    @app.post("/tokenize", tags=["unmask"], summary="A text's tokens, and words turned into gaps")
    async def tokenize(asked: schemas.Tokenize, request: Request) -> Any:
        return await desk.work(request, lambda served: JSONResponse(native.tokenize(served, asked)))

    @app.post("/trace", tags=["unmask"], summary="As fill or generate, step by step (server-sent events)")
    async def trace(asked: schemas.Trace, request: Request) -> Response:
        def job(served: Served, emit: Emit) -> str:
            return _event("end", native.trace(served, asked, lambda kind, event: emit(_event(kind, event))))

        return await _sse(request, desk.stream(request, job))


def _other_routes(app: FastAPI, desk: Desk) -> None:
    @app.get("/health", tags=["server"], summary="Is it there?")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", tags=["server"], summary="Prometheus text", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return PlainTextResponse(desk.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/info", tags=["server"], summary="What the page needs to know of model and limits")
    async def info() -> dict[str, Any]:
        from unmask.samplers import room

        limits = {"budget": desk.limits.budget, "length": desk.limits.length, "texts": MAX_TEXTS}
        tokenizer = desk.model.tokenizer
        return {
            "model": desk.name,
            "parameters": desk.model.num_parameters,
            "window": desk.model.length,
            "vocabulary": tokenizer.num_ids,
            "mask": tokenizer.mask_id,
            "end": tokenizer.eot_id,
            "begin": len(desk.model.begin),
            "autoregressive": desk.model.denoiser.causal,
            "samplers": room.names(),
            "limits": limits,
            "version": unmask.__version__,
        }

    @app.get("/docs", tags=["server"], summary="These routes, as a page", response_class=HTMLResponse)
    async def docs() -> Response:
        return HTMLResponse(_docs(app.openapi()))

    files = {path.name: path for path in PAGE.iterdir() if path.suffix in _KINDS}

    @app.get("/", tags=["server"], summary="The page", response_class=HTMLResponse)
    async def index() -> Response:
        return HTMLResponse(files["index.html"].read_bytes())

    @app.get("/page/{name}", tags=["server"], summary="What the page is made of")
    async def page(name: str) -> Response:
        if name not in files:
            raise Refused(404, "there is no such file", "not_found")
        return Response(files[name].read_bytes(), media_type=_KINDS[files[name].suffix])


async def _sse(request: Request, events: AsyncGenerator[str]) -> Response:
    """Server-sent events. The first is awaited before the answer begins, so that what is refused has its status."""
    waiting, left = asyncio.ensure_future(anext(events, None)), asyncio.ensure_future(gone(request))
    try:
        await asyncio.wait({waiting, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
        if not waiting.done():
            waiting.cancel()  # which ends the work
    try:
        first = await waiting
    except asyncio.CancelledError:
        raise Refused(499, "the client has gone", "cancelled") from None  # nobody reads it

    async def lines() -> AsyncIterator[str]:
        try:
            if first is not None:
                yield first
            async for event in events:
                yield event
        except Refused as e:  # the answer has begun: the error is its last event
            yield _event("error", e.body)
        finally:
            await events.aclose()

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


def _event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


def _chunk(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n" if chunk else ""


def _schema(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI schema, with the errors as we send them."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        error = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        shelf = found.setdefault("components", {}).setdefault("schemas", {})
        shelf["Error"] = error
        for name in ("HTTPValidationError", "ValidationError"):
            shelf.pop(name, None)
        for methods in found["paths"].values():
            for about in methods.values():
                about["responses"].pop("422", None)
                about["responses"]["4XX"] = {"description": "Refused; the sentence says why.", "content": content}
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = found
    return app.openapi_schema


def _docs(schema: dict[str, Any]) -> str:
    """The routes as a plain page: nothing is loaded from elsewhere."""
    rows = []
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            rows.append(f"<tr><td><code>{method.upper()} {path}</code></td><td>{about['summary']}</td></tr>")
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>unmask: routes</title>'
    link = '<link rel="icon" href="/page/icon.svg"><link rel="stylesheet" href="/page/style.css"><main><h1>Routes</h1>'
    tail = '<p>Every field is described in <a href="/openapi.json">openapi.json</a>.</p></main></html>'
    return f"{head}{link}<table>{''.join(rows)}</table>{tail}"
