"""The numbers of cases.md, down to "Shift": on three backends, with blocks of 1, of 4, and of all that is there.

Keys and values of a token are one number, so that what a query sees can be written down as a list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from arrays import BACKENDS, open_columns, to_backend, to_numpy
from kvcache import Batch, CacheConfig, CausalCache, Chunked, Full, Sliding
from kvcache.kernels.rope import rope_shift

BLOCK_SIZES = [1, 4, 64]

pytestmark = [pytest.mark.parametrize("backend", BACKENDS), pytest.mark.parametrize("block_size", BLOCK_SIZES)]


def add_offsets(layer: int, keys: Any, offsets: Any) -> Any:
    """The shift of B1: the offset is added to the key."""
    moved = np.asarray(offsets if isinstance(offsets, np.ndarray) else offsets.tolist(), np.float32)
    library = type(keys).__module__.partition(".")[0]
    return keys + to_backend(library, np.broadcast_to(moved[:, None, None], tuple(keys.shape)).copy())


class Numbers:
    """A cache of one layer whose keys are numbers; by default each token's number is its position."""

    def __init__(
        self,
        backend: str,
        block_size: int,
        span: Any,
        *,
        config: CacheConfig | None = None,
        dtype: str = "f32",
        capacity: int = 16,
        **sizes: int,
    ) -> None:
        self.backend = backend
        self.cache = CausalCache(span, shift=add_offsets, block_size=block_size)
        if config:
            self.cache.set_config(config)
        self.cache.init(backend, dtype, capacity=capacity, **sizes)

    def forward(
        self, positions: Sequence[int], sequences: Sequence[int] | None = None, numbers: Sequence[float] | None = None
    ) -> list[list[float]]:
        """Run a pass and say what each of its queries sees."""
        self.cache.start_forward(Batch(positions, sequences or [0] * len(positions)))
        self.cache.set_layer(0)
        rows = np.asarray(numbers if numbers is not None else positions, np.float32)[:, None, None]
        self.cache.put(to_backend(self.backend, rows), to_backend(self.backend, rows + 100))
        seen = self.seen()
        self.cache.check()
        return seen

    def seen(self) -> list[list[float]]:
        history = self.cache.get()
        keys = to_numpy(history.keys)[:, 0, 0]
        return [sorted(float(keys[c]) for c in row) for row in open_columns(history.mask, history.mask.shape[0])]

    def stored(self, sequence: int = 0) -> list[float]:
        parts = self.cache.sequence(sequence).views(0)
        return [float(k) for part in parts for k in to_numpy(part.keys)[:, 0, 0]]

    def resumable(self, sequence: int = 0, stop: int = 20) -> list[int]:
        return [p for p in range(stop) if self.cache.can_resume(sequence, p)]


# --- masks and storage ------------------------------------------------------------------------------------------------


def test_a1_full_is_a_lower_triangle(backend: str, block_size: int) -> None:
    world = Numbers(backend, block_size, Full())
    assert world.forward([0, 1, 2, 3]) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert world.forward([4]) == [[0, 1, 2, 3, 4]]


def test_a2_sliding_window_of_two(backend: str, block_size: int) -> None:
    world = Numbers(backend, block_size, Sliding(2))
    assert world.forward([0, 1, 2, 3]) == [[0], [0, 1], [1, 2], [2, 3]]
    assert world.forward([4, 5]) == [[3, 4], [4, 5]]


def test_a2_four_slots_suffice(backend: str, block_size: int) -> None:
    """With blocks of one slot: the batch of two replaces two of the four tokens."""
    if block_size > 1:
        pytest.skip("a claim about blocks of one slot")
    world = Numbers(backend, block_size, Sliding(2), capacity=4, max_batch=4)
    assert world.cache.usage().num_blocks == 4  # never more than Full
    world.forward([0, 1, 2, 3])
    assert world.forward([4, 5]) == [[3, 4], [4, 5]]
    assert world.stored() == [3, 4, 5]


