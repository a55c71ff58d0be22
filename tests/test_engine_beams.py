"""Beams: transformers' search is the oracle; blocks are shared; nothing changes when they are preempted or aborted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from engines import (
    BLOCK,
    DECODERS,
    assert_empty,
    block_bytes,
    check_greedy,
    engine_for,
    media_inputs,
    reference,
    word_tokenizer,
)
from families import FAMILIES, VOCABULARY, one_thread
from kvcache import Completion, Engine, Finished, Request, SamplingParams, Token
from kvcache.caches import EncoderCache
from kvcache.request import Event, MediaInput, RequestRefused


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


@torch.inference_mode()
def searched(
    name: str, prompt: list[int], params: SamplingParams, **inputs: Any
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Tokens and scores of transformers' beam search, without a cache of ours."""
    ids = torch.tensor([prompt])
    if FAMILIES[name].encoder_decoder:
        inputs["decoder_input_ids"] = ids
    else:
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = GenerationMixin.generate(  # Whisper's own wants to see timestamps
        reference(name),
        **inputs,
        num_beams=params.num_beams,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=list(params.stop_token_ids) or None,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    outputs = []
    for row in found.sequences.tolist():
        tokens = row[len(prompt) :]
        ends = [at + 1 for at, token in enumerate(tokens) if token in params.stop_token_ids]
        outputs.append(tuple(tokens[: min(ends, default=len(tokens))]))
    return outputs, found.sequences_scores.tolist()


def run(engine: Engine, *, checked: bool = True) -> dict[str, list[Completion]]:
    """Step until idle; the completions of each request in their order."""
    done: dict[str, list[Completion]] = {}
    for _ in range(5000):
        if engine.is_idle:
            return done
        for event in engine.step():
            if isinstance(event, Finished):
                outputs = done.setdefault(event.request_id, [])
                assert event.index == len(outputs)
                outputs.append(event.completion)
        if checked:
            engine.check()
    raise AssertionError("the engine hangs")


def drawn(seed: int) -> tuple[list[int], SamplingParams]:
    """A prompt and parameters of all kinds."""
    chance = random.Random(seed)
    num_beams = chance.choice((2, 3, 4, 8))
    params = SamplingParams(
        max_tokens=chance.randrange(1, 12),
        num_beams=num_beams,
        n=chance.randrange(1, num_beams + 1),
        length_penalty=chance.choice((1.0, 0.0, 2.0, -1.0)),
        early_stopping=chance.choice((True, False, "never")),
        stop_token_ids=chance.sample(range(3, VOCABULARY - 1), chance.choice((0, 1, 2, 12))),
        repetition_penalty=chance.choice((1.0, 1.0, 1.3)),
    )
    return [chance.randrange(3, VOCABULARY - 1) for _ in range(chance.randrange(1, 24))], params


def assert_searched(
    name: str, prompt: list[int], params: SamplingParams, done: list[Completion], **inputs: Any
) -> None:
    outputs, scores = searched(name, prompt, params, **inputs)
    assert [completion.token_ids for completion in done] == outputs, (name, prompt, params)
    assert [completion.score for completion in done] == pytest.approx(scores, rel=1e-3, abs=1e-3)
    for completion in done:
        ended = completion.token_ids[-1] in params.stop_token_ids
        assert completion.finish_reason == ("stop" if ended else "length")


@pytest.mark.parametrize("name", DECODERS)
def test_beams_are_those_of_transformers(name: str) -> None:
    """Together in one engine, the second time from cached prefixes."""
    requests = [drawn(seed) for seed in range(4)]
    with engine_for(name, 400, max_sequences=20) as engine:
        for time in ("cold", "warm"):
            for number, (prompt, params) in enumerate(requests):
                engine.add(Request(f"{time} {number}", prompt, params))
        done = run(engine)
        assert_empty(engine)
    for time in ("cold", "warm"):
        for number, (prompt, params) in enumerate(requests):
            assert_searched(name, prompt, params, done[f"{time} {number}"])


@pytest.mark.parametrize("name", ["t5", "whisper", "mllama"])
def test_beams_read_media(name: str) -> None:
    with engine_for(name, 200) as engine:
        for seed in (1, 2):
            inputs = media_inputs(name, seed)
            prompt, params = [1, *range(5, 14)], SamplingParams(max_tokens=7, num_beams=3, n=3)
            media = [MediaInput(0, f"medium {seed}", engine.encode(**inputs))]
            engine.add(Request("it", prompt, params, media=media))
            done = run(engine)["it"]
            assert_searched(name, prompt, params, done, **inputs)
            assert len({completion.token_ids for completion in done}) == 3
            encoder = next(member for member in engine.cache.members if isinstance(member, EncoderCache))  # type: ignore[attr-defined]
            assert not encoder.usage().sequences
        assert_empty(engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_beams_share_blocks(prefix_cache: bool) -> None:
    """A prompt of 10 blocks is held once, by all four; each beam has little besides."""
    prompt = list(range(5, 45))
    with engine_for("llama", 60, prefix_cache=prefix_cache) as engine:
        engine.add(Request("it", prompt, SamplingParams(max_tokens=20, num_beams=4)))
        pool = engine._core.members[0].tables.pool
        most = 0
        while not engine.is_idle:
            engine.step()
            engine.check()
            if engine.is_idle:
                break
            references = [pool.references(block) for block in range(pool.num_blocks)]
            assert references.count(4) >= 10
            most = max(most, sum(count > 0 for count in references))
        assert most <= 10 + 4 * 5
        assert engine.counts.num_computed_tokens == 40 + 4 * 19  # the prompt once, then a token for each beam
        assert_empty(engine)


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"max_batch_tokens": 3}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "lfm2", "bloom"])
def test_beams_that_are_preempted_are_those_of_each_alone(name: str, options: dict[str, Any]) -> None:
    """Greedy requests that go first grow until there is no room for beams beside them."""
    requests = [drawn(seed) for seed in range(30, 36)]
    with engine_for(name, 34, max_sequences=16, **options) as engine:
        for number, (prompt, _) in enumerate(requests):
            engine.add(Request(f"greedy {number}", [*prompt, 7], SamplingParams(max_tokens=60), priority=1))
        for number, (prompt, params) in enumerate(requests):
            engine.add(Request(f"beams {number}", prompt, params))
        done = run(engine)
        assert_empty(engine)
        assert sum(each[0].num_preemptions for key, each in done.items() if key.startswith("beams"))
    for number, (prompt, params) in enumerate(requests):
        assert_searched(name, prompt, params, done[f"beams {number}"])
        check_greedy(name, [*prompt, 7], done[f"greedy {number}"][0].token_ids)


