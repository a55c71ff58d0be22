"""One thread owns the engine. Handlers put commands into its inbox and get events through the event loop.

    handlers (event loop)                                 engine thread
    opened(requests)  -- Add -->   inbox  --> engine.add          forever: drain the inbox, step, hand events on
    ticket closes     -- Abort -->        --> engine.abort
    metrics()         -- Ask -->          --> engine.metrics
    async for event in ticket  <-- call_soon_threadsafe --  engine.step

Every request's events go to its `Ticket`; leaving the ticket's `with` aborts what is unfinished, so a client that goes
away frees its blocks before the next step. When nothing is under way for a while, `engine.check()` runs once. A check
that fails, or a step that raises, ends the service: all tickets and everybody after get the report, no wrong answer.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final

from kvcache.engine import Engine, Metrics
from kvcache.errors import CorruptState, KVCacheError
from kvcache.request import Event, Finished, Request, Token
from kvcache.server.instruments import Instruments

__all__ = ["EngineThread", "Numbered", "Ticket", "Unavailable"]

IDLE_SECONDS = 0.2
"""Rest before a check: a client that sends one request after the other is not delayed by it."""


class Unavailable(Exception):
    """The request cannot be served now, whatever it is. `code` is a word for programs."""

    def __init__(self, message: str, code: str) -> None:
        self.code = code
        super().__init__(message)


class Numbered(NamedTuple):
    """An event, and the number of its request among those of the ticket."""

    number: int
    event: Event


@final
class Ticket:
    """The events of some requests, as they come: `async for number, event in ticket`.

    Ends after the last event of the last request. Raises what the engine says of a request that it refuses
    (`RequestRefused`, `ValueError`), and `Unavailable` when the engine stops.
    """

    def __init__(self, requests: Sequence[Request], loop: asyncio.AbstractEventLoop) -> None:
        self.requests = tuple(requests)
        self.num_sequences = sum(request.params.num_sequences for request in requests)
        self.loop = loop
        self.last_token: dict[tuple[str, int], float] = {}  # when, by request and index; the engine thread's
        self.num_unended = {request.id: request.params.n for request in requests}  # outputs; the engine thread's
        self._numbers = {request.id: number for number, request in enumerate(requests)}
        self._unfinished = set(self._numbers)
        self._arrived: asyncio.Queue[Event | Exception] = asyncio.Queue()

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Requests whose last event has not been read."""
        return tuple(self._unfinished)

    def arrive(self, item: Event | Exception) -> None:
        """Called in the event loop."""
        self._arrived.put_nowait(item)

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> Numbered:
        if not self._unfinished:
            raise StopAsyncIteration
        item = await self._arrived.get()
        if isinstance(item, Exception):
            raise item
        if isinstance(item, Finished) and item.is_last:
            self._unfinished.discard(item.request_id)
        return Numbered(self._numbers[item.request_id], item)


@dataclass(frozen=True, slots=True)
class _Add:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class _Abort:
    ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Ask:
    answer: Future[Metrics]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command: TypeAlias = _Add | _Abort | _Ask | _Stop


