"""The shift of a transformers model's keys, found by asking the model instead of trusting names.

How a position enters a stored key differs more than configs tell: two frequency tables by layer type (Gemma 3),
pairs side by side (Llama 4) or halves apart, layers without rotation (NoPE), rotation of a part of the head only. But
rotary attention depends on distances alone, so the same tokens at positions p and p + d have the same hidden states
everywhere, and their keys differ by exactly the rotation that a shift must apply. So, the first time that keys have to
move, the model is run twice on four tokens, at positions 0.. and d.., and each layer takes the one way of turning that
maps the first keys to the second:

| a layer's keys at p + d are                             | the shift is                             |
|---------------------------------------------------------|------------------------------------------|
| those at p                                              | nothing (NoPE, ALiBi, relative bias)     |
| those at p turned by one of the model's frequency tables | that rotation                           |
| anything else                                           | none: `NotSupported`, tokens cannot move |

Cost: two forwards of four tokens, once per layout. Nothing is trusted that was not seen to hold.
"""

from __future__ import annotations

import weakref
from typing import final

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kvcache.caches.causal import Shift
from kvcache.errors import NotSupported
from kvcache.kernels.rope import RopeShift, rope_shift
from kvcache.spec import Array

__all__ = ["ModelShift", "has_position_table", "shift_of"]

_NUM_TOKENS = 4
_DISTANCE = 7
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Modules with these names learn one vector per absolute position: moving a key then needs its hidden state again.
_ABSOLUTE = ("wpe", "embed_positions", "position_embeddings", "position_embedding")


def shift_of(model: PreTrainedModel) -> Shift | None:
    """A shift for this model's keys, or `None` where they are known not to move. Costs nothing until it is used."""
    decoder = model.get_decoder()
    if has_position_table(model) or any(callable(getattr(module, "expand_kv", None)) for module in decoder.modules()):
        return None
    if model.config.is_encoder_decoder or "mamba" in type(model).__name__.lower():
        return None
    return ModelShift(model)


def has_position_table(model: PreTrainedModel) -> bool:
    """Whether the model has a vector for each absolute position."""
    return any(name.rpartition(".")[2] in _ABSOLUTE for name, _ in model.get_decoder().named_modules())


@final
class ModelShift:
    """`shift(layer, keys, offsets) -> keys` of one model; measures on first use. Holds the model weakly."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._layers: dict[int, RopeShift | None] = {}
        self._refused: str | None = None

    def __call__(self, layer: int, keys: Array, offsets: Array) -> Array:
        """Keys [n,H,D] turned by `offsets` [n]. Raises `NotSupported` where keys are not seen to be rotated."""
        if not self._layers and self._refused is None:
            self._measure()
        if self._refused is not None or layer not in self._layers:
            raise NotSupported(self._refused or f"layer {layer} keeps no keys of its own")
        turn = self._layers[layer]
        return keys if turn is None else turn(layer, keys, offsets)

    def _measure(self) -> None:
        model = self._model()
        if model is None:
            raise NotSupported("the model is gone, and with it the way to find how its keys are rotated")
        before, after = (_keys_at(model, begin) for begin in (0, _DISTANCE))
        tables, tolerance = _tables(model), _TOLERANCE.get(model.dtype, 1e-3)
        found: dict[int, RopeShift | None] = {}
        for layer, (keys, values) in before.items():
            moved_keys, moved_values = after[layer]
            same_values = _alike(values, moved_values, tolerance)
            turn = _turn(keys, moved_keys, tables, tolerance) if same_values else "unlike"
            if isinstance(turn, str):
                self._refused = (
                    f"tokens cannot be moved in {type(model).__name__}: the keys of layer {layer} are rotated by none "
                    f"of its {len(tables)} frequency tables; remove to the end and recompute"
                )
                return
            found[layer] = turn
        self._layers = found


def _keys_at(model: PreTrainedModel, begin: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values [n,H,D] per layer, float32, of four fixed tokens at positions from `begin` on."""
    device = model.device
    ids = torch.arange(3, 3 + _NUM_TOKENS, device=device).unsqueeze(0) % model.config.get_text_config().vocab_size
    positions = torch.arange(begin, begin + _NUM_TOKENS, device=device).unsqueeze(0)
    decoder = model.get_decoder()
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        decoder(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    return {
        i: (layer.keys[0].transpose(0, 1).float(), layer.values[0].transpose(0, 1).float())
        for i, layer in enumerate(cache.layers)
        if isinstance(layer, CacheLayerMixin)
        and layer.keys is not None
        and layer.values is not None
        and layer.keys.numel()
    }


def _tables(model: PreTrainedModel) -> list[Tensor]:
    """The frequency tables that the decoder holds: `inv_freq`, or `sliding_attention_inv_freq` and the like."""
    named = model.get_decoder().named_buffers()
    return [table.float().cpu() for name, table in named if name.endswith("inv_freq") and "original" not in name]


def _turn(before: Tensor, after: Tensor, tables: list[Tensor], tolerance: float) -> RopeShift | str | None:
    """What turns keys [n,H,D] into `after`: nothing, a rotation, or `"unlike"` when neither does."""
    if _alike(before, after, tolerance):
        return None
    offsets = torch.full((len(before),), _DISTANCE, dtype=torch.int32)
    for table in tables:
        rotary_dim = 2 * len(table)
        if rotary_dim > before.shape[2]:
            continue
        for interleaved in (False, True):
            for begin in dict.fromkeys((0, before.shape[2] - rotary_dim)):
                turn = rope_shift(table, interleaved=interleaved, rotary_begin=begin)
                if _alike(turn(0, before, offsets), after, tolerance):
                    return turn
    return "unlike"


def _alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether they differ by at most `tolerance` of the largest value."""
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= tolerance * one.abs().max())
