"""The engine on tiny models: every output as each request alone, whatever is shared, evicted, preempted or aborted."""

from __future__ import annotations

import gc
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import serving
from engines import (
    assert_empty,
    check_greedy,
    drained,
    engine_for,
    media_inputs,
    reference,
    tree,
    word_tokenizer,
)
from families import FAMILIES, VOCABULARY
from kvcache import Completion, CorruptState, Engine, Finished, Request, SamplingParams, Token
from kvcache.engine.prefixes import Prefixes
from kvcache.engine.sample import Sample
from kvcache.engine.text import TextStream
from kvcache.hf.runner import Runner, Work
from kvcache.prefix import Hit
from kvcache.request import Event, MediaInput, RequestRefused

# --- the same tokens as alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["bf16", "q8_0", ("q8_0", "q4_0")], ids=str)
def test_reused_blocks_of_coarser_formats_are_as_good_as_computed_ones(kv_dtype: Any) -> None:
    prompts = tree(5, 10)
    outputs = []
    for prefix_cache in (True, False):
        with engine_for("gemma3", kv_dtype=kv_dtype, prefix_cache=prefix_cache) as engine:
            outputs.append([completion.token_ids for completion in engine.generate(prompts, max_tokens=6)])
            assert bool(engine.counts.num_cached_tokens) is prefix_cache
            assert_empty(engine)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["t5", "whisper", "mllama"])
def test_media_are_part_of_what_is_reused(name: str) -> None:
    """Equal media by key: the prefix is reused; other media: not. Outputs as alone with that medium."""
    prompt = [1, *range(5, 20)]
    with engine_for(name, 100) as engine:
        states = {seed: engine.encode(**media_inputs(name, seed)) for seed in (1, 2)}
        seen = []
        for number, seed in enumerate((1, 1, 2, 1)):
            media = [MediaInput(0, f"medium {seed}", states[seed])]
            engine.add(Request(str(number), prompt, SamplingParams(max_tokens=6), media=media))
            completion = drained(engine)[str(number)]
            seen.append(completion.cached_tokens)
            check_greedy(name, prompt, completion.token_ids, **media_inputs(name, seed))
        assert seen == [0, 15, 0, 15]
        assert_empty(engine)


def test_requests_that_arrive_together_compute_a_common_prefix_once() -> None:
    prompt = list(range(10, 58))
    for name in ("llama", "gemma3", "lfm2"):
        with engine_for(name, max_batch_tokens=16) as engine:
            for number in range(4):
                engine.add(Request(str(number), [*prompt, 60 + number, 7], SamplingParams(max_tokens=3)))
            done = drained(engine)
            assert [done[str(number)].cached_tokens for number in range(4)] == [0, 48, 48, 48], name
            assert engine.counts.num_computed_tokens == 50 + 3 * 2 + 4 * 2
            for number in range(4):
                check_greedy(name, [*prompt, 60 + number, 7], done[str(number)].token_ids)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_who_waits_for_a_prefix_is_not_looked_at_in_each_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many may wait, and the prefix may take many steps: they are matched when they come and when it is there."""
    base, num_matches = list(range(5, 66)), Counter[int]()
    match = Prefixes.match

    def counted(self: Prefixes, sample: Sample) -> Hit:
        num_matches[sample.number] += 1
        return match(self, sample)

    monkeypatch.setattr(Prefixes, "match", counted)
    with engine_for(name, max_batch_tokens=4) as engine:
        for number in range(6):
            engine.add(Request(str(number), [*base, 70 + number, 3], SamplingParams(max_tokens=2)))
        done = drained(engine)
        assert [done[str(number)].cached_tokens for number in range(6)] == [0, *[60] * 5]
    assert max(num_matches.values()) <= 3


def test_who_waits_for_a_prefix_goes_on_when_its_owner_is_aborted() -> None:
    prompt = list(range(10, 58))
    with engine_for("llama", max_batch_tokens=8) as engine:
        for number in range(3):
            engine.add(Request(str(number), prompt, SamplingParams(max_tokens=3)))
        engine.step()
        assert engine.abort("0") and not engine.abort("0") and not engine.abort("nobody")
        done = drained(engine)
        assert done["0"].finish_reason == "abort" and not done["0"].token_ids
        assert [done[number].cached_tokens for number in ("1", "2")] == [8, 47]
        assert_empty(engine)


def test_a_conversation_pays_for_what_is_new() -> None:
    """The second turn holds the first, its answer and more: all but the answer's last token is reused, to the token."""
    for name in ("llama", "gemma3", "lfm2", "mamba2"):
        with engine_for(name) as engine:
            prompt = list(range(5, 26))
            (first,) = engine.generate(prompt, max_tokens=6)
            second = [*prompt, *first.token_ids, 50, 51, 52]
            (answer,) = engine.generate(second, max_tokens=6)
            assert answer.cached_tokens == len(prompt) + 5, name
            check_greedy(name, second, answer.token_ids)
            assert engine.match(second).num_tokens == (29 if name in ("llama", "gemma3") else 28)


