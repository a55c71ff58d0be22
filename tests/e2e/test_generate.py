"""`generate()` with our cache against transformers' own: the same tokens, for every family and every mode.

The references are made by the same weights with the built-in cache; sampling starts from the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from families import FAMILIES, PAD, VOCABULARY, Family, one_thread
from kvcache.hf import cache_for
from kvcache.hf.attention import is_in_place

NUM_PROMPT, NUM_NEW = 14, 12


@dataclass(frozen=True)
class Mode:
    """How `generate` is called. rows: of the batch; padding: columns of row 0."""

    rows: int = 2
    padding: int = 0
    assistant: bool = False
    chunks: bool = False
    options: dict[str, Any] = field(default_factory=dict)


MODES = {
    "greedy": Mode(),
    "sample": Mode(options={"do_sample": True, "top_k": 20}),
    "beam": Mode(options={"num_beams": 3}),
    "beam-sample": Mode(rows=1, options={"num_beams": 3, "do_sample": True}),
    "return-sequences": Mode(rows=1, options={"num_return_sequences": 3, "do_sample": True}),
    "prompt-lookup": Mode(rows=1, assistant=True, options={"prompt_lookup_num_tokens": 4}),
    "assistant": Mode(rows=1, assistant=True),
    "chunked-prefill": Mode(chunks=True, options={"prefill_chunk_size": 5}),
    "left-padded": Mode(padding=5),
    "left-padded-chunks": Mode(padding=6, chunks=True, options={"prefill_chunk_size": 4}),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """One thread."""
    with one_thread():
        yield


def why_not(family: Family, mode: Mode) -> str | None:
    """Why transformers itself cannot do this with any cache."""
    if mode.assistant and family.stateful:
        return "transformers refuses assisted decoding with states that cannot be taken back"
    if mode.chunks and family.cache_argument != "past_key_values":
        return "prefill in chunks needs past_key_values"
    if family.encoder_decoder and (mode.chunks or mode.padding):
        return "the decoder's prompt is one token"
    return None


def inputs_of(family: Family, mode: Mode) -> dict[str, Any]:
    if family.encoder_decoder:
        return dict(family.encoder_inputs(mode.rows))
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, VOCABULARY, (mode.rows, NUM_PROMPT), generator=generator)
    mask = torch.ones_like(prompt)
    prompt[0, : mode.padding], mask[0, : mode.padding] = PAD, 0
    # transformers cannot split images into chunks, nor verify drafts under Mllama's cross attention mask.
    images = {} if mode.chunks or mode.assistant else family.image_inputs(mode.rows, NUM_PROMPT)
    return {"input_ids": prompt, "attention_mask": mask, **images}


def tokens(model: Any, family: Family, mode: Mode, cache: Any = None) -> Tensor:
    torch.manual_seed(3)
    options = dict(mode.options)
    if mode.assistant and not options:
        options["assistant_model"] = family.build()
    if cache is not None:
        options[family.cache_argument] = cache
    return model.generate(**inputs_of(family, mode), max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, **options)


def compare(name: str, mode_name: str, attention: str | None, **options: Any) -> None:
    family, mode = FAMILIES[name], MODES[mode_name]
    if reason := why_not(family, mode):
        pytest.skip(reason)
    expected = tokens(family.build(), family, mode)
    model = family.build(attention)
    cache = cache_for(model, capacity=48, max_sequences=6, **options)
    assert tokens(model, family, mode, cache).tolist() == expected.tolist()
    cache.check()
    if attention is not None:
        assert is_in_place(model.get_decoder().config)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_built_in_attention(name: str, mode: str) -> None:
    """Whole keys and values out of blocks, for whatever attention the model has."""
    compare(name, mode, None)


@pytest.mark.parametrize("mode", ["greedy", "left-padded-chunks"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.interface])
def test_attention_in_place(name: str, mode: str) -> None:
    """Blocks read in place, left padding included."""
    compare(name, mode, "kvcache")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("greedy", "left-padded-chunks")])
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llama4", "whisper", "mllama", "lfm2"])
def test_every_mode_in_place(name: str, mode: str) -> None:
    compare(name, mode, "kvcache", block_size=4)


@pytest.mark.parametrize("attention", [None, "kvcache"])
@pytest.mark.parametrize(
    "name", [n for n, f in FAMILIES.items() if not f.encoder_decoder and f.cache_argument == "past_key_values"]
)
def test_continuing(name: str, attention: str | None) -> None:
    """A second `generate` with the cache of the first, as with transformers' own."""
    family = FAMILIES[name]
    if attention and not family.interface:
        pytest.skip("its attention does not go through AttentionInterface")
    prompt = inputs_of(family, MODES["left-padded"])["input_ids"]
    more = torch.randint(3, VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(2))
    answers = []
    for ours in (False, True):
        model = family.build(attention if ours else None)
        config = model.config.get_text_config(decoder=True)
        cache = cache_for(model, capacity=48, max_sequences=2) if ours else DynamicCache(config=config)
        text, mask = prompt, (prompt != PAD).long()
        for _ in range(2):
            text = model.generate(
                input_ids=text, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, past_key_values=cache
            )
            text = torch.cat([text, more], dim=1)
            mask = torch.cat([mask, torch.ones(2, 12, dtype=torch.long)], dim=1)
        answers.append(text.tolist())
    assert answers[1] == answers[0]


