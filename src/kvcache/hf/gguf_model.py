"""A GGUF file -> a transformers model.

Everything is planned and checked before torch is imported: `plan_model` makes the configuration from the metadata, says
which stored tensor becomes which parameter, and refuses a missing, foreign or misshapen tensor by name. `build_model`
then makes the model without initialising it and gives it the decoded tensors.

What conversion to GGUF did to a model, and is undone here (llama.cpp, convert_hf_to_gguf.py):

| family       | undone                                                                                        |
|--------------|-----------------------------------------------------------------------------------------------|
| gemma3       | every norm weight is stored plus 1                                                            |
| llama        | rows of q and k are interleaved (the other RoPE layout); Llama 3 scaling is a tensor of factors |
| qwen2, qwen3 | nothing                                                                                       |

Other architectures go to transformers' own reader (`slow_model`), which takes half a minute where this takes a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from kvcache.errors import NotSupported
from kvcache.hf.gguf import CorruptFile, GGUFFile, GGUFTensor
from kvcache.hf.gguf_config import Sizes, read_config, read_sizes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["FAMILIES", "ModelPlan", "build_model", "plan_model", "slow_model"]


@final
@dataclass(frozen=True)
class Family:
    """One architecture: its model type, its tensors and how it was converted."""

    model_type: str
    block: Mapping[str, str]  # tensor of a block -> parameter of a layer
    norm_offset: float = 0.0
    interleaved: bool = False


@final
@dataclass(frozen=True)
class Placement:
    """A stored tensor, the parameter it becomes, what to add to each value, and heads to de-interleave (0: none)."""

    tensor: GGUFTensor
    parameter: str
    add: float = 0.0
    heads: int = 0


@final
@dataclass(frozen=True)
class ModelPlan:
    """A checked plan: the configuration (transformers' names) and a place for every tensor."""

    config: dict[str, Any]
    placements: list[Placement]
    stored_dtype: str
    extra_eos: list[int] = field(default_factory=list)


_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_LLAMA_NORM = {"ffn_norm.weight": "post_attention_layernorm.weight"}
_GEMMA_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_QK_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
_QKV_BIASES = {f"attn_{each}.bias": f"self_attn.{each}_proj.bias" for each in "qkv"}

FAMILIES = {
    "gemma3": Family("gemma3_text", _BLOCK | _GEMMA_NORMS | _QK_NORMS, norm_offset=1.0),
    "llama": Family("llama", _BLOCK | _LLAMA_NORM, interleaved=True),
    "qwen2": Family("qwen2", _BLOCK | _LLAMA_NORM | _QKV_BIASES),
    "qwen3": Family("qwen3", _BLOCK | _LLAMA_NORM | _QK_NORMS),
}


def plan_model(file: GGUFFile) -> ModelPlan:
    """The plan for a file of one of `FAMILIES`. Reads no tensor data but Llama 3's rope factors; some milliseconds.

    Raises `CorruptFile` for missing, foreign or misshapen tensors and missing settings, `NotSupported` for settings
    that the model class cannot express; always before anything heavy.
    """
    architecture = file.architecture
    family = FAMILIES[architecture]
    sizes = read_sizes(file)
    config = read_config(file, family.model_type, sizes)
    placements = _placements(file, family, sizes)
    ids = {key: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    stops = [each for each in dict.fromkeys(ids.values()) if each is not None]
    return ModelPlan(config, placements, _stored_dtype(file), stops if len(stops) > 1 else [])


def _placements(file: GGUFFile, family: Family, sizes: Sizes) -> list[Placement]:
    wanted = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for layer in range(sizes.layers):
        wanted |= {f"blk.{layer}.{name}": f"model.layers.{layer}.{to}" for name, to in family.block.items()}
    missing = [name for name in wanted if name not in file.tensors]
    if missing:
        raise CorruptFile(f"{file.path}: {len(missing)} of {len(wanted)} tensors are missing: {_some(missing)}")
    if "output.weight" in file.tensors:
        wanted["output.weight"] = "lm_head.weight"
    foreign = [name for name in file.tensors if name not in wanted and name != "rope_freqs.weight"]
    if foreign:
        raise NotSupported(
            f"{file.path}: {len(foreign)} tensors have no place in a {file.architecture} model: {_some(foreign)}"
        )
    return [_placement(file.path, file.tensors[name], to, family, sizes) for name, to in wanted.items()]


def _placement(path: object, tensor: GGUFTensor, parameter: str, family: Family, sizes: Sizes) -> Placement:
    name = tensor.name.split(".", 2)[2] if tensor.name.startswith("blk.") else tensor.name
    expected = sizes.shape(name)
    if tensor.shape != expected:
        raise CorruptFile(f"{path}: tensor {tensor.name} has shape {tensor.shape}; the metadata implies {expected}")
    heads = 0
    if family.interleaved and name.startswith(("attn_q.", "attn_k.")):
        heads = sizes.heads if name.startswith("attn_q.") else sizes.kv_heads
    # Undone in f32 before rounding: near 1 a bf16 has 7 bits, and the weight itself may be small.
    return Placement(tensor, parameter, -family.norm_offset if name.endswith("norm.weight") else 0.0, heads)


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _stored_dtype(file: GGUFFile) -> str:
    """The library's name of the type to compute in when nobody asks: as stored, and bf16 for quantised files."""
    kinds = {tensor.kind.name for tensor in file.tensors.values()}
    if kinds <= {"F32"}:
        return "f32"
    return "f16" if kinds <= {"F32", "F16"} else "bf16"  # norms are F32 in every file


def build_model(
    file: GGUFFile, plan: ModelPlan, dtype: torch.dtype, *, advance: Callable[[int], None]
) -> PreTrainedModel:
    """The model of `plan`, its weights decoded to `dtype`, on the CPU, heads tied where the file stores one matrix.

    `advance` is told the stored bytes decoded. Cost: 0.5 s for 270 M parameters in bf16; memory: the weights and a few
    MiB (the parameters made with the model are never touched, so the system never gives them memory).
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from kvcache.hf.gguf_decode import decode

    settings = dict(plan.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.name_or_path = str(file.metadata.get("general.name", file.path.stem))
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)

    def weight(place: Placement) -> tuple[str, torch.Tensor]:
        values = decode(file, place.tensor, dtype, add=place.add, advance=advance)
        return place.parameter, _deinterleave(values, place.heads) if place.heads else values

    largest_first = sorted(plan.placements, key=lambda place: -place.tensor.num_bytes)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as workers:
        weights = dict(workers.map(weight, largest_first))
    absent = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    unfilled = set(absent.missing_keys) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if unfilled or absent.unexpected_keys:
        raise NotSupported(
            f"{file.path}: this version of transformers names the parameters of {config.model_type} differently "
            f"(without a value: {_some(sorted(unfilled))}; unknown: {_some(absent.unexpected_keys)})"
        )
    if plan.extra_eos and model.generation_config is not None:
        model.generation_config.eos_token_id = plan.extra_eos
    return model


def _deinterleave(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (0, half, 1, half + 1, ...) back to (0, 1, ..., half, ...)."""
    rows: torch.Tensor = values.view(heads, -1, 2, *values.shape[1:])
    return rows.transpose(1, 2).reshape(values.shape)


def slow_model(file: GGUFFile, dtype: torch.dtype | None) -> PreTrainedModel:
    """Any other architecture, by transformers' own reader. Raises `NotSupported`, naming it, where there is none.

    `CorruptFile` where tensors are missing: transformers would go on with random numbers in their place.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(file.path.parent),
            gguf_file=file.path.name,
            dtype=dtype or torch.bfloat16,
            output_loading_info=True,
        )
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        AssertionError,
        ImportError,
        RuntimeError,
    ) as error:
        raise NotSupported(
            f"{file.path}: architecture {file.architecture!r} cannot be loaded from GGUF (here: {', '.join(FAMILIES)}; "
            f"transformers says: {' '.join(str(error).split())[:300]}). Load the original folder or hub id instead"
        ) from error
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        raise CorruptFile(f"{file.path}: {len(missing)} weights are missing: {_some(missing)}")
    return model
