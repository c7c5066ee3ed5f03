"""The app with all routes: OpenAI's and our own, the page, the metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

import unmask
from unmask.errors import UnmaskError
from unmask.model import Model
from unmask.server import responses, routes_native, schemas
from unmask.server.access import PARSED, Access, AccessMiddleware
from unmask.server.docs import STREAM, TRACE_EVENTS, docs_page, openapi
from unmask.server.errors import HTTPError, from_error, from_validation, internal
from unmask.server.jobs import Emit, Jobs, disconnected
from unmask.server.limits import MAX_TEXTS, Limits
from unmask.server.metrics import MEDIA_TYPE
from unmask.server.routes_openai import complete
from unmask.server.served_model import Served

PAGE = Path(__file__).parent / "page"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

STREAMS = (
    "With stream, server-sent events: pieces of the answer, at the end [DONE]. A text is sent from its beginning as "
    "far as no mask stands before it. For streams take the sampler block or left_to_right: a random order, as the "
    "default one, settles late, and most of the text comes at the end."
)


def make_app(
    model: Model,
    *,
    name: str = "unmask",
    access: Access = Access(),
    limits: Limits = Limits(),
    max_batch: int = 64,
) -> AccessMiddleware:
    """The ASGI app for a model. It owns an engine, which stops with the app's lifespan.

    >>> app = make_app(unmask.load("runs/demo"))  # doctest: +SKIP
    """
    jobs = Jobs(model, name, limits, max_batch=max_batch)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            jobs.close()

    app = FastAPI(
        title="unmask",
        description="Texts written, filled, edited and scored by a masked diffusion language model.",
        version=unmask.__version__,
        docs_url=None,
        openapi_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    app.router.route_class = ParsedRoute
    app.add_exception_handler(HTTPError, _error_response)
    app.add_exception_handler(UnmaskError, _error_response)
    app.add_exception_handler(RequestValidationError, _error_response)
    app.add_exception_handler(HTTPException, _error_response)
    app.add_exception_handler(Exception, _error_response)  # re-raised after the answer, so that the server logs it
    _openai_routes(app, jobs)
    _native_routes(app, jobs)
    _other_routes(app, jobs)
    app.openapi = partial(openapi, app)  # type: ignore[method-assign]
    return AccessMiddleware(app, jobs=jobs, access=access)


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        error = from_validation(error.errors(), schemas.field_names())
    elif isinstance(error, UnmaskError):
        error = from_error(error)
    elif isinstance(error, HTTPException):
        sentences = {404: "there is no such route", 405: "this route does not take that method"}
        message = sentences.get(error.status_code, "refused")
        error = HTTPError(error.status_code, message, "not_found", dict(error.headers or {}))
    elif not isinstance(error, HTTPError):
        error = internal()
    return JSONResponse(error.body, error.status, error.headers)


class ParsedRequest(Request):
    """A request whose body the middleware has parsed."""

    async def json(self) -> Any:
        return self.scope.pop(PARSED)


class ParsedRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(ParsedRequest(request.scope, request.receive))

        return handle_parsed


class EventStream(StreamingResponse):
    media_type = "text/event-stream"


def _openai_routes(app: FastAPI, jobs: Jobs) -> None:
    card = {"id": jobs.name, "object": "model", "created": 0, "owned_by": "unmask", "window": jobs.model.length}

    def check_name(asked: str | None) -> None:
        if asked not in (None, jobs.name):
            raise HTTPError(404, "no such model here: see /v1/models", "model_not_found")

    @app.get("/v1/models", tags=["OpenAI"], summary="The model that is served", response_model=responses.ModelList)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get(
        "/v1/models/{name:path}", tags=["OpenAI"], summary="One model, by its name", response_model=responses.ModelCard
    )
    async def model(name: str) -> Response:
        check_name(name)
        return JSONResponse(card)

    @app.post(
        "/v1/completions",
        tags=["OpenAI"],
        summary="Write after a prompt, or between prompt and suffix",
        description=STREAMS,
        response_model=responses.CompletionAnswer,
        responses={200: {"content": STREAM}},
    )
    async def completions(asked: schemas.Completion, request: Request) -> Response:
        check_name(asked.model)
        asked.model = jobs.name
        if not asked.stream:
            return await jobs.run(request, lambda served: JSONResponse(complete(served, asked)))

        def job(served: Served, emit: Emit) -> str:
            return _chunk(complete(served, asked, lambda chunk: emit(_chunk(chunk)))) + "data: [DONE]\n\n"

        return await _sse(request, jobs.stream(request, job))

    @app.post(
        "/v1/chat/completions",
        tags=["OpenAI"],
        summary="Refused: no model here has a chat template",
        response_class=JSONResponse,
    )
    async def chat(asked: schemas.Chat) -> Response:
        check_name(asked.model)
        raise HTTPError(400, "this model has no chat template: use /v1/completions", "no_chat_template")


def _native_routes(app: FastAPI, jobs: Jobs) -> None:
    post = partial(app.post, tags=["unmask"])

    @post("/fill", summary="Write every gap of a text", response_model=responses.FillAnswer)
    async def fill(asked: schemas.Fill, request: Request) -> Response:
        return await jobs.run(request, lambda served: JSONResponse(routes_native.fill(served, asked)))

    @post("/edit", summary="Write a span of a text anew", response_model=responses.EditsAnswer)
    async def edit(asked: schemas.EditSpan, request: Request) -> Response:
        return await jobs.run(request, lambda served: JSONResponse(routes_native.edit(served, asked)))

    @post("/score", summary="The bound of texts, token by token", response_model=responses.ScoreAnswer)
    async def score(asked: schemas.Score, request: Request) -> Response:
        return await jobs.run(request, lambda served: JSONResponse(routes_native.score(served, asked)))

    @post("/fit", summary="Can a constraint hold in a gap?", response_model=responses.FitAnswer)
    async def fit(asked: schemas.Fit, request: Request) -> Response:
        return await jobs.run(request, lambda served: JSONResponse(routes_native.fit(served, asked)))

    @post("/tokenize", summary="A text's tokens, and words turned into gaps", response_model=responses.TokenizeAnswer)
    async def tokenize(asked: schemas.Tokenize, request: Request) -> Response:
        return await jobs.run(request, lambda served: JSONResponse(routes_native.tokenize(served, asked)))

    @post(
        "/trace",
        summary="As fill or generate, step by step (server-sent events)",
        response_class=EventStream,
        openapi_extra={"x-events": TRACE_EVENTS},
    )
    async def trace(asked: schemas.Trace, request: Request) -> Response:
        def job(served: Served, emit: Emit) -> str:
            return _event("end", routes_native.trace(served, asked, lambda kind, event: emit(_event(kind, event))))

        return await _sse(request, jobs.stream(request, job))


def _other_routes(app: FastAPI, jobs: Jobs) -> None:
    @app.get("/health", tags=["server"], summary="Is it there?", response_model=responses.Health)
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", tags=["server"], summary="Prometheus text", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return PlainTextResponse(jobs.metrics.text(), media_type=MEDIA_TYPE)

    samplers = cache(jobs.model.sampler_names)  # inspecting every sampler is slow

    @app.get(
        "/info", tags=["server"], summary="Model and limits, as the page knows them", response_model=responses.Info
    )
    async def info() -> Response:
        limits = {"budget": jobs.limits.budget, "length": jobs.limits.length, "texts": MAX_TEXTS}
        tokenizer = jobs.model.tokenizer
        about = {
            "model": jobs.name,
            "parameters": jobs.model.num_parameters,
            "window": jobs.model.length,
            "vocabulary": tokenizer.num_ids,
            "mask": tokenizer.mask_id,
            "end": tokenizer.eot_id,
            "begin": len(jobs.model.begin),
            "autoregressive": jobs.model.denoiser.causal,
            "samplers": samplers(),
            "limits": limits,
            "version": unmask.__version__,
        }
        return JSONResponse(about)

    @cache  # computed once, because it would block the event loop
    def described() -> tuple[bytes, bytes]:
        return json.dumps(app.openapi()).encode(), docs_page(app.openapi()).encode()

    @app.get("/openapi.json", include_in_schema=False)
    async def schema() -> Response:
        return Response(described()[0], media_type="application/json")

    @app.get("/docs", tags=["server"], summary="These routes, as a page", response_class=HTMLResponse)
    async def docs() -> Response:
        return HTMLResponse(described()[1])

    files = {path.name: path for path in PAGE.iterdir() if path.suffix in _KINDS}

    @app.get("/", tags=["server"], summary="The page", response_class=HTMLResponse)
    async def index() -> Response:
        return HTMLResponse(files["index.html"].read_bytes())

    @app.get("/page/{name}", tags=["server"], summary="What the page is made of", response_class=Response)
    async def page(name: str) -> Response:
        if name not in files:
            raise HTTPError(404, "there is no such file", "not_found")
        return Response(files[name].read_bytes(), media_type=_KINDS[files[name].suffix])


async def _sse(request: Request, events: AsyncGenerator[str]) -> Response:
    """Server-sent events.

    The first event is awaited before the response starts, so that a refused request gets its status.
    """
    waiting, left = asyncio.ensure_future(anext(events, None)), asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({waiting, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
        if not waiting.done():
            waiting.cancel()  # this cancels the work
    try:
        first = await waiting
    except asyncio.CancelledError:
        raise HTTPError(499, "the client has gone", "cancelled") from None  # this answer is never read

    async def lines() -> AsyncIterator[str]:
        try:
            if first is not None:
                yield first
            async for event in events:
                yield event
        except HTTPError as e:  # the response has started, so the error is its last event
            yield _event("error", e.body)
        finally:
            await events.aclose()

    return EventStream(lines(), headers={"x-accel-buffering": "no"})


def _event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


def _chunk(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n" if chunk else ""
