"""`Server`: the application under uvicorn, on a socket of its own. The only place that knows uvicorn.

    with Server(engine) as server:      # in a thread, for programs and tests; stops at the end of the block
        ... server.url ...
    Server(engine, settings).run()      # in this thread, until SIGINT or SIGTERM

Stopping, when the signal comes: no new connections, new requests get 503, what is under way may finish for
`grace_seconds`, then it gets an error; at last the engine's thread ends. A second SIGINT stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Any, final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcache.engine import Engine
from kvcache.server.app import application
from kvcache.server.engine_thread import EngineThread
from kvcache.server.instruments import Instruments
from kvcache.server.model import served_model
from kvcache.server.prompts import Prompts
from kvcache.server.settings import Settings
from kvcache.server.shared import Shared

__all__ = ["Server", "bind"]

_TICK_SECONDS = 0.1
_STOP_SECONDS = 10.0
"""After the grace, how long connections may take to hear of it."""


def bind(settings: Settings) -> socket.socket:
    """A socket that listens to nobody yet. Raises `ValueError` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host.strip("[]"), settings.port))
    except OSError as error:
        made.close()
        raise ValueError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another --host or --port"
        ) from None
    return made


@final
class Server:
    """Serves one engine over HTTP. The engine is its own from `start` or `run` until it has stopped; closing is yours.

    name: what clients call the model; None: what it was loaded as. sock: from `bind`; None: it is bound here.
    log: told of what an operator must know; None: stderr. Raises `ValueError` when the address cannot be had.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings | None = None,
        *,
        name: str | None = None,
        sock: socket.socket | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings or Settings(port=0)
        instruments = Instruments()
        model = served_model(engine, name)
        self._shared = Shared(
            EngineThread(engine, instruments, max_open=self.settings.max_open, log=log),
            model,
            Prompts(engine.tokenizer, model.vocabulary, engine.max_length, model.capacity),
            self.settings,
            datetime.now(UTC).replace(microsecond=0),
        )
        self._socket = sock or bind(self.settings)
        host, port = self._socket.getsockname()[:2]
        self.address = (str(host), int(port))
        self.app = application(self._shared, instruments, _version(), self._lifespan, self._num_connections)
        self._uvicorn = uvicorn.Server(self._config())
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it can be reached."""
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template; without one the texts of messages are continued as they are."""
        return bool(self._shared.prompts.template)

    def run(self) -> None:
        """Serve in this thread until SIGINT or SIGTERM, or `stop` from elsewhere."""
        with _signals_swallowed():
            self._serve()

    def start(self) -> None:
        """Serve in a thread; returns when it listens."""
        if self._thread is not None:
            raise ValueError("the server was started before; make a new one")
        self._thread = threading.Thread(target=self._serve, name="kvcache-http", daemon=True)
        self._thread.start()
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start; its log says why")
            time.sleep(0.005)

    def stop(self) -> None:
        """Stop gracefully, and wait for it."""
        self._uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _serve(self) -> None:
        complaints = logging.getLogger("uvicorn.error")
        complaints.addFilter(self._is_news)
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            complaints.removeFilter(self._is_news)
            self._shared.engine.stop()
            self._shared.prompts.close()
            self._socket.close()

    def _is_news(self, _: logging.LogRecord) -> bool:
        """Not the tracebacks of what a second signal breaks off."""
        return not self._uvicorn.force_exit

    def _num_connections(self) -> int:
        """Open ones. Uvicorn's own bound would answer in plain text."""
        return len(self._uvicorn.server_state.connections)

    def _config(self) -> uvicorn.Config:
        settings = self.settings
        return uvicorn.Config(
            self.app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=max(1, round(settings.idle_seconds)),
            timeout_graceful_shutdown=round(settings.grace_seconds + _STOP_SECONDS),
        )

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        self._shared.engine.start()
        tasks = [asyncio.create_task(work) for work in (self._drain_when_told(), self._close_silent_connections())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await asyncio.get_running_loop().run_in_executor(None, self._shared.engine.stop)

    async def _drain_when_told(self) -> None:
        """Uvicorn waits for answers under way; this sees to it that they end."""
        while not self._uvicorn.should_exit:
            await asyncio.sleep(_TICK_SECONDS / 2)
        hint = "; Ctrl-C stops it now" if self._thread is None else ""  # signals come to who has called `run`
        await self._shared.engine.drained(self.settings.grace_seconds, hint)

    async def _close_silent_connections(self) -> None:
        """Close connections that have not sent the head of a request for long: uvicorn knows no bound for them."""
        since: dict[H11Protocol, tuple[object, float]] = {}
        while True:
            await asyncio.sleep(min(1.0, self.settings.idle_seconds / 4))
            now = time.monotonic()
            found = [each for each in self._uvicorn.server_state.connections if isinstance(each, H11Protocol)]
            since = {each: since[each] for each in found if each in since}
            for each in found:
                cycle: Any = each.cycle
                if cycle is not None and not cycle.response_complete:
                    since.pop(each, None)
                elif each not in since or since[each][0] is not cycle:
                    since[each] = (cycle, now)
                elif now - since[each][1] > self.settings.idle_seconds:
                    each.transport.close()


@contextmanager
def _signals_swallowed() -> Iterator[None]:
    """Uvicorn repeats, after it has stopped, the signal that stopped it; that one must not kill us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _version() -> str:
    try:
        return version_of("kvcache")
    except PackageNotFoundError:  # run from a checkout
        return "0"
