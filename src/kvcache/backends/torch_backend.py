"""The PyTorch backend: any device that PyTorch knows, and single layers on devices of their own.

Rows are moved through a matrix view of the storage, because `index_select` copies whole matrix rows where
`storage[blocks, :, offsets]` walks elements (0.3 ms against 0.9 ms for 4096 bf16 rows of 8 x 128 on two cores). What
lies between larger blocks, as values do between those of keys, is in the matrix, too:

    block_size 1:  [N, H * W], one matrix row per slot
    otherwise:     rows [W], H matrix rows per slot, `block_size` apart

Writing walks elements in any case, so on the CPU rows are written as words, the widest into which they divide (8 bytes
instead of 1: 0.2 ms against 0.9 ms for those 4096 rows). A write of 16 rows takes about 10 µs.

Storage on the CPU asks for huge pages: blocks lie anywhere, and with pages of 4 KiB each small block costs a walk
through the page tables.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from kvcache.backends import Backend
from kvcache.backends.numpy_backend import host_array, refusal
from kvcache.errors import needing
from kvcache.spec import Array, Device, integer

with needing("torch", "the torch backend"):
    import torch

__all__ = ["TorchBackend"]

ELEMENT_TYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "u16": torch.uint16,
    "u8": torch.uint8,
}
NAMES = {kind: name for name, kind in ELEMENT_TYPES.items()}
WORDS = (torch.float64, torch.int32, torch.int16)
"""What bytes are moved as, widest first. PyTorch moves f64 faster than i64 here; no arithmetic touches them."""
MIN_HUGE = 2**22
"""Bytes of a storage from which on huge pages, of 2 MiB on most machines, are asked for."""


class _Rows(NamedTuple):
    """The storage as a matrix, and the rows of it, int64, that hold the slots asked for, slot by slot."""

    matrix: torch.Tensor
    indices: torch.Tensor


def _rows(storage: torch.Tensor, slots: NDArray[np.int64]) -> _Rows:
    num_blocks, num_heads, block_size, width = storage.shape
    if block_size == 1:
        return _Rows(storage.view(num_blocks, num_heads * width), _indices(slots, storage))
    blocks = storage.view(num_blocks, num_heads * block_size * width)  # raises where a block has gaps
    each = blocks.stride(0) // width  # rows from a block to the next
    first = slots + slots // block_size * (each - block_size)
    heads = np.arange(0, num_heads * block_size, block_size)
    num_rows = (num_blocks - 1) * each + num_heads * block_size
    matrix = blocks.as_strided((num_rows, width), (width, 1))
    return _Rows(matrix, _indices((first[:, None] + heads).ravel(), storage))


def _indices(values: NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    return _shared(values).to(like.device)


def _shared(array: NDArray[Any]) -> torch.Tensor:
    """A tensor over the array's memory; over a copy where PyTorch cannot share (read-only, negative strides)."""
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    return torch.from_numpy(array)


def _put(matrix: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    """matrix[index] = row, in place, in words where both divide into them and begin at one."""
    size = matrix.element_size()
    for word in WORDS if matrix.is_cpu else ():
        begins = (int(matrix.storage_offset()) | int(rows.storage_offset())) * size
        if word.itemsize >= size and begins % word.itemsize == matrix.shape[1] * size % word.itemsize == 0:
            matrix, rows = matrix.view(word), rows.view(word)
            break
    matrix.index_put_((indices,), rows)


def _huge_pages(num_bytes: int) -> torch.Tensor | None:
    """Zeros, u8 [num_bytes], in memory of its own for which huge pages were asked; None: it is too small or cannot be.

    As with `torch.zeros`, memory is taken when it is first written to.
    """
    if num_bytes < MIN_HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them, or no memory: torch.zeros has the better message
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)


