"""What causal caches claim beyond what a query sees: shapes refused, room, copies not made, memory, places, formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

import kvcache.backends
from arrays import BACKENDS, add_offsets, to_backend, to_numpy
from kvcache import Batch, CacheConfig, CausalCache, Chunked, Full, Media, Sliding
from kvcache.errors import CacheFull, NotSupported

H, D, DV = 2, 4, 6


def made(span: Any = None, *, block_size: int = 1, dtype: Any = "f32", backend: Any = "numpy", **sizes: int) -> Any:
    cache = CausalCache(Full() if span is None else span, block_size=block_size)
    cache.init(backend, dtype, **{"capacity": 16, **sizes})
    return cache


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def forward(cache: CausalCache, positions: Iterable[int], sequences: Iterable[int] | int = 0, layer: int = 0) -> Any:
    positions = list(positions)
    rows = [sequences] * len(positions) if isinstance(sequences, int) else list(sequences)
    cache.start_forward(Batch(positions, rows))
    cache.set_layer(layer)
    cache.put(numbers(len(positions), H, D, seed=positions[0]), numbers(len(positions), H, DV, seed=positions[0] + 1))
    return cache.get()


def state(cache: CausalCache) -> list[Any]:
    parts = [part for s in range(4) for part in cache.sequence(s).views(0)]
    return [repr(cache.usage()), [(p.start, p.keys.tobytes(), p.values.tobytes()) for p in parts]]


def refused(cache: CausalCache, operation: Callable[[], object], *errors: type[Exception]) -> Exception:
    before = state(cache)
    with pytest.raises(errors or ValueError) as raised:
        operation()
    assert state(cache) == before
    cache.check()
    return raised.value


# --- puts and appends that are refused --------------------------------------------------------------------------------

WRONG_SHAPES = [
    ((2, H, D), (2, H + 1, DV)),
    ((2, H + 1, D), (2, H, DV)),
    ((2, H, D), (3, H, DV)),
    ((3, H, D), (3, H, DV)),
    ((1, H, D), (1, H, DV)),
    ((2, H * D), (2, H * DV)),
    ((1, 2, H, D), (1, 2, H, DV)),
    ((2, H, 0), (2, H, DV)),
    ((2, 0, D), (2, 0, DV)),
]


@pytest.mark.parametrize(("keys", "values"), WRONG_SHAPES, ids=str)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_put_of_the_wrong_shape(keys: tuple[int, ...], values: tuple[int, ...], is_first: bool) -> None:
    cache = made()
    if not is_first:
        forward(cache, [0, 1], 1)
    cache.start_forward(Batch([0, 1], [0, 0]))
    cache.set_layer(0)
    before = cache.usage()
    with pytest.raises(ValueError):
        cache.put(numbers(*keys), numbers(*values))
    assert cache.usage() == before
    cache.put(numbers(2, H, D), numbers(2, H, DV))
    assert cache.get().keys.shape[1:] == (H, D)


@pytest.mark.parametrize(
    ("keys", "values"),
    [((2, H, D + 1), (2, H, DV)), ((2, H, D), (2, H, DV - 1)), ((2, 1, D), (2, 1, DV)), ((2, 4, D), (2, 4, DV))],
    ids=str,
)
def test_the_first_put_of_a_layer_fixes_heads_and_sizes(keys: tuple[int, ...], values: tuple[int, ...]) -> None:
    cache = made()
    forward(cache, [0, 1])
    cache.start_forward(Batch([2, 3], [0, 0]))
    refused(cache, lambda: cache.put(numbers(*keys), numbers(*values)))
    refused(cache, lambda: cache.sequence(1).append(0, numbers(*keys), numbers(*values)))
    cache.start_forward(Batch([2, 3], [1, 1]))
    cache.set_layer(1)
    cache.put(numbers(*keys), numbers(*values))  # another layer may differ


def test_elements_must_be_floating() -> None:
    cache = made()
    forward(cache, [0])
    cache.start_forward(Batch([1], [0]))
    refused(cache, lambda: cache.put(np.array([[["a"] * D] * H]), numbers(1, H, DV)), TypeError, ValueError)


@pytest.mark.parametrize("keys", [None, 5, 5.0, "keys"])
def test_what_is_appended_is_named_when_it_is_no_array(keys: Any) -> None:
    cache = made()
    forward(cache, [0])
    error = refused(cache, lambda: cache.sequence(0).append(0, keys, keys), TypeError, ValueError)
    assert "keys" in str(error) and "expected" in str(error)


@pytest.mark.parametrize("what", ["zeros", "cast"])  # the layer's tensors, and rows in the layer's element type
def test_a_layer_that_memory_has_no_room_for(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def out_of_memory(*_: object) -> Any:
        raise MemoryError

    backend = kvcache.backends.numpy()
    cache = made(backend=backend, dtype="f16")
    with monkeypatch.context() as patch:
        patch.setattr(type(backend), what, out_of_memory)
        before = repr(cache.usage())
        with pytest.raises(MemoryError):
            cache.sequence(0).append(0, numbers(2, H, D), numbers(2, H, DV))
        assert repr(cache.usage()) == before
        cache.start_forward(Batch([0], [0]))
        cache.set_layer(0)
        before = repr(cache.usage())
        with pytest.raises(MemoryError):
            cache.put(numbers(1, H, D), numbers(1, H, DV))
        assert repr(cache.usage()) == before
        with pytest.raises(ValueError, match="holds nothing yet"):
            cache.sequence(0).packed_views(0)
    cache.put(numbers(1, H + 1, D), numbers(1, H + 1, DV))  # the layer takes what is put first
    assert cache.get().keys.shape == (1, H + 1, D)


def test_an_append_that_cannot_show_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = made(dtype="q8_0")
    view, rows = cache.sequence(0), numbers(2, 1, 32)
    view.append(0, rows, rows)
    view.commit(2)
    with monkeypatch.context() as patch:
        patch.setattr(type(view), "_views", lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                view.append(0, rows, rows)
    with pytest.raises(ValueError, match="has 0 appended tokens"):
        view.commit(2)
    view.commit(0)
    cache.start_forward(Batch([2], [0]))
    assert cache.usage().sequences[0].num_blocks == 3
    cache.check()


def test_a_reserve_beside_appended_tokens() -> None:
    cache = made()
    forward(cache, [0])
    view = cache.sequence(0)
    view.append(0, numbers(2, H, D), numbers(2, H, DV))
    cache.start_forward(Batch([0], [0]), reserve=True)
    view.commit(2)
    assert view.seq_len == 3
    cache.check()


def test_appends_that_are_refused() -> None:
    cache = made()
    forward(cache, [0, 1])
    view = cache.sequence(0)
    refused(cache, lambda: view.append(0, numbers(0, H, D), numbers(0, H, DV)))
    refused(cache, lambda: view.append(0, numbers(2, H, D), numbers(3, H, DV)))
    refused(cache, lambda: view.append(-1, numbers(2, H, D), numbers(2, H, DV)))
    refused(cache, lambda: view.commit(1))
    refused(cache, lambda: view.commit(-1))
    refused(cache, lambda: view.truncate(-1))
    refused(cache, lambda: view.truncate(3))


def test_commit_needs_every_layer() -> None:
    cache = made()
    view = cache.sequence(0)
    for layer in (0, 1):
        view.append(layer, numbers(1, H, D), numbers(1, H, DV))
    view.commit(1)
    view.append(0, numbers(2, H, D), numbers(2, H, DV))
    refused(cache, lambda: view.commit(1))
    view.append(1, numbers(1, H, D), numbers(1, H, DV))
    refused(cache, lambda: view.commit(2))
    refused(cache, lambda: cache.start_forward(Batch([1], [0])))
    view.commit(1)
    assert view.seq_len == 2
    forward(cache, [2])


@pytest.mark.parametrize("rows", [(5,), (-1,), (0, 9), ("a",), (1.5,)], ids=str)
def test_excepted_rows_are_rows_of_the_batch(rows: tuple[Any, ...]) -> None:
    cache = made()
    before = forward(cache, [0, 1, 2]).mask
    with pytest.raises((ValueError, TypeError)):
        cache.set_causal(except_=rows)
    np.testing.assert_array_equal(cache.get().mask, before)


@pytest.mark.parametrize("num_blocks", [0, -3, True, 2.5, "8"], ids=str)
def test_blocks_are_counted(num_blocks: Any) -> None:
    cache = CausalCache()
    with pytest.raises((ValueError, TypeError), match=f"num_blocks is {num_blocks!r}.*; expected"):
        cache.init("numpy", "f32", capacity=16, num_blocks=num_blocks)
    cache.init("numpy", "f32", capacity=16, num_blocks=np.int64(8))
    assert cache.usage().num_blocks == 8


@pytest.mark.parametrize(
    "arguments", [{"block_size": 0}, {"block_size": 1.5}, {"span": "full"}, {"span": Full}, {"shift": 3}], ids=str
)
def test_constructor_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        CausalCache(**arguments)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint64, np.array], ids=lambda kind: kind.__name__)
def test_sizes_of_other_integers_are_kept_as_python_has_them(kind: Callable[[int], Any]) -> None:
    """A window of uint8 wraps around at 256, and hides what it should show."""
    values = [
        *(Sliding(kind(100)).window, Sliding(5, kind(100)).memory, Chunked(kind(100)).size),
        *(CacheConfig(padding=kind(100)).padding, Media(kind(100), "a").index, Media(0, "a", kind(100)).num_tokens),
        *(Batch([kind(100)], [0]).positions[0], Batch([0], [kind(100)]).sequences[0]),
    ]
    assert [(type(value), value) for value in values] == [(int, 100)] * len(values)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint64, np.array], ids=lambda kind: kind.__name__)
def test_other_integers_in_ranges_and_views(kind: Callable[[int], Any]) -> None:
    def answers(n: Callable[[int], Any]) -> list[Any]:
        cache = CausalCache(shift=add_offsets)
        cache.init("numpy", "f32", capacity=16)
        forward(cache, range(6))
        cache.remove(n(0), n(1), n(3))
        view = cache.sequence(0)
        appended = view.append(n(0), numbers(3, H, D), numbers(3, H, DV))
        view.commit(n(2))
        views = [appended.views, view.views(n(0)), view.packed_views(n(0)), [view.contiguous_kv(n(0), n(1))]]
        return [*state(cache), [(part.keys.tobytes(), part.values.tobytes()) for parts in views for part in parts]]

    assert answers(kind) == answers(int)


@pytest.mark.parametrize(
    ("span", "sizes"),
    [(Sliding, (5, 4)), (Sliding, (0,)), (Chunked, (0,)), (Chunked, (-1,)), (Sliding, (2**63,)), (Chunked, (2**64,))],
)
def test_spans_that_make_no_sense(span: Any, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        span(*sizes)


@pytest.mark.parametrize(
    "config", [{"padding": 0}, {"mask_dtype": "f64"}, {"padding": -2}, {"permuted_values": "no"}], ids=str
)
def test_configurations_that_make_no_sense(config: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"CacheConfig.* is .*; expected"):
        CacheConfig(**config)


def test_permuted_values() -> None:
    plain, permuted = made(), CausalCache()
    permuted.set_config(CacheConfig(permuted_values=True))
    permuted.init("numpy", "f32", capacity=16)
    keys, values, mask = forward(plain, [0, 1, 2])
    other = forward(permuted, [0, 1, 2])
    assert other.values.shape == (H, DV, mask.shape[1])
    np.testing.assert_array_equal(other.values, values.transpose(1, 2, 0))
    np.testing.assert_array_equal(other.keys, keys)


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash", "", "sdpa"])
def test_unknown_and_unfit_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """`sdpa` reads torch arrays; on NumPy it cannot be had, and saying so beats another result."""
    cache = made()
    forward(cache, [0, 1])
    queries = numbers(2, 2 * H, D)
    expected = cache.attend(queries)
    monkeypatch.setenv("KVCACHE_KERNEL", name)
    if name:
        refused(cache, lambda: cache.attend(queries))
    monkeypatch.setenv("KVCACHE_KERNEL", "reference")
    np.testing.assert_array_equal(cache.attend(queries), expected)


@pytest.mark.parametrize("shape", [(3, 4, D), (2, 3, D), (2, 4, D + 1), (2, 4 * D), (2, 0, D)], ids=str)
def test_queries_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    cache = made()
    forward(cache, [0, 1])
    refused(cache, lambda: cache.attend(numbers(*shape)))


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("wrong", ["x", True, math.nan, math.inf, [1.0]], ids=str)
def test_scales_and_softcaps_are_numbers(name: str, wrong: Any) -> None:
    cache = made()
    forward(cache, [0, 1])
    given: dict[str, Any] = {name: wrong}
    assert f"{name} is {wrong!r}" in str(
        refused(cache, lambda: cache.attend(numbers(2, 4, D), **given), ValueError, TypeError)
    )
    other: dict[str, Any] = {name: np.float32(0.5)}
    np.testing.assert_array_equal(
        cache.attend(numbers(2, 4, D), **other), cache.attend(numbers(2, 4, D), **{name: 0.5})
    )


# --- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "capacity"), [(1, 6), (4, 6), (16, 16)])
def test_cache_full_carries_numbers_and_changes_nothing(block_size: int, capacity: int) -> None:
    cache = made(block_size=block_size, capacity=capacity, max_batch=4)
    sequence = position = 0
    full = None
    while full is None:
        try:
            forward(cache, range(position, position + 4), sequence)
            position += 4
            sequence, position = (sequence + 1, 0) if position == 12 else (sequence, position)
        except CacheFull as error:
            full = error
    assert 0 <= full.free < full.needed <= max(4, 2 * block_size)
    assert str(full.needed) in str(full) and str(full.free) in str(full)
    if block_size == 1:
        assert (full.needed, full.free) == (4, 2)
    again = refused(cache, lambda: cache.start_forward(Batch(range(position, position + 4), [sequence] * 4)), CacheFull)
    assert isinstance(again, CacheFull) and (again.needed, again.free) == (full.needed, full.free)
    assert cache.sequence(sequence).seq_len == position
    cache.remove(0, 0)
    forward(cache, range(position, position + 4), sequence)


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_full_holds_what_it_promises(block_size: int, num_sequences: int) -> None:
    """`max_sequences` sequences of `capacity` tokens fit, in any order of arrival."""
    cache = made(block_size=block_size, max_sequences=num_sequences, capacity=24, max_batch=6)
    rng = np.random.default_rng(block_size)
    ends = dict.fromkeys(range(num_sequences), 0)
    while growing := [s for s, end in ends.items() if end < 24]:
        sequence = int(rng.choice(growing))
        count = min(1 + int(rng.integers(6)), 24 - ends[sequence])
        forward(cache, range(ends[sequence], ends[sequence] + count), sequence)
        ends[sequence] += count
    cache.check()


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("span", [Sliding(1), Sliding(4), Sliding(5, memory=8), Chunked(4), Chunked(7)], ids=str)
def test_forgetting_spans_never_fill_their_pool(span: Any, block_size: int) -> None:
    """`max_sequences` sequences: one prefills in batches, or all decode, for ever."""
    cache = made(span, block_size=block_size, max_sequences=3, capacity=4096, max_batch=5)
    rng = np.random.default_rng(block_size)
    ends = [0, 0, 0]
    for _ in range(150):
        if rng.random() < 0.5:
            sequence, count = int(rng.integers(3)), 1 + int(rng.integers(5))
            forward(cache, range(ends[sequence], ends[sequence] + count), sequence)
            ends[sequence] += count
        else:
            forward(cache, ends, range(3))
            ends = [end + 1 for end in ends]
    cache.check()


def blocks_of_section_4(retained: int, block_size: int, max_sequences: int, max_batch: int) -> int:
    if block_size == 1:
        return max_sequences * retained + max_batch
    return max_sequences * (math.ceil(retained / block_size) + 1) + math.ceil(max_batch / block_size)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize(("span", "retained"), [(Sliding(32), 32), (Sliding(20, memory=40), 40), (Chunked(24), 24)])
def test_memory_does_not_grow_with_length(span: Any, retained: int, block_size: int) -> None:
    """Ten thousand tokens in steps of ten."""
    cache = made(span, block_size=block_size, capacity=100_000, max_batch=10)
    limit = blocks_of_section_4(retained, block_size, 1, 10)
    assert cache.usage().num_blocks == limit
    sizes = set()
    for first in range(0, 10_000, 10):
        cache.start_forward(Batch(range(first, first + 10), [0] * 10))
        cache.set_layer(0)
        cache.put(numbers(10, H, D), numbers(10, H, DV))
        usage = cache.usage()
        sizes.add(usage.num_bytes)
        assert usage.num_blocks - usage.num_free_blocks <= limit
        assert usage.num_tokens <= retained + 10 + block_size
    assert len(sizes) == 1 and cache.sequence(0).seq_len == 10_000
    assert cache.get().keys.shape[0] <= limit * block_size


@pytest.mark.parametrize("block_size", [1, 16])
def test_resting_sequences_forget_too(block_size: int) -> None:
    """A long batch of one sequence is given back when another goes on."""
    cache = made(Sliding(4), block_size=block_size, max_sequences=2, capacity=400, max_batch=40)
    forward(cache, range(40), 0)
    forward(cache, range(3), 1)
    assert cache.usage().sequences[0].num_tokens <= 4 + block_size
    assert cache.sequence(0).seq_len == 40 and cache.can_resume(0, 40)


def test_the_end_outlives_the_tokens() -> None:
    cache = made(Chunked(4))
    forward(cache, range(8), 0)
    forward(cache, [0], 1)
    assert cache.usage().sequences[0].num_tokens == 0
    assert cache.sequence(0).seq_len == 8
    assert cache.can_resume(0, 8) and not cache.can_resume(0, 7) and not cache.can_resume(0, 9)
    assert cache.can_resume(0, 4), "a chunk can always be begun anew"
    with pytest.raises(NotSupported):
        cache.remove(0, 7)
    with pytest.raises(NotSupported):
        cache.remove(0, 0, 1)
    assert forward(cache, [8]).mask.shape[0] == 1


def test_a_sequence_may_outgrow_capacity_and_there_may_be_more() -> None:
    cache = made(max_sequences=2, capacity=8)
    forward(cache, range(8), 5)
    forward(cache, range(8, 12), 5)
    for sequence in range(4):
        forward(cache, [0], sequence)
    assert cache.usage().num_free_blocks == 0


# --- copies that are not made -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 16])
def test_contiguous_history_is_not_copied(block_size: int) -> None:
    cache = made(block_size=block_size)
    first = forward(cache, [0, 1, 2])
    second = cache.get()
    assert np.shares_memory(first.keys, second.keys) and np.shares_memory(first.values, second.values)
    third = forward(cache, [3])
    assert np.shares_memory(first.keys, third.keys) and len(third.keys) >= 4


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_views_share_storage(block_size: int) -> None:
    cache = made(block_size=block_size)
    view = cache.sequence(0)
    keys, values = numbers(6, H, D), numbers(6, H, DV)
    appended = view.append(0, keys, values)
    view.commit(6)
    parts = view.views(0)
    assert [(p.start, p.length) for p in parts] == {1: [(0, 6)], 4: [(0, 4), (4, 2)], 16: [(0, 6)]}[block_size]
    for part in parts:
        assert part.keys.shape == (part.length, H, D) and part.values.shape == (part.length, H, DV)
        assert any(np.shares_memory(part.keys, other.keys) for other in appended.views)
        np.testing.assert_array_equal(part.keys, keys[part.start : part.start + part.length])
        assert part.device.name == "cpu"
    for part in view.packed_views(0):
        assert part.keys.dtype == np.float32 and part.block_size == block_size
        assert (part.head_dim, part.num_kv_heads) == (D, H)
        np.testing.assert_array_equal(
            part.keys[:, : part.length].swapaxes(0, 1), keys[part.start : part.start + part.length]
        )
        assert any(np.shares_memory(part.keys, other.keys) for other in parts)
    whole = view.contiguous_kv(0, 6)
    if block_size == 4:
        assert whole is None
    else:
        assert np.shares_memory(whole.keys, parts[0].keys) and whole.keys.shape == (6, H, D)
        np.testing.assert_array_equal(whole.values, values)


def test_copy_on_write_leaves_the_other_sequence_alone() -> None:
    cache = made(block_size=4, max_sequences=2)
    forward(cache, range(6), 0)
    cache.copy_prefix(0, 1, 6)
    free = cache.usage().num_free_blocks
    before = [p.keys.tobytes() for p in cache.sequence(0).views(0)]
    forward(cache, [6], 1)
    assert cache.usage().num_free_blocks == free - 1, "the shared tail block was copied, the full one was not"
    assert [p.keys.tobytes() for p in cache.sequence(0).views(0)] == before
    assert np.shares_memory(cache.sequence(0).views(0)[0].keys, cache.sequence(1).views(0)[0].keys)


# --- places -----------------------------------------------------------------------------------------------------------


def test_layers_may_live_elsewhere() -> None:
    pytest.importorskip("torch")
    backend = kvcache.backends.torch(device="cpu", layer_devices={1: "meta"})
    cache = made(backend=backend)
    view = cache.sequence(0)
    assert view.layer_device(0).name == "cpu" and view.layer_device(1).name == "meta"
    assert not view.layer_device(1).is_gpu and not view.is_on_gpu
    cache.start_forward(Batch([0], [0]))
    for layer in (0, 1):
        cache.set_layer(layer)
        cache.put(to_backend("torch", numbers(1, H, D)), to_backend("torch", numbers(1, H, DV)))
    assert [view.views(layer)[0].device.name for layer in (0, 1)] == ["cpu", "meta"]
    assert [view.views(layer)[0].keys.device.type for layer in (0, 1)] == ["cpu", "meta"]


@pytest.mark.parametrize("span", [Full(), Sliding(3)], ids=str)
def test_attention_uses_the_default_device_for_nothing(span: Any) -> None:
    """`torch.set_default_device("cuda")` must not take what kernels are told to where the cache is not."""
    torch = pytest.importorskip("torch")
    keys, queries = torch.ones(6, 1, 32), torch.ones(6, 2, 32)
    with torch.device("meta"):
        cache = CausalCache(span, block_size=4)
        cache.init("torch", "f32", max_sequences=2, capacity=8)
        cache.start_forward(Batch([0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1]))
        cache.set_layer(0)
        cache.put(keys, keys)
        assert torch.equal(cache.attend(queries), queries)


# --- formats ----------------------------------------------------------------------------------------------------------

WIDE = 64
DTYPES = ["f32", "f16", "bf16", "fp8_e4m3", "q8_0", "q4_0"]


def tolerance(dtype: str, rows: Any) -> Any:
    """What a format may lose, per value: half a step of its grid (of the largest of 32 for ggml's formats)."""
    largest = np.abs(rows.reshape(*rows.shape[:-1], -1, 32)).max(axis=-1).repeat(32, axis=-1)
    return {
        "f32": np.zeros_like(rows),
        "f16": np.abs(rows) * 2**-11 + 2**-24,
        "bf16": np.abs(rows) * 2**-8,
        "fp8_e4m3": np.abs(rows) * 2**-4 + 2**-10,
        "q8_0": largest / 127 * 0.55 + 1e-6,
        "q4_0": largest / 8 * 1.01 + 1e-6,  # the end of the grid opposite to the largest value is a whole step away
    }[dtype]


def round_trip(backend: str, dtype: Any, block_size: int) -> tuple[Any, Any, Any, Any, Any]:
    keys, values = numbers(9, H, WIDE, seed=3), numbers(9, H, 2 * WIDE, seed=4)
    cache = made(backend=backend, dtype=dtype, block_size=block_size)
    cache.start_forward(Batch(range(9), [0] * 9))
    cache.set_layer(0)
    cache.put(to_backend(backend, keys), to_backend(backend, values))
    history = cache.get()
    columns = np.flatnonzero(to_numpy(history.mask)[8] == 0)
    order = np.argsort((to_numpy(history.mask)[:, columns] == 0).sum(axis=0))[::-1]  # position 0 is seen by most
    found = (to_numpy(array)[columns[order]] for array in (history.keys, history.values))
    return keys, values, *found, (cache, history)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4])
