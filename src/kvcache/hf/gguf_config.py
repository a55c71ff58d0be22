"""GGUF metadata -> the configuration of a transformers model, and the sizes that its tensors must have.

The keys are llama.cpp's (`gemma3.embedding_length`, ...). Every one that shapes the model is read, and one that asks
for what the model class cannot do is refused by name. What the file does not say is what llama.cpp has in its source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

from kvcache.errors import NotSupported
from kvcache.hf.gguf import CorruptFile, GGUFFile

__all__ = ["Sizes", "read_config", "read_sizes"]

_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


@final
@dataclass(frozen=True)
class Sizes:
    """What the metadata says about shapes."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor (its name without `blk.N.`), in torch's order."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attn_q.weight": (queries, self.hidden),
            "attn_k.weight": (keys, self.hidden),
            "attn_v.weight": (keys, self.hidden),
            "attn_output.weight": (self.hidden, queries),
            "attn_q.bias": (queries,),
            "attn_k.bias": (keys,),
            "attn_v.bias": (keys,),
            "attn_q_norm.weight": (self.head_dim,),
            "attn_k_norm.weight": (self.head_dim,),
            "ffn_gate.weight": (self.feed_forward, self.hidden),
            "ffn_up.weight": (self.feed_forward, self.hidden),
            "ffn_down.weight": (self.hidden, self.feed_forward),
            "token_embd.weight": (self.vocabulary, self.hidden),
            "output.weight": (self.vocabulary, self.hidden),
        }
        return shapes.get(tensor, (self.hidden,))  # what is left are the norms over the hidden state


def _setting(file: GGUFFile, name: str, default: Any = None) -> Any:
    key = f"{file.architecture}.{name}"
    value = file.metadata.get(key, default)
    if value is None:
        raise CorruptFile(f"{file.path}: the metadata lacks {key}, which a {file.architecture} model needs")
    if isinstance(value, list) and value:
        if len(set(value)) != 1:
            raise NotSupported(f"{file.path}: {key} differs between layers ({value}); one value for all can be loaded")
        value = value[0]
    if not isinstance(value, (int, float)) or value < 0:
        raise CorruptFile(f"{file.path}: {key} is {value!r}; a number was expected")
    return value


def read_sizes(file: GGUFFile) -> Sizes:
    """The sizes of a dense decoder. Raises `CorruptFile` where one is missing, `NotSupported` where layers differ."""
    heads, hidden = _setting(file, "attention.head_count"), _setting(file, "embedding_length")
    if heads < 1:
        raise CorruptFile(f"{file.path}: {file.architecture}.attention.head_count is {heads}; 1 or more was expected")
    head_dim = _setting(file, "attention.key_length", hidden // heads)
    only = {"attention.value_length": head_dim, "rope.dimension_count": head_dim, "expert_count": 0}
    for name, expected in only.items():
        seen = _setting(file, name, expected)
        if seen != expected:
            raise NotSupported(
                f"{file.path}: {file.architecture}.{name} is {seen}, and only {expected} can be loaded "
                f"(dense layers, keys as wide as values, the whole head rotated)"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptFile(f"{file.path}: tensor token_embd.weight is missing; is it the file of a text model?")
    return Sizes(
        layers=_setting(file, "block_count"),
        hidden=hidden,
        feed_forward=_setting(file, "feed_forward_length"),
        heads=heads,
        kv_heads=_setting(file, "attention.head_count_kv", heads),
        head_dim=head_dim,
        vocabulary=embedding.shape[0],
    )


def read_config(file: GGUFFile, model_type: str, sizes: Sizes) -> dict[str, Any]:
    """The keyword arguments of transformers' configuration class, `model_type` included."""
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_IDS.items()}
    common = {
        "model_type": model_type,
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.feed_forward,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": _setting(file, "context_length"),
        "rms_norm_eps": _setting(file, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **ids,
    }
    if model_type == "gemma3_text":
        return common | _gemma3_config(file, sizes)
    return common | {"rope_parameters": _rope(file, sizes, 10_000.0)}


def _gemma3_config(file: GGUFFile, sizes: Sizes) -> dict[str, Any]:
    # The file does not say the attention scale: llama.cpp takes the head's, and hidden / heads for the 27B (62 layers).
    scale = sizes.hidden // sizes.heads if sizes.layers == 62 else sizes.head_dim
    pattern = _setting(file, "attention.sliding_window_pattern", 6)
    kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(sizes.layers)]
    local = {"rope_type": "default", "rope_theta": _setting(file, "rope.freq_base_swa", 10_000.0)}
    return {
        "query_pre_attn_scalar": scale,
        "sliding_window": _setting(file, "attention.sliding_window"),
        "layer_types": kinds,
        "final_logit_softcapping": file.metadata.get("gemma3.final_logit_softcapping"),
        "rope_parameters": {"full_attention": _rope(file, sizes, 1e6), "sliding_attention": local},
    }


def _rope(file: GGUFFile, sizes: Sizes, default_base: float) -> dict[str, Any]:
    base = float(_setting(file, "rope.freq_base", default_base))
    rope: dict[str, Any] = {"rope_theta": base, "rope_type": "default"}
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return rope | _llama3_scaling(file, sizes, base)
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise NotSupported(f"{file.path}: rope scaling {kind!r}; none, linear, yarn and Llama 3's can be loaded")
    rope |= {"rope_type": kind, "factor": float(_setting(file, "rope.scaling.factor"))}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = _setting(file, "rope.scaling.original_context_length")
    return rope


def _llama3_scaling(file: GGUFFile, sizes: Sizes, base: float) -> dict[str, Any]:
    """Llama 3 scaling, recovered from the stored factors (one per pair of channels: how much slower it turns).

    The file keeps the result, not the parameters: the published ones (8192 positions, 1, 4) are tried and checked.
    """
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.kind.name != "F32" or tensor.shape != (sizes.head_dim // 2,):
        raise CorruptFile(
            f"{file.path}: rope_freqs.weight should be F32 of shape ({sizes.head_dim // 2},), "
            f"it is {tensor.kind.name} of shape {tensor.shape}"
        )
    stored = memoryview(file.buffer)[tensor.offset : tensor.offset + tensor.num_bytes].cast("f").tolist()
    factor, low, high, original = max(stored), 1.0, 4.0, 8192
    for pair, seen in enumerate(stored):
        turns = original / (2 * math.pi * base ** (2 * pair / sizes.head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not math.isclose(seen, expected, rel_tol=1e-4):
            raise NotSupported(
                f"{file.path}: rope_freqs.weight[{pair}] is {seen:.6g} where Llama 3 scaling by {factor:g} has "
                f"{expected:.6g}; other tables of rope factors cannot be expressed in a transformers configuration"
            )
    scaling = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    return {"rope_type": "llama3", "original_max_position_embeddings": original, **scaling}
