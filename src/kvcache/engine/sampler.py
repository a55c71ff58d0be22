"""Logits to tokens. Greedy rows of a step are chosen together, each other row by its own request's rules and seed.

The rules are transformers', in the order in which `generate` applies them: repetition penalty, temperature, top-k,
top-p, min-p; logit bias and presence and frequency penalties come before the repetition penalty. What a row draws
depends on its logits, its seed and how many it has drawn, not on who shares the step.

For a vocabulary of 262144, milliseconds for one row on two cores of a Zen 3, median over five texts:

| step              | here                                                       | ms  | transformers, torch    | ms  |
|-------------------|------------------------------------------------------------|-----|------------------------|-----|
| top-k 40          | of what is at least the 40th highest of spans' highest     | 0.5 | `TopKLogitsWarper`     | 1.3 |
| top-p 0.9         | of tokens of at least 1e-4 of all; of more, if need be     | 1.0 | `TopPLogitsWarper`     | 21  |
| min-p 0.05        | compared with the highest                                  | 0.6 | `MinPLogitsWarper`     | 1.8 |
| shares and a draw | one number, found among the sums of spans, then within one | 0.6 | softmax, `multinomial` | 8.7 |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from kvcache.request import SamplingParams

__all__ = ["Candidates", "Choice", "Chooser", "candidates", "greedy"]

SPAN = 512
"""Tokens that are looked at together before they are looked at one by one."""

SHARES = (1e-4, 1e-6, 0.0)
"""Tokens of less are left out of what top-p puts in order, where the others reach it: the first are 10 000 at most."""


class Choice(NamedTuple):
    """A token; `logprob` and `top` (tokens and log-probabilities, falling) where they were asked for."""

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


class Candidates(NamedTuple):
    """Tokens that may be drawn, with their weights, of which the highest is 1; `tokens` None: all, in their order."""

    weights: Tensor
    tokens: Tensor | None

    def only(self, places: Tensor) -> Candidates:
        """Those at `places`."""
        return Candidates(self.weights[places], places if self.tokens is None else self.tokens[places])


@final
class Chooser:
    """How one output's tokens are chosen. `index` tells parallel outputs of one seed apart.

    is_neutral: scores are the logits; is_plain: and the likeliest one is all that is wanted.
    """

    __slots__ = ("_bias", "_generator", "_params", "_repetition", "is_neutral", "is_plain", "wants_logprobs")

    def __init__(self, params: SamplingParams, index: int, device: torch.device) -> None:
        self._params = params
        self._bias: tuple[Tensor, Tensor] | None = None
        if params.logit_bias:
            tokens, values = list(params.logit_bias), list(params.logit_bias.values())
            self._bias = torch.tensor(tokens, device=device), torch.tensor(values, device=device)
        self._repetition: Any = None
        if params.repetition_penalty != 1.0:
            self._repetition = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        self._generator: torch.Generator | None = None
        if not params.is_greedy:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed((params.seed + index * 0x9E3779B97F4A7C15) % 2**63)
        self.wants_logprobs = params.logprobs is not None or params.num_samples > params.n
        changes = self._repetition or self._bias or params.presence_penalty or params.frequency_penalty
        self.is_neutral = not changes
        self.is_plain = params.is_greedy and self.is_neutral and not self.wants_logprobs and params.num_beams == 1

    def pick(self, logits: Tensor, tokens: Sequence[int], generated: Sequence[int]) -> Choice:
        """A token from one row [vocabulary], after `tokens`, of which `generated` are not the prompt's."""
        row = logits.float()[None]
        scores = self.adjusted(row, tokens, generated)
        if self._generator is None:
            token = greedy(scores)[0]
        else:
            token = _drawn(candidates(scores[0], self._params), self._generator)
        return self.described(token, row[0].log_softmax(-1)) if self.wants_logprobs else Choice(token)

    def resume(self, num_drawn: int) -> None:
        """Go on as after so many tokens, whatever has been drawn since. O(tokens)."""
        if self._generator is not None:
            self._generator.manual_seed(self._generator.initial_seed())
            for _ in range(num_drawn):
                torch.rand((), generator=self._generator, dtype=torch.float64)

    def adjusted(self, row: Tensor, tokens: Sequence[int], generated: Sequence[int]) -> Tensor:
        """Scores [1, vocabulary] after bias and penalties; `row` itself stays as it is."""
        presence, frequency = self._params.presence_penalty, self._params.frequency_penalty
        penalised = (presence or frequency) and len(generated) > 0
        if penalised or self._bias is not None:
            row = row.clone()
        if self._bias is not None:
            biased, values = self._bias
            row[0, biased] += values
        if penalised:
            seen, counts = torch.tensor(list(generated), device=row.device).unique(return_counts=True)
            row[0, seen] -= presence + frequency * counts
        if self._repetition is None:
            return row
        scores: Tensor = self._repetition(torch.tensor([list(tokens)], device=row.device), row)
        return scores

    def described(self, token: int, logprobs: Tensor) -> Choice:
        """A chosen token with the log-probabilities that were asked for; `logprobs` [vocabulary] are the model's.

        The first among equals comes first, as where the likeliest is taken: `topk` promises no order.
        """
        top: list[tuple[int, float]] = []
        if count := min(self._params.logprobs or 0, len(logprobs)):
            places = _where(logprobs >= logprobs.topk(count).values[-1])
            values, order = logprobs[places].sort(descending=True, stable=True)
            top = list(zip(places[order[:count]].tolist(), values[:count].tolist(), strict=True))
        return Choice(token, float(logprobs[token]), top)


