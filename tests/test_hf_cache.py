"""`cache_for`: reuse, forks, rows, what it refuses, and what it does when a forward fails."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from families import FAMILIES, VOCABULARY, Family, one_thread
from kvcache import CacheFull, NotSupported, backends, formats
from kvcache.formats import Stored
from kvcache.hf import cache_for
from kvcache.hf.attention import attention_forward
from kvcache.hf.gather import Columns

DECODERS = [name for name, family in FAMILIES.items() if not family.encoder_decoder]
ATTENTIONS = ("built-in", "kvcache")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """One thread."""
    with one_thread():
        yield


def ids(num_rows: int, num_tokens: int, seed: int = 1) -> Tensor:
    """Random tokens [B,n] that are not padding."""
    return torch.randint(3, VOCABULARY, (num_rows, num_tokens), generator=torch.Generator().manual_seed(seed))


def build(family: Family, attention: str = "built-in") -> Any:
    if attention == "kvcache" and not family.interface:
        pytest.skip("its attention does not go through AttentionInterface")
    return family.build(None if attention == "built-in" else attention)


def generate(model: Any, prompt: Tensor, cache: Any = None, num_tokens: int = 6, **options: Any) -> Tensor:
    """The new tokens [rows, num_tokens], all of the prompt visible."""
    if cache is not None:
        options[FAMILIES_BY_TYPE[type(model)].cache_argument] = cache
    options.setdefault("attention_mask", torch.ones_like(prompt))
    return model.generate(input_ids=prompt, max_new_tokens=num_tokens, min_new_tokens=num_tokens, **options)[
        :, prompt.shape[1] :
    ]


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


FAMILIES_BY_TYPE = {type(family.build()): family for family in FAMILIES.values()}


def kept_without_memory(family: Family) -> list[int]:
    """What `reuse` keeps in the conversation below: 27 tokens agree at first, then 15, then 33 of 39, then none."""
    if family.name == "llama4":
        return [27, 8, 33, 0]  # a chunk of 8 can be begun anew, and the last one is still there
    return [27, 0, 0, 0] if family.sliding or family.recurrent else [27, 15, 33, 0]


# --- reuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", DECODERS)
def test_reuse_then_generate_equals_fresh(name: str, attention: str) -> None:
    """A conversation: a second turn, one that leaves the first in its middle, the same prompt again, another one."""
    family = FAMILIES[name]
    model = build(family, attention)
    cache = cache_for(model, capacity=96)
    first = ids(1, 20)
    history = torch.cat([first, generate(model, first, cache, 8)], dim=1)
    second = torch.cat([history, ids(1, 6, seed=5)], dim=1)
    changed = torch.cat([second[:, :15], ids(1, 19, seed=11)], dim=1)
    prompts = (second, changed, changed, ids(1, 20, seed=77))
    for prompt, kept in zip(prompts, kept_without_memory(family), strict=True):
        match = cache.reuse(prompt)
        assert match.num_tokens == kept, match.reason
        assert generate(model, prompt, cache).tolist() == generate(family.build(), prompt).tolist()
        cache.check()


@pytest.mark.parametrize("name", [name for name in DECODERS if FAMILIES[name].sliding])
def test_memory_lets_sliding_layers_rewind(name: str) -> None:
    """With `memory` tokens retained, the window before an earlier position can still be filled."""
    model = FAMILIES[name].build()
    cache = cache_for(model, capacity=96, memory=np.uint32(32))  # type: ignore[arg-type]  as read from an array
    prompt = ids(1, 20)
    generate(model, prompt, cache, 8)
    changed = torch.cat([prompt[:, :15], ids(1, 5, seed=9)], dim=1)
    assert cache.reuse(changed).num_tokens == (8 if name == "llama4" else 15)
    assert generate(model, changed, cache).tolist() == generate(model, changed).tolist()


def test_recurrent_layers_go_back_to_the_end_of_a_prompt() -> None:
    """Turn 1 ends at 20 tokens; turn 2 shares them and goes on differently from what was generated."""
    model = FAMILIES["qwen3_next"].build()
    cache = cache_for(model, capacity=96)
    prompt = ids(1, 20)
    generate(model, prompt, cache, 8)
    other = torch.cat([prompt, ids(1, 5, seed=3)], dim=1)
    match = cache.reuse(other)
    assert match.num_tokens == 20, match.reason
    assert generate(model, other, cache).tolist() == generate(model, other).tolist()


def test_reuse_says_why_no_more() -> None:
    model = FAMILIES["mistral"].build()
    cache = cache_for(model, capacity=96)
    prompt = ids(1, 20)
    assert cache.reuse(prompt) == (0, "the cache is empty")
    generate(model, prompt, cache, 8)
    assert cache.reuse(torch.cat([prompt, ids(1, 3)], 1)).reason.startswith("20 tokens agree and 0 can be kept: layers")
    full = FAMILIES["llama"].build()
    cache = cache_for(full, capacity=96)
    tokens = generate(full, prompt, cache, 8)
    whole = torch.cat([prompt, tokens], dim=1)
    assert cache.reuse(whole) == (27, "all 27 cached tokens")
    assert cache.reuse(prompt) == (19, "19 of 27 cached tokens: the last token of the prompt must be computed")
    changed = prompt.clone()
    changed[0, 4] = 3 if prompt[0, 4] != 3 else 4
    match = cache.reuse(changed)
    assert match.num_tokens == 4
    assert f"token 4 is {changed[0, 4]}, and {prompt[0, 4]} in the cache" in match.reason


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_short_prompt_again_without_reuse_says_what_is_missing(name: str) -> None:
    """transformers cuts what is cached off a prompt, and twice its length leaves nothing."""
    model, prompt = build(FAMILIES[name]), ids(1, 5)
    cache = cache_for(model, capacity=64)
    expected = generate(model, prompt, cache)
    with pytest.raises(ValueError, match=r"no token beyond .*cache\.reuse"):
        generate(model, prompt, cache)
    cache.reuse(prompt)
    torch.testing.assert_close(generate(model, prompt, cache), expected)


def test_reuse_computes_only_new_tokens() -> None:
    """The forward after `reuse` brings the tokens that are not kept, and no others."""
    model = FAMILIES["llama"].build()
    cache = cache_for(model, capacity=96)
    prompt = ids(1, 40)
    generate(model, prompt, cache, 1)
    longer = torch.cat([prompt, ids(1, 5, seed=2)], dim=1)
    assert cache.reuse(longer).num_tokens == 40
    seen: list[int] = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    generate(model, longer, cache, 3)
    handle.remove()
    assert seen == [5, 1, 1]


def test_mamba_is_fed_only_new_tokens_too() -> None:
    """generate() hands models with `cache_params` the whole prompt; the hook takes off what the cache holds."""
    model = FAMILIES["mamba2"].build()
    cache = cache_for(model, capacity=96)
    prompt = ids(1, 20)
    history = torch.cat([prompt, generate(model, prompt, cache, 8)], dim=1)
    longer = torch.cat([history, ids(1, 4, seed=2)], dim=1)
    assert cache.reuse(longer).num_tokens == 27
    seen: list[int] = []
    handle = model.backbone.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    tokens = generate(model, longer, cache, 3)
    handle.remove()
    assert seen == [5, 1, 1]
    assert tokens.tolist() == generate(model, longer, num_tokens=3).tolist()


def test_mamba_skips_what_each_of_several_rows_has() -> None:
    model = FAMILIES["mamba2"].build()
    cache = cache_for(model, capacity=96, max_sequences=2)
    prompt = ids(2, 12)
    longer = torch.cat([prompt, generate(model, prompt, cache), ids(2, 5, seed=7)], dim=1)
    assert cache.reuse(longer).num_tokens == 17
    assert generate(model, longer, cache).tolist() == generate(model, longer).tolist()


@pytest.mark.parametrize("start_anew", [True, False])
def test_the_end_of_a_prompt_is_kept_after_assisted_generation_too(start_anew: bool) -> None:
    """Only that needs to record what convolutions see, and no checkpoints meanwhile."""
    model = FAMILIES["lfm2"].build()
    cache = cache_for(model, capacity=96)
    prompt = ids(1, 12)
    tokens = generate(model, prompt, cache, prompt_lookup_num_tokens=3)
    longer = torch.cat([prompt, tokens, ids(1, 4, seed=3)], dim=1)
    if start_anew:
        cache.reset()
    else:
        assert cache.reuse(longer).num_tokens == 17
    generate(model, longer, cache)
    assert cache.reuse(torch.cat([longer, ids(1, 5, seed=8)], dim=1)).num_tokens == 22


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_assisted_generation_after_reuse(name: str, padding: int, attention: str) -> None:
    """transformers feeds the whole prompt there, whatever the cache holds; the hook takes off what it does."""
    model = build(FAMILIES[name], attention)
    cache = cache_for(model, capacity=96)
    prompt = ids(1, 12)
    mask = torch.ones((1, 23), dtype=torch.long)
    mask[:, :padding] = 0
    longer = torch.cat([prompt, generate(model, prompt, cache, attention_mask=mask[:, :12]), ids(1, 5, seed=7)], dim=1)
    expected = generate(model, longer, attention_mask=mask)
    for options in ({"assistant_model": FAMILIES[name].build()}, {"prompt_lookup_num_tokens": 3}):
        fork = copy.deepcopy(cache)
        assert fork.reuse(longer, mask).num_tokens == 17
        assert generate(model, longer, fork, attention_mask=mask, **options).tolist() == expected.tolist()
        fork.check()


def test_reuse_of_rows() -> None:
    """Each row of the new prompt takes the row that agrees longest; all keep what the worst of them can."""
    model = FAMILIES["llama"].build()
    cache = cache_for(model, capacity=64, max_sequences=4)
    prompt = ids(3, 12)
    generate(model, prompt, cache, 4)
    new = torch.cat([prompt[[2, 2, 0]], ids(3, 4, seed=8)], dim=1)
    new[1, 9] = 3 if new[1, 9] != 3 else 4
    assert cache.reuse(new).num_tokens == 9
    assert generate(model, new, cache).tolist() == generate(model, new).tolist()
    cache.check()
    assert len(cache.usage().sequences) == 3


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
def test_reuse_after_beams_and_before_them(options: dict[str, Any]) -> None:
    model = FAMILIES["gemma3"].build()
    cache = cache_for(model, capacity=64, max_sequences=4, memory=64)
    prompt = ids(1, 12)
    generate(model, prompt, cache, 8, **options)
    longer = torch.cat([prompt, ids(1, 5, seed=4)], dim=1)
    assert cache.reuse(longer).num_tokens >= 12
    torch.manual_seed(0)
    expected = generate(model, longer, **options)
    torch.manual_seed(0)
    assert generate(model, longer, cache, **options).tolist() == expected.tolist()
    cache.check()


def test_reuse_with_left_padding() -> None:
    model = FAMILIES["llama4"].build()
    cache = cache_for(model, capacity=64, max_sequences=2)
    prompt = ids(2, 14)
    mask = torch.ones_like(prompt)
    prompt[0, :5], mask[0, :5] = 0, 0
    tokens = generate(model, prompt, cache, 6, attention_mask=mask)
    longer = torch.cat([prompt, tokens, ids(2, 3, seed=6)], dim=1)
    longer_mask = torch.cat([mask, torch.ones(2, 9, dtype=torch.long)], dim=1)
    assert cache.reuse(longer, longer_mask).num_tokens == 19
    expected = generate(model, longer, attention_mask=longer_mask)
    assert generate(model, longer, cache, attention_mask=longer_mask).tolist() == expected.tolist()
    # The same ids without padding are another prompt.
    assert cache.reuse(longer, torch.ones_like(longer)).num_tokens == 0


def test_a_chunk_of_padding_alone_where_keys_are_wider_than_values() -> None:
    import transformers as tf

    kinds = {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "dense"]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48, "v_head_dim": 32}
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = tf.MiMoV2FlashForCausalLM(tf.MiMoV2FlashConfig(**sizes, **heads, **kinds, sliding_window=8)).eval()
    prompt = ids(1, 12)
    options = {"attention_mask": (torch.arange(12) >= 6).long()[None], "prefill_chunk_size": 4, "pad_token_id": 0}
    expected = generate(model, prompt, None, 4, **options)
    model.set_attn_implementation("kvcache")
    found = generate(model, prompt, None, 4, **options, past_key_values=cache_for(model, capacity=32))
    assert found.equal(expected)


@pytest.mark.parametrize("name", ["bloom", "llama", "gemma3"])
def test_chunks_of_padding_alone(name: str) -> None:
    model = FAMILIES[name].build()
    prompt = ids(2, 17)
    options = {"attention_mask": (torch.arange(17) >= torch.tensor([[11], [12]])).long(), "prefill_chunk_size": 3}
    expected = generate(model, prompt, **options)
    assert generate(model, prompt, cache_for(model, capacity=32, max_sequences=2), **options).equal(expected)


def test_padding_that_becomes_visible_is_refused() -> None:
    """Padding is not stored, so a mask that shows it later cannot be honoured."""
    model = FAMILIES["llama"].build()
    cache = cache_for(model, capacity=64)
    prompt = ids(1, 10)
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    tokens = generate(model, prompt, cache, 4, attention_mask=mask)
    whole = torch.cat([prompt, tokens], dim=1)
    with pytest.raises(ValueError, match=r"generate\(\) drops a mask"):
        generate(model, whole, cache)
    shown = torch.ones_like(whole)
    shown[0, :2] = 0
    with pytest.raises(ValueError, match="padding when they were cached"):
        generate(model, whole, cache, attention_mask=shown)


def test_forwards_in_and_out_of_inference_mode_may_mix() -> None:
    model = FAMILIES["llama"].build()
    cache = cache_for(model, capacity=64, max_sequences=2)
    prompt = ids(2, 12)
    with torch.inference_mode():
        model(prompt, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
    longer = torch.cat([prompt.flip(0), ids(2, 3)], dim=1)
    assert cache.reuse(longer).num_tokens == 12
    assert generate(model, longer, cache).tolist() == generate(model, longer).tolist()


def test_embeddings_are_not_known_by_id() -> None:
    model = FAMILIES["llama"].build()
    cache = cache_for(model, capacity=64)
    prompt = ids(1, 10)
    embeds = model.get_input_embeddings()(prompt)
    model.generate(inputs_embeds=embeds, max_new_tokens=4, past_key_values=cache)
    match = cache.reuse(prompt)
    assert match.num_tokens == 0
    assert "not known" in match.reason


def test_what_is_unknown_agrees_with_nothing() -> None:
    """Not with -1 either, by which the transcript knows it and models may mark an image."""
    model = FAMILIES["llama"].build()
    cache = cache_for(model, capacity=64)
    embeds = model.get_input_embeddings()(ids(1, 10))
    model.generate(inputs_embeds=embeds, max_new_tokens=4, past_key_values=cache)
    match = cache.reuse([[-1] * 10 + [5]])
    assert match.num_tokens == 0
    assert "not known" in match.reason


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_prompts_and_masks_of_the_wrong_kind_change_nothing(name: str) -> None:
    model = FAMILIES[name].build()
    cache = cache_for(model, capacity=64)
    generate(model, ids(1, 9), cache, 3)
    before = cache.usage()
    assert before.num_tokens
    prompt = ids(1, 21)
    for wrong in ([True, False], [[1.5, 2.0]], [], [1j]):
        with pytest.raises(ValueError, match=r"expected integers \[rows, tokens\]"):
            cache.reuse(wrong)
    for shape in ((1, 5), (3, 21), (20,), (1, 1, 21)):
        with pytest.raises(ValueError, match=r"and input_ids are \[1, 21\]; expected 0 or 1 for each token"):
            cache.reuse(prompt, torch.ones(shape))
    for mask in ("ones", [[1, None]], object()):
        with pytest.raises(TypeError, match=r"attention_mask is .*; expected 0 or 1 for each token"):
            cache.reuse(prompt, mask)
    assert cache.usage() == before
    cache.check()


def test_a_mask_may_be_a_list() -> None:
    model = FAMILIES["llama"].build()
    cache = cache_for(model, capacity=64)
    prompt = ids(1, 9)
    generate(model, prompt, cache, 3)
    assert cache.reuse(prompt, [[0] + [1] * 8]).num_tokens == 0
    generate(model, prompt, cache, 3)
    assert cache.reuse(prompt[0].tolist(), [1] * 9).num_tokens == 8


def test_images_are_not_known_by_id() -> None:
    """The same token ids after another image are another prompt."""
    family = FAMILIES["mllama"]
    model = family.build()
    cache = cache_for(model, capacity=64)
    prompt = ids(1, 10)
    image = family.image_inputs(1, 10)
    expected = generate(model, prompt, num_tokens=8, **image)
    assert generate(model, prompt, cache, 8, **image).tolist() == expected.tolist()
    assert cache.reuse(torch.cat([prompt, ids(1, 2)], dim=1)).num_tokens == 0


def test_positions_of_ones_own_are_not_known_by_id() -> None:
    model = FAMILIES["llama"].build()
    cache = cache_for(model, capacity=64)
    prompt = ids(1, 10)
    model(input_ids=prompt, position_ids=torch.arange(5, 15)[None], past_key_values=cache)
    assert cache.reuse(torch.cat([prompt, prompt], dim=1)).num_tokens == 0


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_tokens_under_a_mask_that_hides_others_are_not_known_by_id(attention: str) -> None:
    """The keys of the second layer depend on what was seen in the first."""
    model = build(FAMILIES["llama"], attention)
    prompt = ids(1, 12)
    hole = torch.ones_like(prompt)
    hole[0, 3] = 0
    square = torch.ones((1, 1, 12, 12), dtype=torch.bool).tril()
    square[..., 4:, 3] = False
    for mask in (hole, square):
        cache = cache_for(model, capacity=32)
        with torch.no_grad():
            model(prompt, attention_mask=mask, past_key_values=cache)
        longer = torch.cat([prompt, ids(1, 3)], dim=1)
        assert "under a mask that hides" in cache.reuse(longer).reason
        assert generate(model, longer, cache).tolist() == generate(model, longer).tolist()


def test_encoder_decoders_start_anew() -> None:
    family = FAMILIES["t5"]
    model = family.build()
    cache = cache_for(model, capacity=32)
    for seed in (5, 6):
        inputs = family.encoder_inputs(1, seed)
        expected = model.generate(**inputs, max_new_tokens=8)
        assert model.generate(**inputs, max_new_tokens=8, past_key_values=cache).tolist() == expected.tolist()
        match = cache.reuse([[1]])
        assert match.num_tokens == 0
        assert "encoder" in match.reason


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(FAMILIES))
def test_deepcopy_forks_by_reference(name: str) -> None:
    """The documented recipe of prompt caching: fill a cache once, deep-copy it for each continuation."""
    family = FAMILIES[name]
    model = family.build()
    cache = cache_for(model, capacity=64, max_sequences=3)
    if family.encoder_decoder:
        inputs = family.encoder_inputs(1)
        model.generate(**inputs, max_new_tokens=4, past_key_values=cache)
        fork = copy.deepcopy(cache)
        keys = cache.cross_attention_cache.layers[0].keys
        assert torch.equal(fork.cross_attention_cache.layers[0].keys, keys)
        assert fork.get_seq_length() == cache.get_seq_length()
        fork.check()
        return
    prompt = ids(1, 15)
    with torch.no_grad():
        model(input_ids=prompt, attention_mask=torch.ones_like(prompt), **{family.cache_argument: cache})
    before = cache.usage()
    forks = [copy.deepcopy(cache) for _ in range(2)]
    assert cache.usage().num_bytes == before.num_bytes
    assert cache.usage().num_free_blocks == before.num_free_blocks
    for seed, fork in enumerate([*forks, cache]):
        question = torch.cat([prompt, ids(1, 4, seed=20 + seed)], dim=1)
        assert fork.reuse(question).num_tokens == 15
        assert generate(model, question, fork).tolist() == generate(model, question).tolist()
        fork.check()


def test_a_dropped_fork_gives_its_blocks_back() -> None:
    model = FAMILIES["llama"].build()
    cache = cache_for(model, capacity=64, max_sequences=2)
    generate(model, ids(1, 12), cache)
    free = cache.usage().num_free_blocks
    fork = copy.deepcopy(cache)
    longer = torch.cat([ids(1, 12), ids(1, 9, seed=4)], dim=1)
    assert fork.reuse(longer).num_tokens == 12
    generate(model, longer, fork)
    assert cache.usage().num_free_blocks < free
    del fork
    gc.collect()
    assert cache.usage().num_free_blocks == free
    assert len(cache.usage().sequences) == 1


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_selected_and_repeated_by_reference() -> None:
    model = FAMILIES["qwen3"].build()
    cache = cache_for(model, capacity=32, max_sequences=4)
    prompt = ids(2, 9)
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=cache)
    free = cache.usage().num_free_blocks
    keys = cache.layers[1].keys
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[1].keys, keys[[0, 0, 1, 1]])
    cache.reorder_cache(torch.tensor([3, 0, 0, 2]))
    assert torch.equal(cache.layers[1].keys, keys[[1, 0, 0, 1]])
    cache.batch_select_indices(torch.tensor([1, 3]))
    assert torch.equal(cache.layers[1].keys, keys)
    assert cache.usage().num_free_blocks == free
    cache.check()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next", "t5"])
def test_rows_that_do_not_exist_are_refused(name: str) -> None:
    """Before any row is copied: what a failed selection made would belong to nobody."""
    family = FAMILIES[name]
    model = family.build()
    cache = cache_for(model, capacity=64, max_sequences=4)
    generate(model, ids(2, 9), cache, 3)
    before = cache.usage()
    for rows in ([0, 0, 7], [0, -1], [2], [], [0.0], [[0, 1]], [True], [True, False, True], [False, False]):
        for select in (cache.reorder_cache, cache.batch_select_indices):
            with pytest.raises(ValueError, match="and the cache holds 2 rows; expected numbers of these, from 0"):
                select(torch.tensor(rows))
    for repeats in (0, -1):
        with pytest.raises(ValueError, match=f"repeats is {repeats}; expected at least 1"):
            cache.batch_repeat_interleave(repeats)
    assert cache.usage() == before
    cache.check()
    cache.batch_select_indices(torch.tensor([False, True]))
    cache.check()
    cache.reset()
    assert not cache.usage().sequences


def test_layers_look_like_those_of_transformers() -> None:
    """What transformers' own tests read: keys and values [B,H,S,D] on each layer."""
    from transformers import DynamicCache

    model = FAMILIES["gemma3"].build()
    prompt = ids(2, 13)
    ours, theirs = cache_for(model, capacity=32, max_sequences=2), DynamicCache(config=model.config)
    for cache in (ours, theirs):
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=cache)
    assert len(ours) == len(theirs) == 3
    assert ours.is_sliding == theirs.is_sliding
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
        assert one.get_mask_sizes(4) == other.get_mask_sizes(4)
    assert ours.get_seq_length() == 13


