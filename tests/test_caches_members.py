"""Caches that are not causal: of several (`HybridCache`), of media (`EncoderCache`), of states (`RecurrentCache`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import kvcache.backends
import kvcache.caches.causal
from arrays import BACKENDS, add_offsets, attention, keys_of, open_columns, recognise, to_backend, to_numpy, values_of
from kvcache import (
    Batch,
    CacheConfig,
    CausalCache,
    Chunked,
    EncoderCache,
    Full,
    HybridCache,
    Media,
    RecurrentCache,
    Sliding,
)
from kvcache.errors import CacheFull, NotSupported

SIZES = {"max_sequences": 2, "capacity": 16, "max_batch": 8}


def out_of_memory(*_: object) -> Any:
    raise MemoryError


def refused(members: Sequence[Any], operation: Callable[[], object], error: type[Exception] = ValueError) -> None:
    """The operation raises and no member notices."""

    def picture() -> list[Any]:
        seen: list[Any] = []
        for member in members:
            lengths = [member.sequence(s).seq_len for s in range(3)]
            resumable = [[member.can_resume(s, p) for p in range(n + 1)] for s, n in enumerate(lengths)]
            seen += [repr(member.usage()), lengths, resumable]
        return seen

    before = picture()
    with pytest.raises(error):
        operation()
    assert picture() == before
    for member in members:
        member.check()


# --- hybrid -----------------------------------------------------------------------------------------------------------

SLIDING, FULL = 0, 1
LAYER_TYPES = [SLIDING, FULL, SLIDING]


def hybrid(*, can_shift: bool = True, **sizes: int) -> tuple[HybridCache, CausalCache, CausalCache]:
    """Two kinds of layers, blocks of different sizes; tokens are numbered by position, plus 100 per sequence."""
    sliding = CausalCache(Sliding(3, memory=4), shift=add_offsets, block_size=1)
    full = CausalCache(Full(), shift=add_offsets if can_shift else None, block_size=4)
    cache = HybridCache(sliding, full, layer_types=LAYER_TYPES)
    cache.init("numpy", "f32", **{**SIZES, **sizes})
    return cache, sliding, full


def forward(cache: HybridCache, positions: Sequence[int], sequence: int = 0) -> list[list[tuple[int, int]]]:
    """A pass; per layer what its last query sees."""
    cache.start_forward(Batch(positions, [sequence] * len(positions)))
    uids = [p + 100 * sequence for p in positions]
    seen = []
    for layer in range(len(LAYER_TYPES)):
        cache.set_layer(layer)
        cache.put(keys_of(layer, uids, [0] * len(uids)), values_of(layer, uids))
        history = cache.get()
        columns = open_columns(history.mask, len(positions))[-1]
        seen.append(sorted(recognise(layer, history.keys[columns], history.values[columns])))
    return seen


def test_each_layer_sees_by_its_own_span() -> None:
    cache, sliding, full = hybrid()
    assert forward(cache, range(5)) == [
        [(2, 0), (3, 0), (4, 0)],
        [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)],
        [(2, 0), (3, 0), (4, 0)],
    ]
    assert cache.usage().num_bytes == sliding.usage().num_bytes + full.usage().num_bytes


def test_can_resume_is_the_conjunction() -> None:
    cache, sliding, full = hybrid()
    forward(cache, range(6))
    forward(cache, [6])
    for position in range(9):
        both = sliding.can_resume(0, position) and full.can_resume(0, position)
        assert cache.can_resume(0, position) is both
    assert [p for p in range(9) if cache.can_resume(0, p)] == [0, 5, 6, 7]


def test_no_room_in_one_member_changes_none() -> None:
    """The sliding member has room and would forget; the full one has none left."""
    cache, sliding, full = hybrid(max_sequences=1, capacity=16, max_batch=8)
    alone = CausalCache(Sliding(3, memory=4))
    alone.init("numpy", "f32", max_sequences=1, capacity=16, max_batch=8)
    end = full.usage().num_blocks * 4 // 8 * 8
    for position in range(0, end, 8):
        forward(cache, range(position, position + 8))
        alone.start_forward(Batch(range(position, position + 8), [0] * 8))
    batch = Batch(range(end, end + 8), [0] * 8)
    refused([cache, sliding, full], lambda: cache.start_forward(batch), CacheFull)
    alone.start_forward(batch)


def test_what_one_member_cannot_remove_no_member_removes() -> None:
    cache, sliding, full = hybrid()
    forward(cache, range(8))
    forward(cache, [8])
    for begin, end in ((3, None), (6, None), (6, 9)):  # 5 to 8 are left, and a query at 6 sees 4
        refused([cache, sliding, full], lambda b=begin, e=end: cache.remove(0, b, e), NotSupported)
    cache.remove(0, 8)
    assert sliding.sequence(0).seq_len == full.sequence(0).seq_len == 8
    cache, sliding, full = hybrid(can_shift=False)
    forward(cache, range(4))
    refused([cache, sliding, full], lambda: cache.remove(0, 1, 2), NotSupported)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shift_may_use_one_array_for_all_layers(backend: str) -> None:
    """What a shift function returns is stored when all layers are turned; the array may hold the next layer by then."""
    out = to_backend(backend, np.zeros((2, 1, 4), np.float32))

    def shift(layer: int, keys: Any, offsets: Any) -> Any:
        out[:] = keys + offsets[:, None, None]
        return out

    cache = CausalCache(shift=shift)
    cache.init(backend, "f32", **SIZES)
    cache.start_forward(Batch([0, 1, 2], [0, 0, 0]))
    for layer in (0, 1):
        rows = to_backend(backend, np.full((3, 1, 4), 10 + 10 * layer, np.float32))
        cache.set_layer(layer)
        cache.put(rows, rows)
    cache.remove(0, 0, 1)
    for layer in (0, 1):
        for view in cache.sequence(0).views(layer):
            assert (to_numpy(view.keys) == 9 + 10 * layer).all()


def test_shift_is_told_the_layer_of_the_model() -> None:
    calls = []

    def shift(layer: int, keys: Any, offsets: Any) -> Any:
        calls.append(layer)
        return add_offsets(layer, keys, offsets)

    cache = HybridCache(CausalCache(Sliding(3), shift), CausalCache(Full(), shift), layer_types=LAYER_TYPES)
    cache.init("numpy", "f32", **SIZES)
    forward(cache, range(4))
    cache.remove(0, 0, 1)
    assert sorted(calls) == [0, 1, 2]
    assert forward(cache, [3])[FULL] == [(1, -1), (2, -1), (3, -1), (3, 0)]


def test_copy_prefix_and_remove_change_all_members() -> None:
    cache, sliding, full = hybrid()
    forward(cache, range(4))
    cache.copy_prefix(0, 1, 3)
    assert [m.sequence(1).seq_len for m in (cache, sliding, full)] == [3, 3, 3]
    cache.remove(1, 0)
    assert [m.sequence(1).seq_len for m in (cache, sliding, full)] == [0, 0, 0]
    assert [m.sequence(0).seq_len for m in (cache, sliding, full)] == [4, 4, 4]


@pytest.mark.parametrize("is_type_first", [True, False])
def test_layer_types_by_hand(is_type_first: bool) -> None:
    """As Ollama's models do: the layer and its type are set for each layer, in either order."""
    sliding, full = CausalCache(Sliding(2)), CausalCache()
    cache = HybridCache(sliding, full)
    cache.init("numpy", "f32", **SIZES)
    cache.start_forward(Batch(range(4), [0] * 4))
    for layer, kind in enumerate(LAYER_TYPES):
        steps = [lambda k=kind: cache.set_layer_type(k), lambda n=layer: cache.set_layer(n)]
        for step in steps if is_type_first else reversed(steps):
            step()
        assert cache.underlying_cache() is (sliding, full)[kind]
        cache.put(keys_of(layer, [0, 1, 2, 3], [0] * 4), values_of(layer, [0, 1, 2, 3]))
        assert len(open_columns(cache.get().mask, 4)[-1]) == (2, 4)[kind]
    with pytest.raises(ValueError):
        cache.set_layer_type(2)