def test_a3_memory_retains_more_than_the_window(backend: str, block_size: int) -> None:
    world = Numbers(backend, block_size, Sliding(2, memory=4))
    world.forward([0, 1, 2, 3])
    assert world.forward([4, 5]) == [[3, 4], [4, 5]]
    assert world.stored()[-5:] == [1, 2, 3, 4, 5]
    if block_size == 1:
        assert world.stored() == [1, 2, 3, 4, 5]


def test_a4_two_sequences_alternate_without_filling_the_pool(backend: str, block_size: int) -> None:
    world = Numbers(backend, block_size, Sliding(2), max_sequences=2, max_batch=2)
    for i in range(50):
        for sequence in (0, 1):
            first, base = 2 * i, 1000 * sequence
            seen = world.forward([first, first + 1], [sequence] * 2, [base + first, base + first + 1])
            before = [base + first - 1] if i else []
            assert seen == [[*before, base + first], [base + first, base + first + 1]]


def test_a5_chunks(backend: str, block_size: int) -> None:
    world = Numbers(backend, block_size, Chunked(2))
    world.forward([0, 1, 2, 3])
    assert world.forward([4, 5, 6]) == [[4], [4, 5], [6]]
    assert world.forward([7, 8]) == [[6, 7], [8]]


def test_a5_finished_chunks_leave_the_pool(backend: str, block_size: int) -> None:
    world = Numbers(backend, block_size, Chunked(2), max_batch=2, capacity=2000)
    capacity = 2 + 2 if block_size == 1 else math.ceil(2 / block_size) + 1 + math.ceil(2 / block_size)
    assert world.cache.usage().num_blocks == capacity
    for first in range(0, 1000, 2):
        assert world.forward([first, first + 1]) == [[first], [first, first + 1]]
    assert world.cache.sequence(0).seq_len == 1000


def test_a6_sequences_do_not_see_each_other(backend: str, block_size: int) -> None:
    world = Numbers(backend, block_size, Full())
    assert world.forward([0, 1, 0, 1], [0, 0, 1, 1], [1, 2, 3, 4]) == [[1], [1, 2], [3], [3, 4]]
    assert world.forward([2, 2], [0, 1], [5, 6]) == [[1, 2, 5], [3, 4, 6]]


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (Full(), [[0], [0, 1, 2, 3, 4], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]),
        (Sliding(2), [[0], [0, 1, 2, 3, 4], [1, 2], [2, 3, 4], [3, 4]]),
        (Chunked(5), [[0], [0, 1, 2, 3, 4], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]),
    ],
    ids=str,
)
def test_a7_excepted_queries_see_later_tokens(backend: str, block_size: int, span: Any, expected: list[Any]) -> None:
    """Rows 1 and 3 are excepted; row 5 is another sequence's and stays unseen. The next pass is causal again."""
    world = Numbers(backend, block_size, span)
    causal = world.forward([0, 1, 2, 3, 4, 0], [0] * 5 + [1], [0, 1, 2, 3, 4, 50])
    world.cache.set_causal(except_=(1, 3))
    assert world.seen() == [*expected, [50]]
    world.cache.set_causal()
    assert world.seen() == causal
    world.cache.set_causal(except_=(1, 3))
    assert world.forward([1, 2, 3], [1, 1, 1], [51, 52, 53])[1][-2:] == [51, 52]


def test_a7_an_earlier_chunk_stays_out_of_sight(backend: str, block_size: int) -> None:
    world = Numbers(backend, block_size, Chunked(2))
    world.forward([0, 1, 2, 3])
    world.cache.set_causal(except_=(2,))
    assert world.seen()[2:] == [[2, 3], [2, 3]]


