"""Random paged layouts for kernels, and what attention over them must give.

A `World` is a pool of blocks in which several segments were given blocks in random order, with their raw keys and
values in NumPy; `stored` encodes it for a backend. Whatever no query sees (free blocks, empty slots, slots past the
end) is poisoned with NaN, or with the bytes that decode to it, so a kernel that lets it near a product shows it.

`naive` is attention as a table of all scores with what is not visible masked away: another way than the reference's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache import backends, formats
from kvcache.formats import Stored
from kvcache.kernels import AttentionBatch, Segment

F32 = NDArray[np.float32]
UNBOUNDED = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Shape:
    """Heads and blocks of a world."""

    num_heads: int = 2
    group: int = 1
    head_dim: int = 32
    value_dim: int = 32
    block_size: int = 4


@dataclass(frozen=True)
class Sequence:
    """One segment: `num_slots` slots from position `first_position` on, and the positions of its queries.

    window: positions a query sees, its own included; chunk: those of its own chunk; neither: all.
    is_causal: whether a query sees none after its own. holes: how many slots are empty, and the rest in random order.
    """

    num_slots: int
    queries: tuple[int, ...]
    first_position: int = 0
    window: int | None = None
    chunk: int | None = None
    is_causal: bool = True
    holes: int | None = None

    def bounds(self, position: int) -> tuple[int, int]:
        begin = 0
        if self.window is not None:
            begin = max(0, position - self.window + 1)
        if self.chunk is not None:
            begin = position - position % self.chunk
        return begin, position + 1 if self.is_causal else UNBOUNDED


def decode(num_slots: int, **options: Any) -> Sequence:
    """One query, the newest token."""
    return Sequence(num_slots, (options.get("first_position", 0) + num_slots - 1,), **options)


def prefill(num_slots: int, num_queries: int | None = None, **options: Any) -> Sequence:
    """The last `num_queries` tokens (all of them by default) are queries."""
    end = options.get("first_position", 0) + num_slots
    return Sequence(num_slots, tuple(range(end - (num_queries or num_slots), end)), **options)


@dataclass(frozen=True)
class World:
    """Keys [N,H,block_size,D], values [N,H,block_size,Dv] and queries [T,Hq,D] in f32, and how they lie."""

    shape: Shape
    keys: F32
    values: F32
    queries: F32
    batch: AttentionBatch
    visible: NDArray[np.bool_] = field(repr=False)  # [T, N * block_size]

    @property
    def seen_slots(self) -> NDArray[np.bool_]:
        """The storage slots that some query sees, [N * block_size]."""
        return self.visible.any(axis=0)


def make_world(shape: Shape, sequences: list[Sequence], seed: int, *, shuffle_rows: bool = True) -> World:
    """Segments with random blocks of a pool that has some to spare, and batch rows dealt out at random."""
    rng = np.random.default_rng(seed)
    size = shape.block_size
    counts = [-(-s.num_slots // size) for s in sequences]
    num_blocks = sum(counts) + 3
    free = rng.permutation(num_blocks).astype(np.int32)
    T = sum(len(s.queries) for s in sequences)
    deal = rng.permutation(T) if shuffle_rows else np.arange(T)
    begins, ends = np.zeros(T, np.int32), np.zeros(T, np.int32)
    visible = np.zeros((T, num_blocks * size), bool)
    segments = []
    for sequence, count in zip(sequences, counts, strict=True):
        table, free = free[:count], free[count:]
        rows, deal = deal[: len(sequence.queries)].astype(np.int64), deal[len(sequence.queries) :]
        positions = sequence.first_position + np.arange(sequence.num_slots, dtype=np.int32)
        if sequence.holes is not None:
            positions = rng.permutation(positions)
            positions[rng.permutation(sequence.num_slots)[: sequence.holes]] = -1
        slots = table[np.arange(sequence.num_slots) // size] * size + np.arange(sequence.num_slots) % size
        for row, query in zip(rows, sequence.queries, strict=True):
            begins[row], ends[row] = sequence.bounds(query)
            visible[row, slots] = (positions >= begins[row]) & (positions < ends[row]) & (positions >= 0)
        irregular = None if sequence.holes is None else positions
        segments.append(Segment(rows, table, sequence.num_slots, sequence.first_position, irregular))

    def random(*dims: int) -> F32:
        return rng.standard_normal(dims, dtype=np.float32)

    H, D = shape.num_heads, shape.head_dim
    return World(
        shape=shape,
        keys=random(num_blocks, H, size, D),
        values=random(num_blocks, H, size, shape.value_dim),
        queries=random(T, H * shape.group, D),
        batch=AttentionBatch(segments, begins, ends, size),
        visible=visible,
    )


def rounded(world: World, dtype: str) -> World:
    """The same world with all numbers rounded to an element type, so that only the computation differs."""

    def to(array: F32) -> F32:
        if dtype == "bf16":
            bits = array.view(np.uint32)
            return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
        return array.astype({"f16": np.float16, "f32": np.float32}[dtype]).astype(np.float32)

    return replace(world, keys=to(world.keys), values=to(world.values), queries=to(world.queries))


def backend_named(name: str) -> backends.Backend:
    """A backend by name; `cuda` is PyTorch on a GPU."""
    return backends.torch("cuda") if name == "cuda" else backends.create(name)


def array(backend: str, value: NDArray[Any], dtype: str = "f32") -> Any:
    """A backend's array in element type `f32 f16 bf16`."""
    made = backend_named(backend)
    return made.cast(made.from_numpy(np.ascontiguousarray(value), 0), dtype)