def test_the_underlying_cache_takes_exceptions() -> None:
    cache, *_ = hybrid()
    forward(cache, range(4))
    cache.set_layer(1)
    underlying = cache.underlying_cache()
    assert isinstance(underlying, CausalCache)
    underlying.set_causal(except_=(0,))
    assert [len(c) for c in open_columns(cache.get().mask, 4)] == [4, 2, 3, 4]
    cache.set_layer(0)
    assert [len(c) for c in open_columns(cache.get().mask, 4)] == [1, 2, 3, 3]


def test_both_faces_of_a_hybrid() -> None:
    cache, sliding, full = hybrid()
    forward(cache, range(3))
    view = cache.sequence(0)
    for layer in range(3):
        appended = view.append(layer, keys_of(layer, [3, 4], [0, 0]), values_of(layer, [3, 4]))
        assert appended.start == 3 and view.seq_len == 3
        if layer < 2:
            refused([cache, sliding, full], lambda: view.commit(2))
    view.commit(2)
    assert view.seq_len == sliding.sequence(0).seq_len == full.sequence(0).seq_len == 5
    rows = [row for part in view.views(1) for row in recognise(1, part.keys, part.values)]
    assert rows == [(n, 0) for n in range(5)]
    assert forward(cache, [5])[0] == [(3, 0), (4, 0), (5, 0)]
    view.truncate(4)
    assert sliding.sequence(0).seq_len == full.sequence(0).seq_len == 4
    refused([cache, sliding, full], lambda: view.truncate(1), NotSupported)
    view.free()
    assert cache.usage().num_tokens == 0