def test_every_format_comes_back_within_its_error(backend: str, dtype: str, block_size: int) -> None:
    keys, values, found_keys, found_values, _ = round_trip(backend, dtype, block_size)
    assert (np.abs(found_keys - keys) <= tolerance(dtype, keys)).all()
    assert (np.abs(found_values - values) <= tolerance(dtype, values)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", [("q8_0", "f16"), ("f32", "q4_0"), ("fp8_e4m3", "bf16"), ["f16", "f16"]], ids=str)
def test_keys_and_values_have_formats_of_their_own(backend: str, pair: Sequence[str]) -> None:
    keys, values, found_keys, found_values, (cache, history) = round_trip(backend, pair, 4)
    assert (np.abs(found_keys - keys) <= tolerance(pair[0], keys)).all()
    assert (np.abs(found_values - values) <= tolerance(pair[1], values)).all()
    bits = {"f32": 32, "f16": 16, "bf16": 16, "fp8_e4m3": 8, "q8_0": 8.5, "q4_0": 4.5}
    num_slots = cache.usage().num_blocks * 4
    assert cache.usage().num_bytes == num_slots * H * (WIDE * bits[pair[0]] + 2 * WIDE * bits[pair[1]]) / 8
    native = {"f32", "f16"} | ({"bf16"} if backend != "numpy" else set())
    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    for array, dtype in zip(history[:2], pair, strict=True):
        assert names[dtype if dtype in native else "f32"] in str(array.dtype)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_quantised_heads_are_multiples_of_32(dtype: str) -> None:
    cache = made(dtype=dtype)
    cache.start_forward(Batch([0], [0]))
    cache.set_layer(0)
    with pytest.raises(ValueError, match="32"):
        cache.put(numbers(1, H, 40), numbers(1, H, 64))
    cache.put(numbers(1, H, 32), numbers(1, H, 64))


def test_fp8_saturates() -> None:
    cache = made(dtype="fp8_e4m3")
    cache.start_forward(Batch([0], [0]))
    cache.set_layer(0)
    cache.put(np.full((1, H, D), 1e6, np.float32), np.full((1, H, D), -np.inf, np.float32))
    history = cache.get()
    assert (history.keys[0] == 448).all() and (history.values[0] == -448).all()


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_only_shifted_slots_are_encoded_anew(dtype: str) -> None:
    """Encoding twice is not encoding once: tokens that stay, and those of sharers, must keep their very bytes."""
    calls: list[tuple[int, tuple[int, ...], list[int]]] = []

    def shift(layer: int, keys: Any, offsets: Any) -> Any:
        calls.append((layer, keys.shape, np.asarray(offsets).tolist()))
        return keys * np.float32(1.001)

    cache = CausalCache(Full(), shift=shift, block_size=4)
    cache.init("numpy", dtype, max_sequences=2, capacity=32)
    cache.start_forward(Batch(range(10), [0] * 10))
    cache.set_layer(3)
    cache.put(numbers(10, H, 32), numbers(10, H, 32))
    cache.copy_prefix(0, 1, 10)

    def keys_of(sequence: int) -> Any:
        return np.concatenate([part.keys for part in cache.sequence(sequence).views(3)])

    before = keys_of(0)
    cache.remove(0, 2, 5)
    assert calls == [(3, (5, H, 32), [-3] * 5)]
    np.testing.assert_array_equal(keys_of(1), before)
    np.testing.assert_array_equal(keys_of(0)[:2], before[:2])
    assert not np.array_equal(keys_of(0)[2:], before[5:]) and np.allclose(keys_of(0)[2:], before[5:], atol=0.3)


# --- pins, large numbers, empty tables --------------------------------------------------------------------------------


def test_a_pinned_block_makes_no_room() -> None:
    cache = made(Sliding(4), block_size=2, capacity=64, max_batch=4)
    forward(cache, range(4))
    pool = cache.tables.pool
    for index in range(2):
        assert cache.publish(0, index, bytes([index]))
        assert pool.pin(bytes([index]))
    refusals = 0
    for begin in range(4, 24, 4):
        try:
            forward(cache, range(begin, begin + 4))
        except CacheFull:
            refusals += 1
        cache.check()
    assert refusals
    for index in range(2):
        pool.unpin(bytes([index]))
    end = cache.sequence(0).seq_len
    forward(cache, range(end, end + 4))
    cache.check()


def test_a_removal_that_pinned_blocks_leave_no_room_for() -> None:
    cache = CausalCache(Full(), shift=add_offsets, block_size=2)
    cache.init("numpy", "f32", capacity=2, max_batch=2)
    forward(cache, [0, 1])
    forward(cache, [2, 3])
    for index in range(2):
        assert cache.publish(0, index, bytes([index]))
        assert cache.tables.pool.pin(bytes([index]))
    free = cache.usage().num_free_blocks
    if free:
        forward(cache, range(4, 4 + 2 * free), sequences=1)
    refused(cache, lambda: cache.remove(0, 0, 2), CacheFull)


def test_positions_are_bounded() -> None:
    cache = made(Sliding(2**40), capacity=8)
    forward(cache, [0, 1])
    refused(cache, lambda: forward(cache, [2, 2**31]))
    refused(cache, lambda: forward(cache, [2**31 - 1]))
    keys, _, mask = forward(cache, [2**31 - 2])
    assert len(keys) == 3
    assert (mask == 0).all()


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("span", [Full(), Sliding(4), Chunked(4)], ids=str)
def test_appended_positions_are_bounded(span: Any, block_size: int) -> None:
    """What committing could not store is refused before it is written, tokens that were appended before included."""
    cache = made(span, block_size=block_size)
    forward(cache, [2**31 - 4, 2**31 - 3])
    view = cache.sequence(0)
    error = refused(cache, lambda: view.append(0, numbers(2, H, D), numbers(2, H, DV)))
    assert "sequence 0 ends at 2147483646 and 2 more tokens reach position 2147483647; expected at most" in str(error)
    view.append(0, numbers(1, H, D), numbers(1, H, DV))
    refused(cache, lambda: view.append(0, numbers(1, H, D), numbers(1, H, DV)))
    view.commit(1)
    assert view.seq_len == 2**31 - 1
    refused(cache, lambda: view.append(0, numbers(1, H, D), numbers(1, H, DV)))


def test_nothing_stored_is_not_contiguous() -> None:
    cache = made(Sliding(2))
    for begin in (0, 5):
        forward(cache, range(begin, begin + 5))
    cache.copy_prefix(0, 1, 3)
    assert cache.sequence(1).seq_len == 3
    assert cache.sequence(1).contiguous_kv(0, 2) is None


def test_the_whole_sequence_can_always_be_removed() -> None:
    cache = made()
    view = cache.sequence(0)
    view.append(0, numbers(2, H, D), numbers(2, H, DV))
    refused(cache, lambda: cache.remove(0, 1))
    cache.remove(0, 0)
    assert cache.usage().sequences == {}
    cache.check()


def test_a_mask_type_that_the_backend_lacks() -> None:
    cache = CausalCache()
    cache.set_config(CacheConfig(mask_dtype="bf16"))
    with pytest.raises(ValueError, match="mask_dtype"):
        cache.init("numpy", "f32", capacity=4)
    cache.init("torch", "f32", capacity=4)
