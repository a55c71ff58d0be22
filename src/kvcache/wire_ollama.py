"""Ollama's JSON <-> requests and events: `/api/generate`, `/api/chat`, `/api/tags`, `/api/show`, `/api/ps`.

    bytes -> GenerateBody | OllamaChatBody -> SamplingParams     `parse_generate`, `parse_chat`, then `.params(room)`
    Token, Completion -> objects for JSON                        `token_reply`, `final_reply`

Options and their defaults are Ollama's, with these differences, none of them silent:

| option                                  | here                                                                    |
|-----------------------------------------|-------------------------------------------------------------------------|
| `repeat_penalty`                        | looks at the whole text (theirs: the last `repeat_last_n`); 1 by default |
| `repeat_last_n`                         | -1 (all), or 0, which turns the penalty off; others are refused         |
| `mirostat`, `tfs_z`, `typical_p`, ...   | refused, unless they have the value that turns them off                 |
| `num_ctx`, `num_gpu`, `num_thread`, ... | how a model is loaded: the server decided that when it started          |
| `shift` (of the body)                   | false where not given (theirs: true)                                    |
| `truncate` (of the body)                | without effect: a prompt that is too long is refused (theirs: cut)      |
| `keep_alive` (of the body)              | without effect: the model stays as long as the server                   |

Values only: no I/O, and the time is passed in. Source of the shapes: Ollama's `docs/api.md`, the models of the `ollama`
package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, cast, final

from pydantic import Field
from typing_extensions import TypedDict

from kvcache.request import Completion, Logprob, SamplingParams, Token, TokenLogprobs
from kvcache.wire import WHOLE, Body, Invalid, Refused, bytes_of, likeliest, logarithm, parse

__all__ = [
    "ChatReply",
    "ErrorReply",
    "GenerateBody",
    "GenerateReply",
    "ModelDetails",
    "OllamaChatBody",
    "ProcessList",
    "ShowBody",
    "ShowReply",
    "TagList",
    "VersionReply",
    "final_reply",
    "loaded_reply",
    "parse_chat",
    "parse_generate",
    "parse_show",
    "process_list",
    "tag_list",
    "timestamp",
    "token_reply",
]

# --- bodies -----------------------------------------------------------------------------------------------------------

Int: TypeAlias = Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE]
TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=1000)]
Duration: TypeAlias = Annotated[
    str, Field(pattern=r"^[+-]?(0|(([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+)$", max_length=100)
]
"""As Go writes it: "5m", "1h30m", "-1s"."""


@final
class Options(Body):
    """How to sample. num_predict: tokens at most; 0 and below: to the end of the context."""

    num_predict: Int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 0.8
    top_k: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = 40
    top_p: Annotated[float, Field(ge=0, le=1)] | None = 0.9
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    stop: Annotated[list[Stop], Field(max_length=16)] | Stop | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = 1.0
    repeat_last_n: Annotated[Any, Refused((-1, 0))] = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    num_keep: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = 4
    # how a model is loaded: without effect
    numa: bool | None = None
    num_ctx: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    num_batch: Int | None = None
    num_gpu: Int | None = None
    main_gpu: Int | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    num_thread: Int | None = None
    # refused by name
    logits_all: Annotated[Any, Refused((False,))] = None
    vocab_only: Annotated[Any, Refused((False,))] = None
    embedding_only: Annotated[Any, Refused((False,))] = None
    tfs_z: Annotated[Any, Refused((1,))] = None
    typical_p: Annotated[Any, Refused((1,))] = None
    mirostat: Annotated[Any, Refused((0,))] = None
    penalize_newline: Annotated[Any, Refused((True,))] = None
    # of mirostat alone: without effect
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


class _Common(Body):
    """The fields that both endpoints have. keep_alive: seconds, or a text like "5m"."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = True
    options: Options | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    shift: bool | None = False
    # without effect
    keep_alive: float | Duration | None = None
    truncate: bool | None = None
    # refused by name
    format: Annotated[Any, Refused()] = None
    think: Annotated[Any, Refused((False,))] = None

    @property
    def unloads(self) -> bool:
        """Whether the model shall leave memory, in Ollama's words: a `keep_alive` of 0, such as "0s"."""
        return self.keep_alive is not None and not re.search("[1-9]", str(self.keep_alive))

    def params(self, room: int) -> SamplingParams:
        """How to sample. `room`: tokens that fit after the prompt, the bound where the body has none."""
        given = self.options or Options()
        wanted = given.num_predict or 0
        stop = [given.stop] if isinstance(given.stop, str) else given.stop or ()
        penalty = 1.0 if given.repeat_penalty is None or given.repeat_last_n == 0 else given.repeat_penalty
        top_p, top_k = likeliest(
            0.9 if given.top_p is None else given.top_p, 40 if given.top_k is None else given.top_k
        )
        return SamplingParams(
            max_tokens=wanted if wanted > 0 else room,
            temperature=0.8 if given.temperature is None else given.temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=given.min_p or 0.0,
            seed=None if given.seed is None or given.seed < 0 else given.seed,
            stop=stop,
            repetition_penalty=penalty,
            presence_penalty=given.presence_penalty or 0.0,
            frequency_penalty=given.frequency_penalty or 0.0,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            context_shift=bool(self.shift),
            keep=4 if given.num_keep is None else given.num_keep,
        )


