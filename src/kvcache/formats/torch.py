"""Formats over PyTorch, on whatever device the rows are; bit for bit those of `reference.py`, which explains them.

Encoding the keys of a decode step is many small operations, so what counts is their number: results go straight to
their place in the stored row (`copy_` converts on the way), and in-place operations follow the first allocation.
Decoding allocates its result and, for q4_0, nibbles of an eighth of it; fp8 on the CPU goes through 4-byte indices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from kvcache.formats import GROUP_SIZE, Format
from kvcache.formats.reference import BELOW_HALF, FP8_MAX, row_width
from kvcache.spec import Array

__all__ = ["TorchCodedFormat", "TorchNativeFormat", "torch_format"]

NATIVE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
HALF = GROUP_SIZE // 2

_FP8_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


def _encode_fp8(rows: Tensor) -> Tensor:
    clamped = rows.clamp(-FP8_MAX, FP8_MAX)  # strides of views would stay, and the backend's storage is dense
    return clamped.to(torch.float8_e4m3fn, memory_format=torch.contiguous_format).view(torch.uint8)


def _decode_fp8(stored: Tensor, _head_dim: int) -> Tensor:
    if not stored.is_cpu:
        return stored.view(torch.float8_e4m3fn).float()
    # PyTorch's own conversion is scalar on the CPU: 47 µs against 14 µs for 16 x 8 x 128.
    indices = stored.to(torch.int32, memory_format=torch.contiguous_format)
    return _FP8_VALUES.index_select(0, indices.view(-1)).view(stored.shape)


def _groups(rows: Tensor) -> Tensor:
    return rows.view(*rows.shape[:-1], rows.shape[-1] // GROUP_SIZE, GROUP_SIZE)


def _nibbles(stored: Tensor, head_dim: int) -> Tensor:
    """The bytes of q4_0 quants [...,D/32,16], in place."""
    return stored[..., : head_dim // 2].view(*stored.shape[:-1], head_dim // GROUP_SIZE, HALF)


def _scales(stored: Tensor, head_dim: int) -> Tensor:
    """The scales of a stored row, f16 [...,D/32], in place."""
    return stored[..., -(head_dim // GROUP_SIZE * 2) :].view(torch.float16)


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale, and 0 where that is not finite."""
    return scales.reciprocal().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _empty(rows: Tensor, name: str) -> Tensor:
    return torch.empty((*rows.shape[:-1], row_width(name, rows.shape[-1])), dtype=torch.uint8, device=rows.device)


def _encode_q8_0(rows: Tensor) -> Tensor:
    head_dim = rows.shape[-1]
    groups = _groups(rows.float())
    # The divisor is a tensor: by a Python number CUDA multiplies with the reciprocal, which is not the same.
    scales = groups.abs().amax(-1, keepdim=True).div_(torch.full((), 127.0, device=rows.device))
    scaled = groups * _inverse(scales)
    scaled.add_(scaled.sign(), alpha=BELOW_HALF)
    stored = _empty(rows, "q8_0")
    _groups(stored[..., :head_dim].view(torch.int8)).copy_(scaled)  # cuts the fraction off
    _scales(stored, head_dim).copy_(scales.squeeze(-1))
    return stored


def _decode_q8_0(stored: Tensor, head_dim: int) -> Tensor:
    rows = stored[..., :head_dim].view(torch.int8).float()
    _groups(rows).mul_(_scales(stored, head_dim).float().unsqueeze(-1))
    return rows


def _encode_q4_0(rows: Tensor) -> Tensor:
    head_dim = rows.shape[-1]
    groups = _groups(rows.float())
    first_of_largest = groups.abs().max(-1, keepdim=True).indices
    scales = groups.gather(-1, first_of_largest).div_(-8)
    codes = (groups * _inverse(scales)).add_(8.5).clamp_(max=15).to(torch.uint8)
    stored = _empty(rows, "q4_0")
    _nibbles(stored, head_dim).copy_(codes[..., :HALF]).add_(codes[..., HALF:], alpha=16)
    _scales(stored, head_dim).copy_(scales.squeeze(-1))
    return stored


def _decode_q4_0(stored: Tensor, head_dim: int) -> Tensor:
    nibbles = _nibbles(stored, head_dim)
    groups = torch.empty((*nibbles.shape[:-1], GROUP_SIZE), dtype=torch.float32, device=stored.device)
    groups[..., :HALF] = nibbles & 0x0F
    groups[..., HALF:] = nibbles >> 4
    groups.sub_(8).mul_(_scales(stored, head_dim).float().unsqueeze(-1))
    return groups.flatten(-2)


class Codec(NamedTuple):
    """Floating rows [...,D] to stored u8 rows [...,W], and stored rows with D back to f32 rows."""

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, int], Tensor]


CODECS = {
    "fp8_e4m3": Codec(_encode_fp8, _decode_fp8),
    "q8_0": Codec(_encode_q8_0, _decode_q8_0),
    "q4_0": Codec(_encode_q4_0, _decode_q4_0),
}


@final
class TorchNativeFormat(Format):
    """f32, f16 or bf16, stored as they are."""

    is_native = True

    def __init__(self, name: str) -> None:
        self.name = self.storage_dtype = name
        self._dtype = NATIVE[name]

    def row_width(self, head_dim: int) -> int:
        """See `Format.row_width`."""
        return row_width(self.name, head_dim)

    def encode(self, rows: Array) -> Array:
        """See `Format.encode`; the same object when the element type is already right."""
        return rows.to(self._dtype)

    def decode(self, stored: Array, head_dim: int) -> Array:
        """The same object."""
        return stored


@final
class TorchCodedFormat(Format):
    """A codec over u8 tensors."""

    is_native = False
    storage_dtype = "u8"

    def __init__(self, name: str) -> None:
        self.name = name
        self._codec = CODECS[name]

    def row_width(self, head_dim: int) -> int:
        """See `Format.row_width`."""
        return row_width(self.name, head_dim)

    def encode(self, rows: Array) -> Array:
        """See `Format.encode`."""
        self.row_width(rows.shape[-1])
        return self._codec.encode(rows)

    def decode(self, stored: Array, head_dim: int) -> Array:
        """See `Format.decode`."""
        return self._codec.decode(stored, head_dim)


def torch_format(name: str) -> Format:
    """The format `name` (one of `FORMATS`) over PyTorch."""
    return TorchNativeFormat(name) if name in NATIVE else TorchCodedFormat(name)