def test_beams_alone_end_where_the_cache_does_whatever_they_share() -> None:
    """With 20 blocks, four beams of a prompt of two blocks have room for 4 + (20 - 2 - 4) // 4 * ... tokens each."""
    prompt = list(range(5, 14))
    params = SamplingParams(max_tokens=100, num_beams=4)
    room = 4 * (2 + (20 - 2 - 4) // 4)
    for prefix_cache in (True, False):
        with engine_for("llama", 20, prefix_cache=prefix_cache) as engine:
            engine.add(Request("it", prompt, params))
            (completion,) = run(engine)["it"]
            assert (completion.finish_reason, len(completion.token_ids)) == ("length", room - len(prompt))
            with pytest.raises(RequestRefused, match="divided among 8 beams"):
                engine.add(Request("wide", list(range(5, 65)), SamplingParams(num_beams=8)))
            assert engine.is_idle
            assert_empty(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 7])
def test_beams_are_aborted_at_any_time(num_steps: int) -> None:
    with engine_for("gemma3", 100, max_batch_tokens=10) as engine:
        engine.add(Request("it", list(range(5, 25)), SamplingParams(max_tokens=20, num_beams=3, n=2)))
        engine.add(Request("other", [5, 6, 7], SamplingParams(max_tokens=9)))
        for _ in range(num_steps):
            engine.step()
        assert engine.abort("it") and not engine.abort("it")
        engine.check()
        done = run(engine)
        assert {completion.finish_reason for completion in done["it"]} == {"abort"}
        assert len(done["it"]) == (2 if num_steps > 1 else 1)
        check_greedy("gemma3", [5, 6, 7], done["other"][0].token_ids)
        assert_empty(engine)


