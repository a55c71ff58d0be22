"""Arrays of the three backends for tests: to and from NumPy, payloads that can be recognised, masks read as sets.

A payload says whose it is: the digits of `uid` stand in each row of values and of keys, and the first column of a key
holds what was added to it by shifts (and its layer), so that a key moved by -3 is known from one that was not. All
numbers are exact in f32, f16 and bf16.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

F32 = NDArray[np.float32]

NUM_HEADS = 2
HEAD_DIM = 4
VALUE_DIM = 5
BASE = 16

BACKENDS = [
    "numpy",
    pytest.param("torch", marks=pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")),
    pytest.param("mlx", marks=pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="no mlx")),
]


def to_backend(backend: str, array: NDArray[Any] | list[Any]) -> Any:
    """A NumPy array as the backend's own."""
    array = np.asarray(array)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if backend == "torch":
        import torch

        return torch.from_numpy(np.ascontiguousarray(array))
    if backend == "mlx":
        import mlx.core as mx

        return mx.array(array)
    return array


def to_numpy(array: Any) -> NDArray[Any]:
    """Any backend's floating array in NumPy, f32."""
    library = type(array).__module__.partition(".")[0]
    if library == "torch":
        return array.detach().cpu().float().numpy()
    if library == "mlx":
        import mlx.core as mx

        return np.array(array.astype(mx.float32))
    return np.asarray(array, dtype=np.float32)


def add_offsets(layer: int, keys: Any, offsets: Any) -> Any:
    """A shift that can be checked by eye: the offset is added to the first column of each key."""
    moved = np.zeros(tuple(keys.shape), np.float32)
    moved[:, :, 0] = np.asarray(offsets if isinstance(offsets, np.ndarray) else offsets.tolist())[:, None]
    library = type(keys).__module__.partition(".")[0]
    return keys + to_backend(library, moved) if library != "numpy" else (keys + moved).astype(keys.dtype)


def _digits(uids: NDArray[np.int64], count: int) -> F32:
    powers = BASE ** np.arange(count)
    return ((uids[:, None] // powers % BASE) / 8 - 1).astype(np.float32)


def keys_of(layer: int, uids: list[int], shifts: list[int]) -> F32:
    """Keys [n,H,D] of these tokens in this layer."""
    keys = np.empty((len(uids), NUM_HEADS, HEAD_DIM), np.float32)
    keys[:, 0, 1:] = _digits(np.asarray(uids, np.int64), HEAD_DIM - 1)
    keys[:, 1, 1:] = -keys[:, 0, 1:]
    keys[:, :, 0] = np.asarray(shifts, np.float32)[:, None] + layer
    return keys


def values_of(layer: int, uids: list[int]) -> F32:
    """Values [n,H,Dv] of these tokens in this layer."""
    values = np.empty((len(uids), NUM_HEADS, VALUE_DIM), np.float32)
    values[:, 0] = _digits(np.asarray(uids, np.int64), VALUE_DIM)
    values[:, 1] = -values[:, 0]
    values[:, 1, -1] += layer
    return values


def recognise(layer: int, keys: Any, values: Any) -> list[tuple[int, int]]:
    """(uid, shift) of each row. Asserts that every number of the row is that token's."""
    keys, values = to_numpy(keys), to_numpy(values)
    assert keys.shape[1:] == (NUM_HEADS, HEAD_DIM) and values.shape == (len(keys), NUM_HEADS, VALUE_DIM)
    digits = np.rint((values[:, 0] + 1) * 8).astype(np.int64)
    uids = [int(u) for u in digits @ (BASE ** np.arange(VALUE_DIM))]
    shifts = [int(s) for s in np.rint(keys[:, 0, 0] - layer)]
    assert (values == values_of(layer, uids)).all(), values
    assert (keys == keys_of(layer, uids, shifts)).all(), keys
    return list(zip(uids, shifts, strict=True))


def open_columns(mask: Any, num_queries: int) -> list[NDArray[np.int64]]:
    """For each query the columns it may attend to. Asserts that a mask entry is 0 or minus infinity."""
    assert mask is not None
    mask = to_numpy(mask)
    assert mask.shape[0] == num_queries
    assert ((mask == 0) | np.isneginf(mask)).all(), mask
    return [np.flatnonzero(row == 0) for row in mask]


def attention(queries: F32, seen: list[tuple[F32, F32]], scale: float) -> F32:
    """Softmax attention [T,Hq,Dv] in float64; `seen`: each query's keys [n,H,D] and values [n,H,Dv]."""
    result = np.zeros((*queries.shape[:2], VALUE_DIM))
    group = queries.shape[1] // NUM_HEADS
    for t, (keys, values) in enumerate(seen):
        for head in range(queries.shape[1]):
            scores = keys[:, head // group].astype(np.float64) @ queries[t, head].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            result[t, head] = weights / weights.sum() @ values[:, head // group].astype(np.float64)
    return result.astype(np.float32)
