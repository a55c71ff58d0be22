"""Everything at once on a pool that is too small: samples, beams, drafts, pins, aborts, clearing. Nothing hangs.

Tokens, texts, log-probabilities and reasons are those of an engine with room for everything and no drafts.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvcache.engine
from engines import BLOCK, assert_empty, block_bytes, media_inputs, tree, word_tokenizer
from families import FAMILIES, one_thread
from kvcache import Completion, Engine, Finished, Request, SamplingParams
from kvcache.engine.beams import BeamSearch
from kvcache.engine.core import Core
from kvcache.engine.drafts import DraftModel
from kvcache.engine.places import Places
from kvcache.engine.prefixes import Prefixes
from kvcache.engine.sampler import greedy
from kvcache.hf.runner import Runner
from kvcache.request import Event, MediaInput, RequestRefused, Token
from kvcache.scheduler import Scheduler


class BrokenOff(BaseException):
    """As a KeyboardInterrupt, which would end the tests, too."""


TOKENIZER = word_tokenizer()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


def engine_of(name: str, num_blocks: int, max_sequences: int, **options: Any) -> Engine:
    blocks, states = block_bytes(name)
    num_bytes = num_blocks * blocks + 2 * max_sequences * states + 1
    return Engine(
        FAMILIES[name].build(),
        tokenizer=TOKENIZER,
        kv_bytes=num_bytes,
        block_size=BLOCK,
        max_sequences=max_sequences,
        **options,
    )


def params_of(chance: random.Random) -> SamplingParams:
    """Of all kinds, and of several at once."""
    common: dict[str, Any] = {
        "max_tokens": chance.randrange(1, 12),
        "stop": [f"{chance.randrange(100)}" for _ in range(chance.choice((0, 0, 1, 3)))],
        "stop_token_ids": chance.sample(range(3, 99), chance.choice((0, 0, 4))),
        "logit_bias": {chance.randrange(99): chance.choice((-100.0, 3.0)) for _ in range(chance.choice((0, 0, 5)))},
        "repetition_penalty": chance.choice((1.0, 1.0, 1.4)),
        "frequency_penalty": chance.choice((0.0, 0.0, 1.5)),
        "presence_penalty": chance.choice((0.0, 0.0, 1.0)),
        "logprobs": chance.choice((None, None, 0, 2)),
    }
    kind = chance.choice(("greedy", "greedy", "drawn", "several", "best", "beams"))
    if kind == "beams":
        return SamplingParams(**common, num_beams=chance.choice((2, 3)), n=chance.choice((1, 2)))
    if kind != "greedy":
        common |= {"temperature": chance.choice((0.5, 1.0)), "seed": chance.randrange(1000)}
        common |= chance.choice(({}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.05}))
    if kind == "several":
        common["n"] = chance.randrange(2, 4)
    if kind == "best":
        common |= {"n": 1, "best_of": 3}
    return SamplingParams(**common)


def outcome(done: list[Completion]) -> list[tuple[Any, ...]]:
    """What must be the same however it came about; numbers to three digits."""
    outcomes = []
    for each in sorted(done, key=lambda completion: completion.index):
        logprobs = None
        if each.logprobs is not None:
            logprobs = [(entry.chosen.token_id, [top.token_id for top in entry.top]) for entry in each.logprobs]
        outcomes.append((each.index, each.token_ids, each.text, each.finish_reason, logprobs))
    return outcomes


def run(engine: Engine, requests: list[Request], chance: random.Random | None = None) -> dict[str, list[Completion]]:
    """All requests to their end; with `chance`, as a storm. Completions by request."""
    done: dict[str, list[Completion]] = {request.id: [] for request in requests}
    waiting, pinned, num_steps = list(reversed(requests)), [], 0
    while waiting or not engine.is_idle:
        for _ in range(chance.choice((0, 1, 3)) if chance else 4):
            if waiting:
                request = waiting.pop()
                try:
                    engine.add(request)
                except RequestRefused:  # beside what is pinned
                    assert pinned
                    waiting.append(request)
                    break
        if chance and chance.random() < 0.15:
            engine.abort(chance.choice(requests).id)
        if chance and engine.prefixes is not None and chance.random() < 0.2:
            if pinned and chance.random() < 0.7:
                engine.pin(pinned.pop(), is_pinned=False)
            elif len(pinned) < 2:
                pinned.append(list(chance.choice(requests).prompt))
                engine.pin(pinned[-1])
            elif chance.random() < 0.2:
                engine.prefixes.clear()
        events: list[Event] = []
        try:
            events = engine.step()
        except BrokenOff:
            engine.check()
        for event in events:
            if isinstance(event, Finished):
                done[event.request_id].append(event.completion)
        num_steps += 1
        assert num_steps < 60 * len(requests), "the engine hangs"
        if chance:
            engine.check()
    for prompt in pinned:
        engine.pin(prompt, is_pinned=False)
    assert_empty(engine)
    return done


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"draft": "lookup"}),
        ("llama", {"prefix_cache": False}),
        ("gemma3", {"draft": "itself"}),
        ("llama4", {"max_batch_tokens": 7}),
        ("lfm2", {}),
        ("mamba2", {"max_batch_tokens": 11}),
    ],
    ids=str,
)
def test_a_storm_changes_nothing(name: str, options: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    requests = [
        Request(str(number), prompt, params_of(chance), chance.choice((0, 0, 1)), chance.choice((None, None, "a")))
        for number, prompt in enumerate(tree(seed, 40, 24))
    ]
    if options.get("draft") == "itself":
        options = {**options, "draft": FAMILIES[name].build()}
    with engine_of(name, 400, 16) as engine:
        calm = run(engine, requests)
    with engine_of(name, 24, 6, **options) as engine:
        stormy = run(engine, requests, random.Random(seed + 100))
    num_compared = 0
    for request in requests:
        assert stormy[request.id], request
        if any(completion.finish_reason == "abort" for completion in stormy[request.id]):
            continue
        assert outcome(stormy[request.id]) == outcome(calm[request.id]), request
        num_compared += 1
    assert num_compared > 25


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "mamba2"])
def test_steps_that_break_off_anywhere_change_nothing(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after a forward, while tokens are chosen, while sequences part: all go on, and publish what is right."""
    chance, num_broken = random.Random(seed), Counter[str]()

    def breaking(function: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            if is_stormy and chance.random() < 0.06:
                num_broken[function.__name__] += 1
                raise BrokenOff
            return found

        return broken

    monkeypatch.setattr("kvcache.engine.core.greedy", breaking(greedy))
    for owner, names in (
        (Core, ("_accept", "_extend", "_forked", "_advance")),
        (Places, ("_copy", "advance")),
        (Scheduler, ("admit", "computed", "fork")),
        (DraftModel, ("_forward",)),
        (BeamSearch, ("advance",)),
        (Prefixes, ("adopt",)),
        (Runner, ("forward",)),
    ):
        for each in names:
            monkeypatch.setattr(owner, each, breaking(getattr(owner, each)))
    common = {"temperature": 0.0, "max_tokens": 9}
    kinds = ({}, {"n": 3, "repetition_penalty": 1.4}, {"num_beams": 3, "n": 2})
    requests = [
        Request(str(number), prompt, SamplingParams(**common, **kinds[number % 3]))
        for number, prompt in enumerate(tree(seed, 20, 24))
    ]
    draft = None if FAMILIES[name].build().config.model_type in ("lfm2", "mamba2") else FAMILIES[name].build()
    is_stormy = False
    with engine_of(name, 400, 16) as engine:
        calm = run(engine, requests)
    with engine_of(name, 40, 6, draft=draft) as engine:
        is_stormy = True
        stormy = run(engine, requests)
    assert len(num_broken) > 8, num_broken
    for request in requests:
        assert outcome(stormy[request.id]) == outcome(calm[request.id]), request


class Breaker:
    """Calls a function of an engine, and raises before a line of it, drawn by chance."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._folder = kvcache.__path__[0]
        self.num_broken = 0
        self.is_on = True

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        traced, left = ("/engine/", "/prefix/", "/scheduler.py"), self._chance.randrange(1, 2000)

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            # What comes after the work in `step` hands it over: no signal is looked for between those lines.
            is_handing_over = frame.f_code is Engine.step.__code__ and not frame.f_locals.get("self")._is_busy
            if event == "line" and not is_handing_over:
                left -= 1
                if not left:
                    self.num_broken += 1
                    raise BrokenOff
            name = frame.f_code.co_filename
            is_meant = left > 0 and name.startswith(self._folder) and any(part in name for part in traced)
            return trace if is_meant else None

        if not self.is_on:
            return function(*arguments)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return function(*arguments)
        finally:
            sys.settrace(before)


@pytest.mark.parametrize(("name", "draft"), [("llama", None), ("llama", "lookup"), ("gemma3", None), ("lfm2", None)])
def test_what_breaks_off_before_any_line_changes_nothing(name: str, draft: str | None) -> None:
    """Between any two lines of `add` and `step`: tokens, texts and events are as they would have been, none twice."""
    breaking = Breaker(7)

    def outcomes(engine: Engine) -> dict[tuple[str, int], Any]:
        waiting, completions = list(requests), dict[tuple[str, int], Any]()
        told = defaultdict[tuple[str, int], list[Token]](list)
        for _ in range(2000):
            if not waiting and engine.is_idle:
                break
            try:
                if waiting and waiting[0].id not in engine._core.groups:
                    breaking(engine.add, waiting[0])
                waiting = waiting[1:]
                events = breaking(engine.step)
            except BrokenOff:
                engine.check()
                continue
            for event in events:
                if isinstance(event, Token):
                    told[event.request_id, event.index].append(event)
                    continue
                done, place = event.completion, (event.request_id, event.index)
                assert place not in completions
                completions[place] = (done.token_ids, done.text, done.finish_reason, len(done.logprobs or ()))
                if place in told:
                    assert [token.token_id for token in told[place]] == list(done.token_ids)
                    assert "".join(token.text for token in told[place]) == done.text
        assert_empty(engine)
        return completions

    kinds: list[dict[str, Any]] = [
        {"n": 2, "temperature": 1.0, "seed": 3, "logprobs": 1},
        {"stop": ["7", "3a"], "repetition_penalty": 1.3},
        {"n": 1, "best_of": 3, "temperature": 1.0, "seed": 4},
        {"num_beams": 3, "n": 2, "logprobs": 0},
    ]
    requests = [
        Request(str(number), prompt, SamplingParams(max_tokens=6, **kinds[number % 4]))
        for number, prompt in enumerate(tree(2, 12, 16))
    ]
    breaking.is_on = False
    with engine_of(name, 400, 16) as engine:
        calm = outcomes(engine)
    breaking.is_on = True
    with engine_of(name, 30, 6, draft=draft) as engine:
        assert outcomes(engine) == calm
    assert breaking.num_broken > 10


@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mllama"])
def test_contexts_that_are_shifted_in_a_storm(name: str, draft: str | None) -> None:
    """Shared blocks, pins and images among what is moved: every output has its length, and all is given back."""
    chance = random.Random(3)
    with engine_of(name, 14, 4, draft=draft) as engine:
        requests = []
        for number, prompt in enumerate(tree(4, 16, 20)):
            params = SamplingParams(
                max_tokens=chance.choice((5, 60, 90)),
                context_shift=True,
                keep=chance.choice((0, 2, 9)),
                n=chance.choice((1, 1, 2)),
                temperature=1.0,
                seed=number,
                repetition_penalty=1.2,
            )
            media = []
            if name == "mllama" and chance.random() < 0.7:
                seed, at = chance.choice((1, 2)), chance.randrange(len(prompt))
                media = [MediaInput(at, f"medium {seed}", engine.encode(**media_inputs(name, seed)))]
            requests.append(Request(str(number), prompt, params, media=media))
        done = run(engine, requests, chance)
        assert engine.counts.num_preemptions
    for request in requests:
        for completion in done[request.id]:
            assert completion.finish_reason in ("length", "abort")
            if completion.finish_reason == "length":
                assert len(completion.token_ids) == request.params.max_tokens
