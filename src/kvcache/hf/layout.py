"""What a transformers model keeps per layer, and the cache that fits it.

transformers names the layers (`cache_utils.get_layer_types_and_kwargs`); here each becomes a `Layer`:

| transformers                                | span                | states | cross | storage                       |
|---------------------------------------------|---------------------|--------|-------|-------------------------------|
| full_attention                              | Full()              |        |       | `CausalCache` of that span    |
| sliding_attention, W                        | Sliding(W)          |        |       | `CausalCache` of that span    |
| chunked_attention, c                        | Chunked(c)          |        |       | `CausalCache` of that span    |
| conv, linear_attention                      | None                | 1..    |       | `RecurrentCache`              |
| hybrid, hybrid_sliding (both at once)       | Full() / Sliding(W) | 1..    |       | both                          |
| dummy (reads another layer's keys, or none) | None                |        |       | none                          |
| `cross_attention_layers` (Mllama)           | None                |        | yes   | the caller's `EncoderCache`   |

Layers of one span share a member, so a model has one `CausalCache` per distinct span, in order of first appearance, and
one `RecurrentCache` last. transformers counts a window as we do, the own token included.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from kvcache import backends
from kvcache.backends import Backend
from kvcache.caches import Cache, CausalCache, HybridCache, RecurrentCache
from kvcache.caches.causal import Shift
from kvcache.errors import NotSupported
from kvcache.hf.rope import shift_of
from kvcache.spans import Chunked, Full, Sliding, Span

__all__ = ["Layer", "Layout", "backend_of", "decoder_of", "dtype_name", "layout_of", "looks_ahead"]

# Their scan over several tokens begins at zero; only that of a single token begins with the state.
_ONE_BY_ONE = {"mamba", "falcon_mamba", "jamba", "zamba"}

_BEGINNING = 4096
"""Tokens that these begin with at once. Their scan takes memory for each: 0.4 MiB a token of 130M parameters."""

# Why these are refused, by the type of the model's configuration or of its text's.
_OWN_LAYERS = "its modeling code talks to cache layers of its own making"
_OLD_NAMES = "it reads caches by their old attributes"
_REPLACED_CROSS = "its generate() puts another cache of its own making in the place of the one for cross attention"
_REFUSED = {
    "deepseek_v4": _OWN_LAYERS,
    "unlimited_ocr_text": _OWN_LAYERS,
    "qwen4_exp_text": _OWN_LAYERS,
    "diffusion_gemma_text": _OWN_LAYERS,
    "inkling_text": _OWN_LAYERS,
    "inkling2_text": _OWN_LAYERS,
    "prophetnet": _OLD_NAMES,
    "flaubert": _OLD_NAMES,
    "xlm": _OLD_NAMES,
    "blip_text_model": "it replaces any cache that is not transformers' own",
    "recurrent_gemma": "it keeps its states in its own modules, where each prompt overwrites those of the one before",
    "t5gemma": _REPLACED_CROSS,
    "t5gemma2": _REPLACED_CROSS,
}


@final
@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps.

    span: of its attention; `None` without keys and values of its own.
    num_states: pairs of a convolution and a recurrent state; 0 without.
    is_cross: keys and values come from an encoder, once.
    """

    span: Span | None = None
    num_states: int = 0
    is_cross: bool = False

    @property
    def is_shared(self) -> bool:
        """Keeps nothing: it reads what another layer stored (Gemma 3n, Gemma 4), or has no attention."""
        return self.span is None and not self.num_states and not self.is_cross


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """What a model keeps.

    layers: one per decoder layer.
    gathers: why attention cannot read blocks in place and needs whole keys; `None` when it can.
    cache_argument: `"past_key_values"`, or `"cache_params"` (Mamba).
    is_encoder_decoder: keys and values of an encoder are kept besides.
    one_by_one: after its first forward a sequence goes on by single tokens: of several, states would be forgotten.
    counts_columns: positions come from the number of tokens before: ragged rows cannot share a call.
    keeps_attention: the model's own attention is not taken over. (These two: where it fails else, see `trial.py`.)
    shift: re-rotates keys that move (`CausalCache(shift=...)`), or `None` where moving them is not possible.
    """

    layers: tuple[Layer, ...]
    gathers: str | None
    cache_argument: str
    is_encoder_decoder: bool
    shift: Shift | None
    one_by_one: bool = False
    counts_columns: bool = False
    keeps_attention: bool = False

    @property
    def spans(self) -> tuple[Span, ...]:
        """The distinct spans, in order of appearance: one `CausalCache` each."""
        return tuple(dict.fromkeys(layer.span for layer in self.layers if layer.span is not None))

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps states, which can be resumed at checkpoints only."""
        return any(layer.num_states for layer in self.layers)

    @property
    def state_member(self) -> int:
        """The member that keeps states. Only with `has_states`."""
        return len(self.spans)

    @property
    def beginning(self) -> int:
        """Tokens that a sequence may begin with though a step holds fewer, as the rest goes one by one; or 0."""
        return _BEGINNING if self.one_by_one else 0

    def member(self, layer: int) -> int:
        """The member that keeps the keys and values of `layer`; -1 for a layer without."""
        span = self.layers[layer].span
        return -1 if span is None else self.spans.index(span)

    def members(
        self, block_size: int, *, memory: int | None = None, checkpoints: int | Iterable[int] = ()
    ) -> tuple[Cache, ...]:
        """New caches, not initialised: a `CausalCache` per span, then a `RecurrentCache` where there are states.

        memory: tokens that sliding members retain, see `Sliding`; `ValueError` when it is below a window.
        """
        spans = [replace(s, memory=memory) if memory and isinstance(s, Sliding) else s for s in self.spans]
        causal: list[Cache] = [CausalCache(span, self.shift, block_size) for span in spans]
        return (*causal, RecurrentCache(checkpoints)) if self.has_states else tuple(causal)

    def build(
        self, block_size: int, *, memory: int | None = None, checkpoints: int | Iterable[int] = ()
    ) -> HybridCache:
        """The `HybridCache` of these members, not initialised; with `layer_types` when each layer has one member."""
        members = self.members(block_size, memory=memory, checkpoints=checkpoints)
        both = any(layer.span is not None and layer.num_states for layer in self.layers)
        types = [self.state_member if x.num_states else max(self.member(i), 0) for i, x in enumerate(self.layers)]
        return HybridCache(*members, layer_types=None if both else types)


def layout_of(model: Any) -> Layout:
    """The layout of a transformers model. Raises `TypeError` for anything else, `NotSupported` where none fits."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is {type(model).__name__}; expected a transformers model (PreTrainedModel)")
    name = f"{type(model).__name__} ({model.config.model_type})"
    _refuse(model, name)
    layers = _layers(model, name)
    return Layout(
        layers=layers,
        gathers=_why_gathers(model),
        cache_argument="cache_params" if "mamba" in type(model).__name__.lower() else "past_key_values",
        is_encoder_decoder=bool(model.config.is_encoder_decoder),
        shift=shift_of(model) if any(layer.span is not None for layer in layers) else None,
        one_by_one=model.config.get_text_config(decoder=True).model_type in _ONE_BY_ONE,
    )


