"""What each family keeps per layer, and that moved keys are the keys of the new position."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from families import FAMILIES, WINDOW, one_thread
from kvcache import CausalCache, Chunked, Full, HybridCache, NotSupported, RecurrentCache, Sliding
from kvcache.hf import layout_of
from kvcache.hf.layout import Layer, backend_of

FULL, SLIDING, CHUNKED = Layer(Full()), Layer(Sliding(WINDOW)), Layer(Chunked(WINDOW))
STATES, BOTH, SHARED, CROSS = Layer(num_states=1), Layer(Full(), 1), Layer(), Layer(is_cross=True)
LAYERS = {
    "llama": [FULL, FULL],
    "qwen3": [FULL, FULL],
    "mistral": [SLIDING, SLIDING],
    "gemma2": [SLIDING, FULL],
    "gemma3": [SLIDING, FULL, SLIDING],
    "gemma3n": [SLIDING, FULL, SLIDING, FULL, SHARED, SHARED],
    "gemma4": [SLIDING, FULL, SLIDING, FULL, SHARED, SHARED],
    "llama4": [CHUNKED, CHUNKED, CHUNKED, FULL],
    "gpt_oss": [SLIDING, FULL],
    "deepseek_v3": [FULL, FULL],
    "gpt2": [FULL, FULL],
    "t5": [FULL, FULL],
    "whisper": [FULL, FULL],
    "mllama": [FULL, CROSS, FULL, CROSS],
    "qwen3_next": [STATES, STATES, STATES, FULL],
    "lfm2": [STATES, FULL, STATES],
    "mamba2": [STATES, STATES],
    "falcon_h1": [BOTH, BOTH],
    "bloom": [FULL, FULL],
}
UNMOVABLE = ("deepseek_v3", "gpt2", "t5", "whisper", "mamba2")
ROTATED = [name for name in LAYERS if name not in UNMOVABLE]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """One thread."""
    with one_thread():
        yield


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_every_family(name: str) -> None:
    family = FAMILIES[name]
    layout = layout_of(family.build())
    assert list(layout.layers) == LAYERS[name]
    assert layout.is_encoder_decoder == family.encoder_decoder
    assert layout.has_states == family.recurrent
    assert layout.cache_argument == family.cache_argument
    assert (layout.gathers is None) == family.in_place or not layout.spans
    assert (layout.shift is None) == (name in UNMOVABLE)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_that_fits(name: str) -> None:
    """One member per span, states last; each layer is the business of one member unless it has both."""
    layout = layout_of(FAMILIES[name].build())
    hybrid = layout.build(16, memory=32)
    assert isinstance(hybrid, HybridCache)
    causal = [member for member in hybrid.members if isinstance(member, CausalCache)]
    assert len(causal) == len(layout.spans)
    assert isinstance(hybrid.members[-1], RecurrentCache) == layout.has_states
    for member, span in zip(causal, layout.spans, strict=True):
        assert member.span == (Sliding(WINDOW, 32) if isinstance(span, Sliding) else span)
        assert member.block_size == 16
    assert (hybrid.layer_types is None) == (name == "falcon_h1")


@pytest.mark.parametrize("name", ROTATED)
def test_the_shift_is_the_models_own_rotation(name: str) -> None:
    """Keys of other tokens at position p, shifted by d, are their keys at p + d: in every layer, both directions."""
    model = FAMILIES[name].build()
    layout = layout_of(model)
    tokens = torch.randint(3, 98, (1, 7), generator=torch.Generator().manual_seed(4))
    keys = []
    for begin in (2, 25):
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        positions = torch.arange(begin, begin + 7)[None]
        if name == "bloom":
            positions = None  # ALiBi: positions are not an argument, and not in the keys
        with torch.no_grad():
            arguments = {} if positions is None else {"position_ids": positions}
            model(input_ids=tokens, past_key_values=cache, **arguments)
        keys.append(cache)
    for index, layer in enumerate(layout.layers):
        if layer.span is None:
            continue
        before, after = (cache.layers[index].keys[0].transpose(0, 1) for cache in keys)
        for one, other, distance in ((before, after, 23), (after, before, -23)):
            shifted = layout.shift(index, one, np.full(len(one), distance, np.int32))
            torch.testing.assert_close(shifted, other, atol=2e-5, rtol=2e-5)
        assert torch.equal(layout.shift(index, before, np.zeros(len(before), np.int32)), before)


def test_each_layer_is_cached_where_it_computes() -> None:
    """accelerate's map names GPUs by number; what waits on the host or on a disk computes on the first GPU."""
    model = FAMILIES["llama"].build()
    assert {backend_of(model).device(layer).name for layer in range(3)} == {"cpu"}
    model.hf_device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    assert {backend_of(model).device(layer).name for layer in range(3)} == {"cpu"}
    model.hf_device_map |= {"model.layers.2": "meta", "lm_head": "meta"}
    assert {backend_of(model).device(layer).name for layer in range(3)} == {"meta"}
    model.hf_device_map["model.layers.0"] = 99
    with pytest.raises(ValueError, match=r"layer_devices\[0\] is 'cuda:99'; expected a device that"):
        backend_of(model)


def test_models_that_move_keys_in_another_way_are_refused() -> None:
    """A layer whose keys no rotation explains: `NotSupported`, not a wrong key."""
    model = FAMILIES["llama"].build()
    layout = layout_of(model)
    with torch.no_grad():
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
        model.model.rotary_emb.register_forward_hook(lambda _module, _args, output: (output[0] * 1.5, output[1]))
    with pytest.raises(NotSupported, match="rotated by none"):
        layout.shift(0, torch.zeros(1, 2, 32), np.ones(1, np.int32))
