"""The application: paths to endpoints, failures to answers, and the description of both (OpenAPI)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any, NotRequired, final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from typing_extensions import TypedDict

from kvcache import wire_ollama, wire_openai
from kvcache.errors import KVCacheError
from kvcache.server.answers import TimeIsOver, json_response
from kvcache.server.engine_thread import Unavailable
from kvcache.server.errors import Trouble, error_response, nowhere, trouble_of
from kvcache.server.guard import Guard
from kvcache.server.instruments import Instruments
from kvcache.server.ollama import Ollama
from kvcache.server.openai import OpenAI
from kvcache.server.openapi import Operation, described
from kvcache.server.shared import Shared

__all__ = ["application"]

_TROUBLES = (Trouble, TimeIsOver, Unavailable, KVCacheError, ValueError, TypeError, HTTPException)

Lifespan = Callable[[Any], AbstractAsyncContextManager[None]]


@final
@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A path, who answers, and how it is described."""

    operation: Operation
    answer: Callable[[HttpRequest], Awaitable[Any]]


class _Health(TypedDict):
    """status: "ok", or the code of what is wrong, which the report tells."""

    status: str
    report: NotRequired[str]


@final
class _Pages:
    """What belongs to neither wire."""

    def __init__(self, shared: Shared, instruments: Instruments, description: dict[str, Any]) -> None:
        self._shared = shared
        self._instruments = instruments
        self._description = description

    async def root(self, http: HttpRequest) -> Response:
        """Where Ollama's clients look whether somebody is there."""
        return PlainTextResponse(f"kvcache is running: {self._shared.model.name}")

    async def openapi(self, http: HttpRequest) -> Response:
        """The description."""
        return json_response(self._description)

    async def health(self, http: HttpRequest) -> Response:
        """200 while requests are accepted, 503 with the reason when they are not."""
        if (reason := self._shared.engine.unavailable) is not None:
            return json_response({"status": reason.code, "report": str(reason)}, 503)
        return json_response({"status": "ok"})

    async def metrics(self, http: HttpRequest) -> Response:
        """What Prometheus reads; after a failure what is left of it."""
        engine, found = self._shared.engine, None
        if engine.unavailable is None:
            with suppress(Unavailable):
                found = await engine.metrics()
        text = self._instruments.exposition(found, engine.num_open, engine.unavailable is None)
        return Response(text, media_type="text/plain; version=0.0.4")


def application(
    shared: Shared, instruments: Instruments, version: str, lifespan: Lifespan, num_connections: Callable[[], int]
) -> Starlette:
    """The ASGI application. `lifespan` starts and stops what `shared` holds; num_connections: that are open now."""
    description: dict[str, Any] = {}
    endpoints = [*_page_endpoints(_Pages(shared, instruments, description)), *_endpoints(shared, version)]
    description.update(described([each.operation for each in endpoints], shared.model, version))

    async def failed(http: HttpRequest, error: Exception) -> Response:
        trouble = nowhere(error, http) if isinstance(error, HTTPException) else trouble_of(error)
        return error_response(trouble, http.url.path)

    app = Starlette(
        routes=[Route(each.operation.path, each.answer, methods=[each.operation.method]) for each in endpoints],
        middleware=[
            Middleware(Guard, settings=shared.settings, instruments=instruments, num_connections=num_connections)
        ],
        exception_handlers=dict.fromkeys((*_TROUBLES, Exception), failed),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _page_endpoints(pages: _Pages) -> Sequence[_Endpoint]:
    def get(path: str, answer: Any, reply: Any, media: str = "application/json", error: Any = None) -> _Endpoint:
        return _Endpoint(Operation("GET", path, None, reply, error or wire_openai.ErrorReply, media=media), answer)

    return [
        get("/", pages.root, str, "text/plain"),
        get("/health", pages.health, _Health, error=_Health | wire_openai.ErrorReply),
        get("/metrics", pages.metrics, str, "text/plain"),
        get("/openapi.json", pages.openapi, dict[str, Any]),
    ]


def _endpoints(shared: Shared, version: str) -> Sequence[_Endpoint]:
    openai, ollama = OpenAI(shared), Ollama(shared, version)
    sse, lines = "text/event-stream", "application/x-ndjson"
    failure, ollama_failure = wire_openai.ErrorReply, wire_ollama.ErrorReply

    def post(path: str, answer: Any, body: type, reply: Any, error: Any, stream: str | None = None) -> _Endpoint:
        return _Endpoint(Operation("POST", path, body, reply, error, stream), answer)

    def get(path: str, answer: Any, reply: Any, error: Any) -> _Endpoint:
        return _Endpoint(Operation("GET", path, None, reply, error), answer)

    return [
        post(
            "/v1/completions",
            openai.completions,
            wire_openai.CompletionBody,
            wire_openai.CompletionReply,
            failure,
            sse,
        ),
        post("/v1/chat/completions", openai.chat, wire_openai.ChatBody, wire_openai.ChatReply, failure, sse),
        get("/v1/models", openai.models, wire_openai.ModelList, failure),
        get("/v1/models/{name:path}", openai.model, wire_openai.ModelObject, failure),
        post(
            "/api/generate",
            ollama.generate,
            wire_ollama.GenerateBody,
            wire_ollama.GenerateReply,
            ollama_failure,
            lines,
        ),
        post("/api/chat", ollama.chat, wire_ollama.OllamaChatBody, wire_ollama.ChatReply, ollama_failure, lines),
        get("/api/tags", ollama.tags, wire_ollama.TagList, ollama_failure),
        get("/api/ps", ollama.processes, wire_ollama.ProcessList, ollama_failure),
        post("/api/show", ollama.show, wire_ollama.ShowBody, wire_ollama.ShowReply, ollama_failure),
        get("/api/version", ollama.version, wire_ollama.VersionReply, ollama_failure),
    ]
