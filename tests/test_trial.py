"""Families beside the nineteen, each with something that none of those has: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers as tf

from families import FAMILIES, one_thread
from kvcache import Engine, Finished, NotSupported, Request, SamplingParams
from kvcache.hf import cache_for, layout
from kvcache.request import MediaInput

BASE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
HEADS = BASE | {
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GROUPED = HEADS | {"num_key_value_heads": 2}
BART = {
    "vocab_size": 99,
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "init_std": 0.3,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
JAMBA = GROUPED | {
    "num_hidden_layers": 4,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}

ONE_BY_ONE: dict[str, Callable[[], Any]] = {
    "mamba": lambda: tf.MambaForCausalLM(tf.MambaConfig(**BASE, num_hidden_layers=2, state_size=8)),
    "falcon mamba": lambda: tf.FalconMambaForCausalLM(tf.FalconMambaConfig(**BASE, num_hidden_layers=2, state_size=8)),
    "jamba": lambda: tf.JambaForCausalLM(tf.JambaConfig(**JAMBA)),
}
CHANGING: dict[str, Callable[[], Any]] = {
    "keys": lambda: tf.JetMoeForCausalLM(
        tf.JetMoeConfig(**BASE, intermediate_size=96, num_hidden_layers=2, num_key_value_heads=2, kv_channels=32)
    ),
    "values": lambda: tf.DiffLlamaForCausalLM(tf.DiffLlamaConfig(**GROUPED)),
}
OTHERS: dict[str, Callable[[], Any]] = {
    **ONE_BY_ONE,
    **CHANGING,
    "positions counted by columns": lambda: tf.MvpForCausalLM(tf.MvpConfig(**BART)),
    "rotary positions counted by columns": lambda: tf.RoFormerForCausalLM(tf.RoFormerConfig(**HEADS, is_decoder=True)),
    "masks sized by the past": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(**HEADS | {"ffn_dim": 96, "word_embed_proj_dim": 64})
    ),
    "a decoder of an encoder-decoder": lambda: tf.BartForCausalLM(tf.BartConfig(**BART)),
    "a mask of its own": lambda: tf.DogeForCausalLM(tf.DogeConfig(**GROUPED)),
    "keys that it views": lambda: tf.GPTNeoXJapaneseForCausalLM(tf.GPTNeoXJapaneseConfig(**HEADS)),
    "images alone are read ahead": lambda: tf.Gemma4ForCausalLM(
        tf.Gemma4TextConfig(
            **GROUPED,
            head_dim=16,
            vocab_size_per_layer_input=99,
            use_bidirectional_attention="vision",
            hidden_size_per_layer_input=16,
        )
    ),
    "a head for a decoder": lambda: tf.ModernBertDecoderForCausalLM(tf.ModernBertDecoderConfig(**HEADS)),
}


def paligemma() -> Any:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = tf.PaliGemmaConfig(
        text_config=GROUPED | {"model_type": "gemma", "head_dim": 16},
        vision_config=vision | {"image_size": 16, "patch_size": 8, "projection_dim": 64},
        image_token_index=98,
        projection_dim=64,
        hidden_size=64,
    )
    return tf.PaliGemmaForConditionalGeneration(config)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no cache": (
        lambda: tf.OpenAIGPTLMHeadModel(tf.OpenAIGPTConfig(vocab_size=99, n_embd=64, n_layer=2, n_head=4)),
        "does not take transformers' Cache objects",
    ),
    "no decoder": (lambda: tf.BertLMHeadModel(tf.BertConfig(**HEADS)), "reads in both directions"),
    "a bias and a count of columns": (
        lambda: tf.LongT5ForConditionalGeneration(
            tf.LongT5Config(vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
        ),
        "LongT5ForConditionalGeneration cannot run over blocks",
    ),
    "states in its own modules": (
        lambda: tf.RecurrentGemmaForCausalLM(tf.RecurrentGemmaConfig(**GROUPED, lru_width=64)),
        "keeps its states in its own modules",
    ),
    "a text model whose wrapper is refused": (
        lambda: tf.InklingForCausalLM(tf.InklingTextConfig(**GROUPED, moe_intermediate_size=32, n_routed_experts=4)),
        "talks to cache layers of its own making",
    ),
    "a cache of cross attention made anew": (
        lambda: tf.T5GemmaForConditionalGeneration(
            tf.T5GemmaConfig(encoder=GROUPED | {"head_dim": 16}, decoder=GROUPED | {"head_dim": 16}, vocab_size=99)
        ),
        "in the place of the one for cross attention",
    ),
    "an encoder of its own kind": (
        lambda: tf.EncoderDecoderModel(
            tf.EncoderDecoderConfig.from_encoder_decoder_configs(
                tf.BertConfig(**HEADS), tf.BertConfig(**HEADS, is_decoder=True, add_cross_attention=True)
            )
        ),
        "does not say how wide its encoder's states are",
    ),
    "no head": (lambda: tf.ClvpForCausalLM(tf.ClvpDecoderConfig(**HEADS)), "has no one head"),
    "several heads": (
        lambda: tf.MusicgenForCausalLM(tf.MusicgenDecoderConfig(**HEADS, ffn_dim=96)),
        "has no one head",
    ),
    "a text that is read ahead": (
        lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**GROUPED, head_dim=16, use_bidirectional_attention=True)),
        "reads in both directions.*use_bidirectional_attention=None",
    ),
    "masks for images": (
        lambda: tf.GitForCausalLM(
            tf.GitConfig(**HEADS, vision_config={"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4})
        ),
        "puts columns of an image before each mask.*generate.. with cache_for",
    ),
    "prompts that are read ahead": (paligemma, "reads prompts in both directions.*generate.. with cache_for"),
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    model.generation_config = tf.GenerationConfig(do_sample=False, pad_token_id=0, bos_token_id=1)
    return model


def tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 98, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_greedy(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Each token is the best of a forward without any cache, or as good."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() < 1e-3


@pytest.mark.parametrize("name", OTHERS)
def test_tokens_are_those_of_the_model_alone(name: str) -> None:
    model = made(OTHERS[name])
    prompt = tokens(20)
    prompts = [prompt, prompt[:7], prompt[:13] + tokens(6, seed=2)]
    with Engine(model, kv_bytes="4MiB", block_size=4) as engine:
        rounds = [engine.generate(prompts, max_tokens=6, ignore_eos=True) for _ in range(2)]
        rounds.append(engine.generate([prompt], max_tokens=6, ignore_eos=True))
    for done in rounds:
        for one, given in zip(done, prompts, strict=False):
            assert_greedy(model, given, one.token_ids)
    assert any(one.cached_tokens for one in rounds[1])


def test_generate_with_a_head_for_a_decoder() -> None:
    model = made(OTHERS["a head for a decoder"])
    ids = torch.tensor([tokens(9)])
    done = model.generate(ids, max_new_tokens=3, past_key_values=cache_for(model, capacity=64))
    assert_greedy(model, ids[0].tolist(), done[0, 9:].tolist())


def test_encoder_decoders_that_count_columns() -> None:
    model = made(lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART | {"forced_eos_token_id": None})))
    source = torch.tensor([tokens(12)])
    prompts = [[1], [1, 7, 8], [1]]
    with Engine(model, kv_bytes="4MiB", block_size=4) as engine:
        states = engine.encode(input_ids=source)
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            engine.add(Request(str(number), prompt, params, media=[MediaInput(0, "source", states)]))
        done = {}
        while not engine.is_idle:
            for event in engine.step():
                if isinstance(event, Finished):
                    done[int(event.request_id)] = event.completion.token_ids
        for number, prompt in enumerate(prompts):
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *done[number]]])
                logits = model(input_ids=source, decoder_input_ids=ids, use_cache=False).logits[0]
            assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == list(done[number])


@pytest.mark.parametrize("name", ["eager only", "eager and others"])
def test_a_model_without_a_cache_computes_the_same_under_our_name(name: str) -> None:
    """Modules of models that know no attention but their own may say that they are not causal."""
    makes: dict[str, Callable[[], Any]] = {
        "eager only": lambda: tf.PegasusXForConditionalGeneration(tf.PegasusXConfig(**BART)),
        "eager and others": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART)),
    }
    model = made(makes[name])
    given = {"input_ids": torch.tensor([tokens(12)]), "decoder_input_ids": torch.tensor([tokens(9, seed=2)])}
    with torch.no_grad():
        expected = model(**given, use_cache=False).logits
        model.set_attn_implementation("kvcache")
        seen = model(**given, use_cache=False).logits
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["in its router", "in its encoder"])
def test_masks_that_a_model_reads_itself_are_those_that_it_expects(name: str) -> None:
    sparse = {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 64}
    makes: dict[str, Callable[[], Any]] = {
        "in its router": lambda: tf.NllbMoeForConditionalGeneration(tf.NllbMoeConfig(**BART, **sparse)),
        "in its encoder": lambda: tf.BigBirdPegasusForConditionalGeneration(
            tf.BigBirdPegasusConfig(**BART, attention_type="original_full")
        ),
    }
    model = made(makes[name])
    mask = (torch.arange(12) < torch.tensor([[12], [7]])).long()
    given = {"input_ids": torch.tensor([tokens(12), tokens(12, seed=3)]), "attention_mask": mask}
    given["decoder_input_ids"] = torch.tensor([tokens(5, seed=2)] * 2)
    with torch.no_grad():
        expected = model(**given, use_cache=False).logits
        model.set_attn_implementation("kvcache")
        for cache in (None, cache_for(model, capacity=16, max_sequences=2)):
            seen = model(**given, past_key_values=cache, use_cache=cache is not None).logits
            torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_and_as_it_was(name: str) -> None:
    make, message = REFUSED[name]
    model = made(make)
    before = model.config._attn_implementation
    with pytest.raises(NotSupported, match=message):
        Engine(model, kv_bytes="4MiB")
    assert model.config._attn_implementation == before


def test_a_wrong_environment_does_not_pass_for_the_models_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_ISA", "avx1024")
    with pytest.raises(ValueError, match="KVCACHE_ISA is 'avx1024'; expected one of avx512"):
        Engine(made(OTHERS["a head for a decoder"]), kv_bytes="4MiB")
    monkeypatch.delenv("KVCACHE_ISA")
    monkeypatch.setenv("KVCACHE_KERNEL", "cqu")
    with pytest.raises(ValueError, match=r"^KVCACHE_KERNEL is 'cqu'; expected one of triton, cpu, "):
        Engine(made(OTHERS["a head for a decoder"]), kv_bytes="4MiB")


@pytest.mark.parametrize("what", CHANGING)
def test_in_place_a_model_that_changes_what_is_cached_is_refused(what: str) -> None:
    model = made(CHANGING[what])
    model.set_attn_implementation("kvcache")
    ids = torch.tensor([tokens(9)])
    with pytest.raises(NotSupported, match=f"changes {what} between the cache and its attention"):
        model.generate(ids, max_new_tokens=3, past_key_values=cache_for(model, capacity=64))
    model.set_attn_implementation("sdpa")
    done = model.generate(ids, max_new_tokens=3, past_key_values=cache_for(model, capacity=64))
    assert_greedy(model, ids[0].tolist(), done[0, 9:].tolist())


def test_in_place_a_mask_that_a_model_computes_from_all_values() -> None:
    model = made(OTHERS["a mask of its own"])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.A.normal_()
    model.set_attn_implementation("kvcache")
    cache = cache_for(model, capacity=64)
    ids = torch.tensor([tokens(9)])
    for _ in range(2):
        done = model.generate(ids, max_new_tokens=6, past_key_values=cache)
        assert_greedy(model, ids[0].tolist(), done[0, ids.shape[1] :].tolist())
        ids = torch.cat((done, torch.tensor([tokens(5, seed=3)])), dim=1)


def test_prompts_that_are_read_ahead_are_cached_for_generate() -> None:
    model = made(paligemma)
    ids = torch.tensor([tokens(9)])
    expected = model.generate(ids, max_new_tokens=6)
    assert model.generate(ids, max_new_tokens=6, past_key_values=cache_for(model, capacity=64)).equal(expected)


@pytest.mark.parametrize(
    "model_type", ["inkling_mm_model", "inkling2", "qwen4_exp", "unlimited_ocr", "diffusion_gemma"]
)
def test_what_is_refused_is_named_as_transformers_names_it(model_type: str) -> None:
    assert set(layout._REFUSED) <= set(tf.CONFIG_MAPPING.keys())
    text = tf.CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    assert text.model_type in layout._REFUSED and type(text) is tf.CONFIG_MAPPING[text.model_type]


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_states_that_go_on_one_by_one_are_not_reused_for_more(name: str) -> None:
    model = made(ONE_BY_ONE[name])
    cache: Any = cache_for(model, capacity=64)
    argument = "cache_params" if "mamba" in name else "past_key_values"
    ids = torch.tensor([tokens(12)])
    model.generate(ids, max_new_tokens=4, **{argument: cache})
    with pytest.raises(NotSupported, match=r"goes on by one token at a time \(of several it forgets the 15 before\)"):
        model(torch.tensor([[5, 6]]), **{argument: cache})
    longer = torch.cat((ids, torch.tensor([tokens(5, seed=3)])), dim=1)
    found = cache.reuse(longer)
    assert found.num_tokens == 0 and "one token at a time" in found.reason
    done = model.generate(longer, max_new_tokens=4, **{argument: cache})
    assert_greedy(model, longer[0].tolist(), done[0, 17:].tolist())


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_states_that_go_on_one_by_one_begin_with_the_prompt_and_are_shared(name: str) -> None:
    model = made(ONE_BY_ONE[name])
    shared, lengths = tokens(80), []
    prompts = [[*shared, *tokens(count, seed=count)] for count in (3, 4, 5)]
    with Engine(model, kv_bytes="4MiB", block_size=4, max_batch_tokens=8) as engine:
        embeddings = model.get_input_embeddings()
        counting = embeddings.register_forward_hook(lambda _module, args, _out: lengths.append(args[0].numel()))
        done = engine.generate(prompts, max_tokens=3, ignore_eos=True)
        counting.remove()
    for given, one in zip(prompts, done, strict=True):
        assert_greedy(model, given, one.token_ids)
    assert [one.cached_tokens for one in done] == [0, 80, 80]
    assert max(lengths) == 80 and sorted(lengths)[-2] <= 3  # the rest one by one, for at most three prompts


def test_engines_of_one_model_leave_each_other_their_attention() -> None:
    model = FAMILIES["llama"].build()
    before = model.config._attn_implementation
    prompt = tokens(20)
    first, second = Engine(model, kv_bytes="1MiB"), Engine(model, kv_bytes="1MiB")
    expected = second.generate([prompt], max_tokens=8, ignore_eos=True)[0].token_ids
    first.close()
    again = second.generate([prompt[::-1]], max_tokens=8, ignore_eos=True)[0].token_ids
    assert_greedy(model, prompt[::-1], again)
    with pytest.raises(ValueError, match="another Runner or Engine uses it"):
        Engine(model, kv_bytes="1MiB", compile=True)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attention is 'eager' now"):
        Engine(model, kv_bytes="1MiB")
    with pytest.raises(ValueError, match=r"attention is 'eager' now and was 'kvcache'.*set_attn_implementation"):
        second.generate([prompt], max_tokens=8)
    model.set_attn_implementation("kvcache")
    assert second.generate([prompt], max_tokens=8, ignore_eos=True)[0].token_ids == expected
    second.close()
    assert model.config._attn_implementation == before
