"""Ollama's endpoints: what their bodies ask of the engine, and its events on the way back."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvcache import wire_ollama as wire
from kvcache.request import Request, Token
from kvcache.server.answers import GONE, JsonLines, encoded, json_response, until_gone
from kvcache.server.errors import Trouble, ollama_error, trouble_of
from kvcache.server.shared import Shared

__all__ = ["Ollama"]

_NEVER = datetime(2318, 1, 1, tzinfo=UTC)
"""When the model leaves memory, for clients that want a date."""


@dataclass(frozen=True, slots=True)
class _Said:
    """A message that `/api/generate` implies."""

    role: str
    text: str


@final
class Ollama:
    """`/api/generate`, `/api/chat`, `/api/tags`, `/api/show`, `/api/ps`, `/api/version`."""

    def __init__(self, shared: Shared, version: str) -> None:
        self._shared = shared
        self._version = version

    async def version(self, http: HttpRequest) -> Response:
        """GET `/api/version`."""
        return json_response({"version": self._version})

    async def tags(self, http: HttpRequest) -> Response:
        """GET `/api/tags`."""
        model, started = self._shared.model, self._shared.started
        return json_response(wire.tag_list(model.name, model.num_bytes, model.digest, self._details(), started))

    async def processes(self, http: HttpRequest) -> Response:
        """GET `/api/ps`."""
        model = self._shared.model
        return json_response(
            wire.process_list(model.name, model.num_bytes, model.digest, self._details(), model.capacity or 0, _NEVER)
        )

    async def show(self, http: HttpRequest) -> Response:
        """POST `/api/show`."""
        self._check_model(wire.parse_show(await http.body()))
        template = self._shared.prompts.template
        shown: wire.ShowReply = {
            "modelfile": f"FROM {self._shared.model.name}\n",
            "parameters": "",
            "template": template,
            "details": self._details(),
            "model_info": dict(self._shared.model.info),
            "capabilities": ["completion"],
            "modified_at": wire.timestamp(self._shared.started),
        }
        return json_response(shown)

    async def generate(self, http: HttpRequest) -> Any:
        """POST `/api/generate`."""
        body = wire.parse_generate(await http.body())
        self._check_model(body.model)
        if not body.prompt and not body.context:
            return self._loaded(body)
        prompts, prompt = self._shared.prompts, body.prompt or ""
        before = await prompts.of_ids(body.context, "context") if body.context else []
        if body.raw or not prompts.template or not prompt:
            text = prompt if body.raw else (body.system or "") + prompt
            ids = await prompts.of_text(text, is_whole=not before) if text else []
        else:
            said = [_Said("system", body.system)] if body.system else []
            ids = await prompts.of_chat([*said, _Said("user", prompt)], "prompt", is_whole=not before)
        return await self._answer(http, body, await prompts.of_ids(before + ids), returns_context=not body.raw)

    async def chat(self, http: HttpRequest) -> Any:
        """POST `/api/chat`."""
        body = wire.parse_chat(await http.body())
        self._check_model(body.model)
        if not body.messages:
            return self._loaded(body)
        ids = await self._shared.prompts.of_chat(body.messages, continues=True)
        return await self._answer(http, body, ids, returns_context=False)

    def _loaded(self, body: wire.GenerateBody | wire.OllamaChatBody) -> Response:
        is_chat, name = isinstance(body, wire.OllamaChatBody), self._shared.model.name
        return json_response(wire.loaded_reply(is_chat, name, self._shared.now(), unloads=body.unloads))

    def _check_model(self, name: str) -> None:
        if not self._shared.model.is_called(name):
            raise Trouble(
                404,
                f"model {name[:100]!r} not found; this server has {self._shared.model.name!r}",
                "invalid_request_error",
                code="model_not_found",
            )

    def _details(self) -> wire.ModelDetails:
        model = self._shared.model
        return {
            "parent_model": "",
            "format": "transformers",
            "family": model.family,
            "families": [model.family],
            "parameter_size": model.parameter_size,
            "quantization_level": model.dtype,
        }

    async def _answer(
        self, http: HttpRequest, body: wire.GenerateBody | wire.OllamaChatBody, ids: list[int], *, returns_context: bool
    ) -> Any:
        request = Request(f"ollama-{uuid.uuid4().hex}", ids, body.params(self._shared.prompts.room(ids)))
        is_chat = isinstance(body, wire.OllamaChatBody)
        context = ids if returns_context else None
        seconds = self._shared.settings.request_seconds
        if body.stream is not False:  # null is the default, which is to stream
            return JsonLines(
                self._lines(request, is_chat, context),
                "application/x-ndjson",
                lambda error: encoded(ollama_error(trouble_of(error))) + b"\n",
                seconds,
            )
        completions = await until_gone(http.receive, self._shared.collected([request]), seconds)
        if completions is None:
            return Response(status_code=GONE)
        name, now = self._shared.model.name, self._shared.now()
        return json_response(wire.final_reply(is_chat, name, completions[0].completion, now, context=context))

    async def _lines(self, request: Request, is_chat: bool, context: list[int] | None) -> AsyncGenerator[bytes, None]:
        name, num_told = self._shared.model.name, 0
        with self._shared.engine.opened([request]) as ticket:
            async for _, event in ticket:
                now = self._shared.now()
                if isinstance(event, Token):
                    num_told += len(event.text)
                    if not event.text and event.logprobs is None:
                        continue  # held back until it can be shown
                    line = wire.token_reply(is_chat, name, event, now)
                else:
                    line = wire.final_reply(is_chat, name, event.completion, now, num_told=num_told, context=context)
                yield encoded(line) + b"\n"
