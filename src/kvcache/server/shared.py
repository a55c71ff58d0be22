"""What the endpoints of both wires share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, final

from kvcache.request import Completion, Finished, Request
from kvcache.server.engine_thread import EngineThread
from kvcache.server.model import ServedModel
from kvcache.server.prompts import Prompts
from kvcache.server.settings import Settings

__all__ = ["NumberedCompletion", "Shared"]


class NumberedCompletion(NamedTuple):
    """A completion, and the number of its request among those asked for."""

    number: int
    completion: Completion


@final
@dataclass(frozen=True, slots=True)
class Shared:
    """The engine, its model, the tokenizer and the bounds. started: when the server was."""

    engine: EngineThread
    model: ServedModel
    prompts: Prompts
    settings: Settings
    started: datetime

    def now(self) -> datetime:
        """The time, for answers that tell it."""
        return datetime.now(UTC)

    async def collected(self, requests: Sequence[Request]) -> list[NumberedCompletion]:
        """All completions of `requests`, as they finish."""
        with self.engine.opened(requests) as ticket:
            return [
                NumberedCompletion(number, event.completion)
                async for number, event in ticket
                if isinstance(event, Finished)
            ]