def test_salts_keep_prompts_apart() -> None:
    with engine_for("llama") as engine:
        prompt = list(range(5, 25))
        seen = [engine.generate(prompt, max_tokens=1, salt=salt)[0].cached_tokens for salt in ("a", "a", "b", None)]
        assert seen == [0, 19, 0, 0]


def test_what_is_pinned_stays() -> None:
    with engine_for("llama", 12) as engine:
        prompt = list(range(5, 25))
        engine.generate(prompt, max_tokens=1)
        assert engine.pin(prompt).num_tokens == 19
        engine.generate([list(range(40, 40 + n)) for n in (20, 22, 23)], max_tokens=2)
        assert engine.match(prompt).num_tokens == 19
        engine.pin(prompt, is_pinned=False)
        engine.generate([list(range(30, 30 + n)) for n in (30, 32)], max_tokens=2)
        assert engine.match(prompt).num_tokens < 19
        assert_empty(engine)


def test_a_pin_is_taken_back_whatever_is_cached_by_then() -> None:
    """A longer prompt brings another tail: the pinned one is let go all the same. States are pinned as blocks are."""
    for name in ("llama", "gemma3", "lfm2", "mamba2"):
        with engine_for(name, 40) as engine:
            prompt = list(range(5, 23))
            engine.generate(prompt, max_tokens=1)
            assert engine.pin(prompt).num_tokens == engine.pin(prompt).num_tokens > 15
            engine.generate([*prompt, *range(30, 37)], max_tokens=1)
            for number in range(70):
                engine.generate([number + 3, *range(60, 76)], max_tokens=1)
            assert engine.match(prompt).num_tokens > 15, name
            usage = engine.usage()
            for member in engine._core.members:
                assert member.tables.pool.num_pinned
            for _ in range(3):  # once too often
                engine.pin(prompt, is_pinned=False)
            usage = engine.usage()
            assert usage.num_free_blocks == usage.num_blocks, name
            for member in engine._core.members:
                assert not member.tables.pool.num_pinned
            assert_empty(engine)


def test_pins_leave_room_or_the_request_is_refused() -> None:
    """Twelve blocks of which five are pinned: a stranger has 24 tokens, who begins with what is pinned has all."""
    with engine_for("llama", 12) as engine:
        prompt = list(range(5, 25))
        engine.generate(prompt, max_tokens=1)
        engine.pin(prompt)
        with pytest.raises(RequestRefused, match=r"needs 25 tokens and the cache, beside what is pinned, holds 24"):
            engine.add(Request("stranger", list(range(40, 64))))
        (completion,) = engine.generate(list(range(40, 63)), max_tokens=50)
        assert len(completion.token_ids) >= 1
        (completion,) = engine.generate([*prompt, *range(40, 59)], max_tokens=50)
        assert completion.cached_tokens >= 19 and completion.token_ids
        assert engine.match(prompt).num_tokens == 19
        engine.pin(prompt, is_pinned=False)
        assert len(engine.generate(list(range(30, 65)), max_tokens=50)[0].token_ids) == 44 - 35
        assert_empty(engine)


def test_what_is_pinned_survives_a_context_shift_and_a_writer() -> None:
    """Whoever holds pinned blocks alone still copies them before writing."""
    with engine_for("llama", 14, max_sequences=2) as engine:
        prompt = list(range(5, 27))
        engine.generate(prompt, max_tokens=1)
        engine.pin(prompt)
        params = SamplingParams(max_tokens=60, context_shift=True, keep=4)
        engine.add(Request("it", [*prompt, 40], params))
        drained(engine)
        assert engine.match(prompt).num_tokens == 21
        engine.pin(prompt, is_pinned=False)
        assert_empty(engine)


@pytest.mark.parametrize("num_blocks", [5, 6, 9])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_prompt_runs_through_a_window_of_few_blocks(name: str, num_blocks: int) -> None:
    """Blocks that a window has left make room in the same step: a pool of one window takes a prompt of any length."""
    with engine_for(name, 5 * num_blocks, max_sequences=1) as engine:
        window = engine._core.members[0]
        longest = engine._limit(1, 1)[0]
        assert longest is not None
        prompt = [3 + number % 90 for number in range(min(50, longest - 31))]
        (completion,) = engine.generate(prompt, max_tokens=30)
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 30), window.usage()
        check_greedy(name, prompt, completion.token_ids)
        assert_empty(engine)
    if name == "mistral":
        with engine_for(name, num_blocks, max_sequences=1) as engine:
            (completion,) = engine.generate(list(range(3, 53)), max_tokens=30)
            assert len(completion.token_ids) == 30
            check_greedy(name, list(range(3, 53)), completion.token_ids)


