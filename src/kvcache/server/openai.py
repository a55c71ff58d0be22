"""OpenAI's endpoints: what their bodies ask of the engine, and its events on the way back."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvcache import wire_openai as wire
from kvcache.request import Request, Token
from kvcache.server.answers import GONE, JsonLines, encoded, json_response, until_gone
from kvcache.server.errors import Trouble, openai_error, trouble_of
from kvcache.server.shared import Shared

__all__ = ["OpenAI"]

_DONE = b"data: [DONE]\n\n"


def _event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + encoded(value) + b"\n\n"


@final
class OpenAI:
    """`/v1/completions`, `/v1/chat/completions`, `/v1/models`."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def models(self, http: HttpRequest) -> Response:
        """GET `/v1/models`."""
        return json_response(wire.model_list([self._shared.model.name], int(self._shared.started.timestamp())))

    async def model(self, http: HttpRequest) -> Response:
        """GET `/v1/models/NAME`."""
        self._check_model(http.path_params["name"])
        return json_response(wire.model_object(self._shared.model.name, int(self._shared.started.timestamp())))

    async def completions(self, http: HttpRequest) -> Any:
        """POST `/v1/completions`."""
        body = wire.parse_completion(await http.body())
        self._check_model(body.model)
        prompts = self._shared.prompts
        ids = [await prompts.of_text(p) if isinstance(p, str) else await prompts.of_ids(p) for p in body.prompts]
        echoed: list[str] = []
        if body.echo:
            echoed = [p if isinstance(p, str) else await prompts.text_of(p) for p in body.prompts]
        return await self._answer(http, "cmpl", body, ids, echoed)

    async def chat(self, http: HttpRequest) -> Any:
        """POST `/v1/chat/completions`."""
        body = wire.parse_chat(await http.body())
        self._check_model(body.model)
        return await self._answer(http, "chatcmpl", body, [await self._shared.prompts.of_chat(body.messages)], [])

    def _check_model(self, name: str) -> None:
        if not self._shared.model.is_called(name):
            raise Trouble(
                404,
                f"The model {name[:100]!r} does not exist; this server has {self._shared.model.name!r}",
                "invalid_request_error",
                param="model",
                code="model_not_found",
            )

    async def _answer(
        self,
        http: HttpRequest,
        kind: str,
        body: wire.CompletionBody | wire.ChatBody,
        prompts: Sequence[Sequence[int]],
        echoed: Sequence[str],
    ) -> Any:
        id = f"{kind}-{uuid.uuid4().hex}"
        requests = [
            Request(f"{id}-{number}", ids, body.params(self._shared.prompts.room(ids)), salt=body.cache_salt)
            for number, ids in enumerate(prompts)
        ]
        self._shared.check(requests)
        replies = wire.replies_to(body, id, self._shared.model.name, int(self._shared.now().timestamp()), echoed)
        seconds = self._shared.settings.request_seconds
        if body.stream:
            return JsonLines(
                self._chunks(requests, replies),
                "text/event-stream; charset=utf-8",
                lambda error: _event(openai_error(trouble_of(error))),
                seconds,
            )
        completions = await until_gone(http.receive, self._shared.collected(requests), seconds)
        if completions is None:
            return Response(status_code=GONE)
        return json_response(replies.whole([wire.Numbered(*each) for each in completions]))

    async def _chunks(self, requests: Sequence[Request], replies: wire.Replies) -> AsyncGenerator[bytes, None]:
        completions: list[wire.Numbered] = []
        with self._shared.engine.opened(requests) as ticket:
            async for number, event in ticket:
                if isinstance(event, Token):
                    chunks = replies.token(number, event)
                else:
                    completions.append(wire.Numbered(number, event.completion))
                    chunks = replies.finished(number, event.completion)
                for chunk in chunks:
                    yield _event(chunk)
        for chunk in replies.usage(completions):
            yield _event(chunk)
        yield _DONE
