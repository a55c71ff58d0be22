"""Logits to tokens. Greedy rows of a step are chosen together, each other row by its own request's rules and seed.

The rules are transformers' own processors, in the order in which `generate` applies them: repetition penalty,
temperature, top-k, top-p, min-p; presence and frequency penalties, which it lacks, come before the repetition penalty.
What a row draws depends on its logits, its seed and how many it has drawn, not on who shares the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

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
    """How one output's tokens are chosen. `index` tells parallel outputs of one seed apart."""

    __slots__ = ("_generator", "_params", "_rules", "is_plain", "wants_logprobs")

    def __init__(self, params: SamplingParams, index: int, device: torch.device) -> None:
        self._params = params
        self._rules = LogitsProcessorList()
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
        penalised = params.presence_penalty or params.frequency_penalty
        self.is_plain = params.is_greedy and not self._rules and not penalised and not self.wants_logprobs

    def pick(self, logits: Tensor, tokens: Sequence[int], generated: Sequence[int]) -> Choice:
        """A token from one row [vocabulary], after `tokens`, of which `generated` are not the prompt's."""
        row = logits.float()[None]
        scores = self._penalised(row, generated)
        if self._rules:
            history: Any = torch.tensor([list(tokens)], device=row.device)
            scores = self._rules(history, scores)
        if self._generator is None:
            token = greedy(scores)[0]
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        if not self.wants_logprobs:
            return Choice(token)
        logprobs = row[0].log_softmax(-1)
        top = logprobs.topk(min(self._params.logprobs or 0, len(logprobs)))
        return Choice(token, float(logprobs[token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))

    def _penalised(self, row: Tensor, generated: Sequence[int]) -> Tensor:
        presence, frequency = self._params.presence_penalty, self._params.frequency_penalty
        if not (presence or frequency) or not generated:
            return row
        seen, counts = torch.tensor(list(generated), device=row.device).unique(return_counts=True)
        row = row.clone()
        row[0, seen] -= presence + frequency * counts
        return row


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token of each row [R, vocabulary], the first among equals.

    On the CPU NumPy finds it in a tenth of the time that `torch.argmax` takes for a row of 262144.
    """
    if logits.device.type == "cpu":
        found: list[int] = logits.float().numpy().argmax(-1).tolist()
        return found
    return [int(token) for token in logits.argmax(-1).tolist()]
