"""The NumPy backend: the definition of every operation, and what runs where nothing else is installed.

Files are named `*_backend` because a submodule `kvcache.backends.numpy` would replace the function of that name.

Advanced indexing `storage[blocks, :, offsets]` puts the rows first, `[n,H,W]`, and copies whole runs of W: no other way
measured faster than this by more than a third (1 to 4096 rows of 8 x 128).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from kvcache.backends import Backend
from kvcache.spec import Array, Device

__all__ = ["NumpyBackend", "host_array", "refusal"]

ELEMENT_TYPES: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "u16": np.uint16, "u8": np.uint8}
NAMES = {np.dtype(kind): name for name, kind in ELEMENT_TYPES.items()}
FLOATING = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.float64))


def refusal(value: object, what: str, backend: str) -> TypeError:
    """The error for a value that is not an array of this backend's; `what` names it."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    dtype = getattr(value, "dtype", None)
    seen = kind if dtype is None else f"{kind} of {dtype}"
    own = {"numpy": "", "torch": "a torch.Tensor, ", "mlx": "an mlx.core.array, "}[backend]
    return TypeError(
        f"{what} is {seen}; the {backend} backend expected {own}a NumPy array or nested lists of numbers, with "
        f"floating elements; convert it, or init the cache with the backend whose arrays you use"
    )


def host_array(value: object, what: str, backend: str) -> NDArray[Any]:
    """A NumPy array of f16, f32 or f64 as it is, nested lists of numbers as f32. Raises `TypeError` for all else."""
    if isinstance(value, np.ndarray) and value.dtype in FLOATING:
        return value
    if not isinstance(value, (list, tuple)):
        raise refusal(value, what, backend)
    try:
        array = np.array(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists; tensors that cannot become NumPy arrays
        raise TypeError(f"{what} is a list that is not a rectangle of numbers ({error}); expected one") from error
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{what} is a list of {array.dtype} elements; expected numbers")
    return _silent_cast(array, np.float32)


def _silent_cast(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # what is too large becomes infinite, here as in the other libraries
        return array.astype(dtype, copy=False)


@final
class NumpyBackend(Backend):
    """NumPy arrays on the host."""

    name = "numpy"
    native = frozenset({"f32", "f16"})
    has_views = True

    def device(self, layer: int) -> Device:
        """Always the CPU."""
        return Device("cpu")

    def zeros(self, shape: Sequence[int], dtype: str, layer: int) -> Array:
        """See `Backend.zeros`; pages are touched when first written."""
        if dtype not in ELEMENT_TYPES:
            raise ValueError(f"element type is {dtype!r}; the numpy backend stores {', '.join(ELEMENT_TYPES)}")
        return np.zeros(tuple(shape), ELEMENT_TYPES[dtype])

    def asarray(self, value: object, layer: int, what: str) -> Array:
        """See `Backend.asarray`; arrays are not copied."""
        return host_array(value, what, self.name)

    def from_numpy(self, value: NDArray[Any], layer: int) -> Array:
        """See `Backend.from_numpy`."""
        return value.copy()

    def to_numpy(self, array: Array) -> NDArray[Any]:
        """The array itself."""
        result: NDArray[Any] = array
        return result

    def cast(self, array: Array, dtype: str) -> Array:
        """See `Backend.cast`; there is no bf16."""
        if dtype not in self.native:
            raise ValueError(f"element type is {dtype!r}; the numpy backend computes with f32 and f16")
        return _silent_cast(array, ELEMENT_TYPES[dtype])

    def dtype(self, array: Array) -> str:
        """See `Backend.dtype`."""
        return NAMES.get(array.dtype, str(array.dtype))

    def gather_rows(self, storage: Array, slots: NDArray[np.int64]) -> Array:
        """See `Backend.gather_rows`; 1 µs for a row of 8 x 128, 0.6 ms for 4096."""
        blocks, offsets = np.divmod(slots, storage.shape[2])
        return storage[blocks, :, offsets]

    def view_rows(self, storage: Array, begin: int, end: int) -> Array:
        """See `Backend.view_rows`."""
        block_size = storage.shape[2]
        if block_size == 1:
            return storage[begin:end, :, 0]
        block, offset = divmod(begin, block_size)
        return storage[block, :, offset : offset + end - begin].transpose(1, 0, 2)

    def write_rows(self, storage: Array, slots: NDArray[np.int64], rows: Array) -> None:
        """See `Backend.write_rows`."""
        blocks, offsets = np.divmod(slots, storage.shape[2])
        storage[blocks, :, offsets] = rows

    def copy_blocks(self, storage: Array, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """See `Backend.copy_blocks`."""
        storage[targets] = storage[sources]

    def permute(self, array: Array, axes: Sequence[int]) -> Array:
        """A view."""
        return array.transpose(tuple(axes))

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """See `Backend.concatenate`."""
        return np.concatenate(list(arrays), axis=axis)

    def num_bytes(self, array: Array) -> int:
        """See `Backend.num_bytes`."""
        return int(array.nbytes)
