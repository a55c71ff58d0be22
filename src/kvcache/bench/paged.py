"""What attention is measured on: a pool of random keys and values, and batches whose tables point into it.

A pool is much larger than the last-level cache. A case that needs less than the pool takes turns over several parts of
it (`copies`), so that each call reads from memory, as a model's layers do; a case that is meant to stay in the cache
has one copy. Blocks are dealt out in random order, as an engine's pool ends up.

The memory of the pool is cut into blocks of any size, the values of each behind its keys as caches have them, or into
the contiguous [B,H,S,D] that other operators want. Everyone reads the same bytes.
"""

from __future__ import annotations

from itertools import cycle
from math import prod
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from kvcache import backends, formats, kernels
from kvcache.bench.machine import cache_bytes
from kvcache.bench.timing import CPU, Visit, timed
from kvcache.formats import Stored
from kvcache.kernels import AttentionBatch, Segment

__all__ = ["Case", "Heads", "Paged", "Pool", "make_batch", "more_than_caches", "paged_visit", "row_bytes"]

CACHES = 4
"""A pool and the copies of a case together are so many times the last-level cache."""
MOST_PARTS = 1024
"""Of a pool, that calls take turns over: what is small in a large pool, as in tests, would take long to plan."""
CHUNK = 8192


class Heads(NamedTuple):
    """Hq, H and D of the layer."""

    num_query_heads: int = 32
    num_heads: int = 8
    head_dim: int = 128


class Case(NamedTuple):
    """`num_sequences` of `num_tokens` tokens each, whose `num_queries` newest tokens are queries."""

    num_sequences: int
    num_tokens: int
    num_queries: int = 1
    window: int | None = None
    is_resident: bool = False
    """Whether each call reads the same tokens, so that they stay in the cache if they fit."""

    @property
    def num_slots(self) -> int:
        """Tokens of all sequences."""
        return self.num_sequences * self.num_tokens

    @property
    def num_read(self) -> int:
        """Tokens that at least one query sees: each must be read once."""
        seen = self.num_tokens if self.window is None else min(self.num_tokens, self.window + self.num_queries - 1)
        return self.num_sequences * seen

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a token that it sees."""
        ends = range(self.num_tokens - self.num_queries + 1, self.num_tokens + 1)
        return self.num_sequences * sum(end if self.window is None else min(end, self.window) for end in ends)

    def flops(self, heads: Heads) -> int:
        """Of two products, each a multiplication and an addition for each pair and value of a head."""
        return 4 * heads.head_dim * heads.num_query_heads * self.num_pairs


class Paged(NamedTuple):
    """Keys and values of one layer as a cache stores them."""

    keys: Stored
    values: Stored

    @property
    def bytes_per_token(self) -> int:
        """Of both."""
        return sum(s.array.shape[1] * s.array.shape[3] * s.array.element_size() for s in self)


@final
class Pool:
    """Random keys and values of `num_slots` tokens in bf16; more when that is less than `CACHES` last-level caches."""

    def __init__(self, heads: Heads, num_slots: int, *, seed: int = 0, device: torch.device = CPU) -> None:
        self.heads, self.device = heads, device
        self.width = heads.num_heads * heads.head_dim
        least = CACHES * cache_bytes() // (4 * self.width) if num_slots >= CHUNK else num_slots
        self.num_slots = max(num_slots, -(-least // CHUNK) * CHUNK if least >= CHUNK else least)
        self._memory = _random(2 * self.num_slots * self.width, seed, device)

    def stored(self, block_size: int) -> Paged:
        """The pool in blocks, the values of each behind its keys as in a cache; no copy."""
        form = formats.create("bf16", backends.create("torch"))
        shape = (self.num_slots // block_size, 2, self.heads.num_heads, block_size, self.heads.head_dim)
        both = self._memory[: prod(shape)].view(shape)
        return Paged(Stored(both[:, 0], form, shape[-1]), Stored(both[:, 1], form, shape[-1]))

    def contiguous(self, case: Case) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B,H,S,D] of each copy; no copy of memory."""
        shape = (case.num_sequences, self.heads.num_heads, case.num_tokens, self.heads.head_dim)
        size = case.num_slots * self.width
        keys, values = self._memory.chunk(2)
        return [
            (keys[i * size : (i + 1) * size].view(shape), values[i * size : (i + 1) * size].view(shape))
            for i in range(self.num_copies(case))
        ]

    def num_copies(self, case: Case) -> int:
        """How many parts of the pool calls of this case take turns over."""
        if case.is_resident:
            return 1
        enough = more_than_caches(case.num_read * 4 * self.width, self.device)
        return max(1, min(self.num_slots // case.num_slots, enough))

    def queries(self, case: Case) -> Tensor:
        """bf16 [B * queries, Hq, D]."""
        shape = (case.num_sequences * case.num_queries, self.heads.num_query_heads, self.heads.head_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(self.device)


def more_than_caches(num_bytes: int, device: torch.device = CPU) -> int:
    """How many times so many bytes are `CACHES` last-level caches, at least; once on a GPU, whose are rewritten."""
    if device.type == "cuda":
        return 1
    return -(-CACHES * cache_bytes() // num_bytes)


def row_bytes(name: str, head_dim: int) -> int:
    """Bytes of a row of one head in a format."""
    backend = backends.create("torch")
    return backend.num_bytes(formats.create(name, backend).encode(torch.zeros(1, 1, head_dim)))


def make_batch(case: Case, block_size: int, blocks: np.ndarray[tuple[int], np.dtype[np.int32]]) -> AttentionBatch:
    """The case over the first of these blocks, in their order."""
    each = -(-case.num_tokens // block_size)
    count, queries = case.num_sequences, case.num_queries
    segments = [
        Segment(np.arange(i * queries, (i + 1) * queries), blocks[i * each : (i + 1) * each], case.num_tokens, 0, None)
        for i in range(count)
    ]
    ends = np.tile(np.arange(case.num_tokens - queries + 1, case.num_tokens + 1, dtype=np.int32), count)
    begins = np.zeros_like(ends) if case.window is None else np.maximum(ends - case.window, 0).astype(np.int32)
    return AttentionBatch(segments, begins, ends, block_size)


def paged_visit(case: Case, paged: Paged, queries: Tensor, *, block_size: int, copies: int) -> Visit:
    """Our kernel, the one that a cache takes for these arrays, over parts of the pool in turn.

    Each part is attended to once beforehand, for a kernel plans a batch when it first sees it: once for all layers of a
    step. vLLM's metadata is made beforehand, too.
    """
    each = -(-case.num_tokens // block_size) * case.num_sequences
    order = np.random.default_rng(0).permutation(len(paged.keys.array)).astype(np.int32)
    batches = [make_batch(case, block_size, order[i * each : (i + 1) * each]) for i in range(min(copies, MOST_PARTS))]
    kernel = kernels.choose(queries, paged.keys, paged.values)

    def attend(batch: AttentionBatch) -> object:
        return kernel.attend(queries, paged.keys, paged.values, batch, scale=queries.shape[2] ** -0.5)

    for batch in batches:
        attend(batch)
    turn = cycle(batches)
    return timed(lambda: attend(next(turn)), queries.device)


def _random(count: int, seed: int, device: torch.device) -> Tensor:
    """Normally distributed bf16 in the memory that caches store in, made in pieces: f32 is twice as large."""
    out: Tensor = backends.torch(str(device)).zeros((count,), "bf16", 0)
    generator = torch.Generator().manual_seed(seed)
    for piece in out.split(2**22):
        piece.copy_(torch.randn(len(piece), generator=generator))
    return out