def test_init_of_all_members_or_of_none() -> None:
    """States need no pool, so that only the second member refuses a batch larger than it."""
    cache = HybridCache(RecurrentCache(), CausalCache(), layer_types=[0, 1])
    with pytest.raises(ValueError, match="capacity"):
        cache.init("numpy", "f32", capacity=4, max_batch=64)
    cache.init("numpy", "f32", **SIZES)
    used, new = CausalCache(), CausalCache(Sliding(2))
    used.init("numpy", "f32", **SIZES)
    with pytest.raises(ValueError, match="init"):
        HybridCache(new, used).init("numpy", "f32", **SIZES)
    new.init("numpy", "f32", **SIZES)  # it was left alone


def test_init_with_a_pool_too_large_for_memory_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = HybridCache(CausalCache(Sliding(2)), CausalCache())
    with monkeypatch.context() as patch:
        patch.setattr(kvcache.caches.causal, "Tables", out_of_memory)
        with pytest.raises(MemoryError):
            cache.init("numpy", "f32", **SIZES)
    cache.init("numpy", "f32", **SIZES)


def test_states_are_put_for_all_sequences_or_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = kvcache.backends.numpy()
    cache = RecurrentCache()
    cache.init(backend, "f32", **SIZES)
    cache.set_layer(0)
    cache.start_forward(Batch([0, 0], [0, 1]))
    cache.put(np.zeros((2, 3), np.float32), None)
    copied = []

    def once(arrays: Sequence[Any], axis: int) -> Any:
        if copied:
            out_of_memory()
        copied.append(np.concatenate(arrays, axis))
        return copied[0]

    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "concatenate", lambda _, arrays, axis: once(arrays, axis))
        with pytest.raises(MemoryError):
            cache.put(np.ones((2, 3), np.float32), None)
    cache.start_forward(Batch([1, 1], [0, 1]))
    assert not cache.get().keys.any()


def test_a_cache_is_given_once() -> None:
    cache, other = CausalCache(), CausalCache(Sliding(2))
    for make in (
        lambda: HybridCache(cache, cache),
        lambda: HybridCache(HybridCache(cache), cache),
        lambda: HybridCache(HybridCache(other, cache), HybridCache(HybridCache(cache))),
    ):
        with pytest.raises(ValueError, match="the same cache twice; expected one cache per kind of layer"):
            make()
    HybridCache(HybridCache(cache), other).init("numpy", "f32", **SIZES)