def test_reset_frees_everything() -> None:
    model = FAMILIES["falcon_h1"].build()
    cache = cache_for(model, capacity=32)
    generate(model, ids(1, 9), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    usage = cache.usage()
    assert usage.num_free_blocks == usage.num_blocks
    assert not usage.sequences
    assert generate(model, ids(1, 9, seed=2), cache).tolist() == generate(model, ids(1, 9, seed=2)).tolist()


def test_crop_takes_tokens_back() -> None:
    model = FAMILIES["llama"].build()
    cache = cache_for(model, capacity=32)
    prompt = ids(1, 9)
    with torch.no_grad():
        expected = model(input_ids=prompt).logits[:, -1]
        model(input_ids=torch.cat([prompt[:, :8], ids(1, 4, seed=3)], dim=1), past_key_values=cache)
        cache.crop(-4)
        cache.crop(0)
        assert cache.get_seq_length() == 8
        torch.testing.assert_close(model(input_ids=prompt[:, 8:], past_key_values=cache).logits[:, -1], expected)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)
    sliding = FAMILIES["mistral"].build()
    cache = cache_for(sliding, capacity=64)
    generate(sliding, ids(1, 20), cache, 8)
    with pytest.raises(NotSupported, match="memory"):
        cache.crop(-5)
    cache.check()


