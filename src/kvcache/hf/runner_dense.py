"""For models whose attention cannot be taken over (BLOOM and 26 more): dense rows, as `generate` would give them.

The model's own attention wants keys [B,H,S,D] and a mask. Each row's history is gathered in the order of its tokens and
put at the right end of its row; what is left of it is padding, which `attention_mask` hides:

    lengths 3, 1, 4      . x x x
                         . . . x          get_mask_sizes -> (4, 0)
                         x x x x

So a step costs a copy of all histories in every layer, padded to the longest: as DynamicCache does, but without its one
length for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from transformers import Cache as TransformersCache

from kvcache.caches import Cache, CausalCache
from kvcache.errors import NotSupported
from kvcache.hf.layout import Layout
from kvcache.hf.runner_readers import Step, put_rows
from kvcache.spans import Full

__all__ = ["DenseCache"]


@final
class DenseCache(TransformersCache):
    """The cache that such a decoder sees: real keys and values of B rows, left-padded to the longest."""

    is_compileable = False

    def __init__(self, layout: Layout, members: Sequence[Cache]) -> None:
        if any(layer.span != Full() or layer.num_states or layer.is_cross for layer in layout.layers):
            raise NotSupported(
                "the model's attention does not go through transformers' AttentionInterface, and its layers are not "
                "all plain full attention; run it through generate() with cache_for"
            )
        member = members[0]
        assert isinstance(member, CausalCache)
        self.layers: list[Any] = []
        self.layer_class_to_replicate = None
        self.offloading = False
        self.attention_mask: Tensor
        self._member = member
        self._num_queries = 0
        self._rows: Tensor
        self._slots: np.ndarray[Any, np.dtype[np.int64]]

    def begin(self, step: Step) -> None:
        """The next call of the model is `step`; the member has started its pass."""
        tables = [self._member.tables.sequences[sequence] for sequence in step.sequences]
        parts = []
        for table in tables:
            indices = table.indices_between(0, table.end)
            order = np.argsort(table.positions.view[indices], kind="stable") if not table.is_dense else slice(None)
            parts.append(table.slots(indices)[order])
        lengths = np.array([len(part) for part in parts])
        mask = np.arange(lengths.max()) >= lengths.max() - lengths[:, None]  # [B,S]
        device = step.positions.device
        self.attention_mask = torch.from_numpy(mask.astype(np.int64)).to(device)
        self._slots = np.concatenate(parts)
        self._rows = torch.from_numpy(np.flatnonzero(mask)).to(device)
        self._num_queries = len(step.batch) // len(tables)

    def write_back(self) -> None:
        """Nothing is lent."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        put_rows(self._member, layer_idx, key_states, value_states)
        storage = self._member.storage
        stored = storage.layer(layer_idx)
        B, S = self.attention_mask.shape
        padded = []
        for part, like in ((stored.keys, key_states), (stored.values, value_states)):
            rows = part.format.decode(storage.backend.gather_rows(part.array, self._slots), part.head_dim).to(
                like.dtype
            )
            if len(rows) != B * S:
                rows = rows.new_zeros((B * S, *rows.shape[1:])).index_copy_(0, self._rows, rows)
            padded.append(rows.unflatten(0, (B, S)).transpose(1, 2).contiguous())  # as DynamicCache gives them
        return padded[0], padded[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.attention_mask.shape[1]) - self._num_queries

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return int(self.attention_mask.shape[1]), 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()