def _device(name: str, what: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device  # "cuda" becomes "cuda:0", and it is seen to work
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{what} is {name!r}; expected a device that this PyTorch can use ({reason})") from error


@final
class TorchBackend(Backend):
    """PyTorch tensors.

    Args:
        device: where layers live: `"cpu"`, `"cuda"`, `"cuda:1"`, `"meta"` (shapes without memory), ...
        layer_devices: devices of single layers, by layer number.

    Raises:
        ValueError: a device that PyTorch does not know or that this machine does not have.
    """

    name = "torch"
    native = frozenset({"f32", "f16", "bf16"})
    has_views = True

    def __init__(self, device: str, layer_devices: Mapping[int, str]) -> None:
        self._default = _device(device, "device")
        self._of_layer = {
            integer(layer, "a key of layer_devices"): _device(name, f"layer_devices[{layer}]")
            for layer, name in layer_devices.items()
        }

    def _where(self, layer: int) -> torch.device:
        return self._of_layer.get(layer, self._default)

    def device(self, layer: int) -> Device:
        """See `Backend.device`; the full name, as `cuda:0`."""
        return Device(str(self._where(layer)))

    def zeros(self, shape: Sequence[int], dtype: str, layer: int) -> Array:
        """See `Backend.zeros`."""
        if dtype not in ELEMENT_TYPES:
            raise ValueError(f"element type is {dtype!r}; the torch backend stores {', '.join(ELEMENT_TYPES)}")
        kind, where = ELEMENT_TYPES[dtype], self._where(layer)
        with torch.inference_mode(False):  # an inference tensor could not be written to outside that mode
            pages = _huge_pages(math.prod(shape) * kind.itemsize) if where.type == "cpu" else None
            if pages is not None:
                return pages.view(kind).view(tuple(shape))
            return torch.zeros(tuple(shape), dtype=kind, device=where)

    def asarray(self, value: object, layer: int, what: str) -> Array:
        """See `Backend.asarray`; a tensor that is there already is not copied, gradients are cut off."""
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point():
                raise refusal(value, what, self.name)
            tensor = value.detach() if value.requires_grad else value
        else:
            tensor = _shared(host_array(value, what, self.name))
        return tensor.to(self._where(layer))

    def from_numpy(self, value: NDArray[Any], layer: int) -> Array:
        """See `Backend.from_numpy`."""
        return torch.from_numpy(value.copy()).to(self._where(layer))

    def to_numpy(self, array: Array) -> NDArray[Any]:
        """See `Backend.to_numpy`; shares memory with a tensor on the CPU unless it is bf16."""
        tensor: torch.Tensor = array.detach()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        return tensor.cpu().numpy()

    def cast(self, array: Array, dtype: str) -> Array:
        """See `Backend.cast`."""
        if dtype not in self.native:
            raise ValueError(f"element type is {dtype!r}; expected one of f32, f16, bf16")
        return array.to(ELEMENT_TYPES[dtype])

    def dtype(self, array: Array) -> str:
        """See `Backend.dtype`."""
        return NAMES.get(array.dtype, str(array.dtype))

    def gather_rows(self, storage: Array, slots: NDArray[np.int64]) -> Array:
        """See `Backend.gather_rows`; one copy."""
        matrix, indices = _rows(storage, slots)
        return matrix.index_select(0, indices).view(len(slots), storage.shape[1], storage.shape[3])

    def view_rows(self, storage: Array, begin: int, end: int) -> Array:
        """See `Backend.view_rows`."""
        block_size = storage.shape[2]
        if block_size == 1:
            return storage[begin:end, :, 0]
        block, offset = divmod(begin, block_size)
        return storage[block, :, offset : offset + end - begin].transpose(0, 1)

    def write_rows(self, storage: Array, slots: NDArray[np.int64], rows: Array) -> None:
        """See `Backend.write_rows`."""
        matrix, indices = _rows(storage, slots)
        # Words are read from rows without gaps: `reshape` alone keeps those of expanded and of interleaved ones.
        _put(matrix, indices, rows.reshape(indices.shape[0], matrix.shape[1]).contiguous())

    def copy_blocks(self, storage: Array, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """See `Backend.copy_blocks`."""
        matrix = storage.view(storage.shape[0], storage[0].numel())
        _put(matrix, _indices(targets, storage), matrix.index_select(0, _indices(sources, storage)))

    def permute(self, array: Array, axes: Sequence[int]) -> Array:
        """A view."""
        return array.permute(*axes)

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """See `Backend.concatenate`."""
        return torch.cat(list(arrays), dim=axis)

    def num_bytes(self, array: Array) -> int:
        """See `Backend.num_bytes`."""
        return int(array.nbytes)