# --- storage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "fp8_e4m3", "bf16", ("q8_0", "f16")])
@pytest.mark.parametrize("name", ["llama", "gemma3n", "deepseek_v3", "falcon_h1", "t5", "bloom"])
def test_every_format_works_in_every_kind_of_family(name: str, dtype: Any) -> None:
    """Quantised keys move logits, not by much: 8 bits stay within 5 % of their range on random models."""
    family = FAMILIES[name]
    model = family.build()
    cache = cache_for(model, capacity=64, max_sequences=2, dtype=dtype)
    if family.encoder_decoder:
        tokens = model.generate(**family.encoder_inputs(2), max_new_tokens=6, past_key_values=cache)
        assert tokens.shape == (2, 7)
        cache.check()
        return
    prompt = ids(2, 12)
    with torch.no_grad():
        exact = model(input_ids=prompt).logits[:, -1]
        model(input_ids=prompt[:, :8], past_key_values=cache)
        found = model(input_ids=prompt[:, 8:], past_key_values=cache).logits[:, -1]
    cache.check()
    difference = (found - exact).abs().max() / exact.abs().max()
    assert 0 < difference < (0.05 if dtype in ("bf16", "q8_0", ("q8_0", "f16")) else 1.0)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_block_sizes_change_nothing(block_size: int, attention: str) -> None:
    model = build(FAMILIES["gemma2"], attention)
    prompt = ids(2, 14)
    mask = torch.ones_like(prompt)
    prompt[1, :3], mask[1, :3] = 0, 0
    expected = generate(FAMILIES["gemma2"].build(), prompt, num_tokens=9, attention_mask=mask, num_beams=2)
    cache = cache_for(model, capacity=64, max_sequences=4, block_size=block_size)
    tokens = generate(model, prompt, cache, 9, attention_mask=mask, num_beams=2)
    assert tokens.tolist() == expected.tolist()
    cache.check()


