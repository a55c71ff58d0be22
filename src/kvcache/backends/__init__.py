"""Backends: the few array operations that a cache needs, over NumPy, PyTorch and MLX.

A cache never imports an array library. It holds a `Backend` and asks it for storage, and it moves *rows*: one row is
one token's key (or value) in one layer, `[H,W]`. Storage of a layer is `[N,H,block_size,W]`, so the row of slot s is
`storage[s // block_size, :, s % block_size]`.

Element types of storage are named `f32 f16 bf16 u16 u8`; a backend lists those it stores *natively*, which means that
a model can compute with them as they are. What a format does with elements is the business of `kvcache.formats`.

    create("numpy")                                           -> the NumPy backend
    create("torch")                                           -> PyTorch on the CPU
    kvcache.backends.torch(device="cuda", layer_devices={0: "cpu"})
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.spec import Array, Device

__all__ = ["BACKENDS", "Backend", "create", "mlx", "numpy", "torch"]

BACKENDS = ("numpy", "torch", "mlx")


class Backend(ABC):
    """Array operations over one library. Everything is eager; slot and block indices arrive as NumPy int64 arrays."""

    name: str
    """`"numpy"`, `"torch"` or `"mlx"`."""
    native: frozenset[str]
    """Element types that this library computes with, of `f32 f16 bf16`."""
    has_views: bool
    """Whether a part of an array can be written to on its own."""

    @abstractmethod
    def device(self, layer: int) -> Device:
        """Where the arrays of `layer` live."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: str, layer: int) -> Array:
        """A zeroed array of element type `f32 f16 bf16 u16 u8` on the layer's device."""

    def zeros_pair(self, shape: Sequence[int], dtype: str, layer: int) -> tuple[Array, Array]:
        """Two zeroed arrays [N,...]; where the library has views, entry n of the second lies behind that of the first.

        Who reads both, as attention reads keys and values, then turns to half as many places in memory.
        """
        if not self.has_views:
            return self.zeros(shape, dtype, layer), self.zeros(shape, dtype, layer)
        both = self.zeros((shape[0], 2, *shape[1:]), dtype, layer)
        return both[:, 0], both[:, 1]

    @abstractmethod
    def asarray(self, value: object, layer: int, what: str) -> Array:
        """`value` as this library's array on the layer's device, its floating element type kept.

        NumPy arrays and nested lists are taken by every backend. Raises `TypeError` naming `what` for anything that
        is not a numeric array, and for arrays of another library.
        """

    @abstractmethod
    def from_numpy(self, value: NDArray[Any], layer: int) -> Array:
        """A copy of a NumPy array, element type kept."""

    @abstractmethod
    def to_numpy(self, array: Array) -> NDArray[Any]:
        """The array in NumPy, on the host; bf16 becomes f32, other element types are kept."""

    @abstractmethod
    def cast(self, array: Array, dtype: str) -> Array:
        """The array in element type `f32 f16 bf16`; the same object when nothing changes."""

    @abstractmethod
    def dtype(self, array: Array) -> str:
        """The array's element type, `f32 f16 bf16 u16 u8` (or the library's own word for any other)."""

    @abstractmethod
    def gather_rows(self, storage: Array, slots: NDArray[np.int64]) -> Array:
        """Rows [n,H,W] of `slots`, from storage [N,H,block_size,W]; a copy."""

    @abstractmethod
    def view_rows(self, storage: Array, begin: int, end: int) -> Array:
        """Rows [end-begin,H,W] of the slots [begin, end) without a copy.

        Possible when blocks hold one slot, or when both ends lie in one block; the caller has made sure of that.
        """

    @abstractmethod
    def write_rows(self, storage: Array, slots: NDArray[np.int64], rows: Array) -> None:
        """storage[slot] = row, in place; `rows` [n,H,W] has the element type of `storage`."""

    @abstractmethod
    def copy_blocks(self, storage: Array, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """storage[target] = storage[source], whole blocks, in place. Sources and targets are disjoint."""

    @abstractmethod
    def permute(self, array: Array, axes: Sequence[int]) -> Array:
        """The axes in another order (a view where the library has views)."""

    @abstractmethod
    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """Arrays joined along `axis`."""

    def pad_rows(self, rows: Array, count: int, layer: int) -> Array:
        """Rows [n,...] followed by `count` rows of zeros: finite, so that a masked column cannot spoil a sum."""
        if not count:
            return rows
        zeros = self.cast(self.zeros((count, *rows.shape[1:]), "f32", layer), self.dtype(rows))
        return self.concatenate((rows, zeros), 0)

    @abstractmethod
    def num_bytes(self, array: Array) -> int:
        """Bytes of the array's elements."""


def numpy() -> Backend:
    """The NumPy backend: needs nothing else, stores f32 and f16 natively."""
    from kvcache.backends.numpy_backend import NumpyBackend

    return NumpyBackend()


def torch(device: str = "cpu", layer_devices: Mapping[int, str] | None = None) -> Backend:
    """PyTorch on `device`, single layers elsewhere. Raises `ValueError` for a device that PyTorch does not know."""
    from kvcache.backends.torch_backend import TorchBackend

    return TorchBackend(device, layer_devices or {})


def mlx() -> Backend:
    """MLX on its default device."""
    from kvcache.backends.mlx_backend import MlxBackend

    return MlxBackend()


def create(backend: str | Backend) -> Backend:
    """The backend of that name, or the object itself.

    Raises `ValueError` for an unknown name, `ImportError` for a missing package.
    """
    if isinstance(backend, Backend):
        return backend
    if backend in BACKENDS:
        return {"numpy": numpy, "torch": torch, "mlx": mlx}[backend]()
    raise ValueError(
        f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}, or an object made by kvcache.backends, "
        f"as kvcache.backends.torch(device='cuda')"
    )
