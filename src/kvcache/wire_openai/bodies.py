"""What clients of OpenAI's API send: bodies of `/v1/completions` and `/v1/chat/completions` -> `SamplingParams`.

| a field that ...                                              | is                                            |
|---------------------------------------------------------------|-----------------------------------------------|
| we can serve                                                  | checked, and goes into the `SamplingParams`   |
| never changes an answer (`user`, `store`, `metadata`)          | accepted                                      |
| would change it in a way we cannot (`tools`, `suffix`)         | refused by name, unless it asks for nothing   |
| nobody knows                                                  | refused, as OpenAI does                       |

Beam search has vLLM's names: with `use_beam_search` there are `best_of` beams (`n` where that is not given).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, final

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from kvcache.request import SamplingParams
from kvcache.wire import WHOLE, Body, Invalid, Refused, likeliest, parse

__all__ = ["ChatBody", "CompletionBody", "Message", "parse_chat", "parse_completion"]

Int64: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE]
Bias: TypeAlias = Annotated[
    dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024, json_schema_extra={"additionalProperties": False}),
]
"""Ids without leading zeros: "05" beside "5" would be the same token twice, and one of them lost."""
TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=1000)]
Prompt: TypeAlias = (
    str
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[str], Field(min_length=1, max_length=128)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=128)]
)


@final
class StreamOptions(Body):
    """include_usage: a last chunk tells what the request cost. include_obfuscation: padding; we never send any."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = False


class _Common(Body):
    """The fields that both endpoints have. Fields without effect here are those that never change an answer."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = 1
    stop: Annotated[list[Stop], Field(max_length=16)] | Stop | None = None
    seed: Int64 | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] | None = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    logit_bias: Bias | None = None
    # of other servers
    top_k: Annotated[int, Field(ge=-1, lt=2**31), WHOLE] | None = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = 1.0
    ignore_eos: bool | None = False
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    context_shift: bool | None = False
    keep: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = 0
    use_beam_search: bool | None = False
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    # without effect
    user: str | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what the request cost."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    def check_stream(self) -> None:
        """Raises `Invalid` for what is said of a stream where none is asked for."""
        if self.stream_options is not None and not self.stream:
            raise Invalid("stream_options is for streams only; set stream, or leave it out", "stream_options")

    def check_beams(self) -> None:
        """Raises `Invalid` for what does not go with beam search, or only with it."""
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) is not None:
                    raise Invalid(f"{name} is for beams only; set use_beam_search, or leave it out", name)
            return
        if self.stream:
            raise Invalid("beams cannot be streamed: the best is known at the end; set stream to false", "stream")
        if "temperature" in self.model_fields_set and self.temperature:
            raise Invalid(f"temperature is {self.temperature}; expected 0: beams are not drawn", "temperature")
        if self.context_shift:
            raise Invalid("context_shift does not go with use_beam_search; leave it out", "context_shift")

    def _sampling(self, max_tokens: int, logprobs: int | None, best_of: int | None = None) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        searches, num_beams = bool(self.use_beam_search), best_of or self.num_choices
        top_p, top_k = likeliest(_or(self.top_p, 1.0), self.top_k or 0)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if searches else _or(self.temperature, 1.0),
            top_p=top_p,
            top_k=top_k,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop=stop,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logprobs=logprobs,
            n=self.num_choices,
            best_of=None if searches else best_of,
            logit_bias={int(token): value for token, value in (self.logit_bias or {}).items()},
            num_beams=num_beams if searches else 1,
            length_penalty=_or(self.length_penalty, 1.0),
            early_stopping=self.early_stopping or False,
            context_shift=bool(self.context_shift),
            keep=self.keep or 0,
        )


@final
class CompletionBody(_Common):
    """The body of `/v1/completions`. `max_tokens` is 16 where it is not given, as OpenAI has it."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    echo: bool | None = False
    best_of: Annotated[int, Field(ge=1, le=128), WHOLE] | None = None
    # refused by name
    suffix: Annotated[Any, Refused()] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts apart."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def params(self, room: int) -> SamplingParams:
        """How to sample. `room`: tokens that fit after the prompt; no bound here, since 16 is the default."""
        return self._sampling(16 if self.max_tokens is None else self.max_tokens, self.logprobs, self.best_of)


@final
class TextPart(Body):
    """A part of a message's content. Parts of other types (images, sounds) are refused."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "text":
            raise PydanticCustomError("unsupported", "this server supports no parts but those of type 'text'")
        return value


@final
class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    # what assistants' messages carry when clients send them back; refused unless they ask for nothing
    refusal: Annotated[Any, Refused()] = None
    annotations: Annotated[Any, Refused()] = None
    audio: Annotated[Any, Refused()] = None
    function_call: Annotated[Any, Refused()] = None
    tool_calls: Annotated[Any, Refused()] = None

    @property
    def text(self) -> str:
        """The content in one piece."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


@final
class ChatBody(_Common):
    """The body of `/v1/chat/completions`. Without a number of tokens, a message goes on to the end of the context."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    # without effect
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    # refused by name
    audio: Annotated[Any, Refused()] = None
    function_call: Annotated[Any, Refused(("none",))] = None
    functions: Annotated[Any, Refused()] = None
    modalities: Annotated[Any, Refused((["text"],))] = None
    moderation: Annotated[Any, Refused()] = None
    prediction: Annotated[Any, Refused()] = None
    prompt_cache_options: Annotated[Any, Refused()] = None
    reasoning_effort: Annotated[Any, Refused(("none",))] = None
    response_format: Annotated[Any, Refused(({"type": "text"},))] = None
    tool_choice: Annotated[Any, Refused(("none", "auto"))] = None
    tools: Annotated[Any, Refused()] = None
    verbosity: Annotated[Any, Refused(("medium",))] = None
    web_search_options: Annotated[Any, Refused()] = None

    def params(self, room: int) -> SamplingParams:
        """How to sample. `room`: tokens that fit after the prompt, the bound where the body has none."""
        wanted = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self._sampling(room if wanted is None else wanted, (self.top_logprobs or 0) if self.logprobs else None)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def parse_completion(raw: bytes) -> CompletionBody:
    """A body of `/v1/completions`. Raises `Invalid`."""
    body = parse(CompletionBody, raw)
    if body.best_of is not None and body.best_of < body.num_choices:
        raise Invalid(
            f"best_of is {body.best_of} and n is {body.num_choices}; expected best_of of at least n", "best_of"
        )
    if body.stream and body.best_of not in (None, body.num_choices):
        raise Invalid("best_of cannot be streamed: the best is known at the end; set stream to false", "best_of")
    body.check_stream()
    body.check_beams()
    if body.echo and body.logprobs is not None:
        raise Invalid(
            "logprobs of the prompt are not computed; leave out echo or logprobs", "echo", "unsupported_parameter"
        )
    return body


def parse_chat(raw: bytes) -> ChatBody:
    """A body of `/v1/chat/completions`. Raises `Invalid`."""
    body = parse(ChatBody, raw)
    if body.top_logprobs and not body.logprobs:
        raise Invalid(f"top_logprobs is {body.top_logprobs} and logprobs is not true; set it", "top_logprobs")
    body.check_stream()
    body.check_beams()
    return body
