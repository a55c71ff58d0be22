"""What clients of OpenAI's API get: objects for JSON, in one piece or as the chunks of a stream.

One HTTP request may carry several prompts and ask for `n` completions of each; choice = prompt * n + completion:

    prompts  a  a  b  b        `Replies` is told the prompt's number with every event
    choice   0  1  2  3

A stream of one chat choice: {role}, {content} for each token that shows text, {finish_reason}; when asked for, a last
chunk without choices has the usage. Source of the shapes: OpenAI's API reference, the models of the `openai` package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, NotRequired, TypeAlias, final

from typing_extensions import TypedDict

from kvcache.request import Completion, Logprob, Token, TokenLogprobs
from kvcache.wire_openai.bodies import ChatBody, CompletionBody

__all__ = [
    "ChatChunk",
    "ChatReply",
    "Chunk",
    "CompletionReply",
    "ErrorReply",
    "ModelList",
    "ModelObject",
    "Numbered",
    "Replies",
    "error_reply",
    "model_list",
    "model_object",
    "replies_to",
    "usage_of",
]


class ErrorObject(TypedDict):
    """type: whose fault. param: the field. code: a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """The body of every answer that is no success."""

    error: ErrorObject


class ModelObject(TypedDict):
    """One model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(TypedDict):
    """The body of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelObject]


class PromptTokensDetails(TypedDict):
    """cached_tokens: prompt tokens that were not computed."""

    cached_tokens: int


