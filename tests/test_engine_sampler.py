"""What a row leaves to draw from, against transformers' warpers; that draws follow it; the likeliest token."""

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
from kvcache.engine.sampler import SHARES, SPAN, Chooser, candidates, greedy


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


@pytest.mark.parametrize("vocabulary", [7, 99, SPAN, 10 * SPAN + 7])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_what_is_left_is_what_transformers_leaves(vocabulary: int, spread: float) -> None:
    """Flat rows and steep ones, with and without whole spans."""
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
        found = torch.zeros(vocabulary).index_put_((tokens,), kept.weights / kept.weights.sum())
        expected = warped(scores, params)
        # a token whose share decides by a rounding may be in or out
        assert int(((found > 0) != (expected > 0)).sum()) <= 1
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-2)


def test_top_p_looks_at_small_shares_where_the_large_do_not_reach_it() -> None:
    """A row of three heights: each step takes more, and none leaves out what transformers keeps."""
    counts = (1000, 200_000, 2_000_000)  # a third of all each: single shares of 3e-4, 2e-6 and 2e-7
    scores = torch.cat([torch.full((count,), -torch.tensor(float(count)).log().item()) for count in counts])
    assert [share < 1 / 3 / count for share, count in zip(SHARES, counts, strict=True)] == [True] * 3
    for top_p, expected in ((0.3, 900), (0.5, 101_000), (0.9, 1_601_000)):
        kept = candidates(scores, SamplingParams(temperature=1.0, top_p=top_p))
        assert kept.tokens is not None
        assert len(kept.tokens) == pytest.approx(expected, rel=2e-3)
        assert kept.tokens.tolist() == list(range(len(kept.tokens)))  # the first among equals


def test_draws_come_from_every_span_and_never_from_what_has_no_share() -> None:
    scores = torch.full((5 * SPAN + 3,), -torch.inf)
    allowed = [0, SPAN - 1, SPAN, 3 * SPAN + 77, 5 * SPAN + 1]
    scores[allowed] = torch.tensor([1.0, 2.0, 0.0, 1.5, 1.0])
    chooser = Chooser(SamplingParams(temperature=1.0, seed=5), 0, torch.device("cpu"))
    drawn = torch.tensor([chooser.pick(scores, [], []).token for _ in range(4000)]).bincount(minlength=len(scores))
    torch.testing.assert_close(drawn / 4000, scores.softmax(-1), atol=0.03, rtol=0.0)
    assert int((drawn > 0).sum()) == len(allowed)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_is_the_first_of_the_largest(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn((6, 3000), generator=generator).to(dtype)  # bf16: many are equal
    rows[1] = -rows[1].abs() - 1  # all negative
    rows[2] = rows[2].clamp(max=0)  # zero is the largest
    rows[2, :2] = torch.tensor([-1.0, -0.0], dtype=dtype)  # and of the two zeros neither is larger
    rows[3] = -torch.inf
    rows[4, 77], rows[4, 99] = torch.inf, torch.inf
    expected = rows.float().numpy().argmax(-1).tolist()
    assert greedy(rows) == expected
    assert greedy(rows[:, ::2]) == rows[:, ::2].float().numpy().argmax(-1).tolist()
    assert [greedy(row[None]) for row in rows] == [[token] for token in expected]


@pytest.mark.parametrize("vocabulary", [3, 50, 20 * SPAN])
def test_the_first_among_equals_leads_what_is_told(vocabulary: int) -> None:
    """Logits of bf16 are often equal: the likeliest token is the one that was taken."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        row = torch.randn(vocabulary, generator=generator).to(torch.bfloat16)
        row[torch.randint(vocabulary, (5,), generator=generator)] = row.max()
        for count in (1, 3, 10**6) if vocabulary < 100 else (1, 3):
            choice = Chooser(SamplingParams(logprobs=count), 0, torch.device("cpu")).pick(row, [], [])
            expected = row.float().log_softmax(-1).sort(descending=True, stable=True)
            assert choice.top[0][0] == choice.token
            assert choice.top == list(zip(expected.indices.tolist(), expected.values.tolist(), strict=True))[:count]
