"""Small GGUF files, written with the `gguf` package from tiny transformers models, as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

BLOCK_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = BLOCK_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def tiny_model(model_type: str, **settings: Any) -> PreTrainedModel:
    """Two layers, hidden 64, random weights; norms and biases random too, so that none can be forgotten."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "pad_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(sizes | settings)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.normal_(1.0 if "norm" in name and "gemma" not in model_type else 0.0, 0.2)
    return model.eval()


def write_model(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    *,
    without: Iterable[str] = (),
    more: Callable[[gguf.GGUFWriter], None] | None = None,
    change: Callable[[str, np.ndarray], np.ndarray] | None = None,
) -> Path:
    """Write `model` as F32; `without` leaves tensors out, `change` edits them, `more` adds metadata or tensors."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(1e6)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, values in _stored(model, architecture):
        if name not in set(without):
            writer.add_tensor(name, values if change is None else change(name, values))
    if more is not None:
        more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(model: PreTrainedModel, architecture: str) -> Iterable[tuple[str, np.ndarray]]:
    names = GEMMA_NAMES if architecture == "gemma3" else BLOCK_NAMES
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight":
            if not model.config.tie_word_embeddings:
                yield "output.weight", values
        elif name == "model.embed_tokens.weight":
            yield "token_embd.weight", values
        else:
            if architecture == "gemma3" and "norm" in name:
                values = values + 1
            if name == "model.norm.weight":
                yield "output_norm.weight", values
                continue
            _, _, layer, rest = name.split(".", 3)
            module, suffix = rest.rsplit(".", 1)
            if architecture == "llama" and names[module] in ("attn_q", "attn_k"):
                values = _interleaved(values, len(values) // model.config.head_dim)
            yield f"blk.{layer}.{names[module]}.{suffix}", values


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of Llama: channel i sits beside channel i + half."""
    half = len(values) // heads // 2
    return np.ascontiguousarray(values.reshape(heads, 2, half, -1).swapaxes(1, 2)).reshape(values.shape)