@pytest.mark.parametrize("budget", [16, 18, 21, 512])
@pytest.mark.parametrize("name", ["mistral", "llama4", "mamba2", "falcon_h1"])
def test_a_common_prefix_is_computed_once_in_chunks_of_any_size(name: str, budget: int) -> None:
    """States and windows are known only where somebody can resume: who waits looks further ahead."""
    prompt = list(range(10, 58))
    with engine_for(name, max_batch_tokens=budget) as engine:
        for number in range(4):
            engine.add(Request(str(number), [*prompt, 60 + number, 7], SamplingParams(max_tokens=3)))
        done = drained(engine)
        assert [done[str(number)].cached_tokens for number in range(4)] == [0, 48, 48, 48]
        for number in range(4):
            check_greedy(name, [*prompt, 60 + number, 7], done[str(number)].token_ids)


def test_every_reason_of_a_match() -> None:
    """One word before the colon, always of the same few; and what it says is so."""
    prompt = list(range(5, 25))

    def label(engine: Engine, prompt: list[int], salt: str | None = None) -> tuple[str, int]:
        match = engine.match(prompt, salt)
        return match.reason.partition(":")[0], match.num_tokens

    with engine_for("gemma3", 60) as engine:
        assert label(engine, prompt) == ("new", 0)
        engine.generate(prompt, max_tokens=1)
        assert label(engine, [5]) == ("short", 0)
        assert label(engine, prompt) == ("whole", 19)
        assert label(engine, prompt, "another") == ("new", 0)
        assert label(engine, [*prompt[:10], 90, 91, 92]) == ("differs", 10)
        assert label(engine, [*prompt, 30, 31]) == ("differs", 20)
        window = engine._core.members[0].tables.pool
        for key in list(window.keys)[-3:]:
            block = window.find(key)
            assert block is not None
            window.unpublish(block)
        assert label(engine, prompt)[0] == "forgotten"
        engine.check()
    with engine_for("lfm2", 60) as engine:
        engine.generate(prompt, max_tokens=1)
        assert label(engine, [*prompt[:10], 90, 91, 92]) == ("forgotten", 0)
    with engine_for("llama", prefix_cache=False) as engine:
        engine.generate(prompt, max_tokens=1)
        assert label(engine, prompt) == ("off", 0)
        assert engine.generate(prompt, max_tokens=1)[0].match is None


def test_higher_priorities_are_evicted_last() -> None:
    with engine_for("llama", 12) as engine:
        for number, priority in enumerate((0, 2, 0)):
            prompt = list(range(10 + 20 * number, 22 + 20 * number))
            engine.add(Request(str(number), prompt, SamplingParams(max_tokens=1), priority))
            drained(engine)
        engine.generate(list(range(70, 92)), max_tokens=6)
        kept = [engine.match(list(range(10 + 20 * n, 22 + 20 * n))).num_tokens for n in range(3)]
        assert kept[1] == 11 and kept[0] < 11
        assert_empty(engine)


def test_listeners_hear_of_the_end() -> None:
    engine, cached = engine_for("gemma3", 40), set[tuple[bytes, int]]()
    assert engine.prefixes is not None
    engine.prefixes.index.listeners.append(
        lambda event: cached.symmetric_difference_update({(event.key, event.member)})
    )
    engine.generate(list(range(5, 40)), max_tokens=3)
    engine.add(Request("under way", list(range(5, 30))))
    engine.step()
    assert cached
    engine.close()
    assert not cached


def test_a_listener_that_raises_does_not_keep_the_model() -> None:
    engine = engine_for("llama")
    engine.generate(list(range(5, 20)), max_tokens=2)
    assert engine.prefixes is not None
    engine.prefixes.index.listeners.append(_fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.close()
    assert engine.model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="closed"):
        engine.cache.usage()


# --- one output -------------------------------------------------------------------------------------------------------


def test_generate_takes_one_prompt_or_several() -> None:
    with engine_for("llama") as engine:
        assert len(engine.generate([5, 6, 7], max_tokens=2)) == 1
        assert [c.prompt_tokens for c in engine.generate([[5, 6, 7], [8]], max_tokens=2)] == [3, 1]
        assert engine.generate([], max_tokens=2) == []
        first, second = engine.generate([[5, 6, 7]] * 2, max_tokens=2)
        assert first.token_ids == second.token_ids
        assert 0 < first.time_to_first_token <= first.seconds
        with pytest.raises(ValueError, match="no tokenizer"):
            engine.generate("text")


