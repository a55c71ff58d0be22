"""Before any endpoint: who may ask, and how much may be sent. An ASGI middleware; the application gets a whole body.

Without a key a server on loopback must still not serve every page that a browser of this machine shows. One that was
told that evil.example is 127.0.0.1 gives that name: the `Host` must name this machine. One that asks 127.0.0.1 itself
cannot read the answer, yet would have it computed: its `Origin`, which only browsers send, must be of this machine too.
Bodies that are refused are read to their end, up to a cap, since a client that is still sending does not read its
answer.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterable
from typing import Final, final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcache.server.errors import Trouble, error_response
from kvcache.server.instruments import Instruments
from kvcache.server.settings import Settings, is_local

__all__ = ["Guard"]

_FORGOTTEN_FACTOR: Final = 8
"""A refused body is read up to so many times the bound; beyond that the connection is cut."""

_OPEN_TO_ALL: Final = frozenset({"/health"})
_ALWAYS_ANSWERED: Final = frozenset({"/health", "/metrics"})
"""Who watches the server must be answered when it has too much to do."""


class _Gone(Exception):
    """The client went away while it was sending."""


@final
class Guard:
    """Checks host, origin, key and size of each request, and counts the answers. num_connections: that are open now."""

    def __init__(
        self, app: ASGIApp, settings: Settings, instruments: Instruments, num_connections: Callable[[], int]
    ) -> None:
        self._app = app
        self._num_connections = num_connections
        self._settings = settings
        self._instruments = instruments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._instruments.answered(message["status"])
            await send(message)

        if self._num_connections() > self._settings.max_connections and scope["path"] not in _ALWAYS_ANSWERED:
            await error_response(self._crowded(), scope["path"])(scope, receive, counted)
            return
        trouble = self._objection(scope)
        try:
            body = await self._read(receive, is_kept=trouble is None)
        except Trouble as error:
            trouble = trouble or error
        except _Gone:
            return
        if trouble is not None:
            await error_response(trouble, scope["path"])(scope, receive, counted)
            return
        await self._app(scope, _replayed(body, receive), counted)

    def _crowded(self) -> Trouble:
        """There are too many connections: the answer comes before the body, and with it the end of this one."""
        return Trouble(
            503,
            f"more than {self._settings.max_connections} connections are open; try again later",
            "server_error",
            code="overloaded",
            headers={"connection": "close", "retry-after": "1"},
        )

    def _objection(self, scope: Scope) -> Trouble | None:
        headers, settings = Headers(scope=scope), self._settings
        if settings.api_key is None:
            if not settings.is_loopback:
                return None
            host, origin = headers.get("host", settings.host), headers.get("origin")
            if not is_local(_host_alone(host)):
                message = f"the host is {host[:100]!r}; without a key this server answers to the names of this machine"
                return Trouble(403, message, "permission_error", code="forbidden_host")
            if origin is not None and not is_local(_host_alone(origin.rpartition("://")[2])):
                message = f"the origin is {origin[:100]!r}; without a key this server answers to pages of this machine"
                return Trouble(403, message, "permission_error", code="forbidden_origin")
            return None
        if scope["path"] in _OPEN_TO_ALL:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), settings.api_key.encode()):
            return None
        message = "no or a wrong API key; expected the header Authorization: Bearer KEY"
        challenge = {"www-authenticate": "Bearer"}
        return Trouble(401, message, "authentication_error", code="invalid_api_key", headers=challenge)

    async def _read(self, receive: Receive, *, is_kept: bool) -> bytes:
        """The body. Raises `Trouble` for one that is too large or too slow, `_Gone`."""
        most, size, parts = self._settings.max_body_bytes, 0, []
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    part = message.get("body", b"")
                    size += len(part)
                    if is_kept and size <= most:
                        parts.append(part)
                    if not message.get("more_body", False) or size > most * _FORGOTTEN_FACTOR:
                        break
        except TimeoutError:
            raise Trouble(
                408,
                f"the body was not complete after {self._settings.body_seconds:g} seconds ({size} bytes came)",
                "invalid_request_error",
                code="body_timeout",
                headers={"connection": "close"},
            ) from None
        if size > most:
            close = {"connection": "close"} if size > most * _FORGOTTEN_FACTOR else None
            text = f"the body has {size} bytes{' and more' if close else ''}; at most {most} are accepted"
            raise Trouble(413, text, "invalid_request_error", code="body_too_large", headers=close)
        return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A channel that says the body once, and then whatever comes."""
    ahead: Iterable[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        for message in ahead:
            return message
        return await receive()

    return replay


def _host_alone(host: str) -> str:
    """A `Host` header without its port.

    >>> _host_alone("localhost:8000"), _host_alone("[::1]:8000"), _host_alone("example.org")
    ('localhost', '[::1]', 'example.org')
    """
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and not (":" in name and not name.startswith("[")) else host