def test_only_the_blocks_of_a_pass_are_gathered() -> None:
    """Out of a pool that no memory holds: all its blocks lie at one place."""
    pool = torch.randn(1, 2, 16, 32).expand(1 << 40, 2, 16, 32)
    stored = Stored(pool, formats.create("f32", backends.create("torch")), 32)
    blocks = torch.tensor([9, 1 << 30, 4])
    columns = Columns(1, 35, 16, torch.empty(0), run=None, blocks=(blocks, 5), missing=None)
    assert torch.equal(columns.read(stored, torch.float32), pool[0].repeat(1, 3, 1)[None, :, 5:40])


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", [name for name in DECODERS if FAMILIES[name].sliding])
def test_long_prompts_leave_only_their_tail_in_windowed_layers(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass larger than a windowed member: its pool stays small, tokens stay the same, padded and continued."""
    monkeypatch.setattr("kvcache.hf.pool.MAX_WINDOW_BATCH", 3)
    model = build(FAMILIES[name], attention)
    for padding in (0, 5):
        prompt = ids(2, 26)
        mask = torch.ones_like(prompt)
        prompt[0, :padding], mask[0, :padding] = 0, 0
        cache = cache_for(model, capacity=64, max_sequences=2)
        tokens = generate(model, prompt, cache, 9, attention_mask=mask)
        assert tokens.tolist() == generate(FAMILIES[name].build(), prompt, num_tokens=9, attention_mask=mask).tolist()
        longer = torch.cat([prompt, tokens, ids(2, 21, seed=9)], dim=1)
        longer_mask = torch.cat([mask, torch.ones(2, 30, dtype=torch.long)], dim=1)
        assert cache.reuse(longer, longer_mask).num_tokens == 34
        tokens = generate(model, longer, cache, attention_mask=longer_mask)
        assert tokens.tolist() == generate(FAMILIES[name].build(), longer, attention_mask=longer_mask).tolist()
        # What was never stored cannot be gone back to, but for the beginning of a chunk.
        again = torch.cat([longer[:, :33], ids(2, 3)], dim=1)
        kept = cache.reuse(again, longer_mask[:, :36]).num_tokens
        assert kept == (32 if name == "llama4" and not padding else 0)
        tokens = generate(model, again, cache, attention_mask=longer_mask[:, :36])
        expected = generate(FAMILIES[name].build(), again, attention_mask=longer_mask[:, :36])
        assert tokens.tolist() == expected.tolist()
        cache.check()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_capacity_too_small_changes_nothing() -> None:
    model = FAMILIES["gemma3"].build()
    cache = cache_for(model, capacity=12)
    with pytest.raises(ValueError, match="13 tokens and the cache holds 1 x 12"):
        generate(model, ids(1, 13), cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(CacheFull):
        generate(model, ids(1, 8), cache, 9)
    cache.check()
    assert cache.get_seq_length() == 12
    prompt = ids(1, 8)
    cache.reset()
    assert generate(model, prompt, cache, 3).tolist() == generate(model, prompt, num_tokens=3).tolist()


def test_more_rows_than_room() -> None:
    model = FAMILIES["llama"].build()
    cache = cache_for(model, capacity=16, max_sequences=2)
    with pytest.raises(ValueError, match="max_sequences"):
        generate(model, ids(3, 12), cache)
    with pytest.raises(CacheFull):
        generate(model, ids(3, 8), cache, 9)
    cache.check()
    cache.reset()
    # More rows than max_sequences are fine while there is room.
    assert generate(model, ids(3, 6), cache, 3).tolist() == generate(model, ids(3, 6), num_tokens=3).tolist()


def test_another_number_of_rows() -> None:
    model = FAMILIES["llama"].build()
    cache = cache_for(model, capacity=32, max_sequences=3)
    generate(model, ids(2, 6), cache)
    with pytest.raises(ValueError, match="brings 3 rows and the cache holds 2"):
        model(input_ids=ids(3, 1), past_key_values=cache)
    cache.check()


def test_the_wrong_model() -> None:
    one, other = FAMILIES["llama"].build(), FAMILIES["qwen3"].build()
    cache = cache_for(one, capacity=32)
    cache_for(other, capacity=32)
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        generate(other, ids(1, 6), cache)
    deeper = FAMILIES["gemma3"].build()  # never given to cache_for: three layers against two
    with pytest.raises(ValueError, match="layer 2 of a cache for LlamaForCausalLM"):
        deeper(input_ids=ids(1, 6), past_key_values=cache)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"capacity": 0}, ValueError, "capacity is 0"),
        ({"capacity": "8"}, TypeError, "capacity is '8'"),
        ({"capacity": 8, "dtype": "int8"}, ValueError, "format of keys and values is 'int8'"),
        ({"capacity": 8, "dtype": ("q8_0",)}, ValueError, "format of keys and values is"),
        ({"capacity": 8, "block_size": 0}, ValueError, "block_size is 0"),
        ({"capacity": 8, "max_sequences": 0}, ValueError, "max_sequences is 0"),
        ({"capacity": 32, "memory": 4}, ValueError, "memory >= window"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cache_for(FAMILIES["mistral"].build(), **options)


def test_a_softcap_is_positive() -> None:
    """Where no kernel sees it, too: whole keys with a mask, and transformers' own attention."""
    states = torch.ones(1, 2, 3, 8)
    for softcap in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"softcap is {softcap}; expected a finite number above 0, or None"):
            attention_forward(torch.nn.Module(), states, states, states, None, softcap=softcap)


