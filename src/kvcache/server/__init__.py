"""The HTTP server: OpenAI's and Ollama's clients talk to one engine. The only folder that knows HTTP.

settings.py       where it listens, who may use it, and every bound
run.py            `Server`: the application under uvicorn; starting, stopping
app.py            paths to endpoints, failures to answers; openapi.py describes both
guard.py          before any endpoint: host, key, size and time of the body
openai.py         /v1/...        ollama.py   /api/...        shared.py   what both use
engine_thread.py  one thread owns the engine; tickets carry events to the handlers
answers.py        whole or line by line; a client that goes away ends the work
prompts.py        text and chats to token ids, in a worker thread
errors.py         failures as statuses and bodies
instruments.py    /metrics       model.py    what is told of the model
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache.errors import needing
from kvcache.server.settings import Settings

if TYPE_CHECKING:
    from kvcache.server.run import Server, bind

__all__ = ["Server", "Settings", "bind"]


def __getattr__(name: str) -> Any:
    """`Server` and `bind` bring PyTorch; settings that cannot work are told before that."""
    if name not in ("Server", "bind"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needing("serve", "the server"):
        from kvcache.server import run

    return getattr(run, name)
