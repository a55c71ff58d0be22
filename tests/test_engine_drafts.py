"""Speculative decoding changes nothing but the number of steps; a full context is shifted where asked and possible."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from engines import assert_empty, check_greedy, drained, engine_for, tree
from families import FAMILIES, VOCABULARY
from kvcache import NotSupported, Request, SamplingParams
from kvcache.engine.drafts import Drafter, DraftModel
from kvcache.engine.shift import num_discarded
from kvcache.hf import ModelNotFound
from kvcache.hf.runner import Work

# --- drafts -----------------------------------------------------------------------------------------------------------


def repetitive(seed: int) -> list[int]:
    chance = random.Random(seed)
    phrase = [chance.randrange(3, VOCABULARY - 1) for _ in range(6)]
    return (phrase * 6)[: chance.randrange(14, 34)]


@pytest.mark.parametrize("draft", ["lookup", "itself", "another"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "gpt_oss", "deepseek_v3", "gpt2"])
def test_drafts_change_nothing_but_the_number_of_steps(name: str, draft: str) -> None:
    """Greedy and drawn, in a pool that evicts and preempts: the tokens of plain decoding; no draft is published."""
    prompts = [repetitive(seed) for seed in range(6)] + tree(3, 4)
    params = [SamplingParams(max_tokens=14, temperature=float(n % 3 == 2), seed=n) for n in range(len(prompts))]
    outputs = []
    for drafter in (None, {"lookup": "lookup", "itself": FAMILIES[name].build(), "another": "gpt2"}[draft]):
        model = FAMILIES["qwen3"].build() if drafter == "gpt2" else drafter
        with engine_for(name, 40, max_sequences=5, draft=model) as engine:
            assert engine.prefixes is not None
            stored: list[tuple[int, ...]] = []
            engine.prefixes.index.listeners.append(lambda e, stored=stored: stored.append(getattr(e, "tokens", ())))
            for number, prompt in enumerate(prompts):
                engine.add(Request(str(number), prompt, params[number]))
            done = drained(engine)
            assert_empty(engine)
            outputs.append([done[str(number)].token_ids for number in range(len(prompts))])
            texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs[-1], strict=True)]
            for tokens in stored:
                assert any(tuple(text[i : i + len(tokens)]) == tokens for text in texts for i in range(len(text)))
            counts = engine.counts
            if drafter is not None:
                assert counts.num_drafted >= counts.num_drafts_accepted
                if draft == "itself":
                    assert counts.num_drafts_accepted > 20
    assert outputs[0] == outputs[1]


def test_sixteen_drafts_one_accepted_and_none_published() -> None:
    """The case of cases.md: a block full of drafts, of which one is right, is not known to anybody."""

    class Stubborn(Drafter):
        def propose(self, samples: Any, counts: Any) -> list[list[int]]:
            right = plain[samples[0].num_generated]
            wrong = (plain[samples[0].num_generated + 1] + 1) % VOCABULARY
            return [[right, *[wrong] * 15][: counts[0]]]

        def forget(self, number: int) -> None: ...
        def close(self) -> None: ...

    prompt = list(range(5, 21))
    with engine_for("llama") as engine:
        plain = engine.generate(prompt, max_tokens=40)[0].token_ids
    with engine_for("llama", num_drafts=16) as engine:
        engine._core.drafter = Stubborn()
        engine.add(Request("it", prompt, SamplingParams(max_tokens=20)))
        engine.step()
        assert engine.prefixes is not None
        before = set(engine.prefixes.index.keys)
        engine.step()
        assert (engine.counts.num_drafted, engine.counts.num_drafts_accepted) == (16, 1)
        assert set(engine.prefixes.index.keys) == before  # 18 tokens are computed: no block more than the prompt's four
        engine.check()
        assert drained(engine)["it"].token_ids == plain[:20]
        assert_empty(engine)


@pytest.mark.parametrize("lacks", ["words", "positions", "room"])
def test_what_the_draft_cannot_read_decodes_without_guesses(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no work for the draft, and beside one that keeps its guesses."""
    draft = FAMILIES["llama"].build()
    if lacks == "words":
        draft.resize_token_embeddings(VOCABULARY - 9)
    elif lacks == "positions":
        draft.config.max_position_embeddings = 24
    else:
        monkeypatch.setattr("kvcache.engine.build.DRAFT_TOKENS", 24)
    prompts = [list(range(5, 12)), [*range(VOCABULARY - 30, VOCABULARY - 1)]]
    with engine_for("llama") as engine:
        plain = [done.token_ids for done in engine.generate(prompts, max_tokens=12, ignore_eos=True)]
    with engine_for("llama", draft=draft) as engine:
        drafter = engine._core.drafter
        assert isinstance(drafter, DraftModel)
        fed: list[int] = []
        forward = drafter._runner.forward

        def watched(works: Sequence[Work]) -> Any:
            fed.extend(work.sequence for work in works)
            return forward(works)

        monkeypatch.setattr(drafter._runner, "forward", watched)
        guessed = [done.token_ids for done in engine.generate(prompts, max_tokens=12, ignore_eos=True)]
        assert guessed == plain
        assert set(fed) == {0}
        assert engine.counts.num_drafts_accepted
        assert_empty(engine)


def test_a_draft_is_given_back_when_the_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = FAMILIES["llama"].build()
    before = draft.config._attn_implementation

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr("kvcache.engine.build.initialised", fail)
    with pytest.raises(MemoryError, match="too large"):
        engine_for("llama", draft=draft)
    assert draft.config._attn_implementation == before


def test_states_refuse_drafts() -> None:
    with pytest.raises(NotSupported, match="recurrent states"):
        engine_for("lfm2", draft="lookup")
    with pytest.raises(NotSupported, match="cannot draft"):
        engine_for("llama", draft=FAMILIES["mamba2"].build())


def test_a_misspelt_draft_names_what_it_may_be() -> None:
    with pytest.raises(ModelNotFound, match=r"draft is neither 'lookup' nor a model: .*'lookups'"):
        engine_for("llama", draft="lookups")


# --- context shift ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "keep", "held", "expected"),
    [
        (2048, 5, 2048, 1021),
        (2048, 2047, 2048, 1),
        (2048, 0, 2048, 1024),
        (2048, 5, 5000, 3973),
        (2048, 2047, 5000, 2953),
        (2048, 5, 512, 0),
    ],
)
def test_how_many_tokens_a_shift_discards(context: int, keep: int, held: int, expected: int) -> None:
    assert num_discarded(context, keep, held) == expected


@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize(("name", "shifts"), [("llama", True), ("gemma3", True), ("gpt2", False), ("lfm2", False)])
def test_a_full_context_is_shifted_where_asked_and_possible(name: str, shifts: bool, draft: str | None) -> None:
    prompt = list(range(5, 15))
    if name == "lfm2" and draft:
        return
    for asked in (False, True):
        with engine_for(name, 8, draft=draft) as engine:
            for number in range(2):
                params = SamplingParams(max_tokens=70, context_shift=asked, keep=4)
                engine.add(Request(str(number), [*prompt, 20 + number], params))
            done = drained(engine)
            assert_empty(engine)
        for number in range(2):
            tokens = done[str(number)].token_ids
            assert len(tokens) == (70 if asked and shifts else 28 - 11)
            assert done[str(number)].finish_reason == "length"
            check_greedy(name, [*prompt, 20 + number], tokens[:17])
