"""Blocks of ggml -> numbers, with torch operators.

A decoder takes blocks, uint8 `[n, num_bytes]`, and gives f32 `[n, block_size]`. A block is a few scales and small
integers; a value is `scale * integer` (types ending in 0, Q6_K), `scale * integer + minimum` (types ending in 1) or
`scale * integer - minimum` (Q4_K, Q5_K). Every product and sum is one f32 operation in ggml's own order, so the result
equals ggml's (and the `gguf` package's) bit for bit; narrower types are rounded once, at the end.

Bits are stored in planes: byte `j` of the low plane holds value `j` in its low nibble and value `j + half` in its
high one; a fifth or sixth bit lives in a plane of its own. `_planes` takes one apart. The layouts are those of
ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvcache.hf.gguf import GGUFFile, GGUFTensor

__all__ = ["decode"]

# Intermediates of 128 KiB stay in the processor's cache, and torch runs operators of this size on the calling thread:
# its own team of threads waits for its slowest member at each of 60,000 operators, which took 60 s instead of 0.5 s on
# a busy machine. Whoever wants more cores decodes several tensors at once.
_VALUES_PER_STEP = 1 << 15


def decode(
    file: GGUFFile, tensor: GGUFTensor, dtype: torch.dtype, *, add: float = 0.0, advance: Callable[[int], None]
) -> torch.Tensor:
    """The values of `tensor` as a new tensor of `tensor.shape` and `dtype`; `add` is added in f32 before rounding.

    `advance` is told the number of stored bytes as they are done. Cost: about 1 ns a value and core; memory: the result
    and a few MiB.
    """
    stored, kind = file.raw(tensor), tensor.kind
    blocks = stored.view(-1, kind.num_bytes)
    result = torch.empty(tensor.num_values, dtype=dtype)
    decoder = _DECODERS.get(kind.name) or _borrowed(tensor.kind_id)
    step = max(1, _VALUES_PER_STEP // kind.block_size)
    for begin in range(0, len(blocks), step):
        part = blocks[begin : begin + step]
        values = decoder(part)
        if add:
            values = values + add
        result[begin * kind.block_size :][: values.numel()] = values.reshape(-1)
        advance(part.numel())
    return result.view(tensor.shape)


def _borrowed(kind_id: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The rarer types (Q2_K, Q3_K, IQ*) are decoded by transformers, which has their tables."""
    from transformers.integrations.gguf.dequant import dequantize

    return lambda blocks: dequantize(blocks.reshape(-1), kind_id, torch.float32)


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """The f16 at byte `begin` of each block, f32 `[n, 1]`."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _planes(packed: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """`[..., m]` bytes -> `[..., len(shifts), m]`: the bytes shifted right by each shift, masked."""
    amounts = torch.tensor(shifts, dtype=torch.uint8)[:, None]
    return (packed[..., None, :] >> amounts) & mask


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """16 bytes -> 32 integers below 16."""
    return _planes(packed, (0, 4), 15).flatten(1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """4 bytes -> 32 integers, 0 or 16: bit `j` of the little-endian word belongs to value `j`."""
    amounts = torch.arange(8, dtype=torch.uint8)
    return (((packed[..., None] >> amounts) & 1) << 4).flatten(1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:18]).to(torch.int8) - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:20]) + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    integers = _nibbles(blocks[:, 6:22]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (integers.to(torch.int8) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    integers = _nibbles(blocks[:, 8:24]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * integers + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:34].view(torch.int8)


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima, f32 `[n, 8]` each.

    Bytes 0-3 and 4-7 hold the first four of each in their low six bits; bytes 8-11 hold the low nibbles of the last
    four (scale low, minimum high), whose top two bits sit above the first four.
    """
    low, high, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low & 63, (rest & 15) | (low >> 6 << 4)], dim=1)
    minima = torch.cat([high & 63, (rest >> 4) | (high >> 6 << 4)], dim=1)
    return scales.float(), minima.float()


def _affine(blocks: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
    """Q4_K and Q5_K: integers `[n, 8, 32]` with a scale and a minimum for every 32."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return scale[..., None] * integers - minimum[..., None]


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _affine(blocks, _planes(blocks[:, 16:144].unflatten(1, (4, 32)), (0, 4), 15).flatten(1, 2))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _planes(blocks[:, 48:176].unflatten(1, (4, 32)), (0, 4), 15).flatten(1, 2)
    return _affine(blocks, low | (_planes(blocks[:, 16:48], tuple(range(8)), 1) << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Two halves of 128 values: four rows of 32 share 64 bytes of nibbles and 32 of top pairs; a scale serves 16."""
    low = _planes(blocks[:, 0:128].unflatten(1, (2, 64)), (0, 4), 15).reshape(-1, 2, 4, 32)
    top = _planes(blocks[:, 128:192].unflatten(1, (2, 32)), (0, 2, 4, 6), 3)
    integers = (low | (top << 4)).view(torch.int8) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return scales[..., None] * integers.reshape(-1, 16, 16)


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    # clone() because the map may not be aligned for a wider type
    return lambda blocks: blocks.reshape(-1).clone().view(dtype).float()


_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
