"""Logits to tokens. Greedy rows of a step are chosen together, each other row by its own request's rules and seed.

The rules are transformers', in the order in which `generate` applies them: repetition penalty, temperature, top-k,
top-p, min-p; logit bias and presence and frequency penalties come before the repetition penalty. What a row draws
depends on its logits, its seed and how many it has drawn, not on who shares the step.

For a vocabulary of 262144, milliseconds for one row:

| step  | here                                                      | ms  | transformers and torch              | ms |
|-------|-----------------------------------------------------------|-----|-------------------------------------|----|
| top-p | the first 1024 in order; more, where they are not enough  | 2   | `TopPLogitsWarper`: all in order    | 62 |
| min-p | compared with the highest                                 | 0.2 | `MinPLogitsWarper`: softmax first   | 4  |
| draw  | one number, found among the sums                          | 1.5 | `multinomial`: a number for each    | 9  |
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

NUM_SORTED = 1024
"""Tokens that are put in order to find those of top-p: nearly always more than it leaves."""


class Choice(NamedTuple):
    """A token; `logprob` and `top` (tokens and log-probabilities, falling) where they were asked for."""

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


class Candidates(NamedTuple):
    """Tokens that may be drawn, with their scores; `tokens` None: all, in their order."""

    scores: Tensor
    tokens: Tensor | None


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
        """A chosen token with the log-probabilities that were asked for; `logprobs` [vocabulary] are the model's."""
        top = logprobs.topk(min(self._params.logprobs or 0, len(logprobs)))
        return Choice(token, float(logprobs[token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))


def candidates(scores: Tensor, params: SamplingParams) -> Candidates:
    """What temperature, top-k, top-p and min-p leave of a row [vocabulary]: transformers' warpers, one after the other.

    Of tokens equal to the last that top-k takes, none more is taken. A model that gives NaN gives its tokens no share.
    """
    scores = scores.nan_to_num(nan=-math.inf, posinf=torch.finfo(scores.dtype).max, neginf=-math.inf)
    scores = (scores - scores.max()).nan_to_num_(nan=0.0, neginf=-math.inf) / params.temperature
    kept = Candidates(scores, None)
    if params.top_k:
        kept = Candidates(*scores.topk(min(params.top_k, len(scores))))
    if params.top_p < 1.0:
        kept = _nucleus(kept, params.top_p)
    if params.min_p:
        likely = (kept.scores >= kept.scores.max() + math.log(params.min_p)).nonzero()[:, 0]
        kept = Candidates(kept.scores[likely], likely if kept.tokens is None else kept.tokens[likely])
    return kept


def _nucleus(kept: Candidates, top_p: float) -> Candidates:
    """The likeliest tokens, as many as it takes for their share to reach `top_p` (Holtzman et al. 2019)."""
    total = kept.scores.logsumexp(-1)
    for count in (NUM_SORTED, 16 * NUM_SORTED, len(kept.scores)):
        ordered, places = kept.scores.topk(min(count, len(kept.scores)))
        shares = (ordered - total).double().exp().cumsum(-1)
        if float(shares[-1]) >= top_p:
            break
    num_kept = 1 + int((shares[:-1] < top_p).sum())
    tokens = places[:num_kept]
    return Candidates(ordered[:num_kept], tokens if kept.tokens is None else kept.tokens[tokens])


def _drawn(kept: Candidates, generator: torch.Generator) -> int:
    """One of the candidates, by a number from 0 to the sum of their weights."""
    weights = kept.scores.double().exp()
    if weights.device.type == "cpu":
        sums = weights.numpy().cumsum()
        total = float(sums[-1])
        place = int(sums.searchsorted(_number(generator) * total, side="right"))
    else:
        found = weights.cumsum(-1)
        place = int(torch.searchsorted(found, found[-1:] * _number(generator), right=True))
    place = min(place, len(weights) - 1)
    return place if kept.tokens is None else int(kept.tokens[place])


def _number(generator: torch.Generator) -> float:
    """In [0, 1), to the 53 bits of a double."""
    return float(torch.rand((), generator=generator, dtype=torch.float64))


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
