"""What the Triton kernel does for a batch, decided once for all layers: NumPy in, one int32 tensor on the device out.

    segment -> rows ordered by what they see -> tiles of at most R rows, cut where what they see has a gap
            -> each tile's range of slots cut into parts, so that few rows occupy the whole GPU -> items

    decode of 300 slots, R=4, steps of 64, parts of 256:     rows 1   slots [0, 256) [256, 300)      2 items, 1 merge
    prefill of 6 rows on 300:                                rows 4   slots [0, 299)                 1 item
                                                             rows 2   slots [0, 300)                 1 item

How a segment is cut depends on that segment alone: its rows give the same bits whatever else is in the batch. All of a
pass goes to the device in one copy, of the items, the rows and the block ids that are seen: 16 sequences of 8192 tokens
in blocks of 16 are 66 kB.

A `Room` has fixed sizes and a fixed address. Planned into one, every pass of a CUDA graph has the same grids and
pointers, and what is not used says so itself (items and merges of zeros).

More than 300 lines, because cutting and the layout of what the device reads are one decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.kernels import AttentionBatch, Segment

__all__ = ["ITEM", "MERGE", "Geometry", "Plan", "Room", "Sizes", "Tiling", "decode_sizes", "plan"]

ITEM = 16  # int32 per item: the fields below, and room to a cache line of 64 bytes
MERGE = 4  # int32 per merge: row, first partial result, how many, distance between them
# Fields of an item, in the order in which `triton_jit.attend_items` reads them:
#   rows_at, num_rows           where its rows, begins and ends are
#   lo, full_lo, full_hi, hi    slots: every row sees all of [full_lo, full_hi); lo, full_lo, full_hi are whole steps
#   seen_begin, seen_end        some row sees each position between them
#   table_at                    the block of slot j is tables[table_at + j // block_size]
#   positions_at, is_irregular  the position of slot j is positions[positions_at + j], or
#   first_position              first_position + j
#   partial                     the partial result of its first row, -1 to write the result itself
_TILE = np.dtype([(name, np.int64) for name in (
    "is_prefill", "rows_at", "num_rows", "lo", "full_lo", "full_hi", "hi", "seen_begin", "seen_end", "table_at",
    "positions_at", "is_irregular", "first_position", "num_tiles",
)])  # fmt: skip

# Programs that one segment may have by cutting its slots, in all heads: about four for each multiprocessor of a large
# GPU. Parts are at least this many slots: with heads of 128, writing and merging partial results then moves 3 % of the
# bytes that four query heads to one of bf16 read of a part, and 23 % of what eight to one of q4_0 read.
MAX_PROGRAMS = 512
MIN_PART = 256

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class Tiling(NamedTuple):
    """How a program is cut: queries (M) and slots (N) at a time, and what Triton is told about it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Geometry(NamedTuple):
    """What plans depend on beside the batch. chunk: query heads per program; num_programs: of one item."""

    chunk: int
    num_programs: int
    decode: Tiling
    prefill: Tiling

    def tiling(self, is_prefill: bool) -> Tiling:
        return self.prefill if is_prefill else self.decode


class Sizes(NamedTuple):
    """How much a plan holds, or has room for. partials: partial results, one for each row of each part."""

    decode_items: int
    prefill_items: int
    merges: int
    rows: int
    blocks: int
    positions: int
    partials: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch on the device; views of one int32 tensor. A launch needs nothing else of the batch.

    decode, prefill: [items,ITEM]; merges: [n,MERGE]; rows, begins, ends: [T] in the order of the items.
    num_rows, num_blocks, block_size: what queries and storage must have. num_written: rows that items write.
    """

    decode: Tensor
    prefill: Tensor
    merges: Tensor
    rows: Tensor
    begins: Tensor
    ends: Tensor
    tables: Tensor
    positions: Tensor
    num_partials: int
    num_rows: int
    num_written: int
    num_blocks: int
    block_size: int


@final
class Room:
    """Device memory for the plans of passes that a CUDA graph repeats: fixed sizes, one address."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self._begins = _begins(sizes)
        self._memory = torch.empty(self._begins[-1], dtype=torch.int32, device=device)

    def fill(self, parts: Sequence[Int32]) -> list[Tensor]:
        """Writes sections, each from its beginning, in one copy; items and merges that are not used become zeros.

        Returns the sections whole. Of tables and positions, which come last and are long, only what is used is copied.
        """
        used = max(
            (begin + part.size for begin, part in zip(self._begins, parts, strict=False) if part.size), default=0
        )
        used = max(used, self._begins[3])
        host = torch.zeros(used, dtype=torch.int32, pin_memory=self._memory.is_cuda)
        numbers = host.numpy()
        for begin, part in zip(self._begins, parts, strict=False):
            numbers[begin : begin + part.size] = part.reshape(-1)
        # Pinned memory comes from PyTorch's host allocator, which gives it out again only after this copy.
        self._memory[:used].copy_(host, non_blocking=True)
        widths = _widths(self.sizes)
        return [self._memory[b : b + n] for b, n in zip(self._begins, widths, strict=False)]