def test_in_place_attention_reads_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is gathered: with the gathering taken away, in-place families still generate."""

    def gather(*_: Any) -> None:
        raise AssertionError("gathered")

    monkeypatch.setattr("kvcache.hf.passes.Pass.gather", gather)
    for name in ("llama", "gemma3n", "gpt_oss", "whisper", "falcon_h1"):
        compare(name, "greedy", "kvcache")
        if not FAMILIES[name].encoder_decoder:
            compare(name, "left-padded", "kvcache")
    with pytest.raises(AssertionError, match="gathered"):
        compare("llama", "greedy", None)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "llama4", "t5", "deepseek_v3"])
def test_the_attention_alone_is_right(name: str) -> None:
    """`attn_implementation="kvcache"` with the built-in cache, and with none."""
    family = FAMILIES[name]
    for mode in (MODES["greedy"], MODES["left-padded"]):
        if why_not(family, mode):
            continue
        expected = tokens(family.build(), family, mode)
        assert tokens(family.build("kvcache"), family, mode).tolist() == expected.tolist()
    if family.encoder_decoder:
        return
    prompt = inputs_of(family, MODES["greedy"])["input_ids"]
    with torch.no_grad():
        exact = family.build()(input_ids=prompt, use_cache=False).logits
        torch.testing.assert_close(
            family.build("kvcache")(input_ids=prompt, use_cache=False).logits, exact, atol=1e-4, rtol=1e-4
        )


def test_masks_that_are_not_plain_are_honoured() -> None:
    """Holes in the padding, an own 4D mask, and image blocks that see each other: gathered, with the real mask."""
    family = FAMILIES["gemma3"]
    prompt = inputs_of(family, MODES["greedy"])["input_ids"]
    holes = torch.ones_like(prompt)
    holes[0, 3:5] = 0
    causal = torch.ones(NUM_PROMPT, NUM_PROMPT, dtype=torch.bool).tril()
    causal[9:12, 9:12] = True
    four = causal[None, None].expand(2, 1, -1, -1)
    four = {"full_attention": four, "sliding_attention": four}
    for mask in (holes, four):
        found = []
        for ours in (False, True):
            model = family.build("kvcache" if ours else "sdpa")
            cache = cache_for(model, capacity=48, max_sequences=2) if ours else DynamicCache(config=model.config)
            with torch.no_grad():
                first = model(input_ids=prompt, attention_mask=mask, past_key_values=cache).logits
                second = None
                if isinstance(mask, Tensor):
                    longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
                    second = model(input_ids=prompt[:, :1], attention_mask=longer, past_key_values=cache).logits
            found.append((first, second))
        torch.testing.assert_close(found[1][0], found[0][0], atol=1e-4, rtol=1e-4)
        if found[0][1] is not None:
            torch.testing.assert_close(found[1][1], found[0][1], atol=1e-4, rtol=1e-4)
