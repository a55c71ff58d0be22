"""Requests: what is asked of an engine, what comes back, and the states that a request goes through. Values only.

                  admit            computed             finish
    WAITING ----------> PREFILL ----------> DECODE ----------> FINISHED
       ^                   |                   |
       +----- preempt -----+----- preempt -----+       abort, from each of the first three --> ABORTED

A request that cannot be served even alone never gets a state: `RequestRefused` says why. (PREFILL goes to FINISHED,
too, where pinned blocks leave no room for the rest of a prompt.)
`TRANSITIONS` is that picture as a table; what is not in it is a bug, and `advance` names it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal, TypeAlias, final

from kvcache.errors import CorruptState, KVCacheError
from kvcache.spec import Match, flag, integer, integers, listed

__all__ = [
    "TRANSITIONS",
    "Action",
    "Completion",
    "Event",
    "Finished",
    "Logprob",
    "MediaInput",
    "Request",
    "RequestRefused",
    "SamplingParams",
    "State",
    "Token",
    "TokenLogprobs",
    "advance",
]


PROMPT = "text or token ids (decode bytes, take ['input_ids'] of what a tokenizer made)"
"""What a prompt must be, in errors."""

NEARLY_GREEDY = 1e-5
"""A temperature below which anything but the likeliest token has no share that f32 could hold."""


class RequestRefused(KVCacheError):
    """The request cannot be served even alone. `needed` and `available` count tokens."""

    def __init__(self, request_id: str, needed: int, available: int, what: str) -> None:
        self.request_id = request_id
        self.needed = needed
        self.available = available
        self.what = what
        cure = "give the engine more kv_bytes" if what.startswith("the cache") else "use a model with a longer context"
        super().__init__(
            f"request {request_id!r} needs {needed} tokens and {what} holds {available}; shorten the prompt, or {cure}"
        )

    def __reduce__(self) -> tuple[type[RequestRefused], tuple[str, int, int, str]]:
        return type(self), (self.request_id, self.needed, self.available, self.what)


def _fraction(value: object, what: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} is {value!r} ({type(value).__name__}); expected a number")
    if not low <= value <= high:  # also false for NaN
        raise ValueError(f"{what} is {value}; expected a number from {low} to {high}")
    return float(value)


def _text(value: object, what: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what} is {value!r} ({type(value).__name__}); expected a text")
    if not value:
        raise ValueError(f"{what} is empty; expected at least one character")
    _check_utf8(value, what)


def _check_utf8(text: str, what: str) -> None:
    """Half a character, as `surrogateescape` makes of bytes that are none, can be neither a token nor hashed."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has a lone surrogate at character {error.start}; expected text that UTF-8 can hold: decode bytes "
            f"with errors='replace'"
        ) from None