@final
class GenerateBody(_Common):
    """The body of `/api/generate`. `context` are token ids of what was said before, as an answer gave them."""

    prompt: str | None = ""
    system: str | None = None
    context: list[TokenId] | None = None
    raw: bool | None = False
    # refused by name
    suffix: Annotated[Any, Refused()] = None
    template: Annotated[Any, Refused()] = None
    images: Annotated[Any, Refused()] = None
    width: Annotated[Any, Refused((0,))] = None
    height: Annotated[Any, Refused((0,))] = None
    steps: Annotated[Any, Refused((0,))] = None


@final
class OllamaMessage(Body):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str = ""
    # refused by name
    thinking: Annotated[Any, Refused()] = None
    images: Annotated[Any, Refused()] = None
    tool_name: Annotated[Any, Refused()] = None
    tool_calls: Annotated[Any, Refused()] = None

    @property
    def text(self) -> str:
        """The content."""
        return self.content


@final
class OllamaChatBody(_Common):
    """The body of `/api/chat`. Without messages it only asks whether the model is there."""

    messages: Annotated[list[OllamaMessage], Field(max_length=10_000)] | None = None
    # refused by name
    tools: Annotated[Any, Refused()] = None


@final
class ShowBody(Body):
    """The body of `/api/show`; `name` is what older clients send. `verbose` is without effect."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    # refused by name
    system: Annotated[Any, Refused()] = None
    template: Annotated[Any, Refused()] = None
    options: Annotated[Any, Refused()] = None


def _checked(body: _Common) -> None:
    if body.top_logprobs and not body.logprobs:
        raise Invalid(f"top_logprobs is {body.top_logprobs} and logprobs is not true; set it", "top_logprobs")


def parse_generate(raw: bytes) -> GenerateBody:
    """A body of `/api/generate`. Raises `Invalid`."""
    body = parse(GenerateBody, raw)
    _checked(body)
    if body.raw and (body.system or body.context):
        raise Invalid("raw is true: the prompt goes to the model as it is; leave out system and context", "raw")
    return body


def parse_chat(raw: bytes) -> OllamaChatBody:
    """A body of `/api/chat`. Raises `Invalid`."""
    body = parse(OllamaChatBody, raw)
    _checked(body)
    return body


def parse_show(raw: bytes) -> str:
    """The model that a body of `/api/show` asks for. Raises `Invalid`."""
    body = parse(ShowBody, raw)
    name = body.model or body.name
    if not name:
        raise Invalid("model: missing; it is required", "model")
    return name


# --- replies ----------------------------------------------------------------------------------------------------------


class ErrorReply(TypedDict):
    """The body of every answer that is no success, and the last line of a stream that failed."""

    error: str


class TopLogprob(TypedDict):
    """token: the text, with U+FFFD for a part of a character; bytes: what it stands for, absent where not known."""

    token: str
    logprob: float
    bytes: NotRequired[list[int]]


class TokenLogprob(TopLogprob):
    """The chosen token, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class _Answer(TypedDict):
    """What lines of both endpoints have; the numbers stand in the last one. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[TokenLogprob]]


class GenerateReply(_Answer):
    """A line of `/api/generate`. context: the tokens of prompt and answer, in the last line."""

    response: str
    context: NotRequired[list[int]]


class ChatMessage(TypedDict):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str


class ChatReply(_Answer):
    """A line of `/api/chat`."""

    message: ChatMessage


class ModelDetails(TypedDict):
    """What a model is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class TagObject(TypedDict):
    """One model. size: bytes."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class TagList(TypedDict):
    """The body of `/api/tags`."""

    models: list[TagObject]


class ProcessObject(TypedDict):
    """One loaded model. size: bytes."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class ProcessList(TypedDict):
    """The body of `/api/ps`."""

    models: list[ProcessObject]


