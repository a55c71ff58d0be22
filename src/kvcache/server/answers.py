"""How an answer leaves: whole, or line by line; either way the client's going away ends the work at once.

                        before the first line                       after it
    error               its status and body                         one more line with the error, then the end
    time is over        503                                         the same
    client goes away    the work is cancelled, its ticket closes, the engine aborts

ASGI servers differ in how they tell that a client has gone; `http.disconnect` is what all of them send, so it is waited
for beside the work.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar, final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["GONE", "JsonLines", "TimeIsOver", "encoded", "json_response", "until_gone"]

_T = TypeVar("_T")

GONE = 499
"""The status in logs and metrics when the client went away before the answer (nginx's number)."""


class TimeIsOver(Exception):
    """The request took longer than the server allows."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the request was not finished after {seconds:g} seconds; ask for fewer tokens, or try again later"
        )


def encoded(value: Any) -> bytes:
    """JSON in UTF-8, on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A whole answer."""
    return Response(encoded(value), status, headers=headers, media_type="application/json")


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(receive: Receive, work: Coroutine[Any, Any, _T], seconds: float) -> _T | None:
    """The result of `work`; None when the client went away, and then the work has been cancelled.

    Raises `TimeIsOver` after so many seconds, and what the work raises.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if leaving.done():
            leaving.result()
            return None
        raise TimeIsOver(seconds)
    finally:
        for task in (working, leaving):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(working, leaving, return_exceptions=True)


@final
class JsonLines:
    """A streamed answer, as an ASGI application.

    lines: made as they are sent. error_line: what a stream that has begun says of an error. seconds: for all of it.
    """

    def __init__(
        self,
        lines: AsyncGenerator[bytes, None],
        media_type: str,
        error_line: Callable[[Exception], bytes],
        seconds: float,
    ) -> None:
        self._lines = lines
        self._media_type = media_type
        self._error_line = error_line
        self._seconds = seconds
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send_lines(send), self._seconds)
        except Exception as error:
            if not self._has_begun:
                raise
            with suppress(TimeoutError):  # who does not read is not told, either
                async with asyncio.timeout(1):
                    await self._send(send, self._error_line(error))
                    await self._send(send, b"", more=False)

    async def _send_lines(self, send: Send) -> None:
        async with aclosing(self._lines) as lines:
            async for line in lines:
                if not self._has_begun:
                    await self._begin(send)
                await self._send(send, line)
        await self._send(send, b"", more=False)

    async def _begin(self, send: Send) -> None:
        self._has_begun = True
        headers = [(b"content-type", self._media_type.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})