def test_the_readme_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block about serving, on a tiny model in the demo's place: names are defined, calls are those that exist."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```\n(from kvcache import Engine.*?)```", text, re.DOTALL)
    monkeypatch.setattr("kvcache.Engine", lambda *_, **__: serving.engine())
    names: dict[str, Any] = {}
    exec(block, names)
    last = names["events"][-1]
    assert last.is_last and last.completion.prompt_tokens == len(names["rules"])


def test_ids_may_come_as_arrays() -> None:
    with engine_for("llama") as engine:
        wanted = engine.generate([5, 6, 7], max_tokens=2)[0].token_ids
        for prompts in (
            torch.tensor([5, 6, 7]),
            torch.tensor([[5, 6, 7]]),
            [torch.tensor([5, 6, 7])],
            np.array([5, 6, 7]),
        ):
            assert [each.token_ids for each in engine.generate(prompts, max_tokens=2)] == [wanted]


def test_what_is_no_prompt_is_refused_before_anything_is_added() -> None:
    tokenizer = word_tokenizer()
    with engine_for("llama", tokenizer=tokenizer) as engine:
        made = tokenizer(["3d", "4e"])
        for prompts, error, message in (
            (
                ["3d", "a\ud800b"],
                ValueError,
                "the prompt has a lone surrogate at character 1; expected text that UTF-8",
            ),
            (made, TypeError, r"prompts is BatchEncoding; expected text or token ids .* \['input_ids'\]"),
            ([[5], made], TypeError, "the prompt is BatchEncoding"),
            ({"3d": 1}, TypeError, "prompts is dict"),
            (b"3d", TypeError, r"prompts is bytes; expected text or token ids \(decode bytes"),
            (["3d", b"3d"], TypeError, "the prompt is bytes"),
            (5, TypeError, "prompts is int"),
            (torch.tensor(5), TypeError, "prompts is Tensor"),
        ):
            with pytest.raises(error, match=message):
                engine.generate(prompts)  # type: ignore[arg-type]
        assert engine.is_idle
        assert engine.counts.num_requests == 0
        assert len(engine.generate(made["input_ids"], max_tokens=1)) == 2


def test_a_stream_that_is_left_gives_everything_back() -> None:
    with engine_for("llama") as engine:
        events: list[Event] = []
        for event in engine.stream([5, 6, 7], max_tokens=50):
            events.append(event)
            if len(events) == 3:
                break
        del event
        assert all(isinstance(event, Token) for event in events)
        while not engine.is_idle:
            engine.step()
        assert_empty(engine)
        *tokens, last = engine.stream([5, 6, 7], max_tokens=5)
        assert isinstance(last, Finished)
        assert [token.token_id for token in tokens if isinstance(token, Token)] == list(last.completion.token_ids)


def test_a_stream_that_nobody_reads_ends() -> None:
    with engine_for("llama") as engine:
        stream = engine.stream([5, 6, 7], max_tokens=50)
        assert not engine.is_idle
        del stream
        gc.collect()
        assert engine.is_idle
        assert_empty(engine)


def test_events_of_others_are_not_lost() -> None:
    with engine_for("llama") as engine:
        engine.add(Request("other", [5, 6, 7], SamplingParams(max_tokens=4)))
        engine.generate([9, 8, 7], max_tokens=8)
        done = drained(engine)
        assert len(done["other"].token_ids) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_a_seed_fixes_a_sample_whoever_shares_the_step(options: dict[str, float]) -> None:
    def sampled(others: int, seed: int) -> tuple[int, ...]:
        with engine_for("llama") as engine:
            for number in range(others):
                engine.add(Request(f"other {number}", [3 + number, 9], SamplingParams(max_tokens=9, temperature=1.0)))
            engine.add(Request("it", [5, 6, 7], SamplingParams(max_tokens=12, seed=seed, **options)))  # type: ignore[arg-type]
            return drained(engine)["it"].token_ids

    assert sampled(0, 3) == sampled(4, 3)
    assert len({sampled(0, seed) for seed in range(4)}) > 1


def test_sampling_follows_the_distribution() -> None:
    """Frequencies of 600 first tokens against the softmax of the logits, restricted to the four likeliest."""
    prompt = [5, 6, 7]
    with torch.inference_mode():
        logits = reference("llama")(input_ids=torch.tensor([prompt])).logits[0, -1]
    top = logits.topk(4)
    expected = dict(zip(top.indices.tolist(), (top.values / 2.0).softmax(-1).tolist(), strict=True))
    with engine_for("llama", max_sequences=60, max_batch_tokens=200) as engine:
        for number in range(10):
            params = SamplingParams(max_tokens=1, temperature=2.0, top_k=4, seed=number, n=60)
            engine.add(Request(str(number), prompt, params))
        seen: Counter[int] = Counter()
        while not engine.is_idle:
            seen.update(event.token_id for event in engine.step() if isinstance(event, Token))
    assert seen.total() == 600 and seen.keys() <= expected.keys()
    for token, share in expected.items():
        assert abs(seen[token] / 600 - share) < 0.07