def test_beams_end_at_texts_and_tell_their_logprobs() -> None:
    """Texts and sums against transformers' own search with stop strings."""
    tokenizer = word_tokenizer()
    prompt = [5, 6, 7]
    blocks, _ = block_bytes("llama")
    with Engine(FAMILIES["llama"].build(), tokenizer=tokenizer, kv_bytes=100 * blocks, block_size=BLOCK) as engine:
        params = SamplingParams(max_tokens=12, num_beams=4, n=4, logprobs=2)
        engine.add(Request("plain", prompt, params))
        plain = run(engine)["plain"]
        stop = plain[0].text[4:11]
        engine.add(
            Request("it", prompt, SamplingParams(max_tokens=12, num_beams=4, n=4, stop=[stop], length_penalty=0.0))
        )
        done = run(engine)["it"]
        found = reference("llama").generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, 3, dtype=torch.long),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=12,
            stopping_criteria=[lambda ids, _: torch.tensor([stop in tokenizer.decode(row[3:]) for row in ids])],
            length_penalty=0.0,
            do_sample=False,
        )
        assert_empty(engine)
    expected = [tokenizer.decode([token for token in row[3:] if token > 0]) for row in found.tolist()]
    assert [completion.text for completion in done] == [text.split(stop)[0] for text in expected]
    assert {completion.finish_reason for completion in done} >= {"stop"}
    for completion in plain:
        assert completion.logprobs is not None and completion.score is not None
        total = sum(entry.chosen.logprob for entry in completion.logprobs)
        assert total / len(completion.token_ids) == pytest.approx(completion.score, abs=1e-4)
        assert [entry.chosen.token_id for entry in completion.logprobs] == list(completion.token_ids)


def test_tokens_and_ends_of_beams_are_counted() -> None:
    with engine_for("llama", 60) as engine:
        engine.add(Request("it", [5, 6, 7], SamplingParams(max_tokens=6, num_beams=3, n=2)))
        found = run(engine)["it"]
        assert engine.counts.num_generated_tokens == sum(len(completion.token_ids) for completion in found) > 0
        assert engine.counts.num_finished.total() == len(found) == 2


def test_beams_come_at_the_end_and_drafts_leave_them_alone() -> None:
    prompt, params = [5, 6, 7, 5, 6, 7], SamplingParams(max_tokens=9, num_beams=3)
    with engine_for("llama", 100, draft="lookup") as engine:
        engine.add(Request("it", prompt, params))
        events: list[Event] = []
        while not engine.is_idle:
            events += engine.step()
        assert not any(isinstance(event, Token) for event in events)
        assert_searched("llama", prompt, params, [e.completion for e in events if isinstance(e, Finished)])
        assert engine.counts.num_drafted == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1.0}, "searched, not drawn"),
        ({"n": 4}, "at least as many beams"),
        ({"best_of": 2}, "best_of=2 does not go"),
        ({"context_shift": True}, "context_shift does not go"),
        ({"early_stopping": "often"}, "expected True, False or 'never'"),
        ({"length_penalty": float("inf")}, "length_penalty is inf"),
    ],
)
def test_what_beams_cannot_do_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(num_beams=3, **options)


def test_more_beams_than_may_run_or_words_are_refused() -> None:
    with engine_for("llama", 400, max_sequences=64) as engine:
        with pytest.raises(ValueError, match="asks for 65 outputs"):
            engine.add(Request("it", [5], SamplingParams(num_beams=65)))
        with pytest.raises(ValueError, match="half the vocabulary, 49"):
            engine.add(Request("it", [5], SamplingParams(num_beams=50)))
        assert engine.is_idle
