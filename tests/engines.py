"""Engines on tiny models, and what their outputs must be. Shared by the tests of the engine."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch

from families import FAMILIES, VOCABULARY
from kvcache import Completion, Engine, Finished
from kvcache.engine import memory
from kvcache.hf.layout import layout_of

DECODERS = [name for name, family in FAMILIES.items() if not family.encoder_decoder and name != "mllama"]
BLOCK = 4


@functools.cache
def reference(name: str) -> Any:
    """The model that outputs are compared with."""
    return FAMILIES[name].build("eager" if FAMILIES[name].interface else None)


@functools.cache
def block_bytes(name: str) -> tuple[int, int]:
    """Bytes of a block in all members, and of one sequence's states."""
    model = FAMILIES[name].build()
    sizes = memory.measure(model, layout_of(model), "f32", BLOCK)
    return sum(sizes.blocks), sizes.states


def engine_for(name: str, num_blocks: int = 400, **options: Any) -> Engine:
    """An engine whose pools have `num_blocks` blocks each."""
    blocks, states = block_bytes(name)
    num_sequences = options.setdefault("max_sequences", 8)
    num_bytes = num_blocks * blocks + 2 * num_sequences * states + 1
    return Engine(FAMILIES[name].build(), kv_bytes=num_bytes, block_size=BLOCK, **options)


@torch.inference_mode()
def check_greedy(name: str, prompt: list[int], tokens: tuple[int, ...], **inputs: Any) -> None:
    """Each token is the likeliest after those before it, computed at once without a cache."""
    ids = torch.tensor([[*prompt, *tokens]])
    argument = "decoder_input_ids" if FAMILIES[name].encoder_decoder else "input_ids"
    logits = reference(name)(**{argument: ids}, **inputs, use_cache=False).logits[0, len(prompt) - 1 : -1]
    gap = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float(gap.max()) <= 1e-4, (prompt, tokens, gap)


def drained(engine: Engine, *, checked: bool = True) -> dict[str, Completion]:
    """Step until idle, `check` after each step."""
    done = {}
    for _ in range(20_000):
        if engine.is_idle:
            return done
        done |= {event.request_id: event.completion for event in engine.step() if isinstance(event, Finished)}
        if checked:
            engine.check()
    raise AssertionError("the engine hangs")


def assert_empty(engine: Engine) -> None:
    """Nothing is held, and everything agrees."""
    engine.check()
    usage = engine.usage()
    assert usage.num_free_blocks == usage.num_blocks and not usage.sequences


def tree(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    """Prompts that share prefixes: each goes on from some point of an earlier one."""
    chance = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        parent = chance.choice(prompts[-12:]) if prompts and chance.random() < 0.9 else []
        tail = [chance.randrange(3, VOCABULARY - 1) for _ in range(chance.randrange(1, 14))]
        prompts.append((parent[: chance.randrange(len(parent) // 2, len(parent) + 1)] + tail)[:longest])
    return prompts


def media_inputs(name: str, seed: int) -> dict[str, Any]:
    """What an encoder reads: a source text, a sound, an image."""
    family = FAMILIES[name]
    if name == "mllama":
        images = dict(family.image_inputs(1, 1, seed=seed))
        del images["cross_attention_mask"]
        return images
    return {key: value for key, value in family.encoder_inputs(1, seed=seed).items() if key != "attention_mask"}


def byte_tokenizer() -> Any:
    """Tokens are bytes (id i is byte i of the alphabet): every character beyond ASCII takes several."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def fallback_tokenizer() -> Any:
    """As Gemma's and Llama's: words, and bytes for what has no word. A byte that does not fit spoils a run of them."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", *(f"<0x{byte:02X}>" for byte in range(256)), *"axtheé", "▁", "猫", "th", "he", "the", "▁the"]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [("t", "h"), ("h", "e"), ("th", "e"), ("▁", "the")]
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    raw.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    raw.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>")


def word_tokenizer() -> Any:
    """Token i is the text of its number and a letter: texts for models with a vocabulary of 99."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel(vocab={f"{i}{'abcdef'[i % 6]}": i for i in range(VOCABULARY)}, unk_token="0a"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    raw.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="0a")
