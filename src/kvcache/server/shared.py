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
from kvcache.wire import Invalid

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

    def check(self, requests: Sequence[Request]) -> None:
        """Raise `Invalid`, which names the field, for what one body asks for and this server never has.

        requests: one for each of its prompts, alike but for these.
        """
        params = requests[0].params
        several, num_outputs = "n" if params.num_sequences == params.n else "best_of", params.num_sequences
        if num_outputs > self.model.max_sequences:
            raise Invalid(
                f"{several}: {num_outputs} outputs of a prompt are asked for, and at most {self.model.max_sequences} "
                f"run at a time; ask for fewer, or raise the server's --max-sequences",
                several,
                "invalid_value",
            )
        if len(requests) * num_outputs > self.settings.max_open:
            raise Invalid(
                f"{len(requests) * num_outputs} completions are asked for, and at most {self.settings.max_open} may be "
                f"under way; ask for fewer at a time, or raise the server's --max-open",
                "prompt" if len(requests) > 1 else several,
                "invalid_value",
            )
        if (highest := max(params.logit_bias, default=0)) >= self.model.vocabulary:
            raise Invalid(
                f"logit_bias: token id {highest} is not in the vocabulary of {self.model.vocabulary}",
                "logit_bias",
                "invalid_value",
            )

    async def collected(self, requests: Sequence[Request]) -> list[NumberedCompletion]:
        """All completions of `requests`, as they finish."""
        with self.engine.opened(requests) as ticket:
            return [
                NumberedCompletion(number, event.completion)
                async for number, event in ticket
                if isinstance(event, Finished)
            ]