@pytest.mark.parametrize("layer_types", [[2], [-1], ["full"], [1.0], 0], ids=str)
def test_layer_types_name_members(layer_types: list[Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"layer.type.* is .*; expected"):
        HybridCache(CausalCache(), CausalCache(), layer_types=layer_types)


def test_hybrid_of_attention_and_states() -> None:
    """Rewinding goes to where both can: the checkpoint."""
    attention_member, states = CausalCache(), RecurrentCache(checkpoints=4)
    cache = HybridCache(attention_member, states, layer_types=[0, 1])
    cache.init("numpy", "f32", **SIZES)
    for positions in ([0, 1, 2, 3], [4, 5]):
        cache.start_forward(Batch(positions, [0] * len(positions)))
        cache.set_layer(0)
        cache.put(keys_of(0, positions, [0] * len(positions)), values_of(0, positions))
        cache.set_layer(1)
        cache.put(np.full((1, 2), positions[-1], np.float32), None)
    assert [p for p in range(8) if cache.can_resume(0, p)] == [0, 4, 6]
    refused([cache, attention_member, states], lambda: cache.remove(0, 3), NotSupported)
    refused([cache, attention_member, states], lambda: cache.remove(0, 1, 2), NotSupported)
    refused([cache, attention_member, states], lambda: cache.sequence(0).append(0, *image(0, 1)), NotSupported)
    cache.remove(0, 5, 6)  # to the end, said in numbers
    assert attention_member.sequence(0).seq_len == states.sequence(0).seq_len == 4


def test_only_states_take_the_others_back() -> None:
    cache = HybridCache(CausalCache(Chunked(4)), CausalCache(), layer_types=[0, 1])
    cache.init("numpy", "f32", **SIZES)
    for position in range(10):
        cache.start_forward(Batch([position], [0]))
        for layer in range(2):
            cache.set_layer(layer)
            cache.put(keys_of(layer, [position], [0]), values_of(layer, [position]))
    refused(cache.members, lambda: cache.remove(0, 6), NotSupported)
    refused(cache.members, lambda: cache.sequence(0).truncate(6), NotSupported)
    cache.remove(0, 8)
    assert cache.sequence(0).seq_len == 8


def test_tokens_appended_beside_media() -> None:
    cache = HybridCache(CausalCache(), EncoderCache(), layer_types=[0, 1])
    cache.init("numpy", "f32", **SIZES)
    cache.start_forward(Batch([0, 1], [0, 0], media=[Media(1, "cat")]))
    for layer in range(2):
        cache.set_layer(layer)
        cache.put(*image(0, 2))
    cache.sequence(0).append(0, *image(2, 3))
    cache.sequence(0).commit(2)
    assert [member.sequence(0).seq_len for member in cache.members] == [4, 4]
    assert cache.usage().sequences[0].num_tokens == cache.usage().num_tokens == 4
    cache.start_forward(Batch([4], [0]))
    cache.check()


def test_committed_positions_are_bounded() -> None:
    cache = EncoderCache()
    cache.init("numpy", "f32", **SIZES)
    cache.start_forward(Batch([2**31 - 3], [0]))
    view = cache.sequence(0)
    with pytest.raises(ValueError, match="sequence 0 ends at 2147483646 and 2 more tokens reach position 2147483647"):
        view.commit(2)
    assert view.seq_len == 2**31 - 2
    view.commit(1)
    with pytest.raises(ValueError, match="expected at most 2147483646"):
        view.commit(1)
    assert view.seq_len == 2**31 - 1


def test_a_configuration_for_all_members_or_for_none() -> None:
    first, second = EncoderCache(), CausalCache()
    second.set_config(CacheConfig(padding=2))
    cache = HybridCache(first, second)
    with pytest.raises(ValueError, match="twice"):
        cache.set_config(CacheConfig(padding=8))
    first.set_config(CacheConfig(padding=4))  # nothing was kept


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("dtype", "value_dim", "is_alike"),
    [("f32", 32, True), ("q8_0", 32, True), (("q8_0", "f16"), 32, False), ("f32", 64, False)],
)
def test_the_values_of_a_block_lie_behind_its_keys_where_rows_are_alike(
    backend: str, dtype: Any, value_dim: int, is_alike: bool
) -> None:
    cache = CausalCache(block_size=16)
    cache.init(backend, dtype, capacity=64)
    cache.start_forward(Batch([0], [0]))
    cache.set_layer(0)
    cache.put(*(to_backend(backend, np.ones((1, 2, dim), np.float32)) for dim in (32, value_dim)))
    layer = cache.storage.layer(0)
    begins = [np.asarray(part.array).ctypes.data for part in (layer.keys, layer.values)]
    assert (begins[1] - begins[0] == layer.keys.array[0].nbytes) is is_alike


@pytest.mark.parametrize("make", [CausalCache, EncoderCache, RecurrentCache, lambda: HybridCache(CausalCache())])
def test_nothing_works_on_a_closed_cache(make: Callable[[], Any]) -> None:
    cache = make()
    cache.init("numpy", "f32", **SIZES)
    cache.close()
    calls: list[Callable[[], object]] = [
        lambda: cache.set_layer(0),
        lambda: cache.resume_point(0, 0),
        lambda: cache.can_resume(0, 0),
        lambda: cache.remove(0, 0),
        lambda: cache.copy_prefix(0, 1, 1),
        lambda: cache.sequence(0),
        cache.usage,
        cache.check,
        cache.get,
    ]
    if isinstance(cache, HybridCache):
        calls += [lambda: cache.set_layer_type(0), cache.underlying_cache]
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()
    cache.close()


# --- encoder ----------------------------------------------------------------------------------------------------------


