"""Tiny random models of every supported family: hidden size 64, f32, vocabulary 99. Shared by all transformers tests.

    model = FAMILIES["gemma3"].build()

Traits say what a test may ask of a family. Windows and chunks are 8 tokens, so that prompts of 20 outgrow them. Models
are seeded by name: the same weights in every process. `build` makes a fresh model each time (tests set attention
implementations and hooks on it); a build costs 5 to 40 ms.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf

VOCABULARY = 99
WINDOW = 8
PAD, BOS = 0, 1

# No end token: runs have the length that a test asks for. Untied: tied random embeddings only repeat the last token.
_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": None, "tie_word_embeddings": False}
_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "initializer_range": 0.3, **_IDS}
_DECODER = {
    **_COMMON,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: models this small gain nothing from a second, and on a busy machine threads that wait
    for each other are 20 times slower.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class Family:
    """One family: how to build it, and what it has.

    encoder_decoder: takes encoder inputs, see `encoder_inputs`.
    recurrent: some layers hold states; stateful: transformers refuses assisted decoding with it.
    sliding: some layers forget (window or chunk).
    interface: its attention goes through AttentionInterface, so that `attn_implementation="kvcache"` can be set.
    in_place: blocks are read in place then (the rest gathers: MLA latents, relative position bias, no attention).
    packed: several sequences can share one `[1,T]` forward.
    cache_argument: the name under which forward takes the cache.
    """

    name: str
    make: Callable[[], Any]
    encoder_decoder: bool = False
    recurrent: bool = False
    stateful: bool = False
    sliding: bool = False
    interface: bool = True
    in_place: bool = True
    packed: bool = True
    cache_argument: str = "past_key_values"

    def build(self, attn_implementation: str | None = None) -> Any:
        """A model in eval mode, f32, greedy by default. Same weights each time."""
        torch.manual_seed(zlib.crc32(self.name.encode()))
        model = self.make().eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.generation_config = tf.GenerationConfig(
            do_sample=False, pad_token_id=PAD, bos_token_id=BOS, decoder_start_token_id=BOS
        )
        if attn_implementation is not None:
            model.set_attn_implementation(attn_implementation)
        return model

    def encoder_inputs(self, batch_size: int, seed: int = 5) -> Mapping[str, torch.Tensor]:
        """What the encoder reads, as keyword arguments of `generate`; empty for decoders without an encoder."""
        generator = torch.Generator().manual_seed(seed)
        if self.name == "t5":
            ids = torch.randint(3, VOCABULARY - 1, (batch_size, 11), generator=generator)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.name == "whisper":
            return {"input_features": torch.randn((batch_size, 80, 60), generator=generator)}
        return {}

    def image_inputs(self, batch_size: int, num_tokens: int, seed: int = 5) -> Mapping[str, torch.Tensor]:
        """One image per row for mllama, seen from the second token on."""
        if self.name != "mllama":
            return {}
        generator = torch.Generator().manual_seed(seed)
        seen = torch.ones((batch_size, num_tokens, 1, 1), dtype=torch.long)
        seen[:, 0] = 0
        return {
            "pixel_values": torch.randn((batch_size, 1, 1, 3, 16, 16), generator=generator),
            "aspect_ratio_ids": torch.ones((batch_size, 1), dtype=torch.long),
            "aspect_ratio_mask": torch.ones((batch_size, 1, 1), dtype=torch.long),
            "cross_attention_mask": seen,
        }


def _llama() -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**_DECODER))


def _qwen3() -> Any:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**_DECODER))


def _mistral() -> Any:
    return tf.MistralForCausalLM(tf.MistralConfig(**_DECODER, sliding_window=WINDOW))


def _gemma2() -> Any:
    config = tf.Gemma2Config(
        **_DECODER,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=32,
        attn_implementation="eager",
    )
    return tf.Gemma2ForCausalLM(config)


def _gemma3() -> Any:
    config = tf.Gemma3TextConfig(
        **{**_DECODER, "num_hidden_layers": 3},
        sliding_window=WINDOW,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return tf.Gemma3ForCausalLM(config)


def _gemma3n() -> Any:
    config = tf.Gemma3nTextConfig(
        **{**_DECODER, "num_hidden_layers": 6, "intermediate_size": [96] * 6},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        altup_num_inputs=2,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 6,
    )
    return tf.Gemma3nForCausalLM(config)


def _gemma4() -> Any:
    config = tf.Gemma4TextConfig(
        **{**_DECODER, "num_hidden_layers": 6},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        global_head_dim=64,
    )
    return tf.Gemma4ForCausalLM(config)


def _llama4() -> Any:
    config = tf.Llama4TextConfig(
        **{**_DECODER, "num_hidden_layers": 4},
        intermediate_size_mlp=96,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 1, 1, 0],
        floor_scale=8,
    )
    return tf.Llama4ForCausalLM(config)


def _gpt_oss() -> Any:
    config = tf.GptOssConfig(
        **_DECODER,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
        attn_implementation="eager",
    )
    return tf.GptOssForCausalLM(config)


def _deepseek_v3() -> Any:
    config = tf.DeepseekV3Config(
        **{key: value for key, value in _DECODER.items() if key != "head_dim"} | {"num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=32,
        qk_nope_head_dim=16,
        v_head_dim=32,
    )
    return tf.DeepseekV3ForCausalLM(config)


def _gpt2() -> Any:
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=2, n_positions=512, initializer_range=0.3, **_IDS
    )
    return tf.GPT2LMHeadModel(config)


def _t5() -> Any:
    config = tf.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=32,
        d_ff=96,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        decoder_start_token_id=BOS,
        initializer_factor=3.0,
        **_IDS,
    )
    return tf.T5ForConditionalGeneration(config)


def _whisper() -> Any:
    config = tf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=30,
        max_target_positions=128,
        decoder_start_token_id=BOS,
        init_std=0.3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **_IDS,
    )
    return tf.WhisperForConditionalGeneration(config)


def _mllama() -> Any:
    text = {
        **{key: value for key, value in _DECODER.items() if key != "head_dim"},
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
        "cross_attention_layers": [1, 3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    vision = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 96,
        "image_size": 16,
        "patch_size": 8,
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
        "vision_output_dim": 128,
        "intermediate_layers_indices": [0],
        "initializer_range": 0.3,
    }
    model = tf.MllamaForConditionalGeneration(tf.MllamaConfig(text_config=text, vision_config=vision))
    for name, parameter in model.named_parameters():
        if name.endswith("_gate"):  # gates start at 0, which would hide the image
            torch.nn.init.constant_(parameter, 1.0)
    return model


def _qwen3_next() -> Any:
    config = tf.Qwen3NextConfig(
        **{**_DECODER, "num_hidden_layers": 4},
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    )
    return tf.Qwen3NextForCausalLM(config)


def _lfm2() -> Any:
    config = tf.Lfm2Config(
        **{key: value for key, value in _DECODER.items() if key != "head_dim"}
        | {"num_attention_heads": 2, "num_hidden_layers": 3},
        layer_types=["conv", "full_attention", "conv"],
        block_multiple_of=16,
    )
    return tf.Lfm2ForCausalLM(config)


def _mamba2() -> Any:
    config = tf.Mamba2Config(
        **_COMMON, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16, n_groups=1, expand=2, chunk_size=8
    )
    return tf.Mamba2ForCausalLM(config)


def _falcon_h1() -> Any:
    config = tf.FalconH1Config(
        **_DECODER,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=8,
    )
    return tf.FalconH1ForCausalLM(config)


def _bloom() -> Any:
    config = tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=2, initializer_range=0.3, **_IDS)
    return tf.BloomForCausalLM(config)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", _llama),
        Family("qwen3", _qwen3),
        Family("mistral", _mistral, sliding=True),
        Family("gemma2", _gemma2, sliding=True),
        Family("gemma3", _gemma3, sliding=True),
        Family("gemma3n", _gemma3n, sliding=True),
        Family("gemma4", _gemma4, sliding=True),
        Family("llama4", _llama4, sliding=True),
        Family("gpt_oss", _gpt_oss, sliding=True),
        Family("deepseek_v3", _deepseek_v3, in_place=False),
        Family("gpt2", _gpt2),
        Family("t5", _t5, encoder_decoder=True, in_place=False),
        Family("whisper", _whisper, encoder_decoder=True),
        Family("mllama", _mllama),
        Family("qwen3_next", _qwen3_next, recurrent=True, stateful=True, packed=False),
        Family("lfm2", _lfm2, recurrent=True, packed=False),
        Family(
            "mamba2",
            _mamba2,
            recurrent=True,
            stateful=True,
            interface=False,
            in_place=False,
            packed=False,
            cache_argument="cache_params",
        ),
        Family("falcon_h1", _falcon_h1, recurrent=True, stateful=True, packed=False),
        Family("bloom", _bloom, interface=False, in_place=False, packed=False),
    )
}
