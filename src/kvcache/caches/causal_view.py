"""The sequence face of `CausalCache`: append, commit, views over the same tables and storage."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

from kvcache.caches.lifecycle import Lifecycle, check_growth, check_truncation
from kvcache.sequences import Sequence
from kvcache.spec import Array, Device, integer
from kvcache.views import Appended, ContiguousKV, PackedView, SequenceView, View

if TYPE_CHECKING:
    from kvcache.caches.causal import CausalCache

__all__ = ["CausalSequenceView"]


@final
class CausalSequenceView(SequenceView):
    """One sequence of a `CausalCache`. Holds no state of its own: everything is read from the cache when asked for."""

    __slots__ = ("_cache", "_lifecycle", "_sequence")

    def __init__(self, sequence: int, lifecycle: Lifecycle, cache: CausalCache) -> None:
        self._sequence = sequence
        self._lifecycle = lifecycle
        self._cache = cache

    @property
    def seq_len(self) -> int:
        table = self._table
        return table.end if table else 0

    @property
    def max_seq_len(self) -> int:
        return self._lifecycle.limits.capacity

    @property
    def is_on_gpu(self) -> bool:
        storage = self._cache.storage
        return any(storage.backend.device(layer).is_gpu for layer in storage.layers)

    def append(self, layer: int, keys: Array, values: Array) -> Appended:
        storage, tables = self._cache.storage, self._cache.tables
        layer = integer(layer, "layer")
        keys = storage.backend.asarray(keys, layer, "keys")
        num_tokens = len(keys) if len(keys.shape) else 1  # a number is refused with its shape
        if not num_tokens:
            raise ValueError("append got no tokens; expected keys and values of at least one")
        keys, values = storage.accept(layer, keys, values, num_tokens)
        table = self._table
        begin = table.appended.get(layer, 0) if table else 0
        check_growth(self._sequence, self.seq_len, begin + num_tokens)
        missing = begin + num_tokens - (len(table.pending) if table else 0)
        plan = tables.plan({self._sequence: range(missing)}, pending=True) if missing > 0 else None
        write = self._cache.prepare_write(layer, keys, values)
        if plan:
            self._cache.end_forward()
            applied = tables.apply(plan)
            storage.copy_blocks(applied.sources, applied.targets)
            table = tables.sequences[self._sequence]
        assert table is not None  # it has pending slots now
        indices = np.asarray(table.pending[begin : begin + num_tokens], np.int64)
        write(table.slots(indices))
        views = self._views(layer, begin + num_tokens)  # decoding all there is may fail: then nothing was appended
        table.appended[layer] = begin + num_tokens
        return Appended(views, table.end + begin)

    def commit(self, num_tokens: int) -> None:
        self.prepare_commit(num_tokens)()

    def prepare_commit(self, num_tokens: int) -> Callable[[], None]:
        num_tokens = integer(num_tokens, "num_tokens")
        table = self._table
        appended = table.appended if table else {}
        for layer in self._cache.storage.layers if num_tokens else ():
            if appended.get(layer, 0) < num_tokens:
                raise ValueError(
                    f"commit({num_tokens}): layer {layer} has {appended.get(layer, 0)} appended tokens; append to "
                    "every layer before committing"
                )
        if num_tokens and not appended:
            raise ValueError(f"commit({num_tokens}): nothing was appended; append keys and values first")

        def effect() -> None:
            if table and table.pending:  # an append that broke off leaves slots, too
                self._cache.end_forward()
                self._cache.tables.commit(self._sequence, num_tokens)

        return effect

    def views(self, layer: int) -> list[View]:
        return self._views(integer(layer, "layer"), 0)

    def packed_views(self, layer: int) -> list[PackedView]:
        storage = self._cache.storage
        stored = storage.layer(integer(layer, "layer"))
        packed = []
        for slots, start in self._runs(0, within_blocks=True):
            # From the run's first slot to the end of its block: as far as a kernel may read.
            begin = int(slots[0])
            end = begin - begin % storage.block_size + storage.block_size
            block = np.arange(begin, end, dtype=np.int64)
            keys, values = (
                storage.backend.permute(storage.backend.cast(storage.read(rows, block), "f32"), (1, 0, 2))
                for rows in (stored.keys, stored.values)
            )
            packed.append(
                PackedView(keys, values, start, len(slots), storage.block_size, stored.keys.head_dim, stored.num_heads)
            )
        return packed

    def contiguous_kv(self, layer: int, length: int) -> ContiguousKV | None:
        storage, table = self._cache.storage, self._table
        layer, length = integer(layer, "layer"), integer(length, "length", minimum=1)
        appended = table.appended.get(layer, 0) if table else 0
        if length > self.seq_len + appended:
            raise ValueError(
                f"length is {length} and the sequence has {self.seq_len} tokens and {appended} appended; expected no "
                f"more"
            )
        stored = storage.layer(layer)
        if not (stored.keys.format.is_native and stored.values.format.is_native):
            return None
        runs = self._runs(appended, within_blocks=storage.block_size > 1)
        if not runs or runs[0][1] or len(runs[0][0]) < length:
            return None
        slots, _ = runs[0]
        return ContiguousKV(storage.read(stored.keys, slots[:length]), storage.read(stored.values, slots[:length]))

    def layer_device(self, layer: int) -> Device:
        return self._cache.storage.backend.device(integer(layer, "layer"))

    def truncate(self, seq_len: int) -> None:
        seq_len = check_truncation(seq_len, self.seq_len)
        self._cache.prepare_remove(self._sequence, seq_len, drop_appended=True)()

    def free(self) -> None:
        self._cache.end_forward()
        self._cache.tables.free(self._sequence)

    @property
    def _table(self) -> Sequence | None:
        return self._cache.tables.sequences.get(self._sequence)

    def _views(self, layer: int, num_appended: int) -> list[View]:
        storage = self._cache.storage
        stored = storage.layer(layer)
        device = storage.backend.device(layer)
        within_blocks = storage.block_size > 1
        return [
            View(storage.read(stored.keys, slots), storage.read(stored.values, slots), start, len(slots), device)
            for slots, start in self._runs(num_appended, within_blocks)
        ]

    def _runs(self, num_appended: int, within_blocks: bool) -> list[tuple[NDArray[np.int64], int]]:
        """Slots of consecutive positions that lie side by side, each run with its first position. O(slots)."""
        table = self._table
        if table is None:
            return []
        indices = np.flatnonzero(table.positions.view >= 0)
        positions = table.positions.view[indices].astype(np.int64)
        if num_appended:
            indices = np.concatenate([indices, np.asarray(table.pending[:num_appended], np.int64)])
            positions = np.concatenate([positions, np.arange(table.end, table.end + num_appended)])
        if not len(indices):
            return []
        order = np.argsort(positions, kind="stable")
        slots, positions = table.slots(indices[order]), positions[order]
        breaks = (np.diff(slots) != 1) | (np.diff(positions) != 1)
        if within_blocks:
            breaks |= np.diff(slots // table.block_size) != 0
        starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(slots)]
        return [(slots[a:b], int(positions[a])) for a, b in pairwise(starts)]