def dtype_name(dtype: Any) -> str:
    """Our name of a torch dtype that models compute in. Raises `ValueError` for others."""
    names = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}
    if str(dtype) not in names:
        raise ValueError(
            f"the model computes in {dtype}; expected float32, float16 or bfloat16, or a dtype given by name"
        )
    return names[str(dtype)]


def backend_of(model: PreTrainedModel) -> Backend:
    """PyTorch where the model is; with accelerate's device map, each layer where it computes.

    Layers whose weights wait in the memory of the host or on a disk compute on the first of the other devices.
    """
    placed = getattr(model, "hf_device_map", None) or {}
    devices = {name: f"cuda:{device}" if isinstance(device, int) else str(device) for name, device in placed.items()}
    computing = [device for device in devices.values() if device not in ("cpu", "disk")]
    layers = {}
    for name, device in devices.items():
        number = name.rpartition(".")[2]
        if number.isdigit():
            layers[int(number)] = device if device in computing else next(iter(computing), "cpu")
    return backends.torch(str(model.device), layers)


def _refuse(model: PreTrainedModel, name: str) -> None:
    """Raise `NotSupported` for models that no foreign cache can serve."""
    text = model.config.get_text_config(decoder=True)
    for kind in (model.config.model_type, text.model_type):
        if kind in _REFUSED:
            raise NotSupported(f"{name} cannot use a foreign cache: {_REFUSED[kind]}; use its own cache")
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    if supports is None or not model.can_generate():
        raise NotSupported(f"{name} does not generate and has nothing to cache; pass the model with its language head")
    # A wrapper may read ahead in prompts and not in answers (PaliGemma): generate() tells it which is which.
    if (model.config is text or not _decodes(text)) and (setting := looks_ahead(model)):
        raise NotSupported(
            f"{name} reads in both directions, so that no token's keys and values stay what they are; load it with "
            f"{setting}"
        )
    accepted = inspect.signature(model.forward).parameters
    if not supports() or not {"past_key_values", "cache_params"} & accepted.keys():
        raise NotSupported(f"{name} does not take transformers' Cache objects; use its own cache")


