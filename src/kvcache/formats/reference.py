"""Formats over NumPy and MLX: the definitions, written to be read.

What the library computes with itself is stored as it is (`NativeFormat`). Everything else is a codec over NumPy
(`CodedFormat`): f32 rows in, stored rows out. MLX goes through NumPy too: host and device are one memory there, so it
costs the codec's own pass and one copy, and a single definition of each format is enough. bf16 on NumPy, which has no
such type, rounds the bits:

    f32  1.00390625 = 0x3F808000   half way   -> 0x3F80 = 1.0        to the even neighbour
    f32  1.01171875 = 0x3F818000   half way   -> 0x3F82 = 1.015625

fp8_e4m3 (OCP 8-bit floating point, E4M3: bias 7, no infinities, NaN is 0x7F) counts steps: in the binade of exponent e
a step is 2^(e-3), the lowest binade (-6) reaches down to 0, and a code is the number of steps from there:

    code = 8 * (e + 6) + round_half_even(|x| / 2^(e-3))         x=448: e=8, 14 steps -> 8*14+14 = 126 = 0x7E

q8_0 and q4_0 are ggml's `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref` (llama.cpp, ggml-quants.c; its `gguf`
package is the oracle of the tests); the layout is that of `kvcache.formats`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from kvcache.backends import Backend
from kvcache.formats import GROUP_SIZE, Format
from kvcache.spec import Array, integer

__all__ = ["BELOW_HALF", "FP8_MAX", "CodedFormat", "NativeFormat", "reference_format", "row_width"]

FP8_MAX = 448.0
BELOW_HALF = 0.5 - 2.0**-25
"""The f32 below one half. Adding it and cutting rounds halves away from zero; adding 0.5 takes 0.49999997 to 1."""

Rows = NDArray[Any]


def row_width(name: str, head_dim: int) -> int:
    """Stored elements of a row of `head_dim` values in format `name`. `ValueError` when it cannot hold such rows."""
    head_dim = integer(head_dim, "head_dim", minimum=1)
    if name not in ("q8_0", "q4_0"):
        return head_dim
    if head_dim % GROUP_SIZE:
        raise ValueError(
            f"head_dim is {head_dim}; {name} stores groups of {GROUP_SIZE} values, so head_dim must be a multiple of "
            f"{GROUP_SIZE}; take fp8_e4m3, bf16, f16 or f32 for these keys or values"
        )
    quants = head_dim if name == "q8_0" else head_dim // 2
    return quants + head_dim // GROUP_SIZE * 2


def _encode_bf16(rows: Rows) -> Rows:
    bits = np.ascontiguousarray(rows).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return np.where(np.isnan(rows), quiet_nan, rounded).astype(np.uint16)


def _decode_bf16(stored: Rows, _head_dim: int) -> Rows:
    bits = stored.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _encode_fp8(rows: Rows) -> Rows:
    size = np.minimum(np.abs(rows), np.float32(FP8_MAX))
    exponent = np.maximum((size.view(np.int32) >> 23) - 127, -6)
    with np.errstate(invalid="ignore"):  # NaN to integer; replaced below
        code = (8 * (exponent + 6) + np.rint(np.ldexp(size, 3 - exponent))).astype(np.uint8)
    code = np.where(np.isnan(rows), np.uint8(0x7F), code)
    code |= np.signbit(rows).view(np.uint8) << 7
    return code


def _fp8_values() -> Rows:
    code = np.arange(128)
    binade = np.maximum(code >> 3, 1)
    steps = np.where(code < 8, code, 8 + (code & 7)).astype(np.float32)
    values = np.ldexp(steps, binade - 10)
    values[0x7F] = np.nan
    return np.concatenate([values, -values])


_FP8_VALUES = _fp8_values()


def _decode_fp8(stored: Rows, _head_dim: int) -> Rows:
    return _FP8_VALUES[stored]


def _groups(rows: Rows) -> Rows:
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // GROUP_SIZE, GROUP_SIZE)


def _inverse(scales: Rows) -> Rows:
    """1 / scale, and 0 where that is not finite.

    Such groups decode to zeros, their f16 scale being 0. (ggml converts infinity to an integer there, which is
    undefined in C: zeros as well, of either sign.)
    """
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scales
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _joined(quants: Rows, scales: Rows) -> Rows:
    """Quants u8 [...,D or D/2] first, then scales f32 [...,D/32] as little-endian f16."""
    with np.errstate(over="ignore"):  # a scale above 65504 is infinite, in ggml as here
        scale_bytes = scales.astype("<f2", order="C").view(np.uint8)
    return np.concatenate([quants, scale_bytes], axis=-1)


def _scales(stored: Rows, head_dim: int) -> Rows:
    first = stored.shape[-1] - head_dim // GROUP_SIZE * 2
    return np.ascontiguousarray(stored[..., first:]).view("<f2").astype(np.float32)


def _scaled(groups: Rows, scales: Rows) -> Rows:
    with np.errstate(invalid="ignore"):  # 0 times an infinite scale is NaN, in ggml as here
        groups *= scales[..., None]
    return groups.reshape(*groups.shape[:-2], groups.shape[-2] * GROUP_SIZE)


def _encode_q8_0(rows: Rows) -> Rows:
    groups = _groups(rows)
    scales = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore"):  # a group with an infinity or NaN in it: its scale says so
        scaled = groups * _inverse(scales)
        quants = (scaled + np.copysign(np.float32(BELOW_HALF), scaled)).astype(np.int8)
    return _joined(quants.view(np.uint8).reshape(rows.shape), scales[..., 0])


def _decode_q8_0(stored: Rows, head_dim: int) -> Rows:
    groups = _groups(stored[..., :head_dim].view(np.int8)).astype(np.float32)
    return _scaled(groups, _scales(stored, head_dim))


def _encode_q4_0(rows: Rows) -> Rows:
    groups = _groups(rows)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1, keepdims=True), axis=-1)
    scales = extreme / np.float32(-8)
    with np.errstate(invalid="ignore"):
        codes = np.minimum(groups * _inverse(scales) + np.float32(8.5), np.float32(15)).astype(np.uint8)
    packed = codes[..., : GROUP_SIZE // 2] | (codes[..., GROUP_SIZE // 2 :] << 4)
    return _joined(packed.reshape(*rows.shape[:-1], rows.shape[-1] // 2), scales[..., 0])


def _decode_q4_0(stored: Rows, head_dim: int) -> Rows:
    half = GROUP_SIZE // 2
    packed = stored[..., : head_dim // 2].reshape(*stored.shape[:-1], head_dim // GROUP_SIZE, half)
    groups = np.empty((*packed.shape[:-1], GROUP_SIZE), np.float32)
    groups[..., :half] = packed & 0x0F
    groups[..., half:] = packed >> 4
    groups -= np.float32(8)
    return _scaled(groups, _scales(stored, head_dim))


class Codec(NamedTuple):
    """f32 rows [...,D] to stored rows [...,W], and stored rows with D back to f32 rows."""

    storage_dtype: str
    encode: Callable[[Rows], Rows]
    decode: Callable[[Rows, int], Rows]


CODECS = {
    "bf16": Codec("u16", _encode_bf16, _decode_bf16),
    "fp8_e4m3": Codec("u8", _encode_fp8, _decode_fp8),
    "q8_0": Codec("u8", _encode_q8_0, _decode_q8_0),
    "q4_0": Codec("u8", _encode_q4_0, _decode_q4_0),
}


@final
class NativeFormat(Format):
    """Elements that the backend computes with, stored as they are."""

    is_native = True

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = self.storage_dtype = name
        self._backend = backend

    def row_width(self, head_dim: int) -> int:
        """See `Format.row_width`."""
        return row_width(self.name, head_dim)

    def encode(self, rows: Array) -> Array:
        """See `Format.encode`; the same object when the element type is already right."""
        return self._backend.cast(rows, self.name)

    def decode(self, stored: Array, head_dim: int) -> Array:
        """The same object."""
        return stored


@final
class CodedFormat(Format):
    """A codec over NumPy, between whatever arrays the backend has."""

    is_native = False

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = name
        self._codec = CODECS[name]
        self.storage_dtype = self._codec.storage_dtype
        self._backend = backend

    def row_width(self, head_dim: int) -> int:
        """See `Format.row_width`."""
        return row_width(self.name, head_dim)

    def encode(self, rows: Array) -> Array:
        """See `Format.encode`."""
        self.row_width(rows.shape[-1])
        host = self._backend.to_numpy(rows)
        with np.errstate(over="ignore"):
            return self._own(self._codec.encode(host.astype(np.float32, copy=False)))

    def decode(self, stored: Array, head_dim: int) -> Array:
        """See `Format.decode`."""
        return self._own(self._codec.decode(self._backend.to_numpy(stored), head_dim))

    def _own(self, fresh: Rows) -> Array:
        # `from_numpy` copies, which NumPy's own arrays need not. The layer is of no account: host memory.
        return fresh if self._backend.name == "numpy" else self._backend.from_numpy(fresh, 0)


def reference_format(name: str, backend: Backend) -> Format:
    """The format `name` (one of `FORMATS`) over NumPy or MLX."""
    return NativeFormat(name, backend) if name in backend.native else CodedFormat(name, backend)
