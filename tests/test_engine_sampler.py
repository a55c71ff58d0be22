"""What a row leaves to draw from, against transformers' warpers; and that draws follow it."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvcache import SamplingParams
from kvcache.engine.sampler import NUM_SORTED, Chooser, candidates, greedy


def warped(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [vocabulary], as transformers has them."""
    rules = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        rules.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        rules.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        rules.append(MinPLogitsWarper(params.min_p))
    nothing = torch.zeros((1, 0), dtype=torch.long)
    probabilities: torch.Tensor = rules(nothing, scores[None])[0].softmax(-1)
    return probabilities


@pytest.mark.parametrize("vocabulary", [7, 99, 5 * NUM_SORTED])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_what_is_left_is_what_transformers_leaves(vocabulary: int, spread: float) -> None:
    """Flat rows and steep ones: also where top-p needs more tokens than are put in order at first."""
    for seed in range(40):
        chance = random.Random(seed)
        params = SamplingParams(
            temperature=chance.choice((0.3, 1.0, 2.5)),
            top_k=chance.choice((0, 2, 50, 3000)),
            top_p=chance.choice((1.0, 0.3, 0.9, 0.999)),
            min_p=chance.choice((0.0, 0.0, 0.02, 0.5)),
        )
        scores = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
        kept = candidates(scores, params)
        tokens = torch.arange(vocabulary) if kept.tokens is None else kept.tokens
        found = torch.zeros(vocabulary).index_put_((tokens,), kept.scores.softmax(-1))
        expected = warped(scores, params)
        # a token whose share decides by a rounding may be in or out
        assert int(((found > 0) != (expected > 0)).sum()) <= 1
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-2)


def test_draws_follow_the_shares_and_the_seed() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0, 3.0, -torch.inf])
    params = SamplingParams(temperature=2.0, seed=1, top_p=0.95)
    expected = warped(scores, params)
    chooser, again = (Chooser(params, 0, torch.device("cpu")) for _ in range(2))
    drawn = [chooser.pick(scores, [], []).token for _ in range(4000)]
    assert drawn[:50] == [again.pick(scores, [], []).token for _ in range(50)]
    shares = torch.tensor(drawn).bincount(minlength=5) / len(drawn)
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0.0)
    other = Chooser(params, 1, torch.device("cpu"))
    assert drawn[:50] != [other.pick(scores, [], []).token for _ in range(50)]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 1.0}, {"top_k": 3}], ids=str)
def test_numbers_that_are_none_do_not_raise(options: dict[str, float]) -> None:
    """A broken model, or penalties beyond f32: some token comes, and where there are others not one of NaN."""
    params = SamplingParams(temperature=1.0, seed=0, **options)  # type: ignore[arg-type]
    chooser = Chooser(params, 0, torch.device("cpu"))
    nan, inf = float("nan"), float("inf")
    assert chooser.pick(torch.tensor([nan, 2.0, nan, -inf, nan]), [], []).token == 1
    assert chooser.pick(torch.tensor([0.0, inf, -inf, 1.0, 2.0]), [], []).token == 1
    for scores in ([nan] * 5, [-inf] * 5, [inf] * 5):
        assert 0 <= chooser.pick(torch.tensor(scores), [], []).token < 5


@pytest.mark.parametrize("options", [{}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 3, "top_p": 1e-3}], ids=str)
def test_the_likeliest_is_always_left(options: dict[str, float]) -> None:
    """At a temperature of nearly nothing, and under the strictest rules."""
    for temperature in (1e-30, 1e-3, 1.0) if options else (1e-30, 1e-3):
        params = SamplingParams(temperature=temperature, seed=0, **options)  # type: ignore[arg-type]
        scores = torch.tensor([5.0, 90.0, -3.0, 89.0, 7.0])
        chooser = Chooser(params, 0, torch.device("cpu"))
        assert {chooser.pick(scores, [], []).token for _ in range(20)} == {1}
    assert greedy(scores[None]) == [1]
