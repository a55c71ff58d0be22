"""What a decode step costs beside its tensors: `start_forward` for 16 sequences, at growing lengths.

A step appends one slot to each sequence and frees what the window has outgrown; neither looks at the tokens that are
already there, so the time must not grow with the length. No layer is put to, so no tensor exists.
"""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

from kvcache.bench.table import Cell, Table
from kvcache.caches import Cache, CausalCache, HybridCache
from kvcache.spans import Full, Sliding
from kvcache.spec import Batch

__all__ = ["Row", "measure", "tables"]

NUM_SEQUENCES = 16
LENGTHS = (1024, 4096, 32768)
BLOCK_SIZES = (1, 16, 64)
WINDOW = 512
PREFILL = 1024
ROUNDS = 200


class Row(NamedTuple):
    """Median seconds of one `start_forward`, decoding `num_sequences` sequences of `num_tokens` tokens each."""

    cache: str
    block_size: int
    num_sequences: int
    num_tokens: int
    seconds: float


def measure() -> list[Row]:
    """A row for each cache, block size and length. Rounds of all lengths alternate, so that noise hits them alike."""
    rows = []
    for block_size in BLOCK_SIZES:
        for name in ("full", "sliding", "hybrid"):
            caches = {length: _filled(_make(name, block_size), length) for length in LENGTHS}
            times: dict[int, list[float]] = {length: [] for length in LENGTHS}
            for step in range(ROUNDS):
                for length, cache in caches.items():
                    batch = Batch([length + step] * NUM_SEQUENCES, range(NUM_SEQUENCES))
                    begin = time.perf_counter()
                    cache.start_forward(batch)
                    times[length].append(time.perf_counter() - begin)
            rows += [Row(name, block_size, NUM_SEQUENCES, length, median(times[length])) for length in LENGTHS]
    return rows


def tables() -> list[Table]:
    """The rows of `measure`, with each length's time beside that of the shortest."""
    rows: list[tuple[Cell, ...]] = []
    shortest = 0.0
    for row in measure():
        shortest = row.seconds if row.num_tokens == LENGTHS[0] else shortest
        rows.append((row.cache, row.block_size, row.num_tokens, row.seconds * 1e3, row.seconds / shortest))
    columns = ("cache", "block size", "tokens each", "ms", "time to that of the shortest")
    return [Table(f"start_forward, one token for each of {NUM_SEQUENCES} sequences", columns, rows)]


def _make(name: str, block_size: int) -> Cache:
    sliding, full = CausalCache(Sliding(WINDOW), block_size=block_size), CausalCache(Full(), block_size=block_size)
    return {"full": full, "sliding": sliding}.get(name) or HybridCache(sliding, full, layer_types=[0, 1])


def _filled(cache: Cache, length: int) -> Cache:
    cache.init("numpy", "f16", max_sequences=NUM_SEQUENCES, capacity=length + 2 * ROUNDS, max_batch=PREFILL)
    for sequence in range(NUM_SEQUENCES):
        for begin in range(0, length, PREFILL):
            cache.start_forward(Batch(range(begin, begin + PREFILL), [sequence] * PREFILL))
    return cache
