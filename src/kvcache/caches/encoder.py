"""`EncoderCache`: keys and values of what an encoder made of images or sound, for cross attention.

A sequence holds *media*, each with the position at which it stands and its content key. A batch announces new media;
the puts of that pass fill them, layer by layer. Positions matter to `remove`, `copy_prefix` and `can_resume` only: a
query sees all media of its own sequence. Entries are immutable and shared by reference.

    start_forward(Batch([0, 1, 2], [7, 7, 7], media=[Media(index=1, key="cat")]))
    put(keys [n,H,D], values [n,H,Dv])      # any n, and with one Media in one sequence any shape
    get()                                   # one sequence: as stored, no mask
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias, final

import numpy as np

from kvcache import backends, formats, kernels
from kvcache.backends import Backend
from kvcache.caches import Cache
from kvcache.caches.forward import UNBOUNDED, group_rows
from kvcache.caches.lifecycle import Lifecycle, check_copy, check_range, check_sequence
from kvcache.caches.published import Published
from kvcache.caches.tokenless_view import TokenlessView
from kvcache.errors import CorruptState, NotSupported
from kvcache.formats import Format, Stored
from kvcache.kernels import AttentionBatch, Segment
from kvcache.sequences import moved
from kvcache.spec import Array, Batch, CacheConfig, History, Media, SequenceUsage, Usage, finite, integer
from kvcache.views import SequenceView

__all__ = ["EncoderCache"]


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One medium: where it stands, and per layer its encoded keys and values."""

    key: Hashable
    position: int
    layers: dict[int, tuple[Stored, Stored]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return max((int(keys.array.shape[0]) for keys, _ in self.layers.values()), default=0)

    def at(self, position: int) -> _Entry:
        return _Entry(self.key, position, self.layers)


PublishedMedia: TypeAlias = Published[Hashable, dict[int, tuple[Stored, Stored]]]


@dataclass(slots=True)
class _Sequence:
    end: int = 0
    entries: list[_Entry] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    batch: Batch
    rows: dict[int, list[int]]
    filling: list[tuple[Media, _Entry]]
    is_reserved: bool


@final
class EncoderCache(Cache):
    """Keys and values of media, per sequence. Sized by what is put: `capacity` and `max_sequences` do not bound it."""

    def __init__(self) -> None:
        self._lifecycle = Lifecycle()
        self._layer: int | None = None
        self._pass: _Pass | None = None
        self._sequences: dict[int, _Sequence] = {}
        self._layers: set[int] = set()  # in which anything was ever put
        self._published: PublishedMedia = Published()
        self._backend: Backend
        self._formats: tuple[Format, Format]

    # --- for models ---------------------------------------------------------------------------------------------------

    def set_layer(self, layer: int) -> None:
        self._lifecycle.check_open()
        self._layer = integer(layer, "layer")

    def encoder_cached(self, sequence: int) -> bool:
        """Whether the sequence has media and all of them are filled: the encoder need not run for it."""
        self._lifecycle.check_open()
        known = self._sequences.get(check_sequence(sequence))
        return known is not None and bool(known.entries) and all(map(self._is_filled, known.entries))

    def put(self, keys: Array, values: Array) -> None:
        """Fill the media of this batch: one with rows of any shape, several with their rows one after the other.

        In a batch of several sequences there are as many rows of keys as of values.
        """
        current, layer = self._started()
        if not current.filling:
            raise ValueError(
                "the batch announces no media; expected Batch(..., media=[Media(index, key)]) before a put"
            )
        rows = [self._backend.asarray(array, layer, what) for array, what in ((keys, "keys"), (values, "values"))]
        parts = self._split(current, rows)
        encoded = [
            (self._stored(keys, self._formats[0]), self._stored(values, self._formats[1])) for keys, values in parts
        ]
        for (_, entry), stored in zip(current.filling, encoded, strict=True):
            entry.layers[layer] = stored
        if not current.is_reserved:
            self._layers.add(layer)

    def get(self) -> History:
        """See `Cache.get`: for a batch of one sequence as stored and without a mask, so columns are not padded then."""
        current, layer = self._started()
        found = self._visible(current, layer)
        stored = [pair for pairs in found.values() for pair in pairs]
        if not stored:
            raise ValueError(f"no media of the batch's sequences were put in layer {layer}; put keys and values first")
        if len(current.rows) > 1 and any(k.array.shape[0] != v.array.shape[0] for k, v in stored):
            raise NotSupported(
                f"media of {[(k.array.shape[0], v.array.shape[0]) for k, v in stored]} rows of keys and values have no "
                f"mask between sequences; read one sequence at a time"
            )
        config = self._lifecycle.config
        keys, values = (self._joined([pair[side] for pair in stored]) for side in (0, 1))
        if config.permuted_values and len(values.shape) != 3:
            raise ValueError(f"values are {list(values.shape)}; expected [n,H,Dv], to be permuted as set_config asks")
        # One sequence sees all there is: without a mask that hides them, columns cannot be padded.
        missing = -int(keys.shape[0]) % config.padding if len(current.rows) > 1 else 0
        keys, values = (self._backend.pad_rows(rows, missing, layer) for rows in (keys, values))
        if config.permuted_values:
            values = self._backend.permute(values, (1, 2, 0))
        if len(current.rows) == 1:
            return History(keys, values, None)
        mask = np.full((len(current.batch), int(keys.shape[0])), -np.inf, np.float32)
        begin = 0
        for sequence, pairs in found.items():
            end = begin + sum(int(pair[0].array.shape[0]) for pair in pairs)
            mask[current.rows[sequence], begin:end] = 0
            begin = end
        return History(keys, values, self._backend.cast(self._backend.from_numpy(mask, layer), config.mask_dtype))

    def attend(
        self, queries: Array, *, scale: float | None = None, softcap: float | None = None, sinks: Array | None = None
    ) -> Array:
        current, layer = self._started()
        found = self._visible(current, layer)
        pairs = [pair for pairs in found.values() for pair in pairs]
        queries = self._backend.asarray(queries, layer, "queries")
        if sinks is not None:
            sinks = self._backend.asarray(sinks, layer, "sinks")
        shapes = [(tuple(keys.array.shape), tuple(values.array.shape)) for keys, values in pairs]
        if not pairs or any(len(k) != 3 or len(v) != 3 or k[:2] != v[:2] for k, v in shapes):
            raise ValueError(
                f"layer {layer} holds {shapes or 'nothing'} for the batch's sequences; expected keys [n,H,D] and "
                f"values [n,H,Dv] of as many rows and heads"
            )
        keys, values = (self._as_cells([pair[side] for pair in pairs]) for side in (0, 1))
        shape, num_tokens = tuple(queries.shape), len(current.batch)
        heads, head_dim = keys.array.shape[1], keys.head_dim
        if len(shape) != 3 or shape[0] != num_tokens or shape[2] != head_dim or not shape[1] or shape[1] % heads:
            raise ValueError(f"queries are {list(shape)}; expected [{num_tokens}, a multiple of {heads}, {head_dim}]")
        scale = head_dim**-0.5 if scale is None else finite(scale, "scale")
        softcap = None if softcap is None else finite(softcap, "softcap")
        kernel = kernels.choose(queries, keys, values)
        return kernel.attend(
            queries, keys, values, self._segments(current, found), scale=scale, softcap=softcap, sinks=sinks
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
    ) -> None:
        self.prepare_init(backend, dtype, max_sequences, capacity, max_batch)()

    def prepare_init(
        self,
        backend: str | Backend,
        dtype: str | tuple[str, str],
        max_sequences: int = 1,
        capacity: int | None = None,
        max_batch: int | None = None,
    ) -> Callable[[], None]:
        arrays = backends.create(backend)
        limits = self._lifecycle.prepare(arrays, max_sequences, capacity, max_batch)
        pair = formats.pair(dtype, arrays)

        def effect() -> None:
            self._backend = arrays
            self._formats = pair
            self._lifecycle.begin(limits)

        return effect

    def close(self) -> None:
        self._lifecycle.is_closed = True
        self._pass = None
        self._sequences.clear()
        self._layers.clear()
        self._published.clear()

    def prepare_forward(self, batch: Batch, reserve: bool = False) -> Callable[[], None]:
        self._lifecycle.limits.check_pass(batch, reserve)
        if len(batch.media) > 1 and any(media.num_tokens is None for media in batch.media):
            raise ValueError(
                f"the batch has {len(batch.media)} media; expected num_tokens on each, to share out the put"
            )
        filling = [(media, _Entry(media.key, batch.positions[media.index])) for media in batch.media]
        current = _Pass(batch, group_rows(batch), filling, reserve)

        def effect() -> None:
            self._pass = current
            if reserve:
                return
            for sequence, rows in current.rows.items():
                known = self._sequences.setdefault(sequence, _Sequence())
                known.end = max(known.end, max(batch.positions[row] for row in rows) + 1)
            new = [(self._sequences[batch.sequences[media.index]].entries, entry) for media, entry in filling]
            for entries, entry in new:  # the same medium at the same place again replaces what was there
                entries[:] = [e for e in entries if (e.key, e.position) != (entry.key, entry.position)]
            for entries, entry in new:
                entries.append(entry)

        return effect

    def prepare_copy(self, source: int, target: int, length: int) -> Callable[[], None]:
        self._lifecycle.check_open()
        source, target, length = check_copy(source, target, length)

        def effect() -> None:
            self._pass = None
            known = self._sequences.get(source)
            self._sequences.pop(target, None)
            if known and min(known.end, length):
                kept = [entry for entry in known.entries if entry.position < length]
                self._sequences[target] = _Sequence(min(known.end, length), kept)

        return effect

    def can_resume(self, sequence: int, position: int) -> bool:
        self._lifecycle.check_open()
        position, known = integer(position, "position"), self._sequences.get(check_sequence(sequence))
        if position == 0:
            return True
        if known is None or position > known.end:
            return False
        return all(self._is_filled(entry) for entry in known.entries if entry.position < position)

    def resume_point(self, sequence: int, position: int) -> int:
        self._lifecycle.check_open()
        position, known = integer(position, "position"), self._sequences.get(check_sequence(sequence))
        if known is None:
            return 0
        missing = [entry.position for entry in known.entries if not self._is_filled(entry)]
        return min([position, known.end, *missing])

    def stopping_point(self, sequence: int, position: int) -> int:
        return position

    def prepare_remove(
        self, sequence: int, begin: int, end: int | None = None, *, drop_appended: bool = False
    ) -> Callable[[], None]:
        self._lifecycle.check_open()
        sequence, begin, end = check_range(sequence, begin, end)

        def effect() -> None:
            known = self._sequences.get(sequence)
            if known is None or begin >= known.end or begin == end:
                return
            self._pass = None
            last = known.end if end is None else min(end, known.end)
            known.entries = [
                entry.at(moved(entry.position, begin, last))
                for entry in known.entries
                if not begin <= entry.position < last
            ]
            known.end -= last - begin
            if not known.end:
                del self._sequences[sequence]

        return effect

    def sequence(self, sequence: int) -> SequenceView:
        self._lifecycle.check_open()
        return TokenlessView(check_sequence(sequence), self._lifecycle, self, "EncoderCache", self.advance)

    def usage(self) -> Usage:
        self._lifecycle.check_open()
        entries = {id(e.layers): e.layers for known in self._sequences.values() for e in known.entries}
        sequences = {
            key: SequenceUsage(sum(entry.num_tokens for entry in known.entries), 0)
            for key, known in self._sequences.items()
        }
        num_bytes = sum(
            self._backend.num_bytes(stored.array)
            for layers in entries.values()
            for pair in layers.values()
            for stored in pair
        )
        return Usage(sum(used.num_tokens for used in sequences.values()), 0, 0, num_bytes, sequences)

    def check(self) -> None:
        self._lifecycle.check_open()
        for sequence, known in self._sequences.items():
            if beyond := [entry.position for entry in known.entries if entry.position >= known.end]:
                raise CorruptState(f"sequence {sequence} ends at {known.end} and has media at {beyond}")

    # --- for prefix reuse: media that are known by their key ----------------------------------------------------------

    @property
    def published(self) -> PublishedMedia:
        """The media that `adopt` can take over."""
        return self._published

    def publish(self, sequence: int, priority: int = 0) -> None:
        """Let other sequences have the filled media of this one by their keys, wherever these stand there."""
        self._lifecycle.check_open()
        known = self._sequences.get(sequence)
        for entry in known.entries if known else ():
            if self._is_filled(entry) and entry.key not in self._published:
                arrays = [stored.array for pair in entry.layers.values() for stored in pair]
                num_bytes = sum(self._backend.num_bytes(array) for array in arrays)
                self._published.add(entry.key, entry.layers, num_bytes, priority)

    def adopt(self, sequence: int, media: Iterable[tuple[int, Hashable]], end: int) -> None:
        """A new sequence that ends at `end` and has published `media`, each a position and a key.

        Raises `ValueError` when the sequence exists or a key is unknown.
        """
        self._lifecycle.check_open()
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} exists already; remove it before it adopts media")
        entries = [_Entry(key, position, self._published.use(key)) for position, key in media]
        self._pass = None
        self._sequences[sequence] = _Sequence(end, entries)

    # --- for its views ------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> Backend:
        self._lifecycle.check_open()
        return self._backend

    def end(self, sequence: int) -> int:
        """The position after the sequence's last token; 0 when it is unknown."""
        self._lifecycle.check_open()
        known = self._sequences.get(sequence)
        return known.end if known else 0

    def advance(self, sequence: int, num_tokens: int) -> None:
        """`num_tokens` tokens without media follow the sequence's last."""
        self._pass = None
        self._sequences.setdefault(sequence, _Sequence()).end += num_tokens

    def layers(self) -> set[int]:
        """Layers that hold anything."""
        return {layer for known in self._sequences.values() for entry in known.entries for layer in entry.layers}

    # --- inside -------------------------------------------------------------------------------------------------------

    def _started(self) -> tuple[_Pass, int]:
        self._lifecycle.check_open()
        if self._pass is None:
            raise ValueError("no forward pass is under way; call start_forward first")
        if self._layer is None:
            raise ValueError("no layer is active; call set_layer first")
        return self._pass, self._layer

    def _is_filled(self, entry: _Entry) -> bool:
        """Whether no layer lacks the medium: where a model died on its way, later layers would not see it."""
        return bool(entry.layers) and entry.layers.keys() >= self._layers

    def _stored(self, rows: Array, form: Format) -> Stored:
        encoded = form.encode(rows)
        if form.is_native:  # perhaps the caller's own array, which he may write to again: joining one array copies it
            encoded = self._backend.concatenate((encoded,), 0)
        return Stored(encoded, form, int(rows.shape[-1]))

    def _split(self, current: _Pass, rows: list[Array]) -> list[tuple[Array, Array]]:
        """The put arrays, one pair per medium."""
        if not all(len(array.shape) and array.shape[0] for array in rows):
            raise ValueError(f"keys {list(rows[0].shape)} and values {list(rows[1].shape)} are empty; expected rows")
        counts = [media.num_tokens for media, _ in current.filling]
        if len(counts) == 1 and counts[0] is None:
            if len(current.rows) > 1 and rows[0].shape[0] != rows[1].shape[0]:
                raise ValueError(
                    f"keys {list(rows[0].shape)}, values {list(rows[1].shape)} in a batch of {len(current.rows)} "
                    f"sequences; expected as many rows in each, for the mask between sequences"
                )
            return [(rows[0], rows[1])]
        expected = sum(count or 0 for count in counts)
        if any(array.shape[0] != expected for array in rows):
            raise ValueError(
                f"keys {list(rows[0].shape)}, values {list(rows[1].shape)}; expected {expected} rows in each, as many "
                f"as the batch's media have tokens ({counts})"
            )
        ends = np.cumsum([0, *(count or 0 for count in counts)]).tolist()
        return [(rows[0][a:b], rows[1][a:b]) for a, b in pairwise(ends)]

    def _visible(self, current: _Pass, layer: int) -> dict[int, list[tuple[Stored, Stored]]]:
        """Per sequence of the batch, in its order: what its media hold in this layer, in order of position."""
        found: dict[int, list[tuple[Stored, Stored]]] = {}
        for sequence in current.rows:
            known = self._sequences.get(sequence)
            entries = list(known.entries) if known else []
            if current.is_reserved:  # its media belong to this pass alone
                entries += [e for media, e in current.filling if current.batch.sequences[media.index] == sequence]
            entries.sort(key=lambda entry: entry.position)
            found[sequence] = [entry.layers[layer] for entry in entries if layer in entry.layers]
        return found

    def _joined(self, stored: list[Stored]) -> Array:
        rows = [part.format.decode(part.array, part.head_dim) for part in stored]
        if len(rows) == 1:
            return rows[0]
        if len({tuple(array.shape[1:]) for array in rows}) != 1:
            raise NotSupported(
                f"media of shapes {[list(a.shape) for a in rows]} cannot be joined; read one sequence at a time"
            )
        return self._backend.concatenate(rows, 0)

    def _as_cells(self, stored: list[Stored]) -> Stored:
        """Encoded rows [n,H,W] as storage of one-slot blocks [n,H,1,W], which is how kernels read them."""
        arrays = [part.array for part in stored]
        rows = arrays[0] if len(arrays) == 1 else self._backend.concatenate(arrays, 0)
        return Stored(rows[:, :, None, :], stored[0].format, stored[0].head_dim)

    def _segments(self, current: _Pass, found: dict[int, list[tuple[Stored, Stored]]]) -> AttentionBatch:
        segments, begin = [], 0
        for sequence, rows in current.rows.items():
            count = sum(int(pair[0].array.shape[0]) for pair in found[sequence])
            table = np.arange(begin, begin + count, dtype=np.int32)
            segments.append(Segment(np.asarray(rows, np.int64), table, count, 0, None))
            begin += count
        num_tokens = len(current.batch)
        return AttentionBatch(segments, np.zeros(num_tokens, np.int32), np.full(num_tokens, UNBOUNDED, np.int32), 1)