def test_models_that_cannot_be_served() -> None:
    import transformers as tf

    with pytest.raises(TypeError, match="expected a transformers model"):
        cache_for("llama", capacity=8)  # type: ignore[arg-type]
    model = FAMILIES["llama"].build()
    with pytest.raises(NotSupported, match="does not generate"):
        cache_for(model.model, capacity=8)
    model.config.model_type = "deepseek_v4"
    with pytest.raises(NotSupported, match="cache layers of its own"):
        cache_for(model, capacity=8)
    indexed = FAMILIES["llama"].build()
    indexed.config.layer_types = ["full_attention", "indexed_attention"]
    with pytest.raises(NotSupported, match="indexed_attention"):
        cache_for(indexed, capacity=8)
    config = tf.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    with pytest.raises(NotSupported):
        cache_for(tf.BertModel(config), capacity=8)


def test_heads_that_a_format_cannot_hold() -> None:
    import transformers as tf

    config = tf.LlamaConfig(
        vocab_size=99, hidden_size=48, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, head_dim=24
    )
    model = tf.LlamaForCausalLM(config).eval()
    cache = cache_for(model, capacity=8, dtype="q8_0")
    with pytest.raises(ValueError, match="32"):
        model(input_ids=ids(1, 3), past_key_values=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["llama", "mistral", "falcon_h1"])