def test_penalties_change_what_is_greedy() -> None:
    with engine_for("llama") as engine:
        plain = engine.generate([5, 6, 7], max_tokens=30)[0].token_ids
        engine.add(Request("p", [5, 6, 7], SamplingParams(max_tokens=30, presence_penalty=2.0, frequency_penalty=2.0)))
        penalised = drained(engine)["p"].token_ids
        assert len(set(penalised)) > len(set(plain))


def test_logit_bias_forbids_and_forces() -> None:
    prompt = [5, 6, 7]
    with engine_for("llama") as engine:
        plain = engine.generate(prompt, max_tokens=8)[0].token_ids
        forced = SamplingParams(max_tokens=8, logit_bias={42: 100}, logprobs=0)
        forbidden = SamplingParams(max_tokens=8, logit_bias=dict.fromkeys(plain, -100.0), temperature=1.0, seed=3)
        nudged = SamplingParams(max_tokens=1, logit_bias=dict.fromkeys(range(50), 1.5))
        for name, params in (("forced", forced), ("forbidden", forbidden), ("nudged", nudged)):
            engine.add(Request(name, prompt, params))
        done = drained(engine)
        assert done["forced"].token_ids == (42,) * 8
        assert not set(done["forbidden"].token_ids) & set(plain)
        with torch.inference_mode():
            logits = reference("llama")(input_ids=torch.tensor([prompt])).logits[0, -1]
            expected = float(logits.log_softmax(-1)[42])
            logits[:50] += 1.5
        logprobs = done["forced"].logprobs
        assert logprobs is not None  # the model's own, as without a bias
        assert logprobs[0].chosen.logprob == pytest.approx(expected, abs=1e-4)
        assert done["nudged"].token_ids == (int(logits.argmax()),)
        with pytest.raises(ValueError, match="logit_bias of request 'far' names token 99; expected ids below 99"):
            engine.add(Request("far", prompt, SamplingParams(logit_bias={VOCABULARY: 1.0})))
        assert_empty(engine)


def test_logprobs_are_the_models() -> None:
    prompt = [5, 6, 7]
    with engine_for("llama") as engine:
        engine.add(Request("it", prompt, SamplingParams(max_tokens=4, logprobs=3, temperature=0.5, seed=1)))
        tokens = [event for event in (e for _ in range(9) for e in engine.step()) if isinstance(event, Token)]
    ids = torch.tensor([[*prompt, *(token.token_id for token in tokens)]])
    with torch.inference_mode():
        expected = reference("llama")(input_ids=ids).logits[0, 2:-1].log_softmax(-1)
    for row, token in zip(expected, tokens, strict=True):
        assert token.logprobs is not None
        assert token.logprobs.chosen.token_id == token.token_id
        assert token.logprobs.chosen.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        assert [entry.token_id for entry in token.logprobs.top] == row.topk(3).indices.tolist()


def test_parallel_samples_share_their_prompt() -> None:
    prompt = list(range(5, 27))
    for options in ({}, {"prefix_cache": False}):
        with engine_for("gemma3", **options) as engine:
            engine.add(Request("it", prompt, SamplingParams(max_tokens=5, temperature=1.0, seed=2, n=4)))
            finished: dict[int, Completion] = {}
            lasts = []
            while not engine.is_idle:
                for event in engine.step():
                    if isinstance(event, Finished):
                        finished[event.index] = event.completion
                        lasts.append(event.is_last)
                engine.check()
            assert sorted(finished) == [0, 1, 2, 3] and lasts == [False, False, False, True]
            assert len({completion.token_ids for completion in finished.values()}) > 1
            assert engine.counts.num_computed_tokens == len(prompt) + 4 * 4
            assert_empty(engine)
            with pytest.raises(ValueError, match="max_sequences"):
                engine.add(Request("many", prompt, SamplingParams(n=9)))


@pytest.mark.parametrize("options", [{"n": 3}, {"n": 2, "best_of": 3}], ids=str)
def test_an_abort_ends_samples_that_have_not_begun(options: dict[str, int]) -> None:
    with engine_for("llama") as engine:
        engine.add(Request("it", [5, 6, 7], SamplingParams(temperature=1.0, **options)))
        assert engine.abort("it")
        ends = [(event.index, event.is_last) for event in engine.step() if isinstance(event, Finished)]
        assert ends == [(index, index == options["n"] - 1) for index in range(options["n"])]
        assert_empty(engine)


