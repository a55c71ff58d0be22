"""Every failure of a request as a status, and as the body that the clients of each wire know.

| what happened                                     | status | OpenAI's `code`                         |
|---------------------------------------------------|--------|-----------------------------------------|
| the body is wrong (`Invalid`, `ValueError`)       | 400    | of the `Invalid`                        |
| it does not fit even alone (`RequestRefused`)     | 400    | context_length_exceeded                 |
| no or a wrong key                                 | 401    | invalid_api_key                         |
| another host's name (DNS rebinding)               | 403    | forbidden_host                          |
| a page of another site                            | 403    | forbidden_origin                        |
| no such path or model                             | 404    | not_found, model_not_found              |
| another method                                    | 405    | method_not_allowed                      |
| the body did not come                             | 408    | body_timeout                            |
| the body is too large                             | 413    | body_too_large                          |
| something nobody thought of                       | 500    | internal_error                          |
| too many wait; stopping; failed; the time is over | 503    | overloaded, stopping, engine_failed, timeout |
"""

from __future__ import annotations

from typing import final

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kvcache import wire_ollama, wire_openai
from kvcache.errors import KVCacheError
from kvcache.request import RequestRefused
from kvcache.server.answers import TimeIsOver, json_response
from kvcache.server.engine_thread import Unavailable
from kvcache.wire import Invalid

__all__ = ["Trouble", "error_response", "nowhere", "ollama_error", "openai_error", "trouble_of"]


@final
class Trouble(Exception):
    """A failure with its HTTP status. type: whose fault, in OpenAI's words; param: the field; code: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers
        super().__init__(message)


def trouble_of(error: Exception) -> Trouble:
    """Any error as a `Trouble`. What nobody thought of tells its type alone: its text may hold other people's data."""
    fault = "invalid_request_error"
    match error:
        case Trouble():
            return error
        case Invalid():
            return Trouble(400, str(error), fault, param=error.param, code=error.code)
        case RequestRefused():  # its own text has the engine's name for the request
            text = (
                f"{error.needed} tokens are needed and {error.what} holds {error.available}; shorten the prompt, or "
                f"give the server more --kv-bytes"
            )
            return Trouble(400, text, fault, code="context_length_exceeded")
        case Unavailable():
            retry = {"retry-after": "1"} if error.code == "overloaded" else None
            return Trouble(503, str(error), "server_error", code=error.code, headers=retry)
        case TimeIsOver():
            return Trouble(503, str(error), "server_error", code="timeout")
        case ValueError() | TypeError() | KVCacheError():
            return Trouble(400, str(error), fault)
        case _:
            name = type(error).__name__
            return Trouble(500, f"an error that should not happen: {name}", "server_error", code="internal_error")


def nowhere(error: HTTPException, http: HttpRequest) -> Trouble:
    """What the router says of a request that no endpoint takes."""
    asked, headers = f"{http.method} {http.url.path}", dict(error.headers or {})
    if error.status_code == 405:
        taken, code = f"this path takes {headers.get('Allow')}", "method_not_allowed"
    else:
        taken, code = "GET /openapi.json lists those that there are", "not_found"
    message = f"there is no endpoint {asked}; {taken}"
    return Trouble(error.status_code, message, "invalid_request_error", code=code, headers=headers)


def openai_error(trouble: Trouble) -> wire_openai.ErrorReply:
    """The body that OpenAI's clients know."""
    return wire_openai.error_reply(str(trouble), trouble.type, trouble.param, trouble.code)


def ollama_error(trouble: Trouble) -> wire_ollama.ErrorReply:
    """The body that Ollama's clients know."""
    return {"error": str(trouble)}


def error_response(trouble: Trouble, path: str) -> Response:
    """The answer, as the clients of this path know it."""
    body = ollama_error(trouble) if path.startswith("/api/") else openai_error(trouble)
    return json_response(body, trouble.status, trouble.headers)
