"""Prompts to token ids, in one worker thread: a long text does not hold up the streams of others.

The ids are checked here, before a request waits for anything: their number against the context, each against the
vocabulary. A text that is too long by its characters alone is refused without making it into tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, final

from kvcache.wire import Invalid

__all__ = ["Message", "Prompts"]

_T = TypeVar("_T")


class Message(Protocol):
    """A message of a chat, whichever wire it came by."""

    @property
    def role(self) -> str:
        """Who speaks."""

    @property
    def text(self) -> str:
        """What is said."""


@final
class Prompts:
    """What clients send -> token ids. All raise `Invalid`, naming the field `param`.

    max_length: tokens of the model's context; capacity: of the longest request, less where the cache is smaller; None:
    no bound. vocabulary: ids are below it. A tokenizer without a chat template continues the messages' texts, one after
    the other.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, max_length: int | None, capacity: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._max_length = max_length
        self._capacity = capacity
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvcache-tokenizer")
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1

    def close(self) -> None:
        """End the worker thread."""
        self._pool.shutdown()

    @property
    def template(self) -> str:
        """The chat template; empty where there is none."""
        found = getattr(self._tokenizer, "chat_template", None)
        return found if isinstance(found, str) else ""

    def room(self, ids: Sequence[int]) -> int:
        """Tokens that fit after `ids`."""
        return 2**31 - 1 if self._capacity is None else max(1, self._capacity - len(ids))

    async def of_ids(self, ids: Sequence[int], param: str = "prompt") -> list[int]:
        """Token ids, checked."""
        if not ids:
            raise Invalid(f"{param}: it has no tokens; expected at least one", param, "invalid_value")
        self._check_length(len(ids), param)
        if (largest := max(ids)) >= self._vocabulary:
            raise Invalid(
                f"{param}: token id {largest} is not in the vocabulary of {self._vocabulary}", param, "invalid_value"
            )
        return list(ids)

    async def of_text(self, text: str, param: str = "prompt", *, is_whole: bool = True) -> list[int]:
        """Text as it is; `is_whole`: with the tokens that begin a text, such as `<bos>`."""
        self._check_text(len(text), param)
        made = await self._apart(lambda: self._tokenizer(text, add_special_tokens=is_whole)["input_ids"])
        return await self.of_ids(made, param)

    async def of_chat(
        self,
        messages: Sequence[Message],
        param: str = "messages",
        *,
        continues: bool = False,
        is_whole: bool = True,
    ) -> list[int]:
        """A chat. `continues`: when the assistant had the last word, go on with it, and begin no new message.

        `is_whole`: with the token that begins a text, which templates write themselves.
        """
        self._check_text(sum(len(message.text) for message in messages), param)
        if not self.template:
            return await self.of_text("".join(message.text for message in messages), param, is_whole=is_whole)
        said = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.text}
            for message in messages
        ]
        goes_on = continues and messages[-1].role == "assistant"
        made = await self._apart(lambda: self._templated(said, goes_on, param))
        first = getattr(self._tokenizer, "bos_token_id", None)
        return await self.of_ids(made[1:] if not is_whole and made[:1] == [first] else made, param)

    async def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        if self._tokenizer is None:
            return ""
        made: str = await self._apart(lambda: self._tokenizer.decode(list(ids), skip_special_tokens=True))
        return made

    def _templated(self, said: list[dict[str, str]], goes_on: bool, param: str) -> list[int]:
        from jinja2 import TemplateError

        try:
            made: list[int] = self._tokenizer.apply_chat_template(
                said, add_generation_prompt=not goes_on, continue_final_message=goes_on, return_dict=True
            )["input_ids"]
        except TemplateError as error:
            raise Invalid(f"{param}: the model's chat template refuses them: {error}", param, "invalid_value") from None
        return made

    async def _apart(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _check_text(self, num_characters: int, param: str) -> None:
        if self._tokenizer is None:
            raise Invalid(f"{param}: the model has no tokenizer; send token ids to /v1/completions", param)
        if self._capacity is not None and num_characters > self._capacity * self._longest_token:
            self._check_length(-(-num_characters // self._longest_token), param, about="at least ")

    def _check_length(self, num_tokens: int, param: str, about: str = "") -> None:
        if self._capacity is not None and num_tokens >= self._capacity:
            is_of_model = self._capacity == self._max_length
            raise Invalid(
                f"This {'model' if is_of_model else 'server'}'s maximum context length is {self._capacity} tokens. "
                f"However, {param} has {about}{num_tokens}, and the answer needs one. Please shorten it"
                f"{'.' if is_of_model else ', or give the server more --kv-bytes.'}",
                param,
                "context_length_exceeded",
            )
