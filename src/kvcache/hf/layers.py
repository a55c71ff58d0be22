"""What `cache.layers[i]` is: a look at one layer, for models and tests that read layers instead of asking the cache.

Nothing is kept here; the cache is asked each time. Layers hold it weakly, so that a cache is freed with its last user.
"""

from __future__ import annotations

import weakref
from typing import Protocol, final

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin

from kvcache.hf.attention import Gathered
from kvcache.hf.layout import Layer
from kvcache.spans import Chunked, Sliding

__all__ = ["AttentionLayer", "StateLayer", "layer_of"]


class Owner(Protocol):
    """The cache that a layer looks into."""

    def is_stored(self, layer: int) -> bool:
        """Whether the layer holds keys."""

    def stored(self, layer: int) -> Gathered:
        """All keys and values [B,H,S,D] that it holds."""

    def get_seq_length(self, layer_idx: int = 0) -> int: ...

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]: ...

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]: ...


class _Look:
    """The weak reference and the layer's number."""

    def __init__(self, owner: Owner, index: int) -> None:
        self._owner = weakref.ref(owner)
        self._index = index

    @property
    def owner(self) -> Owner:
        owner = self._owner()
        if owner is None:
            raise ValueError("the cache of this layer is gone; keep a reference to the cache, not to its layers")
        return owner

    @property
    def index(self) -> int:
        return self._index


@final
class AttentionLayer(CacheLayerMixin):
    """A layer with keys and values."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: Owner, index: int, layer: Layer) -> None:  # keys and values are looked up: no base state
        self._look = _Look(owner, index)
        self.is_sliding = isinstance(layer.span, (Sliding, Chunked))
        self.record_past = False

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self._look.owner.is_stored(self._look.index)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return self._stored(0)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self._stored(1)

    def _stored(self, side: int) -> Tensor | None:
        look = self._look
        return look.owner.stored(look.index)[side] if look.owner.is_stored(look.index) else None

    @property
    def device(self) -> torch.device | None:
        keys = self.keys
        return None if keys is None else keys.device

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage is made by the first update."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self._look.owner.update(key_states, value_states, self._look.index, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._look.owner.get_mask_sizes(query_length, self._look.index)

    def get_seq_length(self) -> int:
        return self._look.owner.get_seq_length(self._look.index)

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """Nothing to activate: a pass retains what taking it back needs."""

    def reset(self) -> None:
        raise TypeError("a single layer cannot be reset; reset the cache")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise TypeError("a single layer cannot be reordered; reorder the cache")


@final
class StateLayer(LinearAttentionCacheLayerMixin):
    """A layer with states and no keys; states are lent by the cache's own methods."""

    is_compileable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self, num_states: int) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=num_states)

    def lazy_initialization(
        self, conv_states: Tensor | None = None, recurrent_states: Tensor | None = None, state_idx: int = 0
    ) -> None:
        """Storage is made by the first update."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0) -> Tensor:
        raise TypeError("call update_conv_state of the cache, which knows the layer")

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0) -> Tensor:
        raise TypeError("call update_recurrent_state of the cache, which knows the layer")


def layer_of(owner: Owner, index: int, layer: Layer) -> AttentionLayer | StateLayer | DummyLayer:
    """The look at one layer."""
    if layer.is_shared:
        return DummyLayer()
    if layer.span is None and not layer.is_cross:
        return StateLayer(layer.num_states)
    return AttentionLayer(owner, index, layer)