class ShowReply(TypedDict):
    """The body of `/api/show`."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, str | int | float | bool]
    capabilities: list[str]
    modified_at: str


class VersionReply(TypedDict):
    """The body of `/api/version`."""

    version: str


def timestamp(moment: datetime) -> str:
    """RFC 3339, with a time zone, as Ollama writes it."""
    return moment.isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _logprob(one: Logprob) -> TopLogprob:
    made: TopLogprob = {"token": one.text, "logprob": logarithm(one)}
    if (known := bytes_of(one)) is not None:
        made["bytes"] = list(known)
    return made


def _logprobs(tokens: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
    return [{**_logprob(each.chosen), "top_logprobs": [_logprob(top) for top in each.top]} for each in tokens]


def _line(is_chat: bool, model: str, now: datetime, text: str, done: bool) -> GenerateReply | ChatReply:
    if is_chat:
        message: ChatMessage = {"role": "assistant", "content": text}
        return {"model": model, "created_at": timestamp(now), "message": message, "done": done}
    return {"model": model, "created_at": timestamp(now), "response": text, "done": done}


def token_reply(is_chat: bool, model: str, token: Token, now: datetime) -> GenerateReply | ChatReply:
    """A line of a stream."""
    line = _line(is_chat, model, now, token.text, done=False)
    if token.logprobs is not None:
        line["logprobs"] = _logprobs([token.logprobs])
    return line


def final_reply(
    is_chat: bool,
    model: str,
    completion: Completion,
    now: datetime,
    *,
    num_told: int | None = None,
    context: Sequence[int] | None = None,
) -> GenerateReply | ChatReply:
    """The whole answer (`num_told` None), or the last line of a stream that told `num_told` characters.

    context: the tokens of the prompt.
    """
    line = _line(is_chat, model, now, completion.text[num_told or 0 :], done=True)
    line["done_reason"] = "length" if completion.finish_reason == "length" else "stop"
    line["total_duration"] = _nanoseconds(completion.seconds)
    line["load_duration"] = 0
    line["prompt_eval_count"] = completion.prompt_tokens
    line["prompt_eval_duration"] = _nanoseconds(completion.time_to_first_token)
    line["eval_count"] = len(completion.token_ids)
    line["eval_duration"] = _nanoseconds(completion.seconds - completion.time_to_first_token)
    if context is not None and not is_chat:
        cast(GenerateReply, line)["context"] = [*context, *completion.token_ids]
    if num_told is None and completion.logprobs is not None:
        line["logprobs"] = _logprobs(completion.logprobs)
    return line


def loaded_reply(is_chat: bool, model: str, now: datetime, *, unloads: bool = False) -> GenerateReply | ChatReply:
    """The answer to a body without a prompt, which only loads the model, or `unloads` it."""
    line = _line(is_chat, model, now, "", done=True)
    line["done_reason"] = "unload" if unloads else "load"
    return line


def tag_list(model: str, size: int, digest: str, details: ModelDetails, modified: datetime) -> TagList:
    """The body of `/api/tags`. size: bytes."""
    return {
        "models": [
            {
                "name": model,
                "model": model,
                "modified_at": timestamp(modified),
                "size": size,
                "digest": digest,
                "details": details,
            }
        ]
    }


def process_list(
    model: str, size: int, digest: str, details: ModelDetails, context_length: int, expires: datetime
) -> ProcessList:
    """The body of `/api/ps`. size: bytes. context_length: tokens of the longest request. expires: from memory."""
    return {
        "models": [
            {
                "name": model,
                "model": model,
                "size": size,
                "digest": digest,
                "details": details,
                "expires_at": timestamp(expires),
                "size_vram": 0,
                "context_length": context_length,
            }
        ]
    }
