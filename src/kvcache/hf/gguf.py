"""GGUF files: the header read without copying, every claim in it checked, and blocks decoded with torch.

A GGUF file is `header | metadata | tensor table | padding | tensor data`, little-endian:

| part         | layout                                                                                            |
|--------------|---------------------------------------------------------------------------------------------------|
| header       | `GGUF`, u32 version (2 or 3), u64 number of tensors, u64 number of metadata entries               |
| metadata     | per entry: string key, u32 type, value; a string: u64 length, UTF-8; an array: u32 type, u64 count |
| tensor table | per tensor: string name, u32 dimensions, u64 sizes (fastest first), u32 ggml type, u64 offset     |
| tensor data  | starts at the next multiple of `general.alignment` (32); offsets count from there                 |

The strategy: map the file, walk the metadata once with `struct`, and *skip* the arrays (a vocabulary of 262,144 words
is three arrays and most of the header); whoever needs an array reads it later through its `ArrayRef`. That takes 0.05 s
where the `gguf` package's reader takes 20 s. Nothing here imports torch until a tensor is decoded, so a broken file is
refused in milliseconds. The format is ggml's (docs/gguf.md).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from kvcache.errors import KVCacheError, NotSupported

if TYPE_CHECKING:
    import torch

__all__ = ["ArrayRef", "CorruptFile", "GGMLType", "GGUFFile", "GGUFTensor", "read_gguf"]


class CorruptFile(KVCacheError, ValueError):
    """A model file is broken, truncated or contradicts itself. The message names the file and the reason."""


@final
@dataclass(frozen=True)
class GGMLType:
    """How ggml stores a tensor: `block_size` values in `num_bytes` bytes."""

    name: str
    block_size: int
    num_bytes: int


_K = 256  # values in a block of the "K" and "IQ" families
GGML_TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", _K, 84),
    11: GGMLType("Q3_K", _K, 110),
    12: GGMLType("Q4_K", _K, 144),
    13: GGMLType("Q5_K", _K, 176),
    14: GGMLType("Q6_K", _K, 210),
    16: GGMLType("IQ2_XXS", _K, 66),
    17: GGMLType("IQ2_XS", _K, 74),
    18: GGMLType("IQ3_XXS", _K, 98),
    19: GGMLType("IQ1_S", _K, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", _K, 110),
    22: GGMLType("IQ2_S", _K, 82),
    23: GGMLType("IQ4_XS", _K, 136),
    29: GGMLType("IQ1_M", _K, 56),
    30: GGMLType("BF16", 1, 2),
}
"""The ggml types whose values this package can decode, by their number in the file."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SHORT_ARRAY = 1024  # numeric arrays up to this length are per-layer settings; longer ones belong to the vocabulary


@final
@dataclass(frozen=True)
class ArrayRef:
    """An array of the metadata that was not read: `count` values of type `kind`, the first at byte `offset`."""

    kind: int
    count: int
    offset: int