def encoder(backend: str = "numpy", dtype: Any = "f32") -> EncoderCache:
    cache = EncoderCache()
    cache.init(backend, dtype, **SIZES)
    cache.set_layer(0)
    return cache


def image(first: int, count: int) -> tuple[Any, Any]:
    uids = list(range(first, first + count))
    return keys_of(0, uids, [0] * count), values_of(0, uids)


def show(cache: EncoderCache, position: int, sequence: int, key: str, first: int, count: int) -> None:
    """One token with one medium of `count` rows numbered from `first`."""
    cache.start_forward(Batch([position], [sequence], [Media(0, key)]))
    cache.put(*image(first, count))


def rows_of(cache: EncoderCache, *sequences: int) -> list[list[int]]:
    """What one more token of each sequence sees; the pass has no media of its own."""
    ends = [cache.sequence(s).seq_len for s in sequences]
    cache.start_forward(Batch(ends, sequences))
    history = cache.get()
    rows = recognise(0, history.keys, history.values)
    if len(sequences) == 1:
        assert history.mask is None
        return [[uid for uid, _ in rows]]
    return [sorted(rows[c][0] for c in columns) for columns in open_columns(history.mask, len(sequences))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(7,), (5, 3), (4, 2, 6), (3, 2, 2, 5)], ids=str)
