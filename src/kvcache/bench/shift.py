"""Moving 8192 tokens to other positions: their rotary keys are turned in place.

| contender    | what it is                                                                                  |
|--------------|---------------------------------------------------------------------------------------------|
| kernel op    | `Writer.shift` of the kernel over one layer: decode, turn, encode, in one pass              |
| cache.remove | `CausalCache.remove` of a block's tokens behind the first four, for each of its layers      |

The removal is what a context shift does: the first tokens stay, those after the gap move down. Before the next one as
many tokens are put at the end, untimed. The layers together are larger than the last-level cache. Bytes are the stored
keys, read once and written once; values do not move.
"""

from __future__ import annotations

import time
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache import kernels
from kvcache.bench.paged import Heads, more_than_caches, row_bytes
from kvcache.bench.stream import Stream
from kvcache.bench.table import Cell, Table
from kvcache.bench.timing import Effort, Visit, alternate, timed
from kvcache.caches import CausalCache
from kvcache.formats import FORMATS
from kvcache.kernels.rope import rope_shift
from kvcache.spans import Full
from kvcache.spec import Batch

__all__ = ["Sizes", "tables"]

OP, CACHE, STREAM = "kernel op", "cache.remove", "stream"
BASE = 10_000.0
KEEP = 4
"""Tokens that stay where they are, as attention sinks do in a context shift."""


class Sizes(NamedTuple):
    """What is measured."""

    heads: Heads = Heads()
    num_tokens: int = 8192
    num_layers: int | None = None
    """`None`: so many that the keys are much larger than the last-level cache."""
    block_size: int = 16
    formats: tuple[str, ...] = FORMATS
    stream_bytes: int | None = None
    effort: Effort = Effort(rounds=5, visit_seconds=0.05, max_seconds=2.0)


def tables(sizes: Sizes | None = None) -> list[Table]:
    """A row for each format and way. About 30 s."""
    given = sizes or Sizes()
    rows: list[tuple[Cell, ...]] = []
    with torch.no_grad():
        stream = Stream(given.stream_bytes)
        for name in given.formats:
            rows += _measured(given, name, stream)
    columns = ("format", "contender", "moved MB", "ms per layer", "GB/s", "of stream")
    title = (
        f"RoPE shift of {given.num_tokens} tokens, {given.heads.num_heads} KV heads of {given.heads.head_dim}, "
        f"blocks of {given.block_size}"
    )
    return [Table(title, columns, rows)]


def _measured(sizes: Sizes, name: str, stream: Stream) -> list[tuple[Cell, ...]]:
    heads = sizes.heads
    inv_freq = BASE ** -(np.arange(heads.head_dim // 2, dtype=np.float64) * 2 / heads.head_dim)
    per_layer = sizes.num_tokens * heads.num_heads * row_bytes(name, heads.head_dim)
    num_layers = sizes.num_layers or more_than_caches(per_layer)
    cache = _filled(sizes, name, num_layers, inv_freq)
    contenders: dict[str, Visit] = {CACHE: _removal(cache, sizes, num_layers), STREAM: stream.visit}
    writer = kernels.writer((cache.storage.layer(0).keys,))
    if writer is not None:
        contenders[OP] = _kernel_shift(writer, cache, sizes, num_layers, inv_freq)
    times = alternate(contenders, sizes.effort)
    times[CACHE] /= num_layers
    moved = 2 * cache.storage.layer(0).keys.array[0, :, 0].nbytes * sizes.num_tokens
    limit = stream.bandwidth(times[STREAM])
    rows: list[tuple[Cell, ...]] = []
    for contender in (OP, CACHE):
        seconds = times.get(contender)
        if seconds is None:
            rows.append((name, contender, *[None] * 4))
        else:
            speed = moved / seconds
            rows.append((name, contender, moved / 1e6, seconds * 1e3, speed / 1e9, speed / limit))
    return rows


def _filled(sizes: Sizes, name: str, num_layers: int, inv_freq: NDArray[np.float64]) -> CausalCache:
    """One sequence: `KEEP` tokens, a block's worth to remove, and `num_tokens` that are then shifted."""
    total = KEEP + sizes.block_size + sizes.num_tokens
    cache = CausalCache(Full(), shift=rope_shift(inv_freq), block_size=sizes.block_size)
    cache.init("torch", name, capacity=2 * total, max_batch=total)
    _append(cache, sizes, 0, total, num_layers)
    stored = cache.storage.layer(0)
    kernels.choose(
        torch.zeros(1, sizes.heads.num_heads, sizes.heads.head_dim), stored.keys, stored.values
    )  # as attention loads it
    return cache


def _append(cache: CausalCache, sizes: Sizes, begin: int, end: int, num_layers: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(end - begin, sizes.heads.num_heads, sizes.heads.head_dim, generator=generator).bfloat16()
    cache.start_forward(Batch(range(begin, end), [0] * (end - begin)))
    for layer in range(num_layers):
        cache.set_layer(layer)
        cache.put(rows, rows)


def _removal(cache: CausalCache, sizes: Sizes, num_layers: int) -> Visit:
    total = KEEP + sizes.block_size + sizes.num_tokens

    def visit(num_calls: int) -> list[float]:
        seconds = []
        for _ in range(num_calls):
            begin = time.perf_counter()
            cache.remove(0, KEEP, KEEP + sizes.block_size)
            seconds.append(time.perf_counter() - begin)
            _append(cache, sizes, total - sizes.block_size, total, num_layers)
        return seconds

    return visit


def _kernel_shift(
    writer: kernels.Writer, cache: CausalCache, sizes: Sizes, num_layers: int, inv_freq: NDArray[np.float64]
) -> Visit:
    slots = np.arange(sizes.num_tokens, dtype=np.int64)
    offsets = np.full(sizes.num_tokens, -sizes.block_size, np.int64)
    turn = cycle([cache.storage.layer(layer).keys for layer in range(num_layers)])
    rotation = kernels.Rotation(inv_freq, interleaved=False, rotary_begin=0)
    return timed(lambda: writer.shift(next(turn), slots, offsets, rotation))
