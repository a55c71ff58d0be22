"""What the `sdpa` kernel computes for a batch, decided once and kept for all layers: NumPy in, tensors on a device out.

    segment -> queries ordered by their ends -> all at once without a mask (a decode, a prompt from its beginning)
                                             -> or tiles of queries, each with the columns that it sees and a mask
    tiles of one query with equally many columns -> one call for several segments

A column is a slot that some query of the tile sees: a range of slots, or a list where they are scattered. Queries that
see nothing are in no tile. Cost: O(queries * columns) for masked tiles, O(queries + blocks) for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.kernels import AttentionBatch, Segment

__all__ = ["Tile", "plan"]

# Queries that share one gather and one mask. Larger tiles gather less often, smaller ones skip more columns above the
# diagonal and outside the window; at 512 a gather costs about 1 % of the attention it feeds.
TILE_QUERIES = 512


def plan(batch: AttentionBatch, device: torch.device) -> list[Tile]:
    """The calls of attention that make up a pass, with their indices and masks on `device`."""
    return [_on_device(group, batch, device) for group in _together(_tiles(batch), batch.block_size)]


class Columns(NamedTuple):
    """Queries of one segment, and what they see: slots [begin, begin + length) of the segment, or just `slots`."""

    segment: Segment
    rows: NDArray[np.int64]
    begin: int
    length: int
    slots: NDArray[np.int64] | None
    mask: NDArray[np.bool_] | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class Tile:
    """One call of attention: `num_segments` segments (B) with equally many queries (n) and columns (S) each.

    rows: int64 [B*n], the batch rows; `None` when they are all rows in order.
    blocks: int64 [B*m], the storage blocks to gather, or a range of blocks when they are consecutive.
    begin, length: the columns within the gathered slots of a segment.
    slots: int64 [S], storage slots gathered one by one (then there are no blocks, and B is 1).
    mask: bool [n,S], `True` where seen; `None` when everything is, or when `is_causal`.
    """

    num_segments: int
    rows: Tensor | None
    blocks: Tensor | range
    begin: int
    length: int
    slots: Tensor | None
    mask: Tensor | None
    is_causal: bool


def _tiles(batch: AttentionBatch) -> Iterator[Columns]:
    """Each segment's queries in tiles; queries that see nothing are in none of them."""
    for segment in batch.segments:
        rows = segment.rows[np.argsort(batch.query_ends[segment.rows], kind="stable")]
        whole = _unmasked(segment, rows, batch) if segment.positions is None else None
        if whole is not None:
            yield whole
            continue
        for first in range(0, len(rows), TILE_QUERIES):
            tile = rows[first : first + TILE_QUERIES]
            columns = (_regular if segment.positions is None else _irregular)(segment, tile, batch)
            if columns is not None:
                yield columns


def _ranges(segment: Segment, rows: NDArray[np.int64], batch: AttentionBatch) -> tuple[NDArray[np.int64], ...]:
    """The slots [begins, ends) that queries see where slot j holds position `first_position + j`."""
    begins = np.maximum(batch.query_begins[rows].astype(np.int64) - segment.first_position, 0)
    ends = np.minimum(batch.query_ends[rows].astype(np.int64) - segment.first_position, segment.num_slots)
    return begins, ends


def _unmasked(segment: Segment, rows: NDArray[np.int64], batch: AttentionBatch) -> Columns | None:
    """All queries of a regular segment at once, when no mask is needed: a decode, or a prompt from its beginning."""
    begins, ends = _ranges(segment, rows, batch)
    if not rows.size or (begins != begins[0]).any() or (ends <= begins).any():
        return None
    begin, length = int(begins[0]), int(ends[-1] - begins[0])  # the rows are ordered by their ends
    if ends[0] == ends[-1]:
        return Columns(segment, rows, begin, length, None, None, False)
    if len(rows) == length and (ends == begin + 1 + np.arange(length)).all():
        return Columns(segment, rows, begin, length, None, None, True)
    return None


def _regular(segment: Segment, rows: NDArray[np.int64], batch: AttentionBatch) -> Columns | None:
    """Slot j holds position `first_position + j`: what a query sees is a range of slots."""
    begins, ends = _ranges(segment, rows, batch)
    seeing = begins < ends
    if not seeing.any():
        return None
    rows, begins, ends = rows[seeing], begins[seeing], ends[seeing]
    begin = int(begins.min())
    slots = np.arange(begin, int(ends.max()))
    return _masked(segment, rows, begin, (slots >= begins[:, None]) & (slots < ends[:, None]))


def _irregular(segment: Segment, rows: NDArray[np.int64], batch: AttentionBatch) -> Columns | None:
    """Positions in any order, with empty slots: what a query sees is a set of slots."""
    assert segment.positions is not None
    positions = segment.positions[: segment.num_slots]
    begins = np.maximum(batch.query_begins[rows], 0)[:, None]  # position -1, an empty slot, is never seen
    seen = (positions >= begins) & (positions < batch.query_ends[rows][:, None])
    seeing = seen.any(axis=1)
    return _masked(segment, rows[seeing], 0, seen[seeing]) if seeing.any() else None


def _masked(segment: Segment, rows: NDArray[np.int64], begin: int, seen: NDArray[np.bool_]) -> Columns:
    """The columns of `seen` [n, slots from `begin` on] that anybody sees, as a range of slots where they are one."""
    columns = np.flatnonzero(seen.any(axis=0))
    first, length = int(columns[0]), len(columns)
    is_range = int(columns[-1]) - first + 1 == length
    seen = seen[:, first : first + length] if is_range else seen[:, columns]
    mask = None if seen.all() else seen
    return Columns(segment, rows, begin + first, length, None if is_range else begin + columns, mask, False)


def _together(tiles: Iterator[Columns], block_size: int) -> list[list[Columns]]:
    """Single queries with equally many columns share a call, several sequences at once; every other tile is alone."""
    alone: list[list[Columns]] = []
    alike: dict[tuple[int, int], list[Columns]] = {}
    for tile in tiles:
        if len(tile.rows) == 1 and tile.slots is None:
            alike.setdefault((tile.begin % block_size, tile.length), []).append(tile)
        else:
            alone.append([tile])
    return [*alone, *alike.values()]


def _on_device(group: Sequence[Columns], batch: AttentionBatch, device: torch.device) -> Tile:
    first, block_size = group[0], batch.block_size
    rows = np.concatenate([columns.rows for columns in group])
    covers_all = len(rows) == len(batch.query_ends) and bool((rows == np.arange(len(rows))).all())
    blocks: Tensor | range = range(0)
    slots = None
    if first.slots is not None:
        table = first.segment.block_table.astype(np.int64)
        slots = torch.from_numpy(table[first.slots // block_size] * block_size + first.slots % block_size).to(device)
    else:
        tables = []
        for columns in group:
            end = -(-(columns.begin + columns.length) // block_size)
            tables.append(columns.segment.block_table[columns.begin // block_size : end])
        table = np.concatenate(tables).astype(np.int64)
        if (np.diff(table) == 1).all():
            blocks = range(int(table[0]), int(table[0]) + len(table))
        else:
            blocks = torch.from_numpy(table).to(device)
    return Tile(
        num_segments=len(group),
        rows=None if covers_all else torch.from_numpy(rows).to(device),
        blocks=blocks,
        begin=first.begin % block_size,
        length=first.length,
        slots=slots,
        mask=None if first.mask is None else torch.from_numpy(np.ascontiguousarray(first.mask)).to(device),
        is_causal=first.is_causal,
    )