@final
class EngineThread:
    """Owns `engine` from `start` to `stop`. Everything else here is for the event loop's thread.

    max_open: completions that may be under way or wait; more are refused. log: told of what an operator must know.
    """

    def __init__(
        self, engine: Engine, instruments: Instruments, *, max_open: int, log: Callable[[str], None] | None = None
    ) -> None:
        self._engine = engine
        self._instruments = instruments
        self._max_open = max_open
        self._log_to = log or (lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvcache-engine", daemon=True)
        self._tickets: dict[str, Ticket] = {}  # the engine thread's
        self._open: set[Ticket] = set()  # the event loop's
        self._unavailable: Unavailable | None = None

    # --- the event loop's side ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    @property
    def unavailable(self) -> Unavailable | None:
        """Why nothing new is accepted; None while it is."""
        return self._unavailable

    @property
    def num_open(self) -> int:
        """Completions under way or waiting."""
        return sum(ticket.num_sequences for ticket in self._open)

    @contextmanager
    def opened(self, requests: Sequence[Request]) -> Iterator[Ticket]:
        """Ask for `requests`; what is unfinished at the end of the `with` is aborted.

        Raises `Unavailable` when there is no room now.
        """
        if self._unavailable is not None:
            raise self._unavailable
        ticket = Ticket(requests, asyncio.get_running_loop())
        if self.num_open + ticket.num_sequences > self._max_open:
            raise Unavailable(
                f"{self.num_open} completions are under way or wait, and at most {self._max_open} may; try again later",
                "overloaded",
            )
        self._open.add(ticket)
        self._inbox.put(_Add(ticket))
        try:
            yield ticket
        finally:
            self._open.discard(ticket)
            if ticket.unfinished:
                self._inbox.put(_Abort(ticket.unfinished))

    async def metrics(self) -> Metrics:
        """The engine's counters, taken between two steps. Raises `Unavailable` after a failure, and after the end."""
        answer: Future[Metrics] = Future()
        self._inbox.put(_Ask(answer))
        if not self._thread.is_alive():
            self._decline_the_rest()
        return await asyncio.wrap_future(answer)

    def refuse(self) -> None:
        """Accept nothing new: the server is about to stop. What is under way goes on."""
        if self._unavailable is None:
            self._unavailable = Unavailable("the server is stopping", "stopping")

    async def drained(self, seconds: float, hint: str = "") -> None:
        """Wait until nothing is under way; after so many seconds, what still is gets `Unavailable`.

        hint: for the operator, what else can be done.
        """
        self.refuse()
        end = time.monotonic() + seconds
        if self._open and seconds > 0:
            what = "a completion is" if self.num_open == 1 else f"{self.num_open} completions are"
            self._log(f"kvcache: stopping; {what} under way and may take {seconds:g} s{hint}")
        while self._open and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for ticket in self._open:
            ticket.arrive(Unavailable("the server has stopped before the answer was complete", "stopping"))

    def stop(self) -> None:
        """End the thread and wait for it. The engine is the caller's again."""
        self.refuse()
        self._inbox.put(_Stop())
        if self._thread.ident is not None:
            self._thread.join()
        self._decline_the_rest()

    def _decline_the_rest(self) -> None:
        """Answer what came when the thread had ended, or was about to."""
        with suppress(queue.Empty):
            while True:
                self._decline(self._inbox.get_nowait(), Unavailable("the server has stopped", "stopping"))

    # --- both sides' --------------------------------------------------------------------------------------------------

    def _log(self, text: str) -> None:
        """Tell the operator, if he can be told: a broken stderr must not end the service, nor keep an error back."""
        with suppress(Exception):
            self._log_to(text)

    def _tell(self, loop: asyncio.AbstractEventLoop, items: list[tuple[Ticket, Event | Exception]]) -> None:
        def arrive() -> None:
            for ticket, item in items:
                ticket.arrive(item)

        with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(arrive)

    def _decline(self, command: _Command, why: Unavailable) -> None:
        """Tell who has put a command that it is not executed."""
        if isinstance(command, _Add):
            self._tell(command.ticket.loop, [(command.ticket, why)])
        elif isinstance(command, _Ask) and command.answer.set_running_or_notify_cancel():
            command.answer.set_exception(why)

    # --- the engine thread's side -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._drain():
                if self._tickets:
                    self._hand_on(self._engine.step())
        except Exception as error:
            self._fail(error)

    def _drain(self) -> bool:
        """Execute what is in the inbox; wait for something while idle. False: stop."""
        is_checked = False
        while True:
            try:
                if self._tickets:
                    command = self._inbox.get_nowait()
                else:
                    command = self._inbox.get(timeout=None if is_checked else IDLE_SECONDS)
            except queue.Empty:
                if self._tickets:
                    return True
                self._engine.check()
                is_checked = True
                continue
            if isinstance(command, _Stop):
                return False
            self._execute(command)

    def _execute(self, command: _Add | _Abort | _Ask) -> None:
        if isinstance(command, _Ask):
            if command.answer.set_running_or_notify_cancel():
                try:
                    command.answer.set_result(deepcopy(self._engine.metrics()))  # the engine goes on counting
                except Exception as error:
                    command.answer.set_exception(_failure(error))
                    raise
        elif isinstance(command, _Abort):
            for id in command.ids:
                if (ticket := self._tickets.pop(id, None)) is not None:
                    self._engine.abort(id)
                    self._instruments.aborted(ticket.num_unended[id])
        else:
            self._add(command.ticket)

    def _add(self, ticket: Ticket) -> None:
        """Add the ticket's requests, all or none."""
        for request in ticket.requests:
            self._tickets[request.id] = ticket
            try:
                self._engine.add(request)
            except CorruptState:
                raise
            except (KVCacheError, ValueError, TypeError) as error:
                for other in ticket.requests:
                    if self._tickets.pop(other.id, None) is not None:
                        self._engine.abort(other.id)
                self._instruments.refused(sum(ticket.num_unended.values()))
                self._tell(ticket.loop, [(ticket, error)])
                return

    def _hand_on(self, events: Sequence[Event]) -> None:
        now = time.monotonic()
        told: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Event | Exception]]] = {}
        for event in events:
            ticket = self._tickets.get(event.request_id)
            if ticket is None:
                continue  # aborted
            if isinstance(event, Token):
                place = (event.request_id, event.index)
                if place in ticket.last_token:
                    self._instruments.token_after(now - ticket.last_token[place])
                ticket.last_token[place] = now
            else:
                self._instruments.finished(event.completion)
                ticket.num_unended[event.request_id] -= 1
                if event.is_last:
                    del self._tickets[event.request_id]
            told.setdefault(ticket.loop, []).append((ticket, event))
        for loop, items in told.items():
            self._tell(loop, items)

    def _fail(self, error: Exception) -> None:
        """Serve nobody any more: tell those under way, and everybody who comes, until told to stop."""
        self._unavailable = _failure(error)
        for ticket in set(self._tickets.values()):
            self._tell(ticket.loop, [(ticket, _failure(error))])
        self._tickets.clear()
        self._log(f"kvcache: {self._unavailable}\n{''.join(traceback.format_exception(error))}")
        while not isinstance(command := self._inbox.get(), _Stop):
            self._decline(command, _failure(error))


def _failure(error: Exception) -> Unavailable:
    return Unavailable(f"the engine has stopped: {type(error).__name__}: {error}", "engine_failed")
