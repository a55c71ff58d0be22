"""One output under way, the request that it belongs to, and what is told of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

from kvcache.engine.beams import BeamSearch
from kvcache.engine.sampler import Choice, Chooser
from kvcache.engine.text import StopTexts, TextStream, token_bytes, token_text, whole_text
from kvcache.prefix import Chain
from kvcache.request import Completion, Event, Finished, Logprob, MediaInput, Request, Token, TokenLogprobs
from kvcache.spec import Match

__all__ = ["Accepted", "Ending", "Group", "Sample"]


@final
@dataclass(slots=True, eq=False)
class Group:
    """A request and its outputs. `finished`: those that are over, by index, each with what `best_of` ranks it by.

    search: of beams; its samples are then places for them, the first of which is there from beginning to end.
    """

    request: Request
    added: float
    search: BeamSearch | None = None
    samples: dict[int, Sample] = field(default_factory=dict)
    finished: dict[int, tuple[float, Completion]] = field(default_factory=dict)

    @property
    def chooses_best(self) -> bool:
        """Whether more outputs are computed than are wanted."""
        return self.request.params.num_samples > self.request.params.n

    def best(self, ended: Mapping[int, tuple[float, Completion]]) -> list[Completion]:
        """The `n` likeliest of all, numbered anew, now that the last have ended."""
        ranked = sorted((self.finished | dict(ended)).values(), key=lambda scored: scored[0], reverse=True)
        return [replace(done, index=i) for i, (_, done) in enumerate(ranked[: self.request.params.n])]


class Accepted(NamedTuple):
    """A token that has been chosen, and all that follows from it: written to the sample twice, it is there once.

    num_tokens, num_generated: of the sample, before it. reason: why it is the last.
    """

    token: int
    text: str
    logprobs: TokenLogprobs | None
    sum_logprob: float
    event: Token
    reason: str | None
    stream: TextStream
    stops: StopTexts
    num_tokens: int
    num_generated: int
    now: float


class Ending(NamedTuple):
    """What came of an output that is over, and of those that ended with it (see `Group.finished`), and who is told."""

    finished: Mapping[int, tuple[float, Completion]]
    events: Sequence[Event]


@final
@dataclass(slots=True, eq=False)
class Sample:
    """One output. `tokens` is its context: the prompt and what was generated, less what a context shift took out.

    media: the request's, as they stand in `tokens`. generated: all that was, the last of which may not be computed yet.
    drafts: guesses of the next ones.
    chain: None where nothing is to be published (any more); num_published: its blocks that have been.
    awaited: the block of another request that it waits for.
    accepted, ending: what has been decided and may not be carried out yet. reason: why its last token is the last of
    all. is_uncertain: a context shift has begun, and its tokens may not be what is stored.
    """

    number: int
    index: int
    group: Group
    tokens: list[int]
    num_prompt: int
    chooser: Chooser
    stream: TextStream
    stops: StopTexts
    generated: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    media: Sequence[MediaInput] = ()
    chain: Chain | None = None
    num_published: int = 0
    awaited: bytes | None = None
    match: Match | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sum_logprob: float = 0.0
    first_token: float | None = None
    num_preemptions: int = 0
    accepted: Accepted | None = None
    reason: str | None = None
    ending: Ending | None = None
    is_uncertain: bool = False

    @property
    def request(self) -> Request:
        return self.group.request

    @property
    def num_generated(self) -> int:
        return len(self.generated)

    def completion(self, reason: str, now: float) -> Completion:
        """What came of it. `now`: the engine's clock."""
        added = self.group.added
        return Completion(
            text="".join(self.text),
            token_ids=tuple(self.generated),
            finish_reason=reason,
            prompt_tokens=self.num_prompt,
            cached_tokens=self.match.num_tokens if self.match else 0,
            time_to_first_token=(now if self.first_token is None else self.first_token) - added,
            seconds=now - added,
            request_id=self.request.id,
            index=self.index,
            logprobs=tuple(self.logprobs) if self.request.params.logprobs is not None else None,
            match=self.match,
            num_preemptions=self.num_preemptions,
        )

    def described(self, choice: Choice, tokenizer: Any) -> TokenLogprobs | None:
        """The log-probabilities that the request asked for."""
        if choice.logprob is None or self.request.params.logprobs is None:
            return None
        top = tuple(_logprob(token, value, tokenizer) for token, value in choice.top)
        return TokenLogprobs(_logprob(choice.token, choice.logprob, tokenizer), top)

    def ends(self, reason: str, now: float, unborn: Iterable[int], tokenizer: Any) -> Ending:
        """What is told of it, and of those outputs that were still to begin. Changes nothing."""
        group = self.group
        if group.search is not None:
            return self._beams_end(group.search, reason, now, tokenizer)
        done = self.completion(reason, now)
        ended = [done, *(replace(done, index=index) for index in unborn)]
        score = self.sum_logprob / max(1, self.num_generated)
        finished = {c.index: (score, c) for c in ended}
        told, is_last = ended, len(group.samples) == 1
        if group.chooses_best:
            told = group.best(finished) if is_last else []
        return Ending(finished, [Finished(c, c.request_id, c.index, is_last=is_last and c is told[-1]) for c in told])

    def _beams_end(self, search: BeamSearch, reason: str, now: float, tokenizer: Any) -> Ending:
        params, completions = self.request.params, []
        base = self.completion(reason, now)
        for index, beam in enumerate(search.best(params.n, reason)):
            logprobs = [self.described(choice, tokenizer) for choice in beam.choices]
            done = replace(
                base,
                text=whole_text(tokenizer, search.prompt, beam.tokens, params.stop),
                token_ids=beam.tokens,
                # An abort also of those that have ended: there might have been better ones.
                finish_reason=reason if reason == "abort" else beam.reason,
                logprobs=None if params.logprobs is None else tuple(one for one in logprobs if one is not None),
                index=index,
                score=beam.score,
            )
            completions.append(done)
        last = completions[-1]
        events = [Finished(c, c.request_id, c.index, is_last=c is last) for c in completions]
        return Ending({c.index: (0.0, c) for c in completions}, events)


def _logprob(token: int, value: float, tokenizer: Any) -> Logprob:
    text = token_text(tokenizer, token)
    return Logprob(token, text, value, token_bytes(tokenizer, token, text) or b"")
