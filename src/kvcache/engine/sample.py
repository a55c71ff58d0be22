"""One output under way, and the request that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from kvcache.engine.beams import BeamSearch
from kvcache.engine.sampler import Choice, Chooser
from kvcache.engine.text import StopTexts, TextStream, token_bytes, token_text
from kvcache.prefix import Chain
from kvcache.request import Completion, Logprob, MediaInput, Request, TokenLogprobs
from kvcache.spec import Match

__all__ = ["Group", "Sample"]


@final
@dataclass(slots=True, eq=False)
class Group:
    """A request and its outputs. `finished` holds back those of `best_of`, until it is known which are best.

    search: of beams; its samples are then places for them, the first of which is there from beginning to end.
    """

    request: Request
    added: float
    search: BeamSearch | None = None
    samples: dict[int, Sample] = field(default_factory=dict)
    finished: list[tuple[float, Completion]] = field(default_factory=list)

    @property
    def chooses_best(self) -> bool:
        """Whether more outputs are computed than are wanted."""
        return self.request.params.num_samples > self.request.params.n

    def best(self) -> list[Completion]:
        """The `n` likeliest of those that have finished, numbered anew; they all have."""
        ranked = sorted(self.finished, key=lambda scored: scored[0], reverse=True)
        return [replace(done, index=i) for i, (_, done) in enumerate(ranked[: self.request.params.n])]


@final
@dataclass(slots=True, eq=False)
class Sample:
    """One output. `tokens` is its context: the prompt and what was generated, less what a context shift took out.

    media: the request's, as they stand in `tokens`. generated: all that was, the last of which may not be computed yet.
    drafts: guesses of the next ones.
    chain: None where nothing is to be published (any more); num_published: its blocks that have been.
    awaited: the block of another request that it waits for.
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

    @property
    def request(self) -> Request:
        return self.group.request

    @property
    def num_generated(self) -> int:
        return len(self.generated)

    def note(self, choice: Choice, tokenizer: Any) -> TokenLogprobs | None:
        """Keep the log-probabilities of a chosen token, if it came with any; them, if the request asked for them."""
        if choice.logprob is None:
            return None
        self.sum_logprob += choice.logprob
        if self.request.params.logprobs is None:
            return None
        top = tuple(_logprob(token, value, tokenizer) for token, value in choice.top)
        found = TokenLogprobs(_logprob(choice.token, choice.logprob, tokenizer), top)
        self.logprobs.append(found)
        return found

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


def _logprob(token: int, value: float, tokenizer: Any) -> Logprob:
    text = token_text(tokenizer, token)
    return Logprob(token, text, value, token_bytes(tokenizer, token, text) or b"")
