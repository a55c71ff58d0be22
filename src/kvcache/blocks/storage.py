"""The storage: keys and values of every layer of a cache, `[N,H,block_size,W]` each, in their own formats.

Where their rows are alike in width and element type, the values of a block lie behind its keys: attention reads both,
and turns to half as many places in memory.
A layer's tensors are made by the first put into it, which says how many heads of which size it has; layers may differ.
Slots are numbered through the pool: slot s lies in block `s // block_size`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from kvcache.backends import Backend
from kvcache.formats import Format, Stored
from kvcache.spec import Array, Device

__all__ = ["BlockStorage", "LayerStorage"]


@final
class LayerStorage:
    """Keys and values of one layer. Of one storage, layers of the same `kind` differ in nothing but contents."""

    __slots__ = ("keys", "kind", "num_heads", "values")

    def __init__(self, keys: Stored, values: Stored, num_heads: int, device: Device) -> None:
        self.keys = keys
        self.values = values
        self.num_heads = num_heads
        self.kind = (num_heads, keys.head_dim, values.head_dim, device.name)


@final
class BlockStorage:
    """Tensors of all layers over one pool of `num_blocks` blocks."""

    __slots__ = ("_layers", "backend", "block_size", "key_format", "num_blocks", "value_format")

    def __init__(self, backend: Backend, formats: tuple[Format, Format], num_blocks: int, block_size: int) -> None:
        self.backend = backend
        self.key_format, self.value_format = formats
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers: dict[int, LayerStorage] = {}

    @property
    def layers(self) -> Iterable[int]:
        """Layers that have been put to."""
        return self._layers.keys()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors made so far."""
        return sum(
            self.backend.num_bytes(stored.array)
            for layer in self._layers.values()
            for stored in (layer.keys, layer.values)
        )

    def layer(self, layer: int) -> LayerStorage:
        """The tensors of a layer. Raises `ValueError` when nothing was put into it yet."""
        try:
            return self._layers[layer]
        except KeyError:
            raise ValueError(f"layer {layer} holds nothing yet; put keys and values into it first") from None

    def accept(self, layer: int, keys: Array, values: Array, num_tokens: int) -> tuple[Array, Array]:
        """Keys [T,H,D] and values [T,H,Dv] as arrays of the backend, after checking that the layer can hold them.

        Raises `ValueError` or `TypeError` otherwise. Changes nothing.
        """
        keys = self.backend.asarray(keys, layer, "keys")
        values = self.backend.asarray(values, layer, "values")
        have = self._layers.get(layer)
        if have is not None:
            heads, head_dim, value_dim = have.num_heads, have.keys.head_dim, have.values.head_dim
            expected = (num_tokens, heads, head_dim), (num_tokens, heads, value_dim)
            if (tuple(keys.shape), tuple(values.shape)) == expected:
                return keys, values
        seen = f"keys {list(keys.shape)}, values {list(values.shape)}"
        if len(keys.shape) != 3 or len(values.shape) != 3:
            raise ValueError(f"{seen}; expected three dimensions each: [tokens, heads, head_dim]")
        if keys.shape[0] != num_tokens or values.shape[0] != num_tokens:
            raise ValueError(f"{seen}; expected {num_tokens} tokens in each, as many as the batch has")
        if keys.shape[1] != values.shape[1] or (have and keys.shape[1] != heads):
            raise ValueError(f"{seen}; expected {heads if have else 'equally many'} heads in both (layer {layer})")
        if not (keys.shape[1] and keys.shape[2] and values.shape[2]):
            raise ValueError(f"{seen}; expected no empty dimension")
        if have:
            raise ValueError(
                f"{seen}; expected head_dim {head_dim} for keys and {value_dim} for values (layer {layer})"
            )
        self.key_format.row_width(keys.shape[2])  # raises when the format cannot hold such rows
        self.value_format.row_width(values.shape[2])
        return keys, values

    def accept_keys(self, layer: int, keys: Array, num_tokens: int) -> Array:
        """Keys [T,H,D] that a shift function returned, checked likewise."""
        keys = self.backend.asarray(keys, layer, "the result of shift")
        have = self._layers[layer]
        expected = (num_tokens, have.num_heads, have.keys.head_dim)
        if tuple(keys.shape) != expected:
            raise ValueError(
                f"shift returned keys {list(keys.shape)}; expected the shape that it was given, {list(expected)}"
            )
        return keys

    def made(self, layer: int, keys: Array, values: Array) -> LayerStorage:
        """The tensors of a layer, or new ones if nothing was put into it yet; accepted rows say what they must hold.

        New ones are the layer's when `keep` is told so: after the first rows.
        """
        return self._layers.get(layer) or self._create(layer, keys.shape, values.shape)

    def keep(self, layer: int, made: LayerStorage) -> None:
        """Rows were put into these tensors: they are the layer's."""
        self._layers[layer] = made

    def encode(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Accepted rows as `write` takes them."""
        return self.key_format.encode(keys), self.value_format.encode(values)

    def write(self, layer: int, made: LayerStorage, encoded: tuple[Array, Array], slots: NDArray[np.int64]) -> None:
        """Encoded rows into `slots` of a layer's tensors."""
        for stored, rows in zip((made.keys, made.values), encoded, strict=True):
            self.backend.write_rows(stored.array, slots, rows)
        self.keep(layer, made)

    def read_keys(self, layer: int, slots: NDArray[np.int64]) -> Array:
        """Keys [n,H,D] of `slots`, decoded; a copy."""
        stored = self._layers[layer].keys
        return stored.format.decode(self.backend.gather_rows(stored.array, slots), stored.head_dim)

    def write_keys(self, layer: int, slots: NDArray[np.int64], encoded: Array) -> None:
        """Encoded key rows [n,H,W] into `slots`."""
        self.backend.write_rows(self._layers[layer].keys.array, slots, encoded)

    def read(self, stored: Stored, slots: NDArray[np.int64]) -> Array:
        """Rows [n,H,D] of ascending distinct `slots`: a view where they are side by side and need no decoding."""
        begin, end = (int(slots[0]), int(slots[-1]) + 1) if len(slots) else (0, 0)
        adjacent = end - begin == len(slots) > 0
        if adjacent and (self.block_size == 1 or begin // self.block_size == (end - 1) // self.block_size):
            rows = self.backend.view_rows(stored.array, begin, end)
        else:
            rows = self.backend.gather_rows(stored.array, slots)
        return stored.format.decode(rows, stored.head_dim)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks in every layer."""
        if not sources:
            return
        source_ids, target_ids = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
        for have in self._layers.values():
            self.backend.copy_blocks(have.keys.array, source_ids, target_ids)
            self.backend.copy_blocks(have.values.array, source_ids, target_ids)

    def _create(self, layer: int, keys_shape: Sequence[int], values_shape: Sequence[int]) -> LayerStorage:
        num_heads, head_dim, value_dim = keys_shape[1], keys_shape[2], values_shape[2]
        sides = (self.key_format, head_dim), (self.value_format, value_dim)
        kinds = [
            ((self.num_blocks, num_heads, self.block_size, form.row_width(dim)), form.storage_dtype)
            for form, dim in sides
        ]
        if kinds[0] == kinds[1]:
            arrays = self.backend.zeros_pair(*kinds[0], layer)
        else:
            arrays = tuple(self.backend.zeros(*kind, layer) for kind in kinds)
        keys, values = (Stored(array, *side) for array, side in zip(arrays, sides, strict=True))
        return LayerStorage(keys, values, num_heads, self.backend.device(layer))