def test_media_of_any_shape_come_back_as_stored(backend: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    cache = encoder(backend)
    keys = rng.standard_normal(shape).astype(np.float32)
    values = rng.standard_normal((shape[0] + 2, *shape)).astype(np.float32)
    cache.start_forward(Batch([0, 1], [7, 7], [Media(1, "cat")]))
    assert not cache.encoder_cached(7)
    cache.put(to_backend(backend, keys), to_backend(backend, values))
    assert cache.encoder_cached(7) and not cache.encoder_cached(8)
    for _ in range(2):
        history = cache.get()
        np.testing.assert_array_equal(to_numpy(history.keys), keys)
        np.testing.assert_array_equal(to_numpy(history.values), values)
        assert history.mask is None
        cache.start_forward(Batch([2], [7]))


def test_several_sequences_are_kept_apart() -> None:
    cache = encoder()
    show(cache, 0, 3, "cat", 0, 4)
    show(cache, 0, 5, "dog", 10, 2)
    assert rows_of(cache, 3) == [[0, 1, 2, 3]]
    assert rows_of(cache, 3, 5) == [[0, 1, 2, 3], [10, 11]]
    assert rows_of(cache, 5, 3) == [[10, 11], [0, 1, 2, 3]]


def test_a_query_sees_all_images_of_its_sequence() -> None:
    cache = encoder()
    show(cache, 0, 3, "cat", 0, 2)
    show(cache, 1, 3, "dog", 10, 3)
    assert rows_of(cache, 3) == [[0, 1, 10, 11, 12]]


def test_one_put_carries_several_media() -> None:
    cache = encoder()
    media = [Media(1, "cat", 2), Media(2, "dog", 3), Media(3, "cow", 1)]
    cache.start_forward(Batch([0, 1, 2, 0], [3, 3, 3, 5], media))
    cache.put(*image(0, 6))
    assert rows_of(cache, 3, 5) == [[0, 1, 2, 3, 4], [5]]


def test_media_that_cannot_be_told_apart() -> None:
    cache = encoder()

    def guess() -> None:
        cache.start_forward(Batch([0, 1], [3, 3], [Media(0, "cat"), Media(1, "dog")]))
        cache.put(*image(0, 5))

    with pytest.raises(ValueError, match="num_tokens"):
        guess()
    cache.start_forward(Batch([0, 1], [3, 3], [Media(0, "cat", 2), Media(1, "dog", 3)]))
    with pytest.raises(ValueError):
        cache.put(*image(0, 4))
    cache.put(*image(0, 5))


def test_remove_forgets_media_inside_and_moves_later_ones() -> None:
    cache = encoder()
    for position, (key, first) in enumerate([("cat", 0), ("dog", 10), ("cow", 20)]):
        show(cache, position, 3, key, first, 2)
    cache.copy_prefix(3, 4, 2)
    cache.remove(3, 1, 2)
    assert cache.sequence(3).seq_len == 2
    assert rows_of(cache, 3) == [[0, 1, 20, 21]]
    cache.remove(3, 1, 2)  # the cow stands at 1 now
    assert rows_of(cache, 3) == [[0, 1]]
    assert rows_of(cache, 4) == [[0, 1, 10, 11]]


def test_media_that_were_announced_and_not_put_are_missing() -> None:
    cache = encoder()
    show(cache, 0, 3, "cat", 0, 2)
    cache.start_forward(Batch([1, 2, 3], [3] * 3, [Media(1, "dog")]))  # at position 2, and never put
    assert [cache.can_resume(3, p) for p in range(6)] == [True, True, True, False, False, False]
    assert not cache.encoder_cached(3)


def test_media_that_only_some_layers_have_are_missing() -> None:
    """A model that died between two layers: the later one would not see the dog, and say nothing."""
    cache = encoder()
    show(cache, 0, 3, "cat", 0, 2)
    assert cache.encoder_cached(3)  # no other layer is known of
    cache.set_layer(4)
    cache.put(*image(0, 2))
    assert cache.encoder_cached(3)
    cache.set_layer(0)
    show(cache, 1, 3, "dog", 10, 3)
    assert not cache.encoder_cached(3)
    assert [cache.can_resume(3, p) for p in range(3)] == [True, True, False]
    assert cache.resume_point(3, 2) == 1
    cache.publish(3)
    assert "cat" in cache.published and "dog" not in cache.published
    cache.set_layer(4)
    cache.put(*image(10, 3))
    assert cache.encoder_cached(3) and cache.can_resume(3, 2)


def test_a_reserved_put_makes_no_medium_missing() -> None:
    cache = encoder()
    show(cache, 0, 3, "cat", 0, 2)
    cache.start_forward(Batch([1, 2], [3, 3], [Media(0, "dog", 2), Media(1, "cow", 1)]), reserve=True)
    cache.set_layer(1)
    cache.put(*image(10, 3))
    assert len(cache.get().keys) == 3
    assert cache.encoder_cached(3) and cache.can_resume(3, 1)


def test_media_are_shared_by_reference() -> None:
    cache = encoder()
    show(cache, 0, 3, "cat", 0, 4)
    size = cache.usage().num_bytes
    ours = cache.get()
    cache.copy_prefix(3, 4, 1)
    cache.start_forward(Batch([1], [4]))
    assert np.shares_memory(ours.keys, cache.get().keys)
    assert cache.usage().num_bytes == size


@pytest.mark.parametrize(("dtype", "bits"), [("f32", 32), ("f16", 16), ("q8_0", 8.5)])
def test_media_are_stored_in_the_format(dtype: str, bits: float, rng: np.random.Generator) -> None:
    cache = encoder(dtype=dtype)
    rows = rng.standard_normal((6, 2, 32)).astype(np.float32)
    cache.start_forward(Batch([0], [3], [Media(0, "cat")]))
    cache.put(rows, rows)
    assert np.abs(to_numpy(cache.get().keys) - rows).max() < 0.02
    assert cache.usage().num_bytes == 2 * rows.size * bits / 8


def test_cross_attention(rng: np.random.Generator) -> None:
    cache = encoder()
    show(cache, 0, 3, "cat", 0, 4)
    show(cache, 0, 5, "dog", 10, 2)
    cache.start_forward(Batch([1, 1, 2], [5, 3, 5]))
    queries = rng.standard_normal((3, 4, 4)).astype(np.float32)
    expected = attention(queries, [image(10, 2), image(0, 4), image(10, 2)], 0.5)
    np.testing.assert_allclose(cache.attend(queries, scale=0.5), expected, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [CausalCache, EncoderCache])
def test_sinks_are_taken_as_queries_are(make: Callable[[], Any], backend: str, rng: np.random.Generator) -> None:
    cache = make()
    cache.init(backend, "f32", **SIZES)
    cache.set_layer(0)
    cache.start_forward(Batch([0], [0], [Media(0, "cat", 1)]))
    cache.put(*image(0, 1))
    queries, sinks = rng.standard_normal((1, 4, 4)).astype(np.float32), np.linspace(-1, 2, 4, dtype=np.float32)
    own = to_numpy(cache.attend(to_backend(backend, queries), sinks=to_backend(backend, sinks)))
    for foreign in (sinks, sinks.tolist()):
        np.testing.assert_array_equal(to_numpy(cache.attend(queries.tolist(), sinks=foreign)), own)
    for wrong in ("sinks", 1.0, [True] * 4, sinks[:3]):
        with pytest.raises((TypeError, ValueError), match=r"sinks .*expected"):
            cache.attend(queries, sinks=wrong)


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_media_in_the_configured_layout(num_sequences: int) -> None:
    cache = EncoderCache()
    cache.set_config(CacheConfig(permuted_values=True, padding=8))
    cache.init("numpy", "f32", **SIZES)
    cache.set_layer(0)
    for sequence in range(num_sequences):
        show(cache, 0, sequence, "cat", 3 * sequence, 3)
    cache.start_forward(Batch([1] * num_sequences, list(range(num_sequences))))
    keys, values, mask = cache.get()
    count = 3 if num_sequences == 1 else 8  # without a mask nothing is padded
    assert keys.shape[0] == values.shape[2] == count
    if mask is not None:
        assert mask.shape == (2, 8)
        assert [np.flatnonzero(row == 0).tolist() for row in mask] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("num_queries", [1, 3])
def test_queries_of_another_batch(num_queries: int) -> None:
    cache = encoder()
    show(cache, 0, 0, "cat", 0, 3)
    cache.start_forward(Batch([1, 2], [0, 0]))
    with pytest.raises(ValueError, match="queries are"):
        cache.attend(np.ones((num_queries, 2, 4), np.float32))


def test_media_whose_keys_and_values_do_not_match() -> None:
    cache = encoder()
    cache.start_forward(Batch([0], [0], media=[Media(0, "cat")]))
    cache.put(image(0, 5)[0], image(0, 3)[1])
    with pytest.raises(ValueError, match="as many rows"):
        cache.attend(np.ones((1, 2, 4), np.float32))


def test_media_of_unequal_rows_are_read_alone() -> None:
    """No mask fits keys and values of different lengths."""
    cache = encoder()
    keys, values = image(0, 5)[0], image(0, 3)[1]
    cache.start_forward(Batch([0, 0], [0, 1], media=[Media(0, "cat")]))
    refused([cache], lambda: cache.put(keys, values))
    cache.start_forward(Batch([0], [0], media=[Media(0, "cat")]))
    cache.put(keys, values)
    assert [len(rows) for rows in cache.get()[:2]] == [5, 3]
    cache.start_forward(Batch([1, 1], [0, 1]))
    refused([cache], cache.get, NotSupported)


def test_equal_media_at_one_place_are_two() -> None:
    cache = encoder()
    for _ in range(2):
        cache.start_forward(Batch([0], [3], [Media(0, "cat", 2), Media(0, "cat", 1)]))
        cache.put(*image(0, 3))
        assert rows_of(cache, 3) == [[0, 1, 2]]


# --- states -----------------------------------------------------------------------------------------------------------


def states(checkpoints: Any = (), backend: str = "numpy") -> RecurrentCache:
    cache = RecurrentCache(checkpoints=checkpoints)
    cache.init(backend, "f32", **SIZES)
    cache.set_layer(0)
    return cache


def pass_states(cache: RecurrentCache, positions: Sequence[int], sequences: Sequence[int], values: list[float]) -> Any:
    """A pass that leaves one state per sequence, all of one number; returns the states before it."""
    cache.start_forward(Batch(positions, sequences))
    before = cache.get()
    rows = np.asarray(values, np.float32)
    cache.put(np.tile(rows[:, None], (1, 3)), np.tile(rows[:, None, None], (1, 2, 2)) * 10)
    return before


def live(cache: RecurrentCache, sequence: int) -> float:
    """The number of the state from which the sequence goes on."""
    cache.start_forward(Batch([cache.sequence(sequence).seq_len], [sequence]))
    conv, recurrent, mask = cache.get()
    assert mask is None and conv.shape == (1, 3) and recurrent.shape == (1, 2, 2)
    assert (conv == conv[0, 0]).all() and (recurrent == conv[0, 0] * 10).all()
    cache.put(conv, recurrent)
    return float(conv[0, 0])


def test_states_come_in_the_order_of_the_batch() -> None:
    cache = states()
    assert pass_states(cache, [0, 0, 1, 0], [7, 3, 7, 5], [7, 3, 5])[:2] == (None, None)
    before = pass_states(cache, [1, 2, 1, 3], [5, 7, 3, 7], [50, 70, 30])
    np.testing.assert_array_equal(before.conv if hasattr(before, "conv") else before[0], [[5] * 3, [7] * 3, [3] * 3])
    assert (before[1][:, 0, 0] == [50, 70, 30]).all()
    assert [live(cache, s) for s in (3, 5, 7)] == [30, 50, 70]
    cache.check()


@pytest.mark.parametrize(("checkpoints", "expected"), [((), []), (4, [4, 8]), ([2, 8], [2, 8]), ({6}, [6])], ids=str)
def test_checkpoints_are_taken_where_a_pass_ends(checkpoints: Any, expected: list[int]) -> None:
    cache = states(checkpoints)
    for end in (2, 4, 6, 8, 9):  # nothing ends at 1, 3, 5, 7
        begin = cache.sequence(0).seq_len
        pass_states(cache, range(begin, end), [0] * (end - begin), [end])
    assert [p for p in range(12) if cache.can_resume(0, p)] == sorted({0, *expected, 9})


def test_remove_restores_the_nearest_checkpoint() -> None:
    cache = states(4)
    for end in (4, 8, 9):
        begin = cache.sequence(0).seq_len
        pass_states(cache, range(begin, end), [0] * (end - begin), [end])
    cache.copy_prefix(0, 1, 9)
    cache.remove(0, 8)
    assert live(cache, 0) == 8
    cache.remove(0, 6)
    assert cache.sequence(0).seq_len == 4 and live(cache, 0) == 4
    cache.check()
    refused([cache], lambda: cache.remove(0, 3), NotSupported)
    refused([cache], lambda: cache.remove(0, 1, 2), NotSupported)
    refused([cache], lambda: cache.remove(0, 0, 2), NotSupported)
    cache.remove(0, 0)
    assert not cache.can_resume(0, 4)
    assert live(cache, 1) == 9


def test_states_of_a_copy_are_its_own() -> None:
    cache = states(2)
    pass_states(cache, [0, 1], [0, 0], [2])
    pass_states(cache, [2], [0], [3])
    size = cache.usage().num_bytes
    cache.copy_prefix(0, 1, 2)
    assert cache.usage().num_bytes == size
    pass_states(cache, [2], [1], [33])
    assert live(cache, 0) == 3 and live(cache, 1) == 33
    assert cache.can_resume(1, 2) and cache.can_resume(0, 2)


@pytest.mark.parametrize("checkpoints", [0, -1, [0], [-2], 1.5, ["a"]], ids=str)
def test_checkpoints_are_positions(checkpoints: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        RecurrentCache(checkpoints=checkpoints)


def test_chunks_and_states_know_their_own_faces() -> None:
    """A sequence of states has a length but no tokens to show."""
    cache = states()
    pass_states(cache, [0, 1], [0, 0], [2])
    view = cache.sequence(0)
    assert view.seq_len == 2
    with pytest.raises(NotSupported):
        view.append(0, np.zeros((1, 2, 2), np.float32), np.zeros((1, 2, 2), np.float32))
    with pytest.raises(NotSupported):
        view.views(0)
    mixed = HybridCache(CausalCache(Chunked(4)), states_of_two_layers := RecurrentCache(), layer_types=[0, 1])
    mixed.init("numpy", "f32", **SIZES)
    with pytest.raises(NotSupported):
        mixed.sequence(0).views(1)
    assert states_of_two_layers.usage().num_tokens == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_states_stay_as_they_were_put(backend: str, num_sequences: int) -> None:
    """Models change in place what they put, and what they were given."""
    cache = states(2, backend)
    own = to_backend(backend, np.zeros((num_sequences, 3)))
    for position in range(4):
        cache.start_forward(Batch([position] * num_sequences, range(num_sequences)))
        given = cache.get().keys
        own += 1
        cache.put(own, own)
        if given is not None:
            given += 100
    cache.copy_prefix(0, 5, 4)
    own += 1
    for sequence, end in ((5, 4), (0, 2)):
        cache.remove(sequence, end)
        cache.start_forward(Batch([end], [sequence]))
        assert all((to_numpy(array) == end).all() for array in cache.get()[:2])


def test_the_first_states_of_a_layer_fix_their_shape() -> None:
    cache = states()
    pass_states(cache, [0], [0], [1])
    conv, recurrent = np.zeros((1, 3), np.float32), np.zeros((1, 2, 2), np.float32)
    cache.start_forward(Batch([0], [1]))
    for wrong in ((conv[:, :2], recurrent), (conv, recurrent[:, :1]), (conv, conv), (recurrent, None)):
        refused([cache], lambda: cache.put(*wrong))  # noqa: B023  called at once
    cache.set_layer(1)
    cache.put(recurrent, conv)
    cache.set_layer(0)
    cache.put(None, recurrent)
    cache.start_forward(Batch([1, 1], [0, 1]))
    assert cache.get().keys.shape == (2, 3)