@final
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. The defaults are greedy.

    temperature: 0 is greedy, and so is less than 1e-5. top_k: 0 is off. top_p, min_p: as transformers defines them.
    seed: of this request alone; None takes entropy from the system. Penalties: repetition as transformers (1: off), the
    others as OpenAI (0: off).
    stop: texts that end the output, not part of it. stop_token_ids: tokens that do; ignore_eos: the model's own do not.
    logprobs: log-probabilities of the chosen token and of this many likeliest ones; None: none at all.
    n: completions; best_of: how many are sampled to choose the n likeliest from (at least n; None: n).
    logit_bias: added to the logits of these tokens, before penalties; -100 all but forbids a token, 100 all but
    forces it.
    num_beams: above 1, beam search as transformers' `generate` has it; the n best are returned. length_penalty: a
    beam's score is divided by its length to this power. early_stopping: True ends at `num_beams` finished beams, False
    when better ones are unlikely, "never" when they are impossible.
    context_shift: when the context is full, forget half of it instead of ending, but keep the first `keep` tokens.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    context_shift: bool = False
    keep: int = 0

    def __post_init__(self) -> None:
        required = {"max_tokens": 1, "top_k": 0, "n": 1, "num_beams": 1, "keep": 0}
        optional = {"seed": -(2**63), "logprobs": 0, "best_of": 1}
        for name, minimum in (required | optional).items():
            value = getattr(self, name)
            if value is not None or name in required:
                object.__setattr__(self, name, integer(value, name, minimum))
        _fraction(self.temperature, "temperature", 0.0, 100.0)
        if not _fraction(self.top_p, "top_p", 0.0, 1.0):
            raise ValueError("top_p is 0; expected a share of the probability above 0, up to 1")
        _fraction(self.min_p, "min_p", 0.0, 1.0)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(listed(self.stop, "stop", "texts"))
        for text in stop:
            _text(text, "a text of stop")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", integers(self.stop_token_ids, "stop_token_ids"))
        flag(self.ignore_eos, "ignore_eos")
        _fraction(self.repetition_penalty, "repetition_penalty", 0.01, 100.0)
        _fraction(self.presence_penalty, "presence_penalty", -2.0, 2.0)
        _fraction(self.frequency_penalty, "frequency_penalty", -2.0, 2.0)
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of is {self.best_of} and n is {self.n}; expected best_of of at least n")
        flag(self.context_shift, "context_shift")
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias is {self.logit_bias!r}; expected a mapping of token ids to numbers")
        bias = {
            integer(token, "a token in logit_bias"): _fraction(value, f"logit_bias of token {token}", -100.0, 100.0)
            for token, value in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", bias)
        _fraction(self.length_penalty, "length_penalty", -10.0, 10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping is {self.early_stopping!r}; expected True, False or 'never'")
        if self.num_beams > 1:
            self._check_beams()

    def _check_beams(self) -> None:
        if self.temperature >= NEARLY_GREEDY:
            raise ValueError(
                f"temperature is {self.temperature} and num_beams {self.num_beams}; expected 0: beams are searched, "
                f"not drawn"
            )
        if self.n > self.num_beams:
            raise ValueError(f"n is {self.n} and num_beams {self.num_beams}; expected at least as many beams")
        if self.best_of is not None or self.context_shift:
            what = "context_shift" if self.context_shift else f"best_of={self.best_of}"
            raise ValueError(f"{what} does not go with num_beams={self.num_beams}; leave it out")

    @property
    def num_sequences(self) -> int:
        """Sequences that the request may run at a time."""
        return self.num_beams if self.num_beams > 1 else self.num_samples

    @property
    def num_samples(self) -> int:
        """Completions that are computed."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < NEARLY_GREEDY or self.top_k == 1


@final
@dataclass(frozen=True, slots=True, eq=False)
class MediaInput:
    """An image, a sound or a source text of a request.

    It stands at token `index` of the prompt; `key` identifies its content, and `states` [n, hidden] is what
    `Engine.encode` made of it.
    """

    index: int
    key: Hashable
    states: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", integer(self.index, "MediaInput.index"))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt, text or token ids, and what is wanted of it.

    id: the caller's name for it, unique among those under way. priority: higher goes first; equal ones first come first
    served. salt: prompts share cached prefixes only under equal salts. media: in the order of their index.
    """

    id: str
    prompt: str | Sequence[int]
    params: SamplingParams = SamplingParams()
    priority: int = 0
    salt: str | None = None
    media: Sequence[MediaInput] = ()

    def __post_init__(self) -> None:
        _text(self.id, "Request.id")
        if isinstance(self.prompt, str):
            _check_utf8(self.prompt, "the prompt")
        else:
            object.__setattr__(self, "prompt", integers(self.prompt, "the prompt", PROMPT))
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"Request.params is {type(self.params).__name__}; expected SamplingParams")
        object.__setattr__(self, "priority", integer(self.priority, "Request.priority", minimum=-(2**31)))
        if self.salt is not None:
            if not isinstance(self.salt, str):
                raise TypeError(f"Request.salt is {self.salt!r}; expected a text or None")
            _check_utf8(self.salt, "Request.salt")
        object.__setattr__(self, "media", tuple(listed(self.media, "Request.media", "MediaInputs")))
        for one in self.media:
            if not isinstance(one, MediaInput):
                raise TypeError(f"Request.media holds {type(one).__name__}; expected MediaInputs, see Engine.encode")


@final
@dataclass(frozen=True, slots=True)
class Logprob:
    """One token and the natural logarithm of its probability (of the model's own distribution, before temperature).

    bytes: of its text in UTF-8, and of a part of a character, whose text is U+FFFD; empty where the tokenizer does not
    tell them.
    """

    token_id: int
    text: str
    logprob: float
    bytes: bytes = b""


@final
@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's, and those of the likeliest ones, in falling order."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `text` is what can be shown by now: never half a character, nor what may become a stop text.

    index: which of the request's `n` completions.
    """

    token_id: int
    text: str
    request_id: str = ""
    index: int = 0
    logprobs: TokenLogprobs | None = None


@final
@dataclass(frozen=True, slots=True)
class Completion:
    """A finished output.

    finish_reason: "stop" (end token or stop text), "length" (max_tokens, or the context is full), "abort".
    cached_tokens: how many of the prompt's tokens were not computed. time_to_first_token, seconds: since the request
    was added; the first is `seconds` where no token came. match: why not more of the prompt was cached. score: of a
    beam, its log-probability over its length to the power of `length_penalty`; None without beams.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    time_to_first_token: float
    seconds: float
    request_id: str = ""
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    match: Match | None = None
    num_preemptions: int = 0
    score: float | None = None


@final
@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of one completion. `is_last`: of its request (there are `n`)."""

    completion: Completion
    request_id: str = ""
    index: int = 0
    is_last: bool = True


Event: TypeAlias = Token | Finished


class State(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    ABORTED = "aborted"


class Action(Enum):
    """What happens to a request."""

    ADMIT = "admit"
    COMPUTED = "computed"
    PREEMPT = "preempt"
    FINISH = "finish"
    ABORT = "abort"


TRANSITIONS: Final[Mapping[tuple[State, Action], State]] = {
    (State.WAITING, Action.ADMIT): State.PREFILL,
    (State.WAITING, Action.ABORT): State.ABORTED,
    (State.PREFILL, Action.COMPUTED): State.DECODE,
    (State.PREFILL, Action.PREEMPT): State.WAITING,
    (State.PREFILL, Action.FINISH): State.FINISHED,
    (State.PREFILL, Action.ABORT): State.ABORTED,
    (State.DECODE, Action.PREEMPT): State.WAITING,
    (State.DECODE, Action.FINISH): State.FINISHED,
    (State.DECODE, Action.ABORT): State.ABORTED,
}


def advance(state: State, action: Action) -> State:
    """The next state. Raises `CorruptState` for an action that the state does not allow."""
    try:
        return TRANSITIONS[state, action]
    except KeyError:
        allowed = ", ".join(a.value for s, a in TRANSITIONS if s is state) or "nothing: it is final"
        raise CorruptState(f"a request in state {state.value!r} met {action.value!r}; it allows {allowed}") from None