@pytest.mark.parametrize("capacity", [16, 512])
def test_a8_padding(backend: str, block_size: int, capacity: int) -> None:
    masks = {}
    for mask_dtype in ("f32", "f16"):
        config = CacheConfig(padding=256, mask_dtype=mask_dtype)
        world = Numbers(backend, block_size, Full(), config=config, capacity=capacity)
        world.forward([0, 1, 2, 3, 4])
        history = world.cache.get()
        assert tuple(history.mask.shape) == (5, 256)
        assert history.keys.shape[0] == history.values.shape[0] == 256
        assert {"f32": "float32", "f16": "float16"}[mask_dtype] in str(history.mask.dtype)
        masks[mask_dtype] = to_numpy(history.mask)
    assert np.isneginf(masks["f32"]).all(axis=0).sum() == 251
    np.testing.assert_array_equal(masks["f32"], masks["f16"])


# --- remove, copy, resume ---------------------------------------------------------------------------------------------


def test_b1_removal_shifts_keys(backend: str, block_size: int) -> None:
    world = Numbers(backend, block_size, Full())
    world.forward([0, 1, 0, 1], [0, 0, 1, 1], [1, 2, 3, 4])
    world.cache.remove(0, 1)
    assert world.forward([1, 2], [0, 1], [5, 6]) == [[1, 5], [3, 4, 6]]
    world.cache.remove(0, 0, 1)
    assert world.stored() == [4]
    assert world.forward([1, 2], [0, 0], [7, 8]) == [[4, 7], [4, 7, 8]]
    assert world.stored(1) == [3, 4, 6]


def test_b2_a_prefix_is_shared_by_reference(backend: str, block_size: int) -> None:
    world = Numbers(backend, block_size, Full(), max_sequences=2)
    world.forward([0, 1, 2, 3], numbers=[1, 2, 3, 4])
    before = world.cache.usage()
    world.cache.copy_prefix(0, 1, 2)
    after = world.cache.usage()
    assert (after.num_free_blocks, after.num_bytes) == (before.num_free_blocks, before.num_bytes)
    if backend == "numpy":
        (ours,), (theirs,) = (world.cache.sequence(s).views(0)[:1] for s in (0, 1))
        assert np.shares_memory(ours.keys, theirs.keys) and np.shares_memory(ours.values, theirs.values)
    # `copy_prefix(0, 1, 2)` made sequence 1 end at 2; going on at 3 leaves a gap at 2, as the case has it
    assert world.forward([3, 4], [1, 1], [5, 6]) == [[1, 2, 5], [1, 2, 5, 6]]
    assert world.stored() == [1, 2, 3, 4]


def test_b3_can_resume(backend: str, block_size: int) -> None:
    world = Numbers(backend, block_size, Sliding(5))
    world.forward([0, 1, 2, 3, 4])
    assert world.resumable() == [0, 1, 2, 3, 4, 5]
    world.forward([5])
    assert set(world.resumable()) >= {0, 5, 6}
    if block_size == 1:
        assert world.resumable() == [0, 5, 6]
    world = Numbers(backend, block_size, Sliding(5, memory=6))
    world.forward([0, 1, 2, 3, 4, 5, 6])
    world.forward([7])
    assert set(world.resumable()) >= {0, 6, 7, 8}
    if block_size == 1:
        assert world.resumable() == [0, 6, 7, 8]


def test_b4_copy_prefix_to_itself_and_strangers(backend: str, block_size: int) -> None:
    world = Numbers(backend, block_size, Full())
    world.forward([0, 1, 2, 3, 4, 5])
    world.cache.copy_prefix(0, 0, 3)
    assert world.stored() == [0, 1, 2] and world.cache.sequence(0).seq_len == 3
    assert world.resumable() == [0, 1, 2, 3]
    assert world.resumable(sequence=9) == [0]
    world.cache.copy_prefix(9, 0, 3)
    assert world.stored() == [] and world.resumable() == [0]


# --- shift ------------------------------------------------------------------------------------------------------------

NUM_PAIRS = 16
INV_FREQ = 1e4 ** -(np.arange(NUM_PAIRS) / NUM_PAIRS)


