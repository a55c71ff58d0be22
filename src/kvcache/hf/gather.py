"""Whole keys and values for models that want them: columns [B,H,S,D] out of blocks, in the order of tokens.

Which slots the columns are is worked out once per pass and member, in NumPy; each layer then pays one copy, or none:

| the columns of a pass                              | what a layer costs                                       |
|----------------------------------------------------|----------------------------------------------------------|
| one row, slots side by side, blocks of one slot    | nothing: a strided view                                  |
| blocks of one slot                                 | one `index_select` of rows [H*W], a memcpy each          |
| larger blocks, rows aligned alike                  | one `index_select` of blocks, then heads first           |
| anything else                                      | one gather of single slots                               |

Columns that a row does not have (left padding, positions that a span forgot) come as zeros; masks hide them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.caches.tables import Tables
from kvcache.formats import Stored

__all__ = ["Columns", "columns_of"]


@final
@dataclass(frozen=True, slots=True)
class Columns:
    """Columns [B,S] of a pass in one member.

    slots: int64 [B*S], row after row; a missing column has slot 0.
    run: the first slot, when there is one row and its slots lie side by side; else `None`.
    blocks: int64 [B*m] and the offset of column 0 in the first block of each row, when rows are aligned alike.
    missing: bool [B,1,S,1], `True` where a row has no such column; `None` when it has all.
    """

    num_rows: int
    num_columns: int
    block_size: int
    slots: Tensor
    run: int | None
    blocks: tuple[Tensor, int] | None
    missing: Tensor | None

    def read(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """[B,H,S,D] of the stored rows, in `dtype`. A view of the storage where nothing has to move."""
        array: Tensor = stored.array  # [N,H,block_size,W]
        if self.blocks is not None:
            return self._read_blocks(stored, *self.blocks, dtype)
        slots = self.slots.to(array.device)
        if self.block_size > 1:
            rows = array.transpose(1, 2)[slots // self.block_size, slots % self.block_size]
        elif self.run is not None:
            rows = array[self.run : self.run + self.num_columns, :, 0]
        else:
            rows = array.view(len(array), -1).index_select(0, slots).view(-1, array.shape[1], array.shape[3])
        decoded: Tensor = stored.format.decode(rows, stored.head_dim)
        decoded = decoded.to(dtype).unflatten(0, (self.num_rows, self.num_columns)).transpose(1, 2)
        return decoded if self.missing is None else decoded.masked_fill(self.missing.to(array.device), 0)

    def _read_blocks(self, stored: Stored, blocks: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
        # Of any dimension but the first, `index_select` copies the whole pool before it selects.
        chosen = stored.array.index_select(0, blocks.to(stored.array.device)).transpose(0, 1)  # [H,B*m,block_size,W]
        decoded: Tensor = stored.format.decode(chosen, stored.head_dim)
        rows = decoded.to(dtype).reshape(len(decoded), self.num_rows, -1, decoded.shape[-1]).transpose(0, 1)
        return rows[:, :, offset : offset + self.num_columns]


def columns_of(
    tables: Tables, sequences: Sequence[int], paddings: Sequence[int], begin: int, end: int, device: torch.device
) -> Columns:
    """The slots of columns [begin, end) of every row; column c of a row is its position c - padding. O(B * S)."""
    size = end - begin
    slots = np.zeros((len(sequences), size), np.int64)
    held = np.zeros((len(sequences), size), bool)
    starts: set[tuple[int, int]] = set()
    tables_of_rows: list[NDArray[np.int32]] = []
    for row, (sequence, padding) in enumerate(zip(sequences, paddings, strict=True)):
        table = tables.sequences.get(sequence)
        if table is None or not table.num_slots:
            continue
        indices = table.indices_between(max(begin - padding, 0), max(end - padding, 0))
        positions = table.positions.view[indices] + (padding - begin)
        slots[row, positions] = table.slots(indices)
        held[row, positions] = True
        if table.is_dense and len(indices) == size:
            first, last = int(indices[0]) // tables.block_size, int(indices[-1]) // tables.block_size
            starts.add((int(indices[0]) % tables.block_size, last - first))
            tables_of_rows.append(table.table.view[first : last + 1])
    run = int(slots[0, 0]) if len(sequences) == 1 and size and held.all() and _is_run(slots[0]) else None
    blocks = None
    if tables.block_size > 1 and len(tables_of_rows) == len(sequences) and len(starts) == 1:
        joined = torch.from_numpy(np.concatenate(tables_of_rows).astype(np.int64)).to(device)
        blocks = (joined, next(iter(starts))[0])
    missing = None if held.all() else torch.from_numpy(~held).to(device)[:, None, :, None]
    flat = torch.from_numpy(slots.reshape(-1)).to(device)
    return Columns(len(sequences), size, tables.block_size, flat, run, blocks, missing)


def _is_run(slots: NDArray[np.int64]) -> bool:
    return bool(slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all())
