"""`CausalCache`: keys and values of tokens under one span. Tables decide, storage keeps, kernels read.

start_forward   Tables.plan -> Tables.apply -> BlockStorage.copy_blocks     places, forgetting, copy-on-write
put             kernels.writer(...).put, else BlockStorage.encode, write    rows into slots, encoded
get             Forward.columns -> BlockStorage.read                        history and mask
attend          Forward.attention -> kernels.choose(...).attend             blocks read in place
remove          Tables.plan_removal -> turns -> Tables.apply_removal        keys re-rotated
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from kvcache import backends, formats, kernels, spans
from kvcache.backends import Backend
from kvcache.blocks import BlockStorage
from kvcache.caches import Cache
from kvcache.caches.causal_view import CausalSequenceView
from kvcache.caches.forward import Forward, Padded, group_rows
from kvcache.caches.lifecycle import Lifecycle, check_copy, check_range, check_sequence
from kvcache.caches.tables import Removal, Tables
from kvcache.formats import Format
from kvcache.kernels.rope import RopeShift
from kvcache.spans import Full, Span
from kvcache.spec import Array, Batch, CacheConfig, History, Usage, finite, integer
from kvcache.views import SequenceView

__all__ = ["CausalCache", "Shift"]

Shift: TypeAlias = Callable[[int, Array, Array], Array]
"""`shift(layer, keys [n,H,D], offsets [n]) -> keys`: turn each key by so many positions (negative: towards 0)."""


@final
class CausalCache(Cache):
    """A cache under one span, in blocks of `block_size` slots.

    span: `Full()`, `Sliding(window)`, `Chunked(size)`.
    shift: re-rotates keys when `remove` moves tokens; without it such a removal is `NotSupported`.
    block_size: 1 gives single cells, 16 to 128 pages, `capacity` one contiguous run per sequence.
    """

    def __init__(self, span: Span | None = None, shift: Shift | None = None, block_size: int = 1) -> None:
        if span is not None and not isinstance(span, Span):
            raise TypeError(f"span is {span!r}; expected Full(), Sliding(window) or Chunked(size)")
        if shift is not None and not callable(shift):
            raise TypeError(f"shift is {shift!r}; expected a function of (layer, keys, offsets), or None")
        self.span = span or Full()
        self.block_size = integer(block_size, "block_size", minimum=1)
        self._shift = shift
        self._lifecycle = Lifecycle()
        self._layer: int | None = None
        self._forward: Forward | None = None
        self._tables: Tables
        self._storage: BlockStorage

    # --- for models ---------------------------------------------------------------------------------------------------

    def set_layer(self, layer: int) -> None:
        self._lifecycle.check_open()
        self._layer = integer(layer, "layer")

    def set_causal(self, except_: Iterable[int] = ()) -> None:
        """For this pass, let the batch rows `except_` see later positions too, as far as the span allows."""
        self._started().except_from_causality(except_)

    def put(self, keys: Array, values: Array) -> None:
        forward, layer = self._started(), self._active_layer()
        keys, values = self._storage.accept(layer, keys, values, forward.num_rows)
        if not forward.is_reserved:
            self.prepare_write(layer, keys, values)(forward.slots)
        forward.written[layer] = (keys.shape[1], keys.shape[2], values.shape[2])

    def get(self) -> History:
        forward, layer = self._readable()
        config = self._lifecycle.config
        if forward.is_reserved:
            return self._worst_case(forward, layer, config)
        stored = self._storage.layer(layer)
        columns = forward.columns()
        backend, missing = self._storage.backend, -columns.visible.shape[1] % config.padding
        keys = backend.pad_rows(self._storage.read(stored.keys, columns.slots), missing, layer)
        values = backend.pad_rows(self._storage.read(stored.values, columns.slots), missing, layer)
        visible = np.pad(columns.visible, ((0, 0), (0, missing))) if missing else columns.visible
        if config.permuted_values:
            values = backend.permute(values, (1, 2, 0))
        return History(keys, values, self._mask(forward, visible, layer, config))

    def attend(
        self, queries: Array, *, scale: float | None = None, softcap: float | None = None, sinks: Array | None = None
    ) -> Array:
        forward, layer = self._readable()
        queries = self._storage.backend.asarray(queries, layer, "queries")
        if sinks is not None:
            sinks = self._storage.backend.asarray(sinks, layer, "sinks")
        shape, (num_heads, head_dim, value_dim) = tuple(queries.shape), forward.written[layer]
        if (
            len(shape) != 3
            or shape[0] != forward.num_rows
            or shape[2] != head_dim
            or not shape[1]
            or shape[1] % num_heads
        ):
            raise ValueError(
                f"queries are {list(shape)}; expected [{forward.num_rows}, a multiple of {num_heads}, {head_dim}]: the "
                "batch's tokens, heads in groups over the key heads, and the keys' head_dim"
            )
        scale = head_dim**-0.5 if scale is None else finite(scale, "scale")
        softcap = None if softcap is None else finite(softcap, "softcap")
        if forward.is_reserved:
            return self._storage.backend.zeros((shape[0], shape[1], value_dim), "f32", layer)
        stored = self._storage.layer(layer)
        kind = kernels.forced(), queries.dtype, stored.kind
        kernel = forward.kernels.get(kind)
        if kernel is None:
            kernel = forward.kernels[kind] = kernels.choose(queries, stored.keys, stored.values)
        return kernel.attend(
            queries,
            stored.keys,
            stored.values,
            forward.attention(self.block_size),
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )

    def prepare_config(self, config: CacheConfig) -> Callable[[], None]:
        return self._lifecycle.prepare_config(config)

    # --- for whoever manages the cache --------------------------------------------------------------------------------

    def init(
        self,
        backend: str | Backend,
        dtype: str | tuple[str, str],
        max_sequences: int = 1,
        capacity: int | None = None,
        max_batch: int | None = None,
        *,
        num_blocks: int | None = None,
    ) -> None:
        """`num_blocks`: the size of the pool, when it is not to follow from the other limits."""
        self.prepare_init(backend, dtype, max_sequences, capacity, max_batch, num_blocks=num_blocks)()

    def prepare_init(
        self,
        backend: str | Backend,
        dtype: str | tuple[str, str],
        max_sequences: int = 1,
        capacity: int | None = None,
        max_batch: int | None = None,
        *,
        num_blocks: int | None = None,
    ) -> Callable[[], None]:
        arrays = backends.create(backend)
        limits = self._lifecycle.prepare(arrays, max_sequences, capacity, max_batch)
        pair = formats.pair(dtype, arrays)
        span = self.span.resolve(limits.max_sequences)
        if num_blocks is None:
            size = spans.num_blocks(
                span,
                block_size=self.block_size,
                max_sequences=limits.max_sequences,
                capacity=limits.capacity,
                max_batch=limits.max_batch,
            )
        else:
            size = integer(num_blocks, "num_blocks", minimum=1)

        storage = BlockStorage(arrays, pair, size, self.block_size)
        tables = Tables(span, self.block_size, size)  # a pool too large for memory raises here

        def effect() -> None:
            self._storage = storage
            self._tables = tables
            self._lifecycle.begin(limits)

        return effect

    def close(self) -> None:
        if not self._lifecycle.is_closed:
            self._lifecycle.is_closed = True
            self._forward = None
            self.__dict__.pop("_tables", None)
            self.__dict__.pop("_storage", None)

    def prepare_forward(self, batch: Batch, reserve: bool = False) -> Callable[[], None]:
        self._lifecycle.limits.check_pass(batch, reserve)
        rows = group_rows(batch)
        if reserve:
            return lambda: self._start(self._reserved(batch, rows))
        for sequence in rows:
            self._check_committed(sequence)
        tables = self._tables
        if len(rows) == len(batch):  # decode: one token each
            plan = tables.plan({sequence: (batch.positions[row],) for sequence, (row,) in rows.items()})
        else:
            plan = tables.plan({sequence: [batch.positions[row] for row in own] for sequence, own in rows.items()})

        def effect() -> None:
            applied = tables.apply(plan)
            slots = np.empty(len(batch), np.int64)
            for sequence, own in rows.items():
                found = applied.slots[sequence]
                slots[own[0] if isinstance(found, int) else own] = found
            self._storage.copy_blocks(applied.sources, applied.targets)
            self._start(Forward(batch, rows, slots, tables.sequences, tables.span))

        return effect

    def prepare_copy(self, source: int, target: int, length: int) -> Callable[[], None]:
        self._lifecycle.check_open()
        source, target, length = check_copy(source, target, length)
        self._check_committed(target)

        def effect() -> None:
            self._forward = None
            self._tables.copy_prefix(source, target, length)

        return effect

    def can_resume(self, sequence: int, position: int) -> bool:
        self._lifecycle.check_open()
        return self._tables.can_resume(check_sequence(sequence), integer(position, "position"))

    def resume_point(self, sequence: int, position: int) -> int:
        self._lifecycle.check_open()
        return self._tables.resume_point(check_sequence(sequence), integer(position, "position"))

    def stopping_point(self, sequence: int, position: int) -> int:
        return position

    def prepare_remove(
        self, sequence: int, begin: int, end: int | None = None, *, drop_appended: bool = False
    ) -> Callable[[], None]:
        self._lifecycle.check_open()
        sequence, begin, end = check_range(sequence, begin, end)
        if begin == 0 and end is None:
            return lambda: self._free(sequence)
        if not drop_appended:
            self._check_committed(sequence)
        removal = self._tables.plan_removal(sequence, begin, end, can_shift=self._shift is not None)
        if removal is None and not drop_appended:
            return lambda: None
        turns = self._turns(removal) if removal and len(removal.later) else []

        def effect() -> None:
            self._forward = None
            if drop_appended and sequence in self._tables.sequences:
                self._tables.commit(sequence, 0)
            if removal:
                applied = self._tables.apply_removal(removal)
                self._storage.copy_blocks(applied.sources, applied.targets)
                for turn in turns:
                    turn(np.asarray(applied.slots[sequence]))

        return effect

    def sequence(self, sequence: int) -> SequenceView:
        self._lifecycle.check_open()
        return CausalSequenceView(check_sequence(sequence), self._lifecycle, self)

    def usage(self) -> Usage:
        self._lifecycle.check_open()
        sequences = self._tables.usage()
        return Usage(
            num_tokens=sum(used.num_tokens for used in sequences.values()),
            num_blocks=self._tables.pool.num_blocks,
            num_free_blocks=self._tables.pool.num_free,
            num_bytes=self._storage.num_bytes,
            sequences=sequences,
        )

    def check(self) -> None:
        self._lifecycle.check_open()
        self._tables.check()

    # --- for prefix reuse: blocks that are known by their content -----------------------------------------------------

    def publish(self, sequence: int, index: int, key: bytes, priority: int = 0) -> bool:
        """Let others find the block of positions from `index * block_size` on by `key`; false when they do already.

        The tokens in it must be computed. From now on a write to the block copies it first. O(1).
        """
        return self.tables.publish(sequence, index, key, priority)

    def adopt(self, sequence: int, keys: list[bytes], begin: int, end: int) -> None:
        """A new sequence that ends at `end`, by reference: [begin, end) from the blocks of `keys`, the rest forgotten.

        `begin` is a multiple of the block size. Raises `ValueError` when the sequence exists or a key is unknown.
        """
        self._forward = None
        self.tables.adopt(sequence, keys, begin, end)

    def settle(self) -> bool:
        """Free what spans have outgrown now, not with the next pass, which would; whether that was any block."""
        before = self.tables.pool.num_free
        self._forward = None
        self._tables.settle()
        return self._tables.pool.num_free > before

    # --- for its views ------------------------------------------------------------------------------------------------

    @property
    def tables(self) -> Tables:
        """The sequences; raises `ValueError` before `init` and after `close`."""
        self._lifecycle.check_open()
        return self._tables

    @property
    def storage(self) -> BlockStorage:
        """The tensors; raises `ValueError` before `init` and after `close`."""
        self._lifecycle.check_open()
        return self._storage

    def prepare_write(self, layer: int, keys: Array, values: Array) -> Callable[[NDArray[np.int64]], None]:
        """Everything of storing accepted rows that takes memory, changing nothing; the answer puts them into slots."""
        storage = self._storage
        made = storage.made(layer, keys, values)
        writers = self._forward.writers if self._forward else {}
        kind = kernels.forced(), keys.dtype, values.dtype, made.kind
        writer = writers.get(kind) or kernels.writer((made.keys, made.values), (keys, values))
        if writer is None:  # attention may load one before the next layer
            return partial(storage.write, layer, made, storage.encode(keys, values))
        writers[kind] = writer

        def put(slots: NDArray[np.int64]) -> None:
            writer.put(made.keys, made.values, slots, keys, values)
            storage.keep(layer, made)

        return put

    def pad_forward(self, num_rows: int, slots: Array) -> Padded:
        """Give the pass under way `num_rows` rows: those beyond its batch see nothing and are stored nowhere.

        For passes that a CUDA graph repeats. slots: int64 [num_rows] on the storage's device, by which `put` stores
        from now on, to be filled with the slots that are returned; a kernel must be at hand that takes them there.
        """
        return self._started().pad(num_rows, slots, self.block_size)

    def end_forward(self) -> None:
        """The tables are about to change by another way than a pass: the present pass has ended."""
        self._forward = None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start(self, forward: Forward) -> None:
        self._forward = forward

    def _free(self, sequence: int) -> None:
        self._forward = None
        self._tables.free(sequence)

    def _started(self) -> Forward:
        self._lifecycle.check_open()
        if self._forward is None:
            raise ValueError("no forward pass is under way; call start_forward first")
        return self._forward

    def _active_layer(self) -> int:
        if self._layer is None:
            raise ValueError("no layer is active; call set_layer first")
        return self._layer

    def _readable(self) -> tuple[Forward, int]:
        forward, layer = self._started(), self._active_layer()
        if layer not in forward.written:
            raise ValueError(f"layer {layer} was not put in this pass; put its keys and values before reading them")
        return forward, layer

    def _check_committed(self, sequence: int) -> None:
        table = self._tables.sequences.get(sequence)
        if table and table.pending:
            raise ValueError(
                f"sequence {sequence} has {len(table.pending)} appended tokens that are not committed; commit them, or "
                f"commit(0) to drop them"
            )

    def _turns(self, removal: Removal) -> list[Callable[[NDArray[np.int64]], None]]:
        """For each layer, what gives the later tokens the keys of their new positions, once they have their new slots.

        All that may fail happens here. A writer turns rotary keys where they lie; any other shift reads, turns and
        encodes them now.
        """
        assert self._shift is not None  # the removal was planned with a shift
        storage = self._storage
        slots = self._tables.sequences[removal.sequence].slots(removal.later)
        offsets = np.full(len(slots), removal.begin - removal.end, np.int64)
        turns: list[Callable[[NDArray[np.int64]], None]] = []
        for layer in storage.layers:
            keys = storage.layer(layer).keys
            writer = kernels.writer((keys,))
            if isinstance(self._shift, RopeShift) and writer is not None:
                rotation = self._shift.rotation(layer, keys.head_dim)
                if rotation is not None:
                    turns.append(partial(writer.shift, keys, offsets=offsets, rotation=rotation))
                continue
            given = storage.backend.from_numpy(offsets.astype(np.int32), layer)
            turned = self._shift(layer, storage.read_keys(layer, slots), given)
            encoded = storage.key_format.encode(storage.accept_keys(layer, turned, len(slots)))
            if storage.key_format.is_native:  # perhaps the function's own array, in which the next layer comes, too
                encoded = storage.backend.concatenate((encoded,), 0)
            turns.append(partial(storage.write_keys, layer, encoded=encoded))
        return turns

    def _mask(self, forward: Forward, visible: NDArray[np.bool_], layer: int, config: CacheConfig) -> Array:
        """The additive mask on the layer's device; made once per pass and device."""
        backend = self._storage.backend
        device = backend.device(layer)
        if device not in forward.masks:
            mask = np.where(visible, np.float32(0), np.float32(-np.inf))
            forward.masks[device] = backend.cast(backend.from_numpy(mask, layer), config.mask_dtype)
        return forward.masks[device]

    def _worst_case(self, forward: Forward, layer: int, config: CacheConfig) -> History:
        """Zeros in the largest shapes that `get` can answer with: every slot of the pool visible."""
        backend, (num_heads, head_dim, value_dim) = self._storage.backend, forward.written[layer]
        num_slots = self._tables.pool.num_blocks * self.block_size
        num_slots += -num_slots % config.padding

        def rows(form: Format, width: int) -> Array:
            return backend.zeros((num_slots, num_heads, width), form.storage_dtype if form.is_native else "f32", layer)

        values = rows(self._storage.value_format, value_dim)
        if config.permuted_values:
            values = backend.permute(values, (1, 2, 0))
        mask = self._mask(forward, np.ones((len(forward.batch), num_slots), bool), layer, config)
        return History(rows(self._storage.key_format, head_dim), values, mask)

    def _reserved(self, batch: Batch, rows: dict[int, list[int]]) -> Forward:
        return Forward(batch, rows, np.empty(0, np.int64), {}, self._tables.span, is_reserved=True)
