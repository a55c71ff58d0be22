"""`kvcache serve`: an engine behind HTTP, from the command line until SIGINT or SIGTERM."""

from __future__ import annotations

import sys
import time

from kvcache.engine import Engine
from kvcache.server import Server, Settings, bind

__all__ = ["serve"]


def serve(
    model: str,
    settings: Settings,
    *,
    name: str | None,
    kv_bytes: str | None,
    dtype: str,
    device: str,
    kv_dtype: str | None,
    block_size: int | None,
    max_sequences: int,
    max_batch_tokens: int,
    prefix_cache: bool,
    compile: bool,
) -> None:
    """Bind first (a port that is taken is told before a model is loaded), load, say where, serve."""
    sock = bind(settings)
    began = time.perf_counter()
    with (
        sock,
        Engine(
            model,
            kv_bytes=kv_bytes,
            dtype=dtype,
            device=device,
            kv_dtype=kv_dtype,
            block_size=block_size,
            max_sequences=max_sequences,
            max_batch_tokens=max_batch_tokens,
            prefix_cache=prefix_cache,
            compile=compile,
        ) as engine,
    ):
        server = Server(engine, settings, name=name, sock=sock)
        chats = "" if server.has_template else "no chat template: chats are continued as plain text; "
        sys.stdout.write(
            f"kvcache serves {name or engine.model_name} at {server.url} (OpenAI /v1, Ollama /api, /metrics, /health); "
            f"{max_sequences} sequences at a time, of {engine.capacity or 'any number of'} tokens at most; {chats}"
            f"loaded in {time.perf_counter() - began:.1f} s; Ctrl-C stops\n"
        )
        if settings.api_key is None and not settings.is_loopback:
            sys.stdout.write(f"anybody who reaches {settings.host} may use it: --insecure was given and no --api-key\n")
        sys.stdout.flush()
        server.run()
    sys.stdout.write("stopped\n")
