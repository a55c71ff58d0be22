"""Attention as it is defined: one query at a time, in float64. Slow, and meant to be read.

    query at position 6 of a sequence, window 3:      positions   3 4 5 6 . 7 8      (`.` an empty slot)
                                                      visible     . x x x . . .      begin 4, end 7

For each query: pick the slots whose position it sees, decode those keys and values and no others, and take the
softmax-weighted sum of the values. What is not picked is never touched, so an empty slot may hold anything.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from kvcache.backends import Backend, create
from kvcache.formats import Stored
from kvcache.kernels import AttentionBatch, Kernel, Segment, queries_per_head
from kvcache.spec import Array

__all__ = ["ReferenceKernel"]

Float64 = NDArray[np.float64]


@final
class ReferenceKernel(Kernel):
    """The definition of attention: every array library, every format. Cost: O(T * S) small NumPy calls."""

    name = "reference"

    def refusal(self, queries: Array, keys: Stored, values: Stored) -> str | None:
        """`None`: it reads whatever there is."""
        return None

    def attend(
        self,
        queries: Array,
        keys: Stored,
        values: Stored,
        batch: AttentionBatch,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """See `Kernel.attend`; the result is rounded once, to the element type of the queries."""
        group = queries_per_head(queries, keys, values, sinks, softcap)
        T, Hq, D = queries.shape
        H = Hq // group
        q = _float64(queries).reshape(T, H, group, D)
        sink = None if sinks is None else _float64(sinks).reshape(H, group, 1)
        out = np.zeros((T, H, group, values.head_dim))
        for segment in batch.segments:
            positions = _positions(segment)
            for row in segment.rows:
                begin, end = batch.query_begins[row], batch.query_ends[row]
                visible = np.flatnonzero((positions >= 0) & (positions >= begin) & (positions < end))
                if visible.size:
                    slots = _storage_slots(segment, visible, batch.block_size)
                    weights = _softmax(_scores(q[row], _rows(keys, slots), scale, softcap), sink)
                    out[row] = np.einsum("hgs,shv->hgv", weights, _rows(values, slots))
        return _like(queries, out.reshape(T, Hq, values.head_dim))


def _positions(segment: Segment) -> NDArray[np.int64]:
    """The position in each slot of the segment, -1 where there is none."""
    if segment.positions is not None:
        return segment.positions[: segment.num_slots].astype(np.int64)
    return segment.first_position + np.arange(segment.num_slots)


def _storage_slots(segment: Segment, slots: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Slots of the segment as slots of the storage, through its block table."""
    return segment.block_table[slots // block_size].astype(np.int64) * block_size + slots % block_size


def _rows(stored: Stored, slots: NDArray[np.int64]) -> Float64:
    """Decoded rows [n,H,D] of these slots."""
    encoded = _backend(stored.array).gather_rows(stored.array, slots)
    return _float64(stored.format.decode(encoded, stored.head_dim))


def _scores(query: Float64, keys: Float64, scale: float, softcap: float | None) -> Float64:
    """Scores [H,G,S] of one query [H,G,D] against keys [S,H,D]."""
    scores: Float64 = scale * np.einsum("hgd,shd->hgs", query, keys)
    return scores if softcap is None else softcap * np.tanh(scores / softcap)


def _softmax(scores: Float64, sink: Float64 | None) -> Float64:
    """Weights [H,G,S]; a sink [H,G,1] takes its share of the sum and has no value."""
    highest = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        highest = np.maximum(highest, sink)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - highest)
    normalised: Float64 = weights / total
    return normalised


@cache
def _backend_named(name: str) -> Backend:
    return create(name)


def _backend(array: Array) -> Backend:
    """The backend whose library made the array; by name, because nothing here may import that library itself."""
    return _backend_named(type(array).__module__.partition(".")[0])


def _float64(array: Array) -> Float64:
    values: Float64 = _backend(array).to_numpy(array).astype(np.float64)
    return values


def _like(queries: Array, result: Float64) -> Array:
    """The result in the library, element type and device of the queries."""
    if isinstance(queries, np.ndarray):
        return result.astype(queries.dtype)
    if type(queries).__module__.startswith("mlx"):
        mlx: Any = sys.modules["mlx.core"]
        return mlx.array(result.astype(np.float32)).astype(queries.dtype)
    return queries.new_tensor(result)
