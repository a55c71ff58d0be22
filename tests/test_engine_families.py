"""Three hundred requests on every family: whatever is shared, evicted, preempted or aborted, each output is as alone.

Prompts are a tree of shared prefixes. A third of the requests goes through an engine without prefix cache, a third
through a pool so small that it evicts and preempts, a third through one with room for all, in small steps. Requests
arrive while others run, with priorities, salts and media, and some are aborted. A listener rebuilds what is cached from
the events alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from engines import BLOCK, assert_empty, engine_for, media_inputs, reference, tree
from families import FAMILIES, one_thread
from kvcache import Completion, Engine, Finished, Full, Request, SamplingParams, Token
from kvcache.prefix import Removed, Stored
from kvcache.request import MediaInput

NUM_REQUESTS = 100
MODES: Mapping[str, tuple[int, dict[str, Any]]] = {
    "without prefix cache": (18, {"prefix_cache": False}),
    "a tiny pool": (14, {"max_sequences": 6}),
    "small steps, ample room": (400, {"max_batch_tokens": 9}),
}
MEDIA: Mapping[str, tuple[int, ...]] = {"t5": (1, 1, 2), "whisper": (1, 1, 2), "mllama": (0, 1, 2)}
"""Seeds of their media; 0: none."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


class Mirror:
    """The set of cached prefixes, from events alone: by member, each block with the tokens that lead to it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.blocks: dict[tuple[bytes, int], tuple[bytes, tuple[int, ...]]] = {}
        if engine.prefixes is not None:
            engine.prefixes.index.listeners.append(self.hear)

    def hear(self, event: Stored | Removed) -> None:
        place = (event.key, event.member)
        if isinstance(event, Stored):
            assert place not in self.blocks
            self.blocks[place] = (event.parent, event.tokens)
        else:
            del self.blocks[place]

    def check(self) -> None:
        """Exactly what the members hold."""
        prefixes = self.engine.prefixes
        if prefixes is None:
            assert not self.blocks
            return
        held = {(key, number) for number, member in prefixes._causal for key in member.tables.pool.keys}
        held |= {(key, number) for number, member in prefixes._states for key in member.published._entries}
        assert self.blocks.keys() == held
        for parent, tokens in self.blocks.values():
            assert 0 < len(tokens) <= BLOCK and len(parent) == 32


def drive(engine: Engine, requests: list[Request], chance: random.Random) -> dict[str, Completion]:
    """Requests come while others run, some are aborted; check often. Completions by id."""
    done: dict[str, Completion] = {}
    streamed: Counter[str] = Counter()
    waiting, mirror, num_steps = list(reversed(requests)), Mirror(engine), 0
    while waiting or not engine.is_idle:
        for _ in range(min(chance.choice((0, 1, 4)), len(waiting))):
            engine.add(waiting.pop())
        if chance.random() < 0.1:
            engine.abort(chance.choice(requests).id)
        for event in engine.step():
            if isinstance(event, Token):
                streamed[event.request_id] += 1
            elif isinstance(event, Finished):
                assert event.request_id not in done
                done[event.request_id] = event.completion
        num_steps += 1
        assert num_steps < 100 * len(requests), "the engine hangs"
        if num_steps % 8 == 0:
            engine.check()
            mirror.check()
    assert done.keys() == {request.id for request in requests}
    assert all(streamed[key] == len(completion.token_ids) for key, completion in done.items())
    assert_empty(engine)
    mirror.check()
    if engine.prefixes is not None:
        engine.prefixes.clear()
        assert not mirror.blocks
        assert_empty(engine)
    return done


def requests_for(engine: Engine, name: str, prompts: list[list[int]], chance: random.Random) -> list[Request]:
    """One for each prompt; salts and media keep some apart whose prompts begin alike."""
    states = {seed: engine.encode(**media_inputs(name, seed)) for seed in MEDIA.get(name, ()) if seed}
    made = []
    for number, prompt in enumerate(prompts):
        seed = chance.choice(MEDIA.get(name, (0,)))
        media = [MediaInput(0, f"medium {seed}", states[seed])] if seed else []
        params = SamplingParams(max_tokens=chance.randrange(1, 16))
        priority, salt = chance.choice((0, 0, 1)), chance.choice((None, None, None, "a"))
        made.append(Request(f"{number} {seed}", prompt, params, priority, salt, media))
    return made


@torch.inference_mode()
def largest_gap(name: str, requests: list[Request], done: dict[str, Completion]) -> float:
    """How far below the likeliest one a token ever was, each request alone in a row, all at once, without a cache."""
    texts = [[*request.prompt, *done[request.id].token_ids] for request in requests]
    ids = torch.zeros((len(texts), max(map(len, texts))), dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)  # what follows is seen by nobody before it
    seed = int(requests[0].id.split()[1])
    inputs = media_inputs(name, seed) if seed else {}
    inputs = {key: value.expand(len(texts), *value.shape[1:]) for key, value in inputs.items()}
    inputs["decoder_input_ids" if FAMILIES[name].encoder_decoder else "input_ids"] = ids
    logits = reference(name)(**inputs, use_cache=False).logits
    largest = 0.0
    for row, request, text in zip(logits, requests, texts, strict=True):
        begin = len(request.prompt) - 1
        chosen = torch.tensor(text[begin + 1 :], dtype=torch.long)
        rows = row[begin : begin + len(chosen)]
        if len(chosen):
            largest = max(largest, float((rows.max(-1).values - rows.gather(1, chosen[:, None])[:, 0]).max()))
    return largest


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_three_hundred_requests_are_each_as_alone(name: str, mode: str) -> None:
    num_blocks, options = MODES[mode]
    seed = list(MODES).index(mode)
    chance = random.Random(seed)
    with engine_for(name, num_blocks, **options) as engine:
        requests = requests_for(engine, name, tree(seed, NUM_REQUESTS, 30), chance)
        done = drive(engine, requests, chance)
        counts, metrics = engine.counts, engine.metrics()
        grows = any(isinstance(member.span, Full) for member in engine._core.members)
        if mode != "without prefix cache":
            assert counts.num_hits > 20 and counts.num_cached_tokens > 100
        if num_blocks < 100 and grows:  # windows and states alone have room enough
            assert counts.num_preemptions
            assert metrics.num_evicted_blocks or "prefix_cache" in options
    reasons = Counter(completion.finish_reason for completion in done.values())
    assert reasons["length"] > 80 and reasons.total() == NUM_REQUESTS
    for request in requests:
        completion = done[request.id]
        assert completion.finish_reason == "abort" or len(completion.token_ids) == request.params.max_tokens
    for medium in {request.id.split()[1] for request in requests}:
        own = [request for request in requests if request.id.split()[1] == medium]
        assert largest_gap(name, own, done) <= 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_the_oracle_would_notice(name: str) -> None:
    """Another token than the likeliest is a gap: the comparison above is not empty."""
    request = Request("0 1" if FAMILIES[name].encoder_decoder else "0 0", [5, 6, 7, 8], SamplingParams(max_tokens=1))
    wrong = [
        largest_gap(name, [request], {request.id: Completion("", (token,), "length", 4, 0, 0.0, 0.0)})
        for token in (50, 51)
    ]
    assert max(wrong) > 1e-2