def test_a_forward_that_fails_is_taken_back(name: str) -> None:
    """An error in the second layer leaves no half of a pass behind."""
    model = FAMILIES[name].build()
    cache = cache_for(model, capacity=64)
    prompt = ids(1, 20)
    tokens = generate(model, prompt, cache, 4)
    expected = generate(model, prompt, num_tokens=4)
    assert tokens.tolist() == expected.tolist()

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    longer = torch.cat([prompt, tokens, ids(1, 3, seed=3)], dim=1)
    with pytest.raises(RuntimeError, match="on purpose"):
        generate(model, longer, cache)
    handle.remove()
    assert cache.get_seq_length() == (0 if name == "falcon_h1" else 23)
    cache.check()
    assert generate(model, longer, cache).tolist() == generate(model, longer).tolist()
    cache.check()


@pytest.mark.parametrize("name", ["llama", "mistral", "falcon_h1"])
def test_a_forward_that_ctrl_c_breaks_off_is_taken_back(name: str) -> None:
    """PyTorch runs hooks after an exception, but not after this one; the second layer has no keys of the pass."""
    model = FAMILIES[name].build()
    prompt = ids(1, 20)
    expected = generate(model, prompt, num_tokens=4)
    longer = torch.cat([prompt, expected, ids(1, 3, seed=3)], dim=1)

    def broken_off() -> Any:
        cache = cache_for(model, capacity=64)
        generate(model, prompt, cache, 4)
        handle = model.model.layers[1].register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(model, longer, cache)
        handle.remove()
        return cache

    def broken_off_with_beams() -> Any:
        cache = cache_for(model, capacity=64, max_sequences=2)
        generate(model, prompt, cache, 4)
        cache.reuse(longer)
        handle = model.model.layers[1].register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(model, longer, cache, num_beams=2)
        handle.remove()
        return cache

    kept = 0 if name == "falcon_h1" else 23
    for cache in (broken_off(), copy.deepcopy(broken_off()), broken_off_with_beams()):
        assert cache.reuse(longer).num_tokens == kept
        assert generate(model, longer, cache).tolist() == generate(model, longer).tolist()
        cache.check()
    cache = broken_off()
    with pytest.raises(ValueError, match=r"broke off .* call cache.reuse"):
        generate(model, torch.cat([longer, ids(1, 1)], dim=1), cache)
    assert cache.get_seq_length() == kept
    assert generate(model, longer, cache).tolist() == generate(model, longer).tolist()


