"""What clients of OpenAI's API get: objects for JSON, in one piece or as the chunks of a stream.

One HTTP request may carry several prompts and ask for `n` completions of each; choice = prompt * n + completion:

    prompts  a  a  b  b        `Replies` is told the prompt's number with every event
    choice   0  1  2  3

A stream of one chat choice: {role}, {content} for each token that shows text, {finish_reason}; when asked for, a last
chunk without choices has the usage. Source of the shapes: OpenAI's API reference, the models of the `openai` package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NotRequired, TypeAlias, final

from typing_extensions import TypedDict

from kvcache.request import Completion, Logprob, Token, TokenLogprobs
from kvcache.wire import bytes_of, logarithm
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
    """What a request cost. A prompt counts once, however many completions it has; discarded ones do not count."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    r"""Of `/v1/completions`: four lists of one entry a token.

    tokens: texts; a token that is no whole characters is called by its bytes: "bytes:\xf0\x9f". top_logprobs: the
    likeliest by these names, and the chosen one; of equal names the likelier. text_offset: whole characters of the
    choice's text before the token; at most those that there are, in a stream those that have been told.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TopLogprob(TypedDict):
    """token: the text, with U+FFFD for a part of a character; bytes: what it stands for, null where not known."""

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


def _logprob(one: Logprob) -> TopLogprob:
    known = bytes_of(one)
    return {"token": one.text, "logprob": logarithm(one), "bytes": None if known is None else list(known)}


def _chat_logprobs(tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    return {
        "content": [{**_logprob(each.chosen), "top_logprobs": [_logprob(top) for top in each.top]} for each in tokens],
        "refusal": None,
    }


def _name(one: Logprob) -> str:
    """What `/v1/completions` calls a token: halves of characters, which all look the same, by their bytes."""
    try:
        one.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + one.bytes.decode("ascii", "backslashreplace")
    return one.text


def _by_name(each: TokenLogprobs) -> dict[str, float]:
    made: dict[str, float] = {}
    for one in (*each.top, each.chosen):
        made.setdefault(_name(one), logarithm(one))
    return made


class _Offsets:
    """Where tokens begin in a text that grows. One that goes on with a character begins where the character does."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._next = 0

    def of(self, token: Logprob) -> int:
        """Whole characters before `token`, the next one."""
        begin, known = self._next, bytes_of(token)
        self._next += len(token.text if known is None else self._decoder.decode(known))
        return begin


def _completion_logprobs(tokens: Sequence[TokenLogprobs], offsets: _Offsets, end: int) -> CompletionLogprobs:
    """`offsets`: in the choice's text. `end`: of it."""
    return {
        "tokens": [_name(each.chosen) for each in tokens],
        "token_logprobs": [logarithm(each.chosen) for each in tokens],
        "top_logprobs": [_by_name(each) for each in tokens],
        "text_offset": [min(offsets.of(each.chosen), end) for each in tokens],
    }


class Numbered(NamedTuple):
    """A finished completion and the number of its prompt."""

    prompt: int
    completion: Completion


def usage_of(completions: Sequence[Numbered]) -> UsageObject:
    """What a request cost: each prompt once, its cached tokens those of its first completion, every token returned.

    Candidates that `best_of` or a search by beams has discarded are not in it.
    """
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
    """What a stream has told of one choice: characters of text, and where the next token begins."""

    num_characters: int = 0
    offsets: _Offsets = field(default_factory=_Offsets)


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
            logprobs = None
            if completion.logprobs is not None:
                logprobs = _completion_logprobs(completion.logprobs, _Offsets(), len(completion.text))
            choices.append(
                {
                    "index": self._head.choice(prompt, completion.index),
                    "text": echo + completion.text,
                    "logprobs": logprobs,
                    "finish_reason": _finish_reason(completion),
                }
            )
        return {**self._reply(choices), "usage": usage_of(ordered)}

    def token(self, prompt: int, token: Token) -> list[Chunk]:
        number = self._head.choice(prompt, token.index)
        is_first = number not in self._head.sent
        sent = self._head.sent.setdefault(number, _Sent())
        text = (self._echo(prompt) if is_first else "") + token.text
        sent.num_characters += len(token.text)
        logprobs = None
        if token.logprobs is not None:
            logprobs = _completion_logprobs([token.logprobs], sent.offsets, sent.num_characters)
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