def test_best_of_returns_the_likeliest() -> None:
    with engine_for("llama") as engine:
        options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.5, "seed": 4, "logprobs": 0}
        engine.add(Request("all", [5, 6, 7], SamplingParams(n=6, **options)))
        engine.add(Request("best", [5, 6, 7], SamplingParams(n=2, best_of=6, **options)))
        events = [event for _ in range(40) for event in engine.step()]
        by_request: dict[str, list[Completion]] = {"all": [], "best": []}
        for event in events:
            if isinstance(event, Finished):
                by_request[event.request_id].append(event.completion)
        assert not any(isinstance(event, Token) and event.request_id == "best" for event in events)

    def likelihood(completion: Completion) -> float:
        assert completion.logprobs is not None
        return sum(entry.chosen.logprob for entry in completion.logprobs) / len(completion.token_ids)

    ranked = sorted(by_request["all"], key=likelihood, reverse=True)
    assert [c.token_ids for c in by_request["best"]] == [c.token_ids for c in ranked[:2]]
    assert [c.index for c in by_request["best"]] == [0, 1]


def test_end_tokens_end() -> None:
    with engine_for("llama") as engine:
        plain = engine.generate([5, 6, 7], max_tokens=9)[0].token_ids
        end = plain[3]
        first = plain.index(end)
        engine._core.stop_tokens = frozenset({end})
        (stopped,) = engine.generate([5, 6, 7], max_tokens=9)
        assert (stopped.finish_reason, stopped.token_ids) == ("stop", plain[: first + 1])
        (ignored,) = engine.generate([5, 6, 7], max_tokens=9, ignore_eos=True)
        assert (ignored.finish_reason, ignored.token_ids) == ("length", plain)
        engine.add(Request("own", [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[plain[1]])))
        assert drained(engine)["own"].token_ids == plain[: plain.index(plain[1]) + 1]


def test_a_stream_that_was_done_and_never_read_leaves_nothing() -> None:
    with engine_for("llama") as engine:
        unread = engine.stream([5, 6, 7], max_tokens=1)
        assert len(list(engine.stream([8, 9], max_tokens=5))) == 6
        assert not engine.is_idle  # its events wait
        del unread
        gc.collect()
        assert engine.is_idle
        assert engine.step() == []


def test_what_ends_within_a_step_ends_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may be dropped by the garbage collector at any time; listeners may abort."""

    class Holder:
        pass

    with engine_for("llama") as engine:
        holder: Any = Holder()
        holder.itself, holder.stream = holder, engine.stream([5, 6, 7], max_tokens=30)
        next(holder.stream)
        engine.add(Request("aborted", [7, 8, 9], SamplingParams(max_tokens=30)))
        other = engine.stream([8, 9], max_tokens=5)
        del holder
        forward = engine._core.runner.forward

        def collecting(works: Any) -> Any:
            gc.collect()
            engine.abort("aborted")
            return forward(works)

        monkeypatch.setattr(engine._core.runner, "forward", collecting)
        assert len(list(other)) == 6
        last = engine.step()[-1]
        assert isinstance(last, Finished)
        assert (last.request_id, last.completion.finish_reason) == ("aborted", "abort")
        assert engine.is_idle
        assert_empty(engine)


def test_names_of_a_caller_are_not_taken() -> None:
    with engine_for("llama") as engine:
        engine.add(Request("kvcache-0", [5, 6, 7], SamplingParams(max_tokens=4)))
        assert len(engine.generate([8, 9], max_tokens=2)[0].token_ids) == 2
        assert len(drained(engine)["kvcache-0"].token_ids) == 4


def test_a_stream_whose_engine_is_closed_raises() -> None:
    with engine_for("llama") as engine:
        done, begun, unread = (engine.stream([5, 6, 7], max_tokens=count) for count in (2, 9, 1))
        assert len([next(done) for _ in range(3)]) == 3
        next(begun)
    assert list(done) == []
    for stream in (begun, unread):
        with pytest.raises(ValueError, match="the engine is closed"):
            list(stream)


def test_events_outlive_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for("llama") as engine:
        for name in "ab":
            engine.add(Request(name, [5, 6, 7], SamplingParams(max_tokens=3)))
        engine.step()
        engine.abort("a")
        with monkeypatch.context() as patch:
            patch.setattr(type(engine._core.runner), "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        ended = [event.request_id for event in engine.step() if isinstance(event, Finished)]
        assert "a" in ended


def test_a_tokenizer_that_raises_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of its own output, nor of others: streamed texts are what the completion says."""
    requests = [Request(name, [5, 6, number], SamplingParams(max_tokens=6)) for number, name in enumerate("abc", 7)]
    with engine_for("llama", tokenizer=word_tokenizer()) as engine:
        for request in requests:
            engine.add(request)
        calm = drained(engine)
        step, countdown = TextStream.step, iter([True, True, False, True, True, True, False])

        def failing(stream: TextStream, token: int) -> str:
            if not next(countdown, True):
                raise OSError
            return step(stream, token)

        monkeypatch.setattr(TextStream, "step", failing)
        for request in requests:
            engine.add(request)
        events: list[Event] = []
        num_failed = 0
        while not engine.is_idle:
            try:
                events += engine.step()
            except OSError:
                num_failed += 1
    assert num_failed == 2
    for name, expected in calm.items():
        own = [event for event in events if event.request_id == name]
        assert tuple(event.token_id for event in own if isinstance(event, Token)) == expected.token_ids
        assert "".join(event.text for event in own if isinstance(event, Token)) == expected.text
        assert isinstance(own[-1], Finished)
        assert (own[-1].completion.token_ids, own[-1].completion.text) == (expected.token_ids, expected.text)


