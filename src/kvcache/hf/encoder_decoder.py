"""The cache of encoder-decoder models: transformers wants two caches in one, ours are two faces of one pool.

EncoderDecoderGenerateCache
  .self_attention_cache    GenerateCache       tokens of the decoder
  .cross_attention_cache   CrossCache          what the encoder made, `CrossStates` of the same rows
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor
from transformers import Cache as TransformersCache
from transformers import EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from kvcache.hf.generate_cache import GenerateCache
from kvcache.spec import Match, Usage

__all__ = ["CrossCache", "EncoderDecoderGenerateCache"]


@final
class CrossLayer(CacheLayerMixin):
    """What cross attention reads of one layer."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, decoder: GenerateCache, index: int) -> None:  # keys and values are looked up: no base state
        self._decoder = decoder
        self._index = index

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self._decoder.media.has(self._index)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return self._decoder.media.get(self._index).keys if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self._decoder.media.get(self._index).values if self.is_initialized else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage is made by the first update."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self._decoder.put_media(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        keys = self.keys
        return 0 if keys is None else keys.shape[2]

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        raise TypeError("a single layer cannot be reset; reset the cache")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise TypeError("a single layer cannot be reordered; reorder the cache")


@final
class CrossCache(TransformersCache):
    """The encoder's side. Rows are those of the decoder's cache, which selects and copies them for both."""

    def __init__(self, decoder: GenerateCache, num_layers: int) -> None:
        super().__init__(layers=[CrossLayer(decoder, i) for i in range(num_layers)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Done together with the decoder's rows."""


@final
class EncoderDecoderGenerateCache(EncoderDecoderCache):
    """Both sides. Everything that a `GenerateCache` does for its owner, this does for both."""

    def __init__(self, decoder: GenerateCache, num_layers: int) -> None:
        super().__init__(decoder, CrossCache(decoder, num_layers))
        self.decoder = decoder
        self.is_updated: dict[int, bool] = {i: decoder.media.has(i) for i in range(num_layers)}
        decoder.on_reset = self.is_updated.clear

    def crop(self, tokens_to_remove: int) -> None:
        """See `GenerateCache.crop`."""
        self.decoder.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.decoder.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.decoder.batch_select_indices(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.decoder.reorder_cache(beam_idx)

    def reuse(self, input_ids: Any, attention_mask: Any = None) -> Match:
        """See `GenerateCache.reuse`: nothing is ever kept, because the encoder's input may differ."""
        return self.decoder.reuse(input_ids, attention_mask)

    def reset(self) -> None:
        """Forget everything."""
        self.decoder.reset()

    def usage(self) -> Usage:
        """What the pool holds, forks included."""
        return self.decoder.usage()

    def check(self) -> None:
        """Raise `CorruptState` unless everything is sound."""
        self.decoder.check()

    def __deepcopy__(self, memo: dict[int, Any]) -> EncoderDecoderGenerateCache:
        fork = EncoderDecoderGenerateCache(self.decoder.__deepcopy__(memo), len(self.cross_attention_cache))
        memo[id(self)] = fork
        return fork