def test_a_pass_that_breaks_off_costs_other_forks_nothing() -> None:
    """States that a fork's last pass lent are written back, though a pass of the cache broke off after it."""
    model = FAMILIES["qwen3_next"].build()
    cache = cache_for(model, capacity=64, max_sequences=2)
    prompt = ids(1, 20)
    generate(model, prompt, cache, 4)
    fork = copy.deepcopy(cache)
    handle = model.model.layers[1].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(ids(1, 1), past_key_values=cache)
    handle.remove()
    history = torch.cat([prompt, generate(model, prompt, num_tokens=4)], dim=1)
    with torch.no_grad():
        model(history[:, 23:], past_key_values=fork)
    cache.reuse(prompt)
    longer = torch.cat([history, ids(1, 1)], dim=1)
    assert fork.reuse(longer).num_tokens == 24
    assert generate(model, longer, fork).tolist() == generate(model, longer).tolist()


def test_a_call_that_is_not_announced_still_works() -> None:
    """The decoder called by itself: right numbers, unknown tokens."""
    model = FAMILIES["gemma3"].build()
    cache = cache_for(model, capacity=32)
    prompt = ids(1, 12)
    with torch.no_grad():
        expected = model.model(input_ids=prompt).last_hidden_state
        for begin, end in ((0, 7), (7, 11), (11, 12)):
            found = model.model(input_ids=prompt[:, begin:end], past_key_values=cache).last_hidden_state
            torch.testing.assert_close(found, expected[:, begin:end], atol=1e-4, rtol=1e-4)
    assert cache.reuse(prompt).num_tokens == 0


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gradients_that_a_cache_would_lose_raise(attention: str) -> None:
    """Keys and values are stored without them: what a loss owes to those would be left out."""
    model = build(FAMILIES["llama"], attention).requires_grad_(True)
    cache = cache_for(model, capacity=32)
    model(ids(1, 12), past_key_values=cache)
    loss = model(ids(1, 3), past_key_values=cache).logits.sum()
    with pytest.raises(NotSupported, match=r"gradients do not flow .*past_key_values=None"):
        loss.backward()
    cache.check()