def interrupted(*arguments: Any, **named: Any) -> Any:
    raise KeyboardInterrupt


def test_stop_texts_need_a_tokenizer() -> None:
    with engine_for("llama") as engine:
        with pytest.raises(ValueError, match=r"stop=\('x',\) and .* has no tokenizer"):
            engine.generate([[5, 6]], stop="x")
        assert engine.is_idle


# --- limits and misuse ------------------------------------------------------------------------------------------------


def test_what_cannot_fit_alone_is_refused_with_the_numbers() -> None:
    with engine_for("llama", 6) as engine:
        with pytest.raises(RequestRefused, match=r"needs 31 tokens and the cache holds 20") as refused:
            engine.add(Request("long", [5] * 30))
        assert (refused.value.needed, refused.value.available) == (31, 20)
        assert engine.is_idle
        (completion,) = engine.generate([5] * 15, max_tokens=50)
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 5)
        assert_empty(engine)
    with engine_for("gpt2", 400) as engine, pytest.raises(RequestRefused, match="the model's context holds 512"):
        engine.add(Request("long", [5] * 600))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Request("", [5]), ValueError, "Request.id is empty"),
        (lambda: Request("a", [5], SamplingParams(max_tokens=0)), ValueError, "max_tokens is 0"),
        (lambda: SamplingParams(temperature=-1), ValueError, "temperature is -1"),
        (lambda: SamplingParams(temperature=float("nan")), ValueError, "temperature is nan"),
        (lambda: SamplingParams(top_p=0), ValueError, "top_p is 0"),
        (lambda: SamplingParams(top_p="1"), TypeError, "top_p is '1'"),  # type: ignore[arg-type]
        (lambda: SamplingParams(n=3, best_of=2), ValueError, "best_of is 2"),
        (lambda: SamplingParams(stop=["a", ""]), ValueError, "empty"),
        (lambda: SamplingParams(stop="\ud800"), ValueError, "a text of stop has a lone surrogate at character 0"),
        (lambda: Request("a", "a\ud800b"), ValueError, "the prompt has a lone surrogate at character 1; expected text"),
        (lambda: Request("a", [5], salt="\udcff"), ValueError, "Request.salt has a lone surrogate"),
        (lambda: Request("a", [5], media=5), TypeError, "Request.media is int; expected MediaInputs"),  # type: ignore[arg-type]
        (lambda: Request("a", [5], media=[5]), TypeError, "Request.media holds int; expected MediaInputs"),  # type: ignore[list-item]
        (lambda: Request("a", [5], media="x"), TypeError, "Request.media holds str; expected MediaInputs"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop=5), TypeError, "stop is int; expected texts"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop_token_ids=b"ab"), TypeError, "stop_token_ids is bytes; expected integers"),
        (lambda: SamplingParams(ignore_eos="no"), TypeError, "ignore_eos is 'no' .*; expected True or False"),  # type: ignore[arg-type]
        (lambda: SamplingParams(context_shift="x"), TypeError, "context_shift is 'x'"),  # type: ignore[arg-type]
        (lambda: SamplingParams(logit_bias=[5]), TypeError, r"logit_bias is \[5\]; expected a mapping"),  # type: ignore[arg-type]
        (lambda: SamplingParams(logit_bias={3: 101.0}), ValueError, "logit_bias of token 3 is 101"),
        (lambda: SamplingParams(logit_bias={-1: 1.0}), ValueError, "a token in logit_bias"),
        (lambda: Request("a", [5, -1]), ValueError, "at least 0"),
        (lambda: Request("a", [5, 6.0]), TypeError, r"the prompt\[1\] is 6.0"),  # type: ignore[list-item]
        (lambda: Request("a", {5: 6}), TypeError, "the prompt is dict; expected text or token ids"),  # type: ignore[arg-type]
        (lambda: Request("a", b"hi"), TypeError, "the prompt is bytes; expected text or token ids .decode bytes"),
        (lambda: Request("a", 5), TypeError, "the prompt is int; expected text or token ids"),  # type: ignore[arg-type]
        (lambda: Request("a", torch.tensor([5.0])), TypeError, r"the prompt\[0\] is 5.0"),  # type: ignore[arg-type]
        (lambda: Request("a", [5], priority=1.5), TypeError, "priority"),  # type: ignore[arg-type]
        (lambda: Request("a", [5], salt=5), TypeError, "salt"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_refused_where_it_is_made(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.uint64, torch.tensor])
