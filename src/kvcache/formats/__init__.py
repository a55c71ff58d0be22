"""Formats: how a row of keys or values becomes stored elements, and how it is read back.

| name       | stored as                                  | bits per value | read back           |
|------------|--------------------------------------------|----------------|---------------------|
| `f32`      | f32                                        | 32             | as stored           |
| `f16`      | f16                                        | 16             | as stored           |
| `bf16`     | bf16, or u16 bit patterns (NumPy)          | 16             | as stored, or f32   |
| `fp8_e4m3` | u8, saturating at 448, never NaN from finite | 8            | f32                 |
| `q8_0`     | 32 values: int8 each, one f16 scale        | 8.5            | f32                 |
| `q4_0`     | 32 values: 4 bits each, one f16 scale      | 4.5            | f32                 |

`q8_0` and `q4_0` are numerically those of ggml (llama.cpp); the layout is ours. A row of D values is stored as
D (or D/2) quants first and then D/32 scales of two bytes, little-endian, so that a row is one stream and its quants
load in whole registers:

    q8_0, D=64:   | q0 q1 ... q63 | s0 s1 |             68 = 64 + 4 bytes
    q4_0, D=64:   | 32 bytes      | s0 s1 |             36 = 32 + 4 bytes

Within each 16 bytes of `q4_0` (32 values) byte j holds value j in its low and value j + 16 in its high half, as ggml.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.backends import Backend
from kvcache.spec import Array

__all__ = ["FORMATS", "GROUP_SIZE", "Format", "Stored", "create", "pair"]

FORMATS = ("f32", "f16", "bf16", "fp8_e4m3", "q8_0", "q4_0")
GROUP_SIZE = 32
"""Values that share one scale in q8_0 and q4_0, ggml's QK8_0 and QK4_0."""


class Format(ABC):
    """Encodes rows [...,D] into stored rows [...,W] and back, over the arrays of one backend."""

    name: str
    storage_dtype: str
    """Element type of the storage, one of `f32 f16 bf16 u16 u8`."""
    is_native: bool
    """True when stored rows are themselves what a model computes with: `decode` is then the identity."""

    @abstractmethod
    def row_width(self, head_dim: int) -> int:
        """W: stored elements of a row of `head_dim` values. `ValueError` when the format cannot hold such rows."""

    @abstractmethod
    def encode(self, rows: Array) -> Array:
        """Stored rows [...,W] of floating rows [...,D] (any floating element type)."""

    @abstractmethod
    def decode(self, stored: Array, head_dim: int) -> Array:
        """Rows [...,D] of stored rows [...,W]: as stored when native, else f32."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The keys or the values of one layer as they lie in memory: what kernels read.

    array: [N,H,block_size,W]; `format` says what an element means; `head_dim` is D (or Dv).
    """

    array: Array
    format: Format
    head_dim: int


def create(name: str, backend: Backend) -> Format:
    """The format `name` over the arrays of `backend`. Raises `ValueError` for an unknown name."""
    if name not in FORMATS:
        raise _unknown(name)
    if backend.name == "torch":
        from kvcache.formats.torch import torch_format

        return torch_format(name)
    from kvcache.formats.reference import reference_format

    return reference_format(name, backend)


def pair(dtype: str | Sequence[str], backend: Backend) -> tuple[Format, Format]:
    """The formats of keys and of values: one name for both, or a pair `(key, value)`."""
    names = (dtype, dtype) if isinstance(dtype, str) else tuple(dtype) if isinstance(dtype, (tuple, list)) else None
    if names is None or len(names) != 2:
        raise _unknown(dtype)
    return create(names[0], backend), create(names[1], backend)


def _unknown(dtype: object) -> ValueError:
    expected = f"one of {', '.join(FORMATS)}, or a pair (key, value) of them"
    return ValueError(f"the format of keys and values is {dtype!r}; expected {expected}")
