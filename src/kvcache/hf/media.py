"""Keys and values that cross attention reads: put once per encoder run, read by every later forward.

They live in the pool's `EncoderCache`, one medium per row, shared by forks and beams. Models want rectangles [B,H,S,D]:
right after a put that is the very array whose slices are stored; after rows have changed it is joined once and
remembered. Quantised media are decoded at each reading, else remembering would undo what quantising saves.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from kvcache.hf.attention import Gathered
from kvcache.hf.passes import Rows
from kvcache.hf.pool import Pool
from kvcache.spec import Batch, Media

__all__ = ["NUM_MEDIA", "CrossStates"]

NUM_MEDIA = 1
"""Media of a row: everything that the encoder made of its inputs, at position 0."""


@final
class CrossStates:
    """Media of the rows of one cache."""

    def __init__(self, pool: Pool, rows: Rows) -> None:
        self._pool = pool
        self._rows = rows
        self._filled: set[int] = set()
        self._open: set[int] | None = None  # layers put since the media were announced
        self._joined: dict[int, Gathered] = {}
        self._dtype = torch.float32  # in which the model wants them

    @property
    def is_filled(self) -> bool:
        """Whether any layer was put."""
        return bool(self._filled)

    def has(self, layer: int) -> bool:
        """Whether this layer was put."""
        return layer in self._filled

    def put(self, layer: int, keys: Tensor, values: Tensor) -> Gathered:
        """Store keys [B,H,S,D] and values of a new encoder run; answers with them as they will be read."""
        encoder, sequences = self._pool.encoder, self._rows.sequences
        if self._open is None or layer in self._open:
            media = [Media(row, "encoder", keys.shape[2]) for row in range(len(sequences))]
            encoder.start_forward(Batch([0] * len(sequences), sequences, media))
            self._open, self._filled, self._joined = set(), set(), {}
        self._open.add(layer)
        self._filled.add(layer)
        encoder.set_layer(layer)
        flat = Gathered(keys.transpose(1, 2).flatten(0, 1), values.transpose(1, 2).flatten(0, 1))
        encoder.put(*flat)
        self._dtype = keys.dtype
        return self._shown(layer, flat) if self._keeps(keys.dtype) else self._read(layer)

    def get(self, layer: int) -> Gathered:
        """Keys and values [B,H,S,D] of a layer that was put."""
        if layer in self._joined:
            return self._joined[layer]
        sequences = self._rows.sequences
        self._open = None
        self._pool.encoder.start_forward(Batch([0] * len(sequences), sequences))
        return self._read(layer)

    def rows_changed(self) -> None:
        """Rows were selected, repeated or copied."""
        self._open, self._joined = None, {}

    def clear(self) -> None:
        """The rows are gone."""
        self._open, self._filled, self._joined = None, set(), {}

    def copied_to(self, rows: Rows) -> CrossStates:
        """The same media for the rows of a fork."""
        other = CrossStates(self._pool, rows)
        other._filled, other._dtype = set(self._filled), self._dtype
        return other

    def _read(self, layer: int) -> Gathered:
        self._pool.encoder.set_layer(layer)
        stored = self._pool.encoder.get()
        return self._shown(layer, Gathered(stored.keys, stored.values))

    def _shown(self, layer: int, rows: Gathered) -> Gathered:
        """Rows [B*S,H,D] as models want them, remembered where that costs no decoding."""
        num_rows = len(self._rows.sequences)
        shown = Gathered(*(r.unflatten(0, (num_rows, -1)).transpose(1, 2).to(self._dtype) for r in rows))
        if num_rows > 1 and self._keeps(self._dtype):
            self._joined[layer] = shown
        return shown

    def _keeps(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this type are stored as they are."""
        return self._pool.keeps(dtype)