def candidates(scores: Tensor, params: SamplingParams) -> Candidates:
    """What temperature, top-k, top-p and min-p leave of a row [vocabulary]: transformers' warpers, one after the other.

    Of tokens equal to the last that top-k takes, none more is taken. A model that gives NaN gives its tokens no share.
    """
    tokens = None
    highest = float(scores.max())
    if not math.isfinite(highest):
        scores = scores.nan_to_num(nan=-math.inf, posinf=torch.finfo(scores.dtype).max, neginf=-math.inf)
        highest = float(scores.max())
        if highest == -math.inf:
            scores, highest = torch.zeros_like(scores), 0.0
    if params.top_k:
        scores, tokens = _likeliest(scores, min(params.top_k, len(scores)))
    kept = Candidates((scores - highest).div_(params.temperature).exp_(), tokens)
    if params.top_p < 1.0:
        kept = _nucleus(kept, params.top_p)
    if params.min_p:
        kept = kept.only(_where(kept.weights >= params.min_p))
    return kept


def _likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest scores, falling, and their tokens.

    Of as many spans each has a token that is at least the lowest of the spans' highest: what is below is not ordered.
    """
    places = None
    if count <= len(scores) // SPAN:
        highest = scores[: len(scores) // SPAN * SPAN].view(-1, SPAN).amax(-1)
        places = _where(scores >= highest.topk(count).values[-1])
        scores = scores[places]
    found = scores.topk(count)
    return found.values, found.indices if places is None else places[found.indices]


def _nucleus(kept: Candidates, top_p: float) -> Candidates:
    """The likeliest tokens, as many as it takes for their share to reach `top_p` (Holtzman et al. 2019)."""
    total = float(kept.weights.sum(dtype=torch.float64))
    for share in SHARES:
        likely = kept.only(_where(kept.weights >= share * total))
        if float(likely.weights.sum(dtype=torch.float64)) >= top_p * total:
            break
    order = likely.weights.argsort(descending=True, stable=True)
    sums = likely.weights[order].cumsum(-1, dtype=torch.float64)
    return likely.only(order[: 1 + int((sums[:-1] < top_p * total).sum())])


def _where(mask: Tensor) -> Tensor:
    """The places that are true; NumPy finds them in a quarter of PyTorch's time."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero()[:, 0]


def _drawn(kept: Candidates, generator: torch.Generator) -> int:
    """One of the candidates, by a number from 0 to the sum of their weights."""
    number = float(torch.rand((), generator=generator, dtype=torch.float64))  # in [0, 1)
    if kept.weights.device.type == "cpu":
        place = _passed(kept.weights, number)
    else:
        sums = kept.weights.cumsum(-1, dtype=torch.float64)
        place = int(torch.searchsorted(sums, sums[-1:] * number, right=True))
    return place if kept.tokens is None else int(kept.tokens[place])


def _passed(weights: Tensor, number: float) -> int:
    """The first place at which the sum of weights is more than `number` of all: by sums of spans, then within one.

    >>> [_passed(torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]), number) for number in (0.0, 0.24, 0.25, 1 - 2**-53)]
    [1, 1, 3, 3]
    """
    whole = len(weights) // SPAN * SPAN
    spans = weights[:whole].view(-1, SPAN).sum(-1, dtype=torch.float64)
    ends = np.append(spans.numpy(), float(weights[whole:].sum(dtype=torch.float64))).cumsum()
    aim = number * ends[-1]
    span = int(ends.searchsorted(aim, side="right"))
    own = weights[span * SPAN :][:SPAN].numpy().cumsum(dtype=np.float64)
    # Rounding may bring the aim to an end of its span, where weights may be 0.
    aim = min(max(aim - (ends[span] - own[-1]), 0.0), np.nextafter(own[-1], 0.0))
    return span * SPAN + int(own.searchsorted(aim, side="right"))


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token of each row [R, vocabulary], the first among equals.

    On the CPU NumPy finds it in far less time than `torch.argmax` (17 against 300 µs for a row of 262144). bf16 is not
    converted for that: patterns of positive values are in their order as integers, too, and above all negative ones.
    """
    if logits.device.type == "cpu":
        if logits.dtype == torch.bfloat16:
            patterns = logits.contiguous().view(torch.int16).numpy()
            highest = patterns.argmax(-1)
            if (patterns[np.arange(len(highest)), highest] > 0).all():
                likeliest: list[int] = highest.tolist()
                return likeliest
        found: list[int] = logits.float().numpy().argmax(-1).tolist()
        return found
    return [int(token) for token in logits.argmax(-1).tolist()]
