"""Logits to tokens. Greedy rows of a step are chosen together, each other row by its own request's rules and seed.

The rules are transformers' own processors, in the order in which `generate` applies them: repetition penalty,
temperature, top-k, top-p, min-p; logit bias and presence and frequency penalties come before the repetition penalty.
What a row draws depends on its logits, its seed and how many it has drawn, not on who shares the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvcache.request import SamplingParams

__all__ = ["Choice", "Chooser", "greedy"]


class Choice(NamedTuple):
    """A token; `logprob` and `top` (tokens and log-probabilities, falling) where they were asked for."""

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


@final
class Chooser:
    """How one output's tokens are chosen. `index` tells parallel outputs of one seed apart.

    is_neutral: scores are the logits; is_plain: and the likeliest one is all that is wanted.
    """

    __slots__ = ("_bias", "_generator", "_params", "_rules", "is_neutral", "is_plain", "wants_logprobs")

    def __init__(self, params: SamplingParams, index: int, device: torch.device) -> None:
        self._params = params
        self._rules = LogitsProcessorList()
        self._bias: tuple[Tensor, Tensor] | None = None
        if params.logit_bias:
            tokens, values = list(params.logit_bias), list(params.logit_bias.values())
            self._bias = torch.tensor(tokens, device=device), torch.tensor(values, device=device)
        if params.repetition_penalty != 1.0:
            self._rules.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        self._generator: torch.Generator | None = None
        if not params.is_greedy:
            self._generator = torch.Generator(device)
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed((params.seed + index * 0x9E3779B97F4A7C15) % 2**63)
            if params.temperature != 1.0:
                self._rules.append(TemperatureLogitsWarper(params.temperature))
            if params.top_k:
                self._rules.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1.0:
                self._rules.append(TopPLogitsWarper(params.top_p))
            if params.min_p:
                self._rules.append(MinPLogitsWarper(params.min_p))
        self.wants_logprobs = params.logprobs is not None or params.num_samples > params.n
        self.is_neutral = not (self._rules or self._bias or params.presence_penalty or params.frequency_penalty)
        self.is_plain = params.is_greedy and self.is_neutral and not self.wants_logprobs and params.num_beams == 1

    def pick(self, logits: Tensor, tokens: Sequence[int], generated: Sequence[int]) -> Choice:
        """A token from one row [vocabulary], after `tokens`, of which `generated` are not the prompt's."""
        row = logits.float()[None]
        scores = self.adjusted(row, tokens, generated)
        if self._generator is None:
            token = greedy(scores)[0]
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        return self.described(token, row[0].log_softmax(-1)) if self.wants_logprobs else Choice(token)

    def adjusted(self, row: Tensor, tokens: Sequence[int], generated: Sequence[int]) -> Tensor:
        """Scores [1, vocabulary] after bias, penalties and warpers; `row` itself stays as it is."""
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
        if not self._rules:
            return row
        history: Any = torch.tensor([list(tokens)], device=row.device)
        scores: Tensor = self._rules(history, row)
        return scores

    def described(self, token: int, logprobs: Tensor) -> Choice:
        """A chosen token with the log-probabilities that were asked for; `logprobs` [vocabulary] are the model's."""
        top = logprobs.topk(min(self._params.logprobs or 0, len(logprobs)))
        return Choice(token, float(logprobs[token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token of each row [R, vocabulary], the first among equals.

    On the CPU NumPy finds it in a hundredth of the time that `torch.argmax` takes for a row of 262144. bf16 is not
    converted for that: patterns of positive values are in their order as integers, too, and above all negative ones.
    """
    if logits.device.type == "cpu":
        if logits.dtype == torch.bfloat16:
            patterns = logits.contiguous().view(torch.int16).numpy()
            highest = patterns.argmax(-1)
            if (np.take_along_axis(patterns, highest[:, None], -1) > 0).all():
                likeliest: list[int] = highest.tolist()
                return likeliest
        found: list[int] = logits.float().numpy().argmax(-1).tolist()
        return found
    return [int(token) for token in logits.argmax(-1).tolist()]