def to_numpy(value: Any) -> NDArray[np.float64]:
    """Any backend's floating array in NumPy."""
    library = type(value).__module__.partition(".")[0]
    return backends.create(library).to_numpy(value).astype(np.float64)


def stored(backend: str, raw: F32, dtype: str, seen_slots: NDArray[np.bool_]) -> Stored:
    """Raw rows [N,H,block_size,D] in a backend's storage.

    Slots that nobody sees hold NaN, and so does what lies between its blocks.
    """
    made = backend_named(backend)
    fmt = formats.create(dtype, made)
    encoded = fmt.encode(made.from_numpy(raw, 0))
    native = made.to_numpy(encoded)
    # 0x7f bytes are NaN in fp8_e4m3, and a scale of 0x7f7f is in q8_0 and q4_0; 0x7fff is NaN as a bf16 pattern.
    poison = {"f": np.nan, "u": 0x7F if native.dtype.itemsize == 1 else 0x7FFF}[native.dtype.kind]
    blocks = _poisoned(native, seen_slots, poison)
    place = int(seen_slots.sum()) % 3  # alone, or the first or the second of two
    both = np.full((len(blocks), min(place, 1) + 1, *blocks.shape[1:]), poison, blocks.dtype)
    both[:, place // 2] = blocks
    array = made.from_numpy(both, 0)
    if dtype == "bf16" and native.dtype.kind == "f":  # NumPy has no bf16 and was given f32, exactly
        array = made.cast(array, "bf16")
    return Stored(array[:, place // 2], fmt, raw.shape[-1])


def _poisoned(blocks: NDArray[Any], seen_slots: NDArray[np.bool_], poison: float) -> NDArray[Any]:
    N, _, size, _ = blocks.shape
    seen = seen_slots.reshape(N, 1, size, 1)
    result: NDArray[Any] = np.where(seen, blocks, np.asarray(poison).astype(blocks.dtype))
    return result


def decoded(part: Stored, seen_slots: NDArray[np.bool_]) -> NDArray[np.float64]:
    """What the storage says, [N,H,block_size,D] in float64, with zeros in slots that nobody sees."""
    values = to_numpy(part.format.decode(part.array, part.head_dim))
    N, _, size, _ = values.shape
    return np.where(seen_slots.reshape(N, 1, size, 1), values, 0.0)


def naive(
    queries: NDArray[np.float64],
    keys: NDArray[np.float64],
    values: NDArray[np.float64],
    visible: NDArray[np.bool_],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Attention [T,Hq,Dv] over all slots of the pool at once: one table of scores, [H, heads to each, T, slots]."""
    T, Hq, D = queries.shape
    H = keys.shape[1]
    q = queries.transpose(1, 0, 2).reshape(H, Hq // H, T, D)
    k, v = (a.transpose(1, 0, 2, 3).reshape(H, 1, -1, a.shape[3]) for a in (keys, values))
    scores = np.matmul(q, k.swapaxes(2, 3)) * scale
    if softcap is not None:
        scores = np.tanh(scores / softcap) * softcap
    weights = np.exp(scores) * visible  # scores of these tests are small: no maximum to subtract
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks).reshape(H, -1, 1, 1)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.matmul(weights, v).reshape(Hq, T, -1).transpose(1, 0, 2)
