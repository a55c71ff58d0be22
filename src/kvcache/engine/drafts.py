"""Speculative decoding: guesses of the next tokens, which the model checks all at once.

    tokens         the cat sat on the mat. the cat        drafts:  sat on the mat
    one forward    cat | sat on the mat                   chosen:  sat on a ...
    accepted       sat on, then the chosen "a"; the cache goes back to "the cat sat on"

At each place the target's own choice is what counts: a draft is kept only where it equals what would have been chosen
there anyway, greedy or drawn. So outputs are those of plain decoding, however bad the guesses.

| drafter      | guesses                                                                 | costs                   |
|--------------|-------------------------------------------------------------------------|-------------------------|
| `Lookup`     | what followed the last few tokens when they came before (prompt lookup) | nothing                 |
| `DraftModel` | what a smaller model with the same tokenizer says                       | its own cache, its time |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from kvcache.engine.sample import Sample
from kvcache.engine.sampler import greedy
from kvcache.errors import CacheFull, NotSupported
from kvcache.hf.runner import Runner, Work
from kvcache.hf.trial import tried_layout
from kvcache.prefix.chain import common_length

__all__ = ["DraftModel", "Drafter", "Lookup"]

LONGEST, SHORTEST = 3, 2
"""Tokens that must have come before in the same order. One alone would match too often to be right."""


class Drafter(ABC):
    """Makes guesses for sequences that decode."""

    @abstractmethod
    def propose(self, samples: Sequence[Sample], counts: Sequence[int]) -> list[list[int]]:
        """For each output at most `counts[i]` tokens that may follow its `tokens`."""

    @abstractmethod
    def forget(self, number: int) -> None:
        """The sequence has left. Unknown ones are fine."""

    @abstractmethod
    def close(self) -> None:
        """Free what is held."""


@final
@dataclass(slots=True)
class _Seen:
    """Where runs of tokens ended last, and before that: by length and run."""

    length: int = 0
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    before: dict[tuple[int, ...], int] = field(default_factory=dict)


@final
class Lookup(Drafter):
    """Prompt lookup decoding (Saxena 2023): O(1) per token."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def propose(self, samples: Sequence[Sample], counts: Sequence[int]) -> list[list[int]]:
        return [self._after(sample, count) for sample, count in zip(samples, counts, strict=True)]

    def forget(self, number: int) -> None:
        self._seen.pop(number, None)

    def close(self) -> None:
        self._seen.clear()

    def _after(self, sample: Sample, count: int) -> list[int]:
        tokens = sample.tokens
        seen = self._seen.setdefault(sample.number, _Seen())
        if seen.length > len(tokens):  # the context was shifted
            seen = self._seen[sample.number] = _Seen()
        for end in range(seen.length + 1, len(tokens) + 1):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                run = tuple(tokens[end - size : end])
                if run in seen.ends:
                    seen.before[run] = seen.ends[run]
                seen.ends[run] = end
        seen.length = len(tokens)
        for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            begin = seen.before.get(tuple(tokens[-size:]))
            if begin is not None:
                return tokens[begin : begin + count]
        return []


@final
class DraftModel(Drafter):
    """A smaller model guesses, greedily, with a cache of its own. Raises `NotSupported` for models with states.

    vocabulary: of the model that checks; guesses beyond it are not made. capacity: tokens for each sequence. Longer
    contexts have no guesses, nor have those with a token that the smaller model does not know.
    """

    def __init__(self, model: Any, *, vocabulary: int, capacity: int, max_sequences: int, max_batch: int) -> None:
        layout = tried_layout(model)
        if layout.has_states or layout.is_encoder_decoder:
            raise NotSupported(
                f"{type(model).__name__} cannot draft: its states cannot be taken back, or it needs an encoder's; "
                f"choose a model with attention only"
            )
        self._vocabulary = min(vocabulary, int(model.get_input_embeddings().weight.shape[0]))
        self._capacity = capacity
        self._max_batch = max_batch
        self._fed: dict[int, list[int]] = {}
        self._runner = Runner(
            model,
            layout=layout,
            capacity=max(capacity, max_batch),
            max_sequences=max_sequences,
            max_batch=max_batch,
            block_size=16,
        )

    def propose(self, samples: Sequence[Sample], counts: Sequence[int]) -> list[list[int]]:
        drafts: dict[int, list[int]] = {sample.number: [] for sample in samples}
        left: dict[int, int] = {}
        ahead: dict[int, list[int]] = {}
        try:
            for sample, count in zip(samples, counts, strict=True):
                room = min(count, self._capacity + 1 - len(sample.tokens))  # the last guess is not fed
                if room > 0:
                    missing = self._rewound(sample)
                    if max(missing) < self._vocabulary:
                        left[sample.number], ahead[sample.number] = room, missing
            while ahead:
                following = self._forward(ahead)
                ahead = {}
                for number, token in following.items():
                    if token >= self._vocabulary:
                        continue
                    drafts[number].append(token)
                    if len(drafts[number]) < left[number]:
                        ahead[number] = [token]
        except BaseException as error:
            for sample in samples:
                self.forget(sample.number)  # what has been fed is uncertain now
            if not isinstance(error, CacheFull | NotSupported):
                raise  # but for these: guesses are a luxury, and whoever has none decodes plainly
        return [drafts[sample.number] for sample in samples]

    def forget(self, number: int) -> None:
        if self._fed.pop(number, None) is not None:
            self._runner.cache.remove(number, 0)

    def close(self) -> None:
        self._fed.clear()
        self._runner.close()

    def _rewound(self, sample: Sample) -> list[int]:
        """Cut the draft's sequence to what was accepted; the tokens that it lacks, at least one."""
        fed = self._fed.setdefault(sample.number, [])
        shared = min(common_length(fed, sample.tokens), len(sample.tokens) - 1)
        if shared < len(fed):
            shared = self._runner.cache.resume_point(sample.number, shared)
            self._runner.cache.remove(sample.number, shared)
            del fed[shared:]
        return sample.tokens[shared:]

    def _forward(self, ahead: dict[int, list[int]]) -> dict[int, int]:
        """Feed these tokens, in steps of `max_batch`; the likeliest token after each sequence."""
        following: dict[int, int] = {}
        waiting = {number: list(tokens) for number, tokens in ahead.items()}
        while waiting:
            works, room = [], self._max_batch
            for number, tokens in waiting.items():
                part = tokens[:room]
                if not part:
                    break
                room -= len(part)
                works.append(Work(number, len(self._fed[number]), part, int(len(part) == len(tokens))))
            chosen = iter(greedy(self._runner.forward(works)))
            for work in works:
                self._fed[work.sequence] += work.tokens
                waiting[work.sequence] = waiting[work.sequence][len(work.tokens) :]
                if not waiting[work.sequence]:
                    following[work.sequence] = next(chosen)
                    del waiting[work.sequence]
        return following