class UsageObject(TypedDict):
    """What a request cost. A prompt counts once, however many completions it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    """Of `/v1/completions`: four lists of one entry a token. text_offset counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TopLogprob(TypedDict):
    """bytes: the text in UTF-8; null where the token is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """Of chats: the chosen token, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Of chats: one entry a token."""

    content: list[TokenLogprob]
    refusal: None


class CompletionChoice(TypedDict):
    """One completion, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatMessage(TypedDict):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatDelta(TypedDict):
    """What is new in a message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChoice(TypedDict):
    """One message."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatChunkChoice(TypedDict):
    """A piece of one message."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionReply(TypedDict):
    """The body of `/v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageObject | None]


class ChatReply(TypedDict):
    """The body of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject


class ChatChunk(TypedDict):
    """A chunk of a stream of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageObject | None]


def error_reply(message: str, type: str, param: str | None = None, code: str | None = None) -> ErrorReply:
    """The body of an answer that is no success."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def model_object(name: str, created: int) -> ModelObject:
    """The body of `/v1/models/NAME`. `created`: seconds since 1970."""
    return {"id": name, "object": "model", "created": created, "owned_by": "kvcache"}


def model_list(names: Sequence[str], created: int) -> ModelList:
    """The body of `/v1/models`. `created`: seconds since 1970."""
    return {"object": "list", "data": [model_object(name, created) for name in names]}


_LEAST: Final = -9999.0
"""JSON has no infinity: the logarithm of a probability of 0."""


def _logprob(one: Logprob) -> TopLogprob:
    # U+FFFD stands for bytes that are no whole character; which ones they were is not known here
    known = None if "\ufffd" in one.text else list(one.text.encode())
    return {"token": one.text, "logprob": max(one.logprob, _LEAST), "bytes": known}


def _chat_logprobs(tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    return {
        "content": [{**_logprob(each.chosen), "top_logprobs": [_logprob(top) for top in each.top]} for each in tokens],
        "refusal": None,
    }


def _completion_logprobs(tokens: Sequence[TokenLogprobs], begin: int) -> CompletionLogprobs:
    """`begin`: characters of the choice's text before these tokens."""
    offsets = []
    for each in tokens:
        offsets.append(begin)
        begin += len(each.chosen.text)
    return {
        "tokens": [each.chosen.text for each in tokens],
        "token_logprobs": [max(each.chosen.logprob, _LEAST) for each in tokens],
        "top_logprobs": [{top.text: max(top.logprob, _LEAST) for top in each.top} for each in tokens],
        "text_offset": offsets,
    }


class Numbered(NamedTuple):
    """A finished completion and the number of its prompt."""

    prompt: int
    completion: Completion


def usage_of(completions: Sequence[Numbered]) -> UsageObject:
    """What a request cost: each prompt once, its cached tokens those of its first completion, every generated token."""
    firsts: dict[int, Completion] = {}
    for prompt, completion in completions:
        if prompt not in firsts or completion.index < firsts[prompt].index:
            firsts[prompt] = completion
    num_prompt = sum(first.prompt_tokens for first in firsts.values())
    num_generated = sum(len(completion.token_ids) for _, completion in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(first.cached_tokens for first in firsts.values())},
    }


def _finish_reason(completion: Completion) -> Literal["stop", "length"]:
    return "length" if completion.finish_reason == "length" else "stop"


Chunk: TypeAlias = CompletionReply | ChatChunk


@final
@dataclass(slots=True)
class _Sent:
    """What a stream has told of one choice: characters of text, and of the texts of its tokens."""

    num_characters: int = 0
    num_token_characters: int = 0


@final
@dataclass(frozen=True, slots=True)
class Head:
    """What stands in every answer to one HTTP request. created: seconds since 1970. num_choices: of each prompt."""

    id: str
    model: str
    created: int
    num_choices: int
    wants_usage: bool
    sent: dict[int, _Sent] = field(default_factory=dict)

    def choice(self, prompt: int, index: int) -> int:
        """The number of a choice."""
        return prompt * self.num_choices + index

    def order(self, completions: Sequence[Numbered]) -> list[Numbered]:
        """Completions as their choices are numbered."""
        return sorted(completions, key=lambda each: self.choice(each.prompt, each.completion.index))


class Replies(ABC):
    """The answers to one HTTP request: `whole`, or a stream of `token`, `finished` and at the end `usage`."""

    @abstractmethod
    def whole(self, completions: Sequence[Numbered]) -> CompletionReply | ChatReply:
        """The answer in one piece; the completions may come in any order."""

    @abstractmethod
    def token(self, prompt: int, token: Token) -> list[Chunk]:
        """What a stream tells of a token; nothing while its text is held back."""

    @abstractmethod
    def finished(self, prompt: int, completion: Completion) -> list[Chunk]:
        """What a stream tells at the end of a choice: text held back until now, and the reason."""

    @abstractmethod
    def usage(self, completions: Sequence[Numbered]) -> list[Chunk]:
        """The end of a stream: the usage, when it was asked for."""


def replies_to(
    body: CompletionBody | ChatBody, id: str, model: str, created: int, echoed: Sequence[str] = ()
) -> Replies:
    """The answers to `body`. created: seconds since 1970. echoed: prompts' texts, if completions begin with them."""
    head = Head(id, model, created, body.num_choices, body.wants_usage)
    return ChatReplies(head) if isinstance(body, ChatBody) else CompletionReplies(head, echoed)


@final
class CompletionReplies(Replies):
    """Answers of `/v1/completions`."""

    def __init__(self, head: Head, echoed: Sequence[str]) -> None:
        self._head = head
        self._echoed = echoed

    def whole(self, completions: Sequence[Numbered]) -> CompletionReply:
        ordered = self._head.order(completions)
        choices: list[CompletionChoice] = []
        for prompt, completion in ordered:
            echo = self._echo(prompt)
            logprobs = completion.logprobs
            choices.append(
                {
                    "index": self._head.choice(prompt, completion.index),
                    "text": echo + completion.text,
                    "logprobs": None if logprobs is None else _completion_logprobs(logprobs, len(echo)),
                    "finish_reason": _finish_reason(completion),
                }
            )
        return {**self._reply(choices), "usage": usage_of(ordered)}

    def token(self, prompt: int, token: Token) -> list[Chunk]:
        number = self._head.choice(prompt, token.index)
        is_first = number not in self._head.sent
        sent = self._head.sent.setdefault(number, _Sent())
        text = (self._echo(prompt) if is_first else "") + token.text
        logprobs = None
        if token.logprobs is not None:
            logprobs = _completion_logprobs([token.logprobs], sent.num_token_characters)
            sent.num_token_characters += len(token.logprobs.chosen.text)
        sent.num_characters += len(token.text)
        if not text and logprobs is None:
            return []
        return [self._chunk({"index": number, "text": text, "logprobs": logprobs, "finish_reason": None})]

    def finished(self, prompt: int, completion: Completion) -> list[Chunk]:
        number = self._head.choice(prompt, completion.index)
        echo = "" if number in self._head.sent else self._echo(prompt)
        text = echo + completion.text[self._head.sent.setdefault(number, _Sent()).num_characters :]
        reason = _finish_reason(completion)
        return [self._chunk({"index": number, "text": text, "logprobs": None, "finish_reason": reason})]

    def usage(self, completions: Sequence[Numbered]) -> list[Chunk]:
        return [{**self._reply([]), "usage": usage_of(completions)}] if self._head.wants_usage else []

    def _echo(self, prompt: int) -> str:
        return self._echoed[prompt] if self._echoed else ""

    def _reply(self, choices: list[CompletionChoice]) -> CompletionReply:
        head = self._head
        return {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }

    def _chunk(self, choice: CompletionChoice) -> CompletionReply:
        made = self._reply([choice])
        return {**made, "usage": None} if self._head.wants_usage else made


@final
class ChatReplies(Replies):
    """Answers of `/v1/chat/completions`."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def whole(self, completions: Sequence[Numbered]) -> ChatReply:
        ordered = self._head.order(completions)
        choices: list[ChatChoice] = [
            {
                "index": self._head.choice(prompt, completion.index),
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "logprobs": None if completion.logprobs is None else _chat_logprobs(completion.logprobs),
                "finish_reason": _finish_reason(completion),
            }
            for prompt, completion in ordered
        ]
        head = self._head
        return {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "usage": usage_of(ordered),
        }

    def token(self, prompt: int, token: Token) -> list[Chunk]:
        number = self._head.choice(prompt, token.index)
        chunks = self._begun(number)
        self._head.sent[number].num_characters += len(token.text)
        if token.text or token.logprobs is not None:
            logprobs = None if token.logprobs is None else _chat_logprobs([token.logprobs])
            delta: ChatDelta = {"content": token.text}
            chunks.append(self._chunk({"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None}))
        return chunks

    def finished(self, prompt: int, completion: Completion) -> list[Chunk]:
        number = self._head.choice(prompt, completion.index)
        chunks = self._begun(number)
        rest = completion.text[self._head.sent[number].num_characters :]
        delta: ChatDelta = {"content": rest} if rest else {}
        reason = _finish_reason(completion)
        chunks.append(self._chunk({"index": number, "delta": delta, "logprobs": None, "finish_reason": reason}))
        return chunks

    def usage(self, completions: Sequence[Numbered]) -> list[Chunk]:
        return [{**self._reply([]), "usage": usage_of(completions)}] if self._head.wants_usage else []

    def _begun(self, number: int) -> list[Chunk]:
        """The chunk with the role, before the first of a choice."""
        if number in self._head.sent:
            return []
        self._head.sent[number] = _Sent()
        delta: ChatDelta = {"role": "assistant", "content": ""}
        return [self._chunk({"index": number, "delta": delta, "logprobs": None, "finish_reason": None})]

    def _reply(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        head = self._head
        return {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        made = self._reply([choice])
        return {**made, "usage": None} if self._head.wants_usage else made