def _decodes(text: Any) -> bool:
    return getattr(text, "is_decoder", True) is not False


@torch.no_grad()
def looks_ahead(model: PreTrainedModel) -> str | None:
    """The setting without which a model reads text in both directions; `None` when it does not anyhow.

    Configurations say so of models that do not, too: whether the first token's logits depend on the second is tried.
    """
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    if not _decodes(text):
        setting = "is_decoder=True"
    elif getattr(text, "use_bidirectional_attention", None) in (True, "all"):  # or "vision", which is images alone
        setting = "use_bidirectional_attention=None"
    else:
        return None
    if config.is_encoder_decoder:
        return None
    ids = torch.tensor([[0, 0], [0, 1]], device=model.device)
    try:
        first, second = model(input_ids=ids).logits[:, 0].float()
    except Exception:
        return None  # it wants more than token ids, and is not of the kind that is looked for
    is_same = torch.allclose(first, second, rtol=1e-2, atol=1e-2 * float(first.abs().max()))
    return None if is_same else setting


def _layers(model: PreTrainedModel, name: str) -> tuple[Layer, ...]:
    text = model.config.get_text_config(decoder=True)
    kinds, options = get_layer_types_and_kwargs(text)
    # Encoder-decoder configs of the old kind count the encoder's layers as theirs: ask for the decoder's.
    count = getattr(model.config, "num_decoder_layers", None) or getattr(model.config, "decoder_layers", None)
    if model.config.is_encoder_decoder and count and count != len(kinds):
        kinds, options = [kinds[0]] * count, [options[0]] * count
    cross = set(getattr(text, "cross_attention_layers", None) or ())
    layers = [_layer(kind, options[i], i in cross, name) for i, kind in enumerate(kinds)]
    if all(layer.is_shared for layer in layers):
        raise NotSupported(f"{name} has no layer that keeps anything ({sorted(set(kinds))})")
    return tuple(layers)


def _layer(kind: str, options: dict[str, Any], is_cross: bool, name: str) -> Layer:
    states = options.get("number_of_states", 1)
    if is_cross:
        return Layer(is_cross=True)
    match kind:
        case "full_attention":
            return Layer(Full())
        case "sliding_attention":
            return Layer(Sliding(options["sliding_window"]))
        case "chunked_attention":
            return Layer(Chunked(options["sliding_window"]))
        case "conv" | "linear_attention":
            return Layer(num_states=states)
        case "hybrid":
            return Layer(Full(), states)
        case "hybrid_sliding":
            return Layer(Sliding(options["sliding_window"]), states)
        case "dummy":
            return Layer()
    raise NotSupported(
        f"{name} has layers of type {kind!r}, which keep more than keys and values per token (an index, compressed "
        f"entries); supported are full, sliding, chunked, linear, conv and hybrid layers"
    )


def _why_gathers(model: PreTrainedModel) -> str | None:
    """What in the model's code reads the shape or the contents of the keys that `update` returns."""
    for module in model.modules():
        if callable(getattr(module, "expand_kv", None)):
            return "latent attention (MLA): the model expands the stored latents itself"
        if getattr(module, "has_relative_attention_bias", False):
            return "a relative position bias is added to each score, sized by the keys"
        if callable(getattr(module, "prepare_dynamic_mask", None)):
            return "a mask is computed from all values (Doge)"
    if not any(type(module)._can_set_attn_implementation() for module in _pretrained(model)):
        return "its attention does not go through transformers' AttentionInterface"
    return None


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part that has the decoder's configuration. ModernBERT names its head, and FSMT a module without one."""
    candidates = (model.get_decoder(), model.base_model, model)
    return next(one for one in candidates if isinstance(one, PreTrainedModel))


def _pretrained(model: PreTrainedModel) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]