def decode_sizes(
    geometry: Geometry,
    block_size: int,
    num_sequences: int,
    max_slots: int,
    *,
    is_irregular: bool,
) -> Sizes:
    """Room for any decode of so many sequences, of one token and at most `max_slots` slots each.

    is_irregular: whether they may have gaps or slots out of order (then their positions need room too).
    """
    parts = max(1, min(MAX_PROGRAMS // geometry.num_programs, -(-max_slots // MIN_PART) + 1))
    return Sizes(
        decode_items=num_sequences * parts,
        prefill_items=0,
        merges=num_sequences,
        rows=num_sequences,
        blocks=num_sequences * (-(-max_slots // block_size) + 1),
        positions=num_sequences * max_slots if is_irregular else 0,
        partials=num_sequences * parts,
    )


def plan(batch: AttentionBatch, geometry: Geometry, device: torch.device, room: Room | None = None) -> Plan:
    """The items of a batch on the device. Cost: O(rows + visible blocks), about 10 µs per segment; no wait.

    Raises `ValueError` for segments that do not fit the batch, and for a batch that does not fit the `room`.
    """
    tiles = _Tiles(batch, geometry)
    for segment in batch.segments:
        if len(segment.rows):
            tiles.add(segment)
    rows, tables = _joined(tiles.rows), _joined(tiles.tables)
    if tables.min(initial=0) < 0:
        raise ValueError(f"a segment names block {tables.min()}; expected block ids of the storage")
    found = np.array(tiles.found, dtype=_TILE)
    is_prefill = found["is_prefill"] == 1
    decode = _items(found[~is_prefill], geometry.decode, geometry, rows, 0)
    prefill = _items(found[is_prefill], geometry.prefill, geometry, rows, decode.num_partials)
    sections = (
        decode.items,
        prefill.items,
        np.concatenate([decode.merges, prefill.merges]),
        rows,
        _joined(tiles.begins),
        _joined(tiles.ends),
        tables,
        _joined(tiles.positions),
    )
    needed = Sizes(
        len(decode.items),
        len(prefill.items),
        len(sections[2]),
        len(rows),
        len(tables),
        len(sections[-1]),
        prefill.num_partials,
    )
    if room is None:
        room = Room(needed, device)
    elif len(rows) != len(batch.query_ends):
        raise ValueError(
            f"{len(rows)} of {len(batch.query_ends)} rows belong to a segment; a room serves passes in which all do: "
            f"give the others segments of no slots"
        )
    elif any(want > have for want, have in zip(needed, room.sizes, strict=True)):
        raise ValueError(f"the batch needs {needed}; the room has {room.sizes}; make a larger one and capture again")
    items, more_items, merges, *flat = room.fill(sections)
    return Plan(
        decode=items.view(-1, ITEM),
        prefill=more_items.view(-1, ITEM),
        merges=merges.view(-1, MERGE),
        rows=flat[0],
        begins=flat[1],
        ends=flat[2],
        tables=flat[3],
        positions=flat[4],
        num_partials=room.sizes.partials,
        num_rows=len(batch.query_ends),
        num_written=len(rows),
        num_blocks=int(tables.max(initial=-1)) + 1,
        block_size=batch.block_size,
    )


# --- tiles ------------------------------------------------------------------------------------------------------------


class _Tiles:
    """Rows in tiles, and the arrays into which tiles and items point."""

    def __init__(self, batch: AttentionBatch, geometry: Geometry) -> None:
        self._batch = batch
        self._geometry = geometry
        self.found: list[tuple[int, ...]] = []
        self.rows: list[Int64] = []
        self.begins: list[Int64] = []
        self.ends: list[Int64] = []
        self.tables: list[Int32] = []
        self.positions: list[Int32] = []
        self._num_rows = self._num_blocks = self._num_positions = 0

    def add(self, segment: Segment) -> None:
        """The tiles of a segment with at least one row."""
        batch = self._batch
        needed = -(-segment.num_slots // batch.block_size)
        if len(segment.block_table) < needed or segment.rows.max() >= len(batch.query_ends):
            raise ValueError(
                f"a segment of {segment.num_slots} slots has {len(segment.block_table)} blocks of {batch.block_size}, "
                f"and rows {segment.rows} of {len(batch.query_ends)}; expected {needed} blocks and rows of the batch"
            )
        held = None if segment.positions is None else segment.positions[: segment.num_slots]
        first = segment.first_position if held is None else 0
        limit = first + segment.num_slots if held is None else int(held.max(initial=-1)) + 1
        is_prefill = len(segment.rows) * self._geometry.chunk > self._geometry.decode.block_m
        tiling = self._geometry.tiling(is_prefill)
        if len(segment.rows) == 1:  # a decode, by far the most frequent: no arrays for single numbers
            begin, end = _clipped_row(int(segment.rows[0]), batch, first, limit)
            seen, cuts = _Seen(segment.rows, np.array([begin]), np.array([end])), [0, 1]
            tiles = [_extent(begin, begin, end, end, first, held)]
        else:
            seen = _clipped(segment.rows, batch, first, limit)
            cuts = _cuts(seen, tiling.block_m // self._geometry.chunk)
            tiles = [_extent_of(seen.begins[a:b], seen.ends[a:b], first, held) for a, b in pairwise(cuts)]
        lowest = min(tile.lo for tile in tiles) // tiling.block_n * tiling.block_n // batch.block_size
        used = segment.block_table[lowest : -(-max(tile.hi for tile in tiles) // batch.block_size)]
        for (a, b), tile in zip(pairwise(cuts), tiles, strict=True):
            here = (is_prefill, self._num_rows + a, b - a, *tile, self._num_blocks - lowest)
            self.found.append((*here, self._num_positions, held is not None, first, len(tiles)))
        self.rows.append(seen.rows)
        self.begins.append(seen.begins)
        self.ends.append(seen.ends)
        self.tables.append(used)
        self._num_rows += len(seen.rows)
        self._num_blocks += len(used)
        if held is not None:
            self.positions.append(held)
            self._num_positions += len(held)


class _Seen(NamedTuple):
    """Rows in the order of what they see, and the positions [begin, end) that are stored of it; [0, 0) for nothing."""

    rows: Int64
    begins: Int64
    ends: Int64


def _clipped(rows: Int64, batch: AttentionBatch, first: int, limit: int) -> _Seen:
    begins = np.maximum(batch.query_begins[rows].astype(np.int64), first)
    ends = np.minimum(batch.query_ends[rows].astype(np.int64), limit)
    blind = begins >= ends
    begins[blind] = ends[blind] = 0
    order = np.lexsort((ends, begins))
    return _Seen(rows[order], begins[order], ends[order])


def _clipped_row(row: int, batch: AttentionBatch, first: int, limit: int) -> tuple[int, int]:
    """What a single row sees, likewise."""
    begin, end = max(int(batch.query_begins[row]), first), min(int(batch.query_ends[row]), limit)
    return (begin, end) if begin < end else (0, 0)


def _cuts(seen: _Seen, most: int) -> list[int]:
    """Where tiles of ordered rows begin, and the end: at most so many rows, and no gap in what they see together."""
    count = len(seen.rows)
    reached = np.zeros(-(-count // most) * most, np.int64)
    reached[:count] = seen.ends
    reached = np.maximum.accumulate(reached.reshape(-1, most), axis=1).reshape(-1)
    cut = np.zeros(count + 1, bool)
    cut[1:count] = seen.begins[1:] > reached[: count - 1]
    cut[::most] = True
    cut[count] = True
    found: list[int] = np.flatnonzero(cut).tolist()
    return found


class _Extent(NamedTuple):
    """What the rows of a tile see: slots and positions, as in `_TILE`."""

    lo: int
    full_lo: int
    full_hi: int
    hi: int
    seen_begin: int
    seen_end: int


def _extent_of(begins: Int64, ends: Int64, first: int, held: Int32 | None) -> _Extent:
    return _extent(int(begins[0]), int(begins[-1]), int(ends.min()), int(ends.max()), first, held)


def _extent(begin: int, last_begin: int, first_end: int, end: int, first: int, held: Int32 | None) -> _Extent:
    if end == 0:
        return _Extent(0, 0, 0, 0, 0, 0)
    if held is None:
        return _Extent(begin - first, last_begin - first, first_end - first, end - first, begin, end)
    slots = np.flatnonzero((held >= begin) & (held < end))
    lo, hi = (int(slots[0]), int(slots[-1]) + 1) if len(slots) else (0, 0)
    return _Extent(lo, lo, lo, hi, begin, end)


# --- items ------------------------------------------------------------------------------------------------------------


class _Items(NamedTuple):
    items: Int32
    merges: Int32
    num_partials: int  # those before included


def _items(tiles: NDArray[Any], tiling: Tiling, geometry: Geometry, rows: Int32, num_partials: int) -> _Items:
    """Tiles cut into parts, the longest first (they would be waited for); `num_partials` are taken already."""
    step, num_rows = tiling.block_n, tiles["num_rows"]
    lo, hi = tiles["lo"] // step * step, tiles["hi"]
    full_lo, full_hi = -(-tiles["full_lo"] // step) * step, tiles["full_hi"] // step * step
    has_full = full_lo < full_hi
    full_lo, full_hi = np.where(has_full, full_lo, lo), np.where(has_full, full_hi, lo)

    steps = -(-(hi - lo) // step)
    most = np.maximum(MAX_PROGRAMS // (tiles["num_tiles"] * geometry.num_programs), 1)
    length = np.maximum(np.maximum(-(-steps // most), MIN_PART // step), 1)  # of a part, in steps
    parts = np.maximum(-(-steps // length), 1)
    length = np.maximum(-(-steps // parts), 1)
    parts = np.maximum(-(-steps // length), 1)

    taken = np.where(parts > 1, parts * num_rows, 0)
    first_partial = num_partials + np.cumsum(taken) - taken
    tile = np.repeat(np.arange(len(tiles)), parts)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = lo[tile] + part * (length * step)[tile]
    end = np.minimum(begin + (length * step)[tile], hi[tile])
    items = np.zeros((len(tile), ITEM), np.int32)
    columns = (tiles["rows_at"][tile], num_rows[tile], begin, full_lo[tile], full_hi[tile], end)
    for column, numbers in enumerate(columns):
        items[:, column] = numbers
    items[:, 3:5] = np.clip(items[:, 3:5], begin[:, None], end[:, None])
    fields = ("seen_begin", "seen_end", "table_at", "positions_at", "is_irregular", "first_position")
    for column, name in enumerate(fields, start=len(columns)):
        items[:, column] = tiles[name][tile]
    items[:, 12] = np.where(parts[tile] > 1, first_partial[tile] + part * num_rows[tile], -1)

    split = np.flatnonzero(parts > 1)
    owner = np.repeat(split, num_rows[split])
    inside = np.arange(len(owner)) - np.repeat(np.cumsum(num_rows[split]) - num_rows[split], num_rows[split])
    merges = np.empty((len(owner), MERGE), np.int32)
    merges[:, 0] = rows[tiles["rows_at"][owner] + inside]
    merges[:, 1] = first_partial[owner] + inside
    merges[:, 2] = parts[owner]
    merges[:, 3] = num_rows[owner]
    return _Items(items[np.argsort(begin - end, kind="stable")], merges, num_partials + int(taken.sum()))


# --- memory -----------------------------------------------------------------------------------------------------------


def _widths(sizes: Sizes) -> list[int]:
    """Numbers in each section, in the order of `Plan`."""
    counts = (sizes.rows, sizes.rows, sizes.rows, sizes.blocks, sizes.positions)
    return [sizes.decode_items * ITEM, sizes.prefill_items * ITEM, sizes.merges * MERGE, *counts]


def _begins(sizes: Sizes) -> list[int]:
    """Where sections begin, and the size of it all. Each at a multiple of 64 bytes: Triton specialises on alignment."""
    begins = [0]
    for width in _widths(sizes):
        begins.append(begins[-1] + max(16, -(-width // 16) * 16))
    return begins


def _joined(parts: Sequence[Int64] | Sequence[Int32]) -> Int32:
    return np.concatenate(parts).astype(np.int32, copy=False) if parts else np.empty(0, np.int32)
