"""Writing one decode step into the cache: the new token of each of 16 sequences, in every layer.

| contender | what it is                                                                                        |
|-----------|---------------------------------------------------------------------------------------------------|
| kernel op | `Writer.put` of the kernel: encodes and scatters keys and values, in one pass                     |
| cache.put | `CausalCache.put`, what a model calls: checks, then that operator, or the backend without one      |
| vLLM      | `cpu_attn_reshape_and_cache` (bf16, its own blocks)                                               |

Each call writes into another layer's storage, as a step does; times are of one layer. The bytes are few, so what is
measured is mostly the cost of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch

from kvcache import kernels
from kvcache.bench.outside import VLLM, VLLM_BLOCK, Vllm
from kvcache.bench.paged import Heads
from kvcache.bench.stream import Stream
from kvcache.bench.table import Cell, Table
from kvcache.bench.timing import Effort, Visit, alternate, timed
from kvcache.caches import CausalCache
from kvcache.formats import FORMATS
from kvcache.spans import Full
from kvcache.spec import Array, Batch

__all__ = ["Sizes", "tables"]

OP, CACHE, STREAM = "kernel op", "cache.put", "stream"


class Sizes(NamedTuple):
    """What is measured."""

    heads: Heads = Heads()
    num_sequences: int = 16
    num_tokens: int = 2048
    num_layers: int = 8
    formats: tuple[str, ...] = FORMATS
    block_sizes: tuple[int, ...] = (1, 16, 64, 128)
    main_block: int = 16
    stream_bytes: int | None = None
    effort: Effort = Effort()


def tables(sizes: Sizes | None = None, peers: Sequence[str] = (VLLM,)) -> list[Table]:
    """Every format in blocks of 16, and every block size in bf16. About 10 s. `peers`: () or ("vLLM",)."""
    given, notes = sizes or Sizes(), []
    rows: list[tuple[Cell, ...]] = []
    with torch.no_grad(), ExitStack() as stack:
        stream, vllm = Stream(given.stream_bytes), None
        if VLLM in peers:
            try:
                slots = -(-given.num_sequences * given.num_tokens // VLLM_BLOCK) * VLLM_BLOCK
                vllm = Vllm(given.heads, slots, num_threads=torch.get_num_threads(), stack=stack)
                notes.append(f"{VLLM}: {vllm.label}")
            except RuntimeError as error:
                notes.append(f"{VLLM} is absent: {error}")
        for name in given.formats:
            rows += _measured(given, name, given.main_block, stream, vllm if name == "bf16" else None)
        for size in given.block_sizes:
            if size != given.main_block:
                rows += _measured(given, "bf16", size, stream, None)
    columns = ("format", "block size", "contender", "moved kB", "µs per layer", "GB/s", "of stream")
    title = (
        f"Put of one decode step, {given.num_sequences} sequences, {given.heads.num_heads} KV heads of "
        f"{given.heads.head_dim}"
    )
    return [Table(title, columns, rows, tuple(notes))]


def _measured(sizes: Sizes, name: str, block_size: int, stream: Stream, vllm: Vllm | None) -> list[tuple[Cell, ...]]:
    cache = _filled(sizes, name, block_size)
    shape = (sizes.num_sequences, sizes.heads.num_heads, sizes.heads.head_dim)
    keys, values = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (1, 2))
    stored = cache.storage.layer(0)
    kernels.choose(keys, stored.keys, stored.values)  # loads the kernel, as attention does
    contenders: dict[str, Visit] = {CACHE: _cache_put(cache, keys, values, sizes.num_layers), STREAM: stream.visit}
    writer = kernels.writer((stored.keys, stored.values), (keys, values))
    if writer is not None:
        contenders[OP] = _kernel_put(writer, cache, keys, values, sizes)
    if vllm is not None:
        contenders[VLLM] = vllm.put(num_sequences=sizes.num_sequences, num_layers=sizes.num_layers)
    times = alternate(contenders, sizes.effort)
    # New rows are read, stored rows are written.
    written = sum(s.array[0, :, 0].nbytes for s in (stored.keys, stored.values)) * sizes.num_sequences
    moved, limit = keys.nbytes + values.nbytes + written, stream.bandwidth(times[STREAM])
    rows: list[tuple[Cell, ...]] = []
    for contender in (OP, CACHE, *((VLLM,) if vllm else ())):
        seconds = times.get(contender)
        if seconds is None:
            rows.append((name, block_size, contender, *[None] * 4))
        else:
            speed = moved / seconds
            rows.append((name, block_size, contender, moved / 1e3, seconds * 1e6, speed / 1e9, speed / limit))
    return rows


def _filled(sizes: Sizes, name: str, block_size: int) -> CausalCache:
    """A cache in which every sequence has `num_tokens` tokens, and a pass for one more of each is under way."""
    cache = CausalCache(Full(), block_size=block_size)
    capacity = -(-(sizes.num_tokens + 1) // block_size) * block_size
    cache.init("torch", name, max_sequences=sizes.num_sequences, capacity=capacity, max_batch=capacity)
    for sequence in range(sizes.num_sequences):
        cache.start_forward(Batch(range(sizes.num_tokens), [sequence] * sizes.num_tokens))
    cache.start_forward(Batch([sizes.num_tokens] * sizes.num_sequences, range(sizes.num_sequences)))
    rows = torch.zeros(sizes.num_sequences, sizes.heads.num_heads, sizes.heads.head_dim, dtype=torch.bfloat16)
    for layer in range(sizes.num_layers):
        cache.set_layer(layer)
        cache.put(rows, rows)
    return cache


def _cache_put(cache: CausalCache, keys: Array, values: Array, num_layers: int) -> Visit:
    turn = cycle(range(num_layers))

    def put() -> None:
        cache.set_layer(next(turn))
        cache.put(keys, values)

    return timed(put)


def _kernel_put(writer: kernels.Writer, cache: CausalCache, keys: Array, values: Array, sizes: Sizes) -> Visit:
    layers = [cache.storage.layer(layer) for layer in range(sizes.num_layers)]
    newest = np.asarray([sizes.num_tokens])
    slots = np.concatenate([table.slots(newest) for table in cache.tables.sequences.values()]).astype(np.int64)
    turn = cycle(layers)

    def put() -> None:
        layer = next(turn)
        writer.put(layer.keys, layer.values, slots, keys, values)

    return timed(put)
