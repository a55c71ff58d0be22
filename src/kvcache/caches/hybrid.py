"""`HybridCache`: several caches that one model uses together, one per kind of layer. A conjunction: all change or none.

    HybridCache(CausalCache(Sliding(512)), CausalCache(Full()), layer_types=[0, 0, 0, 0, 0, 1])

Each operation that can fail is prepared in every member first; only when all are ready are the effects carried out. A
member that can only go back to certain points (`RecurrentCache`) takes the others along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import final

from kvcache import backends
from kvcache.backends import Backend
from kvcache.caches import Cache
from kvcache.caches.encoder import EncoderCache
from kvcache.caches.lifecycle import Lifecycle, check_range, check_sequence, check_truncation
from kvcache.caches.tokenless_view import TokenlessView
from kvcache.errors import NotSupported
from kvcache.spec import Array, Batch, CacheConfig, Device, History, SequenceUsage, Usage, integer, listed
from kvcache.views import Appended, ContiguousKV, PackedView, SequenceView, View

__all__ = ["HybridCache"]


@final
class HybridCache(Cache):
    """One cache made of `caches`. `layer_types[layer]` names the member of each layer.

    Without it, `set_layer_type` does.
    """

    def __init__(self, *caches: Cache, layer_types: Sequence[int] | None = None) -> None:
        if not caches or not all(isinstance(cache, Cache) for cache in caches):
            raise TypeError(f"HybridCache got {caches!r}; expected at least one cache")
        leaves = _leaves(caches)
        if len({id(cache) for cache in leaves}) != len(leaves):
            raise ValueError("HybridCache got the same cache twice; expected one cache per kind of layer")
        self.members = caches
        if layer_types is not None:
            layer_types = tuple(map(self._type, listed(layer_types, "layer_types", "the member of each layer")))
        self.layer_types = layer_types
        self._active = 0
        self._lifecycle = Lifecycle()

    # --- for models ---------------------------------------------------------------------------------------------------

    def set_layer(self, layer: int) -> None:
        self._lifecycle.check_open()
        if self.layer_types is not None:
            layer = integer(layer, "layer")
            if layer >= len(self.layer_types):
                raise ValueError(
                    f"layer is {layer}; expected one of the {len(self.layer_types)} that layer_types names"
                )
            self._active = self.layer_types[layer]
            self.members[self._active].set_layer(layer)
            return
        for member in self.members:
            member.set_layer(layer)

    def set_layer_type(self, layer_type: int) -> None:
        """Make member `layer_type` the one that `put`, `get` and `attend` mean."""
        self._lifecycle.check_open()
        self._active = self._type(layer_type)

    def underlying_cache(self) -> Cache:
        """The active member, for what only it can do (`CausalCache.set_causal`, `EncoderCache.encoder_cached`)."""
        self._lifecycle.check_open()
        return self.members[self._active]

    def put(self, keys: Array, values: Array) -> None:
        self.members[self._active].put(keys, values)

    def get(self) -> History:
        return self.members[self._active].get()

    def attend(
        self, queries: Array, *, scale: float | None = None, softcap: float | None = None, sinks: Array | None = None
    ) -> Array:
        return self.members[self._active].attend(queries, scale=scale, softcap=softcap, sinks=sinks)

    def prepare_config(self, config: CacheConfig) -> Callable[[], None]:
        return _all([self._lifecycle.prepare_config(config), *(m.prepare_config(config) for m in self.members)])

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
        effects = [m.prepare_init(arrays, dtype, max_sequences, capacity, max_batch) for m in self.members]
        return _all([partial(self._lifecycle.begin, limits), *effects])

    def close(self) -> None:
        self._lifecycle.is_closed = True
        for member in self.members:
            member.close()

    def prepare_forward(self, batch: Batch, reserve: bool = False) -> Callable[[], None]:
        return _all([member.prepare_forward(batch, reserve) for member in self.members])

    def prepare_copy(self, source: int, target: int, length: int) -> Callable[[], None]:
        return _all([member.prepare_copy(source, target, length) for member in self.members])

    def can_resume(self, sequence: int, position: int) -> bool:
        return all(member.can_resume(sequence, position) for member in self.members)

    def resume_point(self, sequence: int, position: int) -> int:
        position = integer(position, "position")
        return _agreed(position, [partial(member.resume_point, sequence) for member in self.members])

    def stopping_point(self, sequence: int, position: int) -> int:
        return _agreed(position, [partial(member.stopping_point, sequence) for member in self.members])

    def prepare_remove(
        self, sequence: int, begin: int, end: int | None = None, *, drop_appended: bool = False
    ) -> Callable[[], None]:
        sequence, begin, end = check_range(sequence, begin, end)
        seq_len = self.sequence(sequence).seq_len
        if begin < seq_len and (end is None or end >= seq_len):
            # A member with checkpoints cannot stop just anywhere: all go back to one of them.
            end, point = None, self.stopping_point(sequence, begin)
            if begin and not point:
                raise NotSupported(
                    f"sequence {sequence} cannot be cut at {begin}: its states were kept at no point below; remove the "
                    f"whole sequence and recompute it, or keep more checkpoints"
                )
            begin = point
        return _all(
            [member.prepare_remove(sequence, begin, end, drop_appended=drop_appended) for member in self.members]
        )

    def sequence(self, sequence: int) -> SequenceView:
        sequence = check_sequence(sequence)
        return HybridSequenceView(
            [member.sequence(sequence) for member in self.members], self.layer_types, self, sequence
        )

    def usage(self) -> Usage:
        usages = [member.usage() for member in self.members]
        tokens = [u.sequences for m, u in zip(self.members, usages, strict=True) if not isinstance(m, EncoderCache)]
        ids = {key: None for usage in usages for key in usage.sequences}
        nothing = SequenceUsage(0, 0)
        sequences = {
            key: SequenceUsage(
                max((used.get(key, nothing).num_tokens for used in tokens), default=0),
                sum(usage.sequences.get(key, nothing).num_blocks for usage in usages),
            )
            for key in ids
        }
        return Usage(
            num_tokens=sum(used.num_tokens for used in sequences.values()),
            num_blocks=sum(usage.num_blocks for usage in usages),
            num_free_blocks=sum(usage.num_free_blocks for usage in usages),
            num_bytes=sum(usage.num_bytes for usage in usages),
            sequences=sequences,
        )

    def check(self) -> None:
        for member in self.members:
            member.check()

    def _type(self, layer_type: int) -> int:
        layer_type = integer(layer_type, "layer type")
        if layer_type >= len(self.members):
            raise ValueError(f"layer type is {layer_type}; expected an index into the {len(self.members)} members")
        return layer_type


@final
class HybridSequenceView(SequenceView):
    """The same sequence in every member; layers go to the member that `layer_types` names."""

    __slots__ = ("_cache", "_layer_types", "_sequence", "_views")

    def __init__(
        self, views: Sequence[SequenceView], layer_types: Sequence[int] | None, cache: HybridCache, sequence: int
    ) -> None:
        self._views = views
        self._layer_types = layer_types
        self._cache = cache
        self._sequence = sequence

    @property
    def seq_len(self) -> int:
        return max(view.seq_len for view in self._views)

    @property
    def max_seq_len(self) -> int:
        return min(view.max_seq_len for view in self._views)

    @property
    def is_on_gpu(self) -> bool:
        return any(view.is_on_gpu for view in self._views)

    def append(self, layer: int, keys: Array, values: Array) -> Appended:
        if any(isinstance(view, TokenlessView) and not view.can_advance for view in self._views):
            raise NotSupported("a member holds states, which only passes move on; use start_forward, put and attend")
        return self._of(layer).append(layer, keys, values)

    def commit(self, num_tokens: int) -> None:
        self.prepare_commit(num_tokens)()

    def prepare_commit(self, num_tokens: int) -> Callable[[], None]:
        return _all([view.prepare_commit(num_tokens) for view in self._views])

    def views(self, layer: int) -> list[View]:
        return self._of(layer).views(layer)

    def packed_views(self, layer: int) -> list[PackedView]:
        return self._of(layer).packed_views(layer)

    def contiguous_kv(self, layer: int, length: int) -> ContiguousKV | None:
        return self._of(layer).contiguous_kv(layer, length)

    def layer_device(self, layer: int) -> Device:
        return self._of(layer).layer_device(layer)

    def truncate(self, seq_len: int) -> None:
        seq_len = check_truncation(seq_len, self.seq_len)
        self._cache.prepare_remove(self._sequence, seq_len, drop_appended=True)()

    def free(self) -> None:
        for view in self._views:
            view.free()

    def _of(self, layer: int) -> SequenceView:
        if self._layer_types is None:
            raise ValueError(
                "the hybrid has no layer_types; give HybridCache(..., layer_types=[...]) to drive single sequences"
            )
        layer = integer(layer, "layer")
        if layer >= len(self._layer_types):
            raise ValueError(f"layer is {layer}; expected one of the {len(self._layer_types)} that layer_types names")
        return self._views[self._layer_types[layer]]


def _leaves(caches: Iterable[Cache]) -> list[Cache]:
    """The caches, with those inside hybrids in place of these."""
    return [
        leaf for cache in caches for leaf in (_leaves(cache.members) if isinstance(cache, HybridCache) else (cache,))
    ]


def _agreed(position: int, points: Sequence[Callable[[int], int]]) -> int:
    """The highest position, `position` at most, that each of `points` (highest at or below) leaves as it is."""
    while (lowered := min(point(position) for point in points)) != position:
        position = lowered  # 0 suits every member
    return position


def _all(effects: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def effect() -> None:
        for one in effects:
            one()

    return effect
