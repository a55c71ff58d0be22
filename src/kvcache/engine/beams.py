"""Beam search: the `num_beams` likeliest outputs so far go on, side by side. Values in, values out, no sequences.

    beams    "the"  -1.0      candidates   "the cat" -1.9   "a dog" -2.0   "the end." -2.1   "a cat" -2.4
             "a"    -1.2      beams        "the cat", "a dog";   finished  "the end."

It is transformers' search (`generate(num_beams=...)`), in its arithmetic: log-probabilities of the logits, changed by
penalties, are added in f32; of the best `num_beams * max(2, 1 + end tokens)` candidates those that end join the
finished ones if they are among the first `num_beams`, and the others go on. Scores of finished ones are divided by a
power of their length. Beams of one request are always equally long.

Whoever runs the model keeps each beam's tokens in a sequence. `places` says in which one; a beam with several children
leaves its place to the first, the others take places of beams without any, by reference (`copy_prefix`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from kvcache.engine.sampler import Choice, Chooser
from kvcache.request import SamplingParams

__all__ = ["Beam", "BeamSearch", "Child"]

_OUT = -1.0e9
"""What transformers adds to the score of a candidate that must not be taken: less than any log-probability."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """An output: its tokens, the sum of their log-probabilities, and each as it was chosen if anybody asked.

    score: the sum, or over a power of the length once it has finished; reason: why it has.
    """

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    choices: tuple[Choice, ...] = ()
    reason: str = ""


class Child(NamedTuple):
    """A beam goes on: the sequence at `place` becomes that at `parent` (perhaps itself), and `token` follows."""

    place: int
    parent: int
    token: int


@final
class BeamSearch:
    """The search of one request.

    most: tokens of an output. ends: tokens that end one; has_stopped: whether an output ends for what it says.
    """

    def __init__(
        self,
        params: SamplingParams,
        chooser: Chooser,
        prompt: Sequence[int],
        *,
        most: int,
        ends: frozenset[int],
        has_stopped: Callable[[Sequence[int]], bool],
    ) -> None:
        self._params = params
        self._chooser = chooser
        self.prompt = list(prompt)
        self._most = most
        self._ends = ends
        self._has_stopped = has_stopped
        self._can_improve = True
        self.beams = [Beam()]
        self.places = [0]
        self.finished: list[Beam] = []
        self.rows: dict[int, Tensor] = {}  # logits by place, of those that are computed
        self.is_done = False

    @property
    def num_places(self) -> int:
        """Sequences that the beams take when they have parted."""
        return self._params.num_beams

    def common(self) -> list[int]:
        """Tokens that all beams begin with, the prompt's among them."""
        first, last = min(beam.tokens for beam in self.beams), max(beam.tokens for beam in self.beams)
        length = next((i for i, (x, y) in enumerate(zip(first, last, strict=True)) if x != y), len(first))
        return [*self.prompt, *first[:length]]

    def tokens(self, beam: int) -> list[int]:
        """The context of a beam: the prompt and its own tokens."""
        return [*self.prompt, *self.beams[beam].tokens]

    def advance(self) -> list[Child]:
        """A token more for each beam, now that `rows` has the logits of all; how the beams go on. O(beams * words)."""
        width = self._params.num_beams
        logits = torch.stack([self.rows[place] for place in self.places]).float()
        logprobs = logits.log_softmax(-1)
        sums = torch.tensor([beam.score for beam in self.beams], device=logits.device)
        scores = (self._adjusted(logprobs) + sums[:, None]).flatten()
        best = scores.topk(min(len(scores), width * max(2, 1 + len(self._ends))))
        candidates = [
            self._longer(logprobs, value, *divmod(index, logits.shape[1]))
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        going = torch.tensor([beam.score + _OUT * bool(beam.reason) for _, beam in candidates])
        chosen = going.topk(width)
        finished = self._finished([beam for _, beam in candidates[:width] if beam.reason])
        beams = [
            Beam(beam.tokens, score, beam.choices)
            for score, (_, beam) in zip(
                chosen.values.tolist(), (candidates[i] for i in chosen.indices.tolist()), strict=True
            )
        ]
        children = self._placed(beams, [candidates[index][0] for index in chosen.indices.tolist()])
        can_improve = self._may_improve(beams[0], finished)
        all_ended = all(beam.reason for _, beam in candidates)
        is_done = all_ended or not can_improve or (self._params.early_stopping is True and len(finished) == width)
        # All at once: a search that is broken off before can be gone on with.
        self.rows, self.beams, self.finished = {}, beams, finished
        self.places, self._can_improve, self.is_done = [child.place for child in children], can_improve, is_done
        return children

    def best(self, count: int, reason: str) -> list[Beam]:
        """The best `count` outputs; those that have not finished end now, for `reason`."""
        under_way = [
            Beam(beam.tokens, self._score(beam), beam.choices, reason) for beam in self.beams if not self.is_done
        ]
        under_way.sort(key=lambda beam: beam.score, reverse=True)
        return [*self.finished, *under_way][:count]

    # --- the parts of an advance --------------------------------------------------------------------------------------

    def _adjusted(self, logprobs: Tensor) -> Tensor:
        if self._chooser.is_neutral:
            return logprobs
        rows = [
            self._chooser.adjusted(logprobs[i : i + 1], self.tokens(i), beam.tokens)
            for i, beam in enumerate(self.beams)
        ]
        return torch.cat(rows)

    def _longer(self, logprobs: Tensor, score: float, parent: int, token: int) -> tuple[int, Beam]:
        """The parent's number and a candidate after it; with a reason if that is its end."""
        before = self.beams[parent]
        tokens = (*before.tokens, token)
        choices = before.choices
        if self._chooser.wants_logprobs:
            choices = (*choices, self._chooser.described(token, logprobs[parent]))
        reason = "stop" if token in self._ends or self._has_stopped(tokens) else ""
        return parent, Beam(tokens, score, choices, reason or ("length" if len(tokens) >= self._most else ""))

    def _finished(self, ended: Sequence[Beam]) -> list[Beam]:
        """The best finished ones, with those that have ended now."""
        width = self._params.num_beams
        if not self._can_improve or (self._params.early_stopping is True and len(self.finished) == width):
            return self.finished
        scored = [Beam(beam.tokens, self._score(beam), beam.choices, beam.reason) for beam in ended]
        return sorted([*self.finished, *scored], key=lambda beam: beam.score, reverse=True)[:width]

    def _score(self, beam: Beam) -> float:
        return _divided(beam.score, len(beam.tokens), self._params.length_penalty)

    def _may_improve(self, best: Beam, finished: Sequence[Beam]) -> bool:
        """Whether a finished output better than the worst of `finished` is to be expected; `best`: that goes on."""
        params = self._params
        if len(finished) < params.num_beams:
            return self._can_improve
        is_never = params.early_stopping == "never" and params.length_penalty > 0.0
        possible = _divided(best.score, self._most if is_never else len(best.tokens), params.length_penalty)
        return self._can_improve and possible > finished[-1].score

    def _placed(self, beams: Sequence[Beam], parents: Sequence[int]) -> list[Child]:
        """Where the new beams live: the first child of each stays, the others go where nobody does."""
        wanted = set(parents)
        kept = {place for beam, place in enumerate(self.places) if beam in wanted}
        free = iter(place for place in range(self._params.num_beams) if place not in kept)
        children, settled = [], set[int]()
        for beam, parent in zip(beams, parents, strict=True):
            source = self.places[parent]
            place = next(free) if parent in settled else source
            settled.add(parent)
            children.append(Child(place, source, beam.tokens[-1]))
        return children


def _divided(score: float, length: int, penalty: float) -> float:
    """In f32, as transformers divides."""
    return float(torch.tensor(score, dtype=torch.float32) / (max(1, length) ** penalty))