@final
@dataclass(frozen=True)
class GGUFTensor:
    """One row of the tensor table. `shape` is in torch's order (slowest first), `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLType
    kind_id: int
    offset: int
    num_bytes: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


@final
@dataclass(frozen=True)
class GGUFFile:
    """A checked header over a mapped file, which stays mapped as long as this lives. Data is read when decoded."""

    path: Path
    buffer: mmap.mmap
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    header_bytes: int

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def header_digest(self) -> bytes:
        """32-byte SHA-256 of everything before the tensor data: vocabulary, settings and table. 10 ms for 6.5 MB."""
        return sha256(memoryview(self.buffer)[: self.header_bytes]).digest()

    def strings(self, key: str) -> list[str]:
        """The array of strings `key`, read now (0.1 s for 262,144), or an empty list where the file has none."""
        ref = self._array(key)
        if ref is None:
            return []
        if ref.kind != _STRING:
            raise CorruptFile(f"{self.path}: {key} should be an array of strings and has element type {ref.kind}")
        length_at, position, words = struct.Struct("<Q").unpack_from, ref.offset, []
        raw = self.buffer[: self.header_bytes]  # one copy as bytes: slices of a map are slow
        for _ in range(ref.count):
            end = position + 8 + length_at(raw, position)[0]
            words.append(raw[position + 8 : end])
            position = end
        try:
            return [word.decode() for word in words]
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{self.path}: {key} holds a string that is not UTF-8: {error}") from error

    def numbers(self, key: str) -> list[int] | list[float]:
        """The array of numbers `key`, read now, or an empty list where the file has none."""
        value = self.metadata.get(key)
        if isinstance(value, list):
            return value
        ref = self._array(key)
        if ref is None:
            return []
        if ref.kind not in _SCALARS:
            raise CorruptFile(f"{self.path}: {key} should be an array of numbers and has element type {ref.kind}")
        return list(struct.unpack_from(f"<{ref.count}{_SCALARS[ref.kind]}", self.buffer, ref.offset))

    def raw(self, tensor: GGUFTensor) -> torch.Tensor:
        """The stored bytes of a tensor, uint8 `[num_bytes]`, as a view of the map."""
        import torch

        return torch.frombuffer(self.buffer, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def _array(self, key: str) -> ArrayRef | None:
        value = self.metadata.get(key)
        if value is None or isinstance(value, ArrayRef):
            return value
        raise CorruptFile(f"{self.path}: {key} should be an array and is {type(value).__name__}")


def read_gguf(path: Path) -> GGUFFile:
    """Map `path` and check its header: magic, version, structure, tensor types, and that every tensor lies inside.

    Raises `CorruptFile` for a broken or truncated file and `NotSupported` for a version, a split file or a ggml type
    that cannot be read, each naming the file, what was seen and the cure. Cost: 0.05 s for a vocabulary of 262,144.
    """
    size = path.stat().st_size
    with path.open("rb") as handle:
        _check_magic(path, handle.read(64), size)
        # A private writable map: torch refuses read-only buffers, and nobody writes.
        buffer = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    cursor = _Cursor(path, buffer)
    cursor.position = 8
    num_tensors, num_entries = cursor.number("Q"), cursor.number("Q")
    metadata = dict(_metadata(cursor, num_entries))
    if not isinstance(metadata.get("general.architecture"), str):
        raise CorruptFile(f"{path}: the metadata does not say general.architecture, so the model is unknown")
    if metadata.get("split.count", 1) > 1:
        raise NotSupported(
            f"{path} is one of {metadata['split.count']} parts of a split model; join them first "
            f"(`llama-gguf-split --merge`) and load the joined file"
        )
    rows = list(_table(cursor, num_tensors))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CorruptFile(f"{path}: general.alignment is {alignment!r}; a positive number was expected")
    data_begin = -(-cursor.position // alignment) * alignment
    tensors = _checked_tensors(path, rows, data_begin, size)
    return GGUFFile(path, buffer, metadata, tensors, cursor.position)


def _check_magic(path: Path, head: bytes, size: int) -> None:
    if head[:4] != b"GGUF":
        reason = "it is empty" if not size else f"it starts with {head[:4]!r} and a GGUF file starts with b'GGUF'"
        if head.startswith(b"version https://git-lfs"):
            reason = "it is a Git LFS pointer, not the file itself; run `git lfs pull`"
        elif head[:2] == b"PK":
            reason = "it is a zip archive (a PyTorch checkpoint?)"
        raise CorruptFile(f"{path} is not a GGUF file: {reason}")
    if size < 24:
        raise CorruptFile(f"{path} is truncated: {size} bytes, and the header alone takes 24; download it again")
    (version,) = struct.unpack_from("<I", head, 4)
    if version not in (2, 3):
        why = "it is big-endian" if version & 0xFFFF == 0 and version else f"it is GGUF version {version}"
        raise NotSupported(f"{path} cannot be read: {why}; versions 2 and 3, little-endian, can. Convert it again")


@final
class _Cursor:
    """A position in the header that cannot leave the file."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path, self.buffer, self.position = path, buffer, 0

    def take(self, num_bytes: int) -> int:
        """Step over `num_bytes`; where they began."""
        begin, self.position = self.position, self.position + num_bytes
        if self.position > len(self.buffer):
            raise CorruptFile(
                f"{self.path} is truncated or broken: its header needs bytes [{begin}, {self.position}) "
                f"and the file has {len(self.buffer)}; download it again"
            )
        return begin

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.buffer, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        length = self.number("Q")
        begin = self.take(length)
        try:
            return self.buffer[begin : self.position].decode()
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{self.path}: the string at byte {begin} is not UTF-8: {error}") from error