def test_integers_of_any_kind_are_kept_as_pythons(kind: Any) -> None:
    names = ("max_tokens", "top_k", "seed", "logprobs", "n", "best_of", "keep", "num_beams")
    params = SamplingParams(**{name: kind(1) for name in names})
    assert params == SamplingParams(**dict.fromkeys(names, 1))
    request = Request("it", [5], priority=kind(1), media=[MediaInput(kind(1), "key", None)])
    kept = [*(getattr(params, name) for name in names), request.priority, request.media[0].index]
    assert {type(value) for value in kept} == {int}
    with engine_for("llama") as engine:
        seeded = [engine.generate([5, 6, 7], max_tokens=4, temperature=1.0, seed=seed) for seed in (7, kind(7))]
    assert seeded[0][0].token_ids == seeded[1][0].token_ids


def test_misuse_of_an_engine() -> None:
    engine = engine_for("llama")
    engine.add(Request("a", [5, 6]))
    for request, error, message in (
        (Request("a", [5]), ValueError, "under way"),
        (Request("b", []), ValueError, "no tokens"),
        (Request("b", [VOCABULARY]), ValueError, "vocabulary"),
        (Request("b", "text"), ValueError, "no tokenizer"),
        ("b", TypeError, "expected a kvcache.Request"),
    ):
        with pytest.raises(error, match=message):
            engine.add(request)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="beam"):
        engine.generate([5], beam=3)  # type: ignore[call-arg]
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.step()
    for options, message in (
        ({"kv_bytes": "lots"}, "kv_bytes is 'lots'"),
        ({"kv_bytes": 100}, "two blocks"),
        ({"kv_bytes": "1000TiB"}, "the memory of cpu is"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"kv_dtype": "f12"}, "f12"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(FAMILIES["llama"].build(), **options)  # type: ignore[arg-type]
    for options, message in (
        ({"tokenizer": 5}, "tokenizer is int; expected one of transformers"),
        ({"tokenizer": "gpt2"}, "tokenizer is str; expected one of transformers"),
        ({"prefix_cache": "no"}, "prefix_cache is 'no'"),
        ({"compile": "no"}, "compile is 'no'"),
    ):
        with pytest.raises(TypeError, match=message):
            Engine(FAMILIES["llama"].build(), **options)  # type: ignore[arg-type]


def test_a_second_thread_within_a_step_is_told_so_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for("llama") as engine:
        expected = engine.generate([5, 6, 7], max_tokens=4)[0].token_ids
        forward, told = Runner.forward, list[str]()

        def other() -> None:
            for call in (engine.step, lambda: engine.generate([8, 9], max_tokens=2), engine.check):
                with pytest.raises(ValueError, match="another thread") as found:
                    call()
                told.append(str(found.value))

        def meanwhile(runner: Runner, works: list[Work]) -> Any:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return forward(runner, works)

        monkeypatch.setattr(Runner, "forward", meanwhile)
        assert engine.generate([5, 6, 7], max_tokens=4)[0].token_ids == expected
        assert len(told) == 12
        assert engine.is_idle
        engine.check()


def test_a_broken_cache_stops_the_engine_when_it_is_idle() -> None:
    """After as many tokens as it has blocks: looking at all of them must not cost more than what is done between."""
    engine = engine_for("llama")
    engine.generate([5, 6, 7], max_tokens=2)
    pool = engine._core.members[0].tables.pool
    pool._references[-1] += 1
    prompts = ([first, *range(5, 50)] for first in range(5, 50))
    while engine.counts.num_computed_tokens + 47 < pool.num_blocks:
        engine.generate(next(prompts), max_tokens=2)
    with pytest.raises(CorruptState, match="block 399"):
        engine.generate(next(prompts), max_tokens=2)
    with pytest.raises(CorruptState, match="stopped"):
        engine.generate([5, 6, 7], max_tokens=2)


def test_a_forward_that_fails_leaves_the_requests_as_they_were() -> None:
    with engine_for("llama") as engine:
        engine.add(Request("it", [5, 6, 7], SamplingParams(max_tokens=4)))
        engine.step()
        hook = engine.model.get_output_embeddings().register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            engine.step()
        hook.remove()
        engine.check()
        check_greedy("llama", [5, 6, 7], drained(engine)["it"].token_ids)


def _fail(*_: Any) -> None:
    raise RuntimeError("out of luck")