def yarn(factor: float, trained: int = 4096, fast: float = 32, slow: float = 1) -> tuple[Any, float]:
    """YaRN's frequencies and attention factor (Peng et al., 2023, sections 3.2 and 3.4)."""

    def pair_of(rotations: float) -> float:
        return 2 * NUM_PAIRS * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(1e4))

    low, high = math.floor(pair_of(fast)), math.ceil(pair_of(slow))
    ramp = np.clip((np.arange(NUM_PAIRS) - low) / (high - low), 0, 1)
    return INV_FREQ / factor * ramp + INV_FREQ * (1 - ramp), 0.1 * math.log(factor) + 1


def rotated(raw: Any, positions: Any, inv_freq: Any = INV_FREQ) -> Any:
    """Raw keys [n,1,2m] turned to their positions, half-split, float64."""
    angles = np.asarray(positions)[:, None, None] * inv_freq
    first, second = raw[..., :NUM_PAIRS], raw[..., NUM_PAIRS:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def filled(backend: str, block_size: int, keys: Any, *, dtype: str, inv_freq: Any = INV_FREQ) -> CausalCache:
    """A cache that holds these keys at 0, 1, 2, ..."""
    cache = CausalCache(Full(), shift=rope_shift(inv_freq), block_size=block_size)
    cache.init(backend, dtype, capacity=128)
    cache.start_forward(Batch(range(len(keys)), [0] * len(keys)))
    cache.set_layer(0)
    cache.put(to_backend(backend, keys.astype(np.float32)), to_backend(backend, keys.astype(np.float32)))
    return cache


def stored_keys(cache: CausalCache) -> Any:
    return np.concatenate([to_numpy(part.keys) for part in cache.sequence(0).views(0)])


@pytest.mark.parametrize(("dtype", "error"), [("f32", 1e-5), ("f16", 2e-3)])
def test_c1_a_shift_equals_rotating_the_raw_keys(
    backend: str, block_size: int, dtype: str, error: float, rng: np.random.Generator
) -> None:
    raw = rng.uniform(-1, 1, (100, 1, 2 * NUM_PAIRS))
    keys = rotated(raw, np.arange(100))
    once, twice = (filled(backend, block_size, keys, dtype=dtype) for _ in range(2))
    once.remove(0, 2, 37)
    twice.remove(0, 2, 12)
    twice.remove(0, 2, 27)
    expected = rotated(raw[37:], np.arange(2, 65))
    assert np.abs(stored_keys(once)[2:] - expected).max() <= error
    assert np.abs(stored_keys(twice)[2:] - expected).max() <= 2 * error
    assert np.abs(stored_keys(once) - stored_keys(twice)).max() <= 2 * error
    untouched = stored_keys(filled(backend, block_size, keys, dtype=dtype))[:2]
    np.testing.assert_array_equal(stored_keys(once)[:2], untouched)


def test_c2_norms_survive_with_yarn(backend: str, block_size: int, rng: np.random.Generator) -> None:
    inv_freq, attention_factor = yarn(32)
    keys = rotated(rng.uniform(-1, 1, (40, 1, 2 * NUM_PAIRS)), np.arange(40), inv_freq) * attention_factor
    cache = filled(backend, block_size, keys, dtype="f32", inv_freq=inv_freq)
    for _ in range(3):
        cache.remove(0, 0, 5)
    norms = np.linalg.norm(stored_keys(cache), axis=-1)
    np.testing.assert_allclose(norms, np.linalg.norm(keys[15:], axis=-1), rtol=1e-6)


def test_c2_a_shift_of_zero_is_bit_exact(backend: str, block_size: int, rng: np.random.Generator) -> None:
    shift = rope_shift(yarn(32)[0])
    keys = to_backend(backend, rng.standard_normal((block_size, 1, 2 * NUM_PAIRS)).astype(np.float32))
    shifted = shift(0, keys, to_backend(backend, np.zeros(block_size, np.int32)))
    assert to_numpy(shifted).tobytes() == to_numpy(keys).tobytes()
    cache = filled(backend, block_size, to_numpy(keys), dtype="f32")
    before = stored_keys(cache).tobytes()
    cache.remove(0, 0, 0)
    assert stored_keys(cache).tobytes() == before