def _metadata(cursor: _Cursor, num_entries: int) -> Iterator[tuple[str, Any]]:
    for _ in range(num_entries):
        key = cursor.text()
        kind = cursor.number("I")
        if kind == _STRING:
            yield key, cursor.text()
        elif kind == _ARRAY:
            yield key, _array(cursor, key)
        elif kind in _SCALARS:
            yield key, cursor.number(_SCALARS[kind])
        else:
            raise CorruptFile(f"{cursor.path}: {key} has metadata type {kind}, which GGUF does not define (0 to 12)")


def _array(cursor: _Cursor, key: str) -> ArrayRef | list[Any]:
    kind, count = cursor.number("I"), cursor.number("Q")
    begin = cursor.position
    if kind == _STRING:
        # The one loop over the vocabulary: no call, no slice, no bounds check until a read fails or the end is known.
        length_at, position, buffer = struct.Struct("<Q").unpack_from, begin, cursor.buffer
        try:
            for _ in range(count):
                position += 8 + length_at(buffer, position)[0]
        except struct.error:
            position = len(buffer) + 1
        cursor.take(position - begin)
    elif kind in _SCALARS:
        cursor.take(count * struct.calcsize("<" + _SCALARS[kind]))
        if count <= _SHORT_ARRAY and not key.startswith("tokenizer."):
            return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", cursor.buffer, begin))
    else:
        raise NotSupported(f"{cursor.path}: {key} is an array of metadata type {kind}; numbers and strings can be read")
    return ArrayRef(kind, count, begin)


def _table(cursor: _Cursor, num_tensors: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    for _ in range(num_tensors):
        name = cursor.text()
        num_dimensions = cursor.number("I")
        if num_dimensions > 4:
            raise CorruptFile(f"{cursor.path}: tensor {name} has {num_dimensions} dimensions; ggml has at most 4")
        sizes = [cursor.number("Q") for _ in range(num_dimensions)]
        yield name, tuple(reversed(sizes)), cursor.number("I"), cursor.number("Q")


def _checked_tensors(
    path: Path, rows: list[tuple[str, tuple[int, ...], int, int]], data_begin: int, size: int
) -> dict[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind_id, offset in rows:
        kind = GGML_TYPES.get(kind_id)
        if kind is None:
            known = ", ".join(each.name for each in GGML_TYPES.values())
            raise NotSupported(f"{path}: tensor {name} has ggml type {kind_id}; these can be decoded: {known}")
        if not shape or shape[-1] % kind.block_size or 0 in shape:
            raise CorruptFile(f"{path}: tensor {name} of shape {shape} does not divide into {kind.name} blocks")
        num_bytes = math.prod(shape) // kind.block_size * kind.num_bytes
        begin = data_begin + offset
        if begin + num_bytes > size:
            raise CorruptFile(
                f"{path} is truncated: tensor {name} occupies bytes [{begin}, {begin + num_bytes}) and the file has "
                f"{size}; download it again"
            )
        if name in tensors:
            raise CorruptFile(f"{path}: tensor {name} appears twice in the table")
        tensors[name] = GGUFTensor(name, shape, kind, kind_id, begin, num_bytes)
    return tensors
