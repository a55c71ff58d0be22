"""Sequences: a table of blocks and, per slot, the position of the token in it. No tensors, no pool.

A sequence of a cache with blocks of 4, after tokens 0..9, then after `remove` of [2, 5) (later tokens moved down by 3):

    table        b7        b2        b5               b7        b2        b5
    positions    0 1 2 3   4 5 6 7   8 9              0 1 . .   . 2 3 4   5 6
                 dense: slot j holds position 0 + j   `.` is a hole, stored as -1

Slots are used in the order of the table, so that a sequence is *dense* until something unusual happens to it (a removal
in its middle, positions with gaps or repeats). Nothing but the position decides what a query sees, so holes and
disorder cost speed, never correctness.

What outlives the tokens: `end`, the position after the last one, and `forgotten`, the positions that the span let go.
Everything a decode step does here is O(1); what walks all slots says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Indices
from typing import final

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CorruptState

__all__ = ["IntVector", "Ranges", "Sequence", "moved"]


@final
class IntVector:
    """A growing int32 array: appends at the end and drops at the front in amortised constant time."""

    __slots__ = ("_begin", "_data", "_end")

    def __init__(self) -> None:
        self._data = np.empty(16, np.int32)
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, index: int) -> int:
        return int(self._data[self._begin + index])

    def __setitem__(self, index: int, value: int) -> None:
        self._data[self._begin + index] = value

    @property
    def view(self) -> NDArray[np.int32]:
        """The elements, without a copy; stale once the vector changes its length."""
        return self._data[self._begin : self._end]

    def append(self, value: int) -> None:
        if self._end == len(self._data):
            self._grow(1)
        self._data[self._end] = value
        self._end += 1

    def extend(self, values: Indices[int] | NDArray[np.int32]) -> None:
        if self._end + len(values) > len(self._data):
            self._grow(len(values))
        self._data[self._end : self._end + len(values)] = values
        self._end += len(values)

    def drop_front(self, count: int) -> None:
        self._begin += count

    def cut(self, length: int) -> None:
        self._end = self._begin + length

    def replace(self, values: NDArray[np.int32]) -> None:
        """Make `values` the elements."""
        self._begin = self._end = 0
        self.extend(values)

    def _grow(self, count: int) -> None:
        # A fresh array: views handed out keep the old one, and the dropped front is not copied along.
        live = self.view
        self._data = np.empty(max(16, 2 * (len(live) + count)), np.int32)
        self._data[: len(live)] = live
        self._begin, self._end = 0, len(live)


@final
class Ranges:
    """A set of positions as sorted, disjoint, half-open ranges: one range, where a sequence has no gaps.

    Every operation is O(ranges); adding at the end is O(1).
    """

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges = list(ranges)

    @property
    def end(self) -> int:
        """The position after the highest one; 0 when there is none."""
        return self._ranges[-1][1] if self._ranges else 0

    def add(self, begin: int, end: int) -> None:
        """Add the positions of [begin, end)."""
        if self._ranges and begin < self._ranges[-1][0]:  # not at the end: positions came out of order
            apart = [r for r in self._ranges if r[1] < begin or end < r[0]]
            touching = [r for r in self._ranges if r not in apart]
            begin, end = min([begin, *(r[0] for r in touching)]), max([end, *(r[1] for r in touching)])
            self._ranges = sorted([*apart, (begin, end)])
        elif self._ranges and begin <= self._ranges[-1][1]:
            self._ranges[-1] = (self._ranges[-1][0], max(end, self._ranges[-1][1]))
        else:
            self._ranges.append((begin, end))

    def overlaps(self, begin: int, end: int) -> bool:
        """Whether any position of [begin, end) is in the set."""
        return any(max(first, begin) < min(last, end) for first, last in self._ranges)

    def without(self, begin: int, end: int) -> Ranges:
        """What is left when [begin, end) is taken out and what lies behind moves down."""
        left = Ranges()
        for first, last in self._ranges:
            if moved(first, begin, end) < moved(last, begin, end):
                left.add(moved(first, begin, end), moved(last, begin, end))
        return left

    def below(self, position: int) -> Ranges:
        """The positions below `position`."""
        return Ranges((first, min(last, position)) for first, last in self._ranges if first < position)

    def __repr__(self) -> str:
        return repr(self._ranges)


@final
class Sequence:
    """One sequence's table. `block_size` slots a block; block ids mean whatever the owner's pool says.

    `pending` lists slots that are taken but not yet tokens (appended, not committed), in order.
    """

    __slots__ = (
        "appended",
        "block_size",
        "end",
        "forgotten",
        "is_dense",
        "num_tokens",
        "pending",
        "positions",
        "table",
    )

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.table = IntVector()
        self.positions = IntVector()
        self.end = 0
        self.forgotten = Ranges()
        self.num_tokens = 0
        self.is_dense = True
        self.pending: list[int] = []
        self.appended: dict[int, int] = {}

    @classmethod
    def resumed(cls, block_size: int, blocks: Indices[int], begin: int, end: int) -> Sequence:
        """A sequence whose tokens [begin, end) lie in `blocks`, and whose earlier ones were forgotten."""
        made = cls(block_size)
        made.table.extend(blocks)
        made.positions.extend(np.arange(begin, end, dtype=np.int32))
        made.num_tokens = end - begin
        made.end = end
        if begin:
            made.forgotten.add(0, begin)
        return made

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Slots of the table in use, holes and pending ones included."""
        return len(self.positions)

    @property
    def tail_room(self) -> int:
        """Slots of the last block that come after the last used one."""
        return len(self.table) * self.block_size - len(self.positions)

    def slots(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slot ids in the pool of slot indices of this table."""
        if self.block_size == 1:
            return self.table.view[indices].astype(np.int64)
        blocks, offsets = np.divmod(indices, self.block_size)
        return self.table.view[blocks].astype(np.int64) * self.block_size + offsets

    def indices_between(self, begin: int, end: int) -> NDArray[np.int64]:
        """Slot indices of the stored positions in [begin, end). O(1) plus the answer when dense, else O(slots)."""
        if self.is_dense and self.num_slots:
            first = self.positions[0]
            return np.arange(max(0, begin - first), min(self.num_slots, end - first), dtype=np.int64)
        positions = self.positions.view
        return np.flatnonzero((positions >= max(0, begin)) & (positions < end))

    def forgettable_blocks(self, retained_from: int) -> Indices[int]:
        """Indices of table entries whose tokens all lie below `retained_from`. O(1) when dense, else O(slots)."""
        if not retained_from or not self.num_slots or self.pending:
            return ()
        if self.is_dense:
            first = self.positions[0]
            if retained_from >= first + self.num_slots:
                return range(len(self.table))
            return range(max(0, retained_from - first) // self.block_size)
        highest = self._padded(self.positions.view, fill=-1).max(axis=1)
        return [int(i) for i in np.flatnonzero(highest < retained_from)]

    def holes(self) -> NDArray[np.int64]:
        """Slot indices that hold nothing and are not pending. O(slots)."""
        empty = np.flatnonzero(self.positions.view < 0)
        return empty[~np.isin(empty, self.pending)] if self.pending else empty

    # --- changing -----------------------------------------------------------------------------------------------------

    def append(self, positions: Indices[int]) -> None:
        """Use the next slots of the table for tokens at `positions`. The table has been extended before."""
        if len(positions) == 1:  # decode: no arrays
            position = positions[0]
            self.is_dense &= not self.num_slots or position == self.positions[self.num_slots - 1] + 1
            self.positions.append(position)
            highest = position
        else:
            new = np.asarray(positions, np.int32)
            previous = self.positions[self.num_slots - 1] if self.num_slots else int(new[0]) - 1
            self.is_dense &= bool(new[0] == previous + 1) and bool((np.diff(new) == 1).all())
            self.positions.extend(new)
            highest = int(new.max())
        self.num_tokens += len(positions)
        self.end = max(self.end, highest + 1)

    def fill(self, indices: NDArray[np.int64], positions: Indices[int]) -> None:
        """Put tokens into slots that hold nothing (holes or pending ones). O(slots)."""
        self.positions.view[indices] = positions
        self.num_tokens += len(positions)
        self.end = max(self.end, max(positions) + 1)
        self._settle()

    def append_pending(self, count: int) -> None:
        """Take the next `count` slots of the table without making them tokens."""
        self.pending.extend(range(self.num_slots, self.num_slots + count))
        self.positions.extend([-1] * count)
        self.is_dense = False

    def drop_blocks(self, indices: Indices[int]) -> list[int]:
        """Forget the tokens of those table entries and return the blocks' ids."""
        count = len(indices)
        if not count:
            return []
        whole = count == len(self.table)
        if self.is_dense:  # always the front
            num_slots = min(count * self.block_size, self.num_slots)
            blocks = [int(b) for b in self.table.view[:count]]
            self.forgotten.add(self.positions[0], self.positions[0] + num_slots)
            self.table.drop_front(count)
            self.positions.drop_front(num_slots)
            self.num_tokens -= num_slots
        else:
            blocks, dropped = self._take_out(indices)
            self.num_tokens -= int((dropped >= 0).sum())
            gone = np.unique(dropped[dropped >= 0])
            for run in np.split(gone, np.flatnonzero(np.diff(gone) != 1) + 1):
                self.forgotten.add(int(run[0]), int(run[-1]) + 1)
        if whole:
            self.is_dense = True
        return blocks

    def erase(self, begin: int, end: int) -> list[int]:
        """Remove the tokens in [begin, end), `end` at most the end; later ones move down by `end - begin`.

        Returns the blocks left empty. O(slots).
        """
        positions = self.positions.view
        gone = (positions >= begin) & (positions < end)
        self.num_tokens -= int(gone.sum())
        positions[gone] = -1
        positions[positions >= end] -= end - begin
        self.forgotten = self.forgotten.without(begin, end)
        # After a cut at the end, the position after the last token that is left.
        last = self.end - (end - begin) if end < self.end else int(positions.max(initial=-1)) + 1
        self.end = max(last, self.forgotten.end)
        return self.compact()

    def compact(self) -> list[int]:
        """Cut unused slots off the end and take out blocks that hold nothing; returns those blocks. O(slots)."""
        held = self.positions.view >= 0
        held[self.pending] = True
        last = int(np.flatnonzero(held)[-1]) + 1 if held.any() else 0
        blocks = [int(b) for b in self.table.view[-(-last // self.block_size) :]]
        self.positions.cut(last)
        self.table.cut(-(-last // self.block_size))
        if last:
            empty = np.flatnonzero(~self._padded(held[:last], fill=False).any(axis=1))
            if len(empty):
                blocks += self._take_out([int(i) for i in empty])[0]
        self._settle()
        return blocks

    def prefix(self, length: int) -> Sequence:
        """A sequence that names the same blocks for the tokens below position `length`. O(slots)."""
        copy = Sequence(self.block_size)
        copy.table.extend(self.table.view)
        copy.positions.extend(self.positions.view)
        positions = copy.positions.view
        positions[positions >= length] = -1
        copy.num_tokens = int((positions >= 0).sum())
        copy.forgotten = self.forgotten.below(length)
        copy.end = max(int(positions.max(initial=-1)) + 1, copy.forgotten.end)
        copy.compact()
        return copy

    # --- proving ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `CorruptState` unless the table, the positions and the counters agree. O(slots)."""
        positions = self.positions.view
        stored = positions[positions >= 0]
        dense = bool((np.diff(positions) == 1).all()) and bool((positions >= 0).all())
        facts = {
            "a table as long as the slots need": len(self.table) == -(-len(positions) // self.block_size),
            "each block once": len(set(self.table.view.tolist())) == len(self.table),
            "num_tokens": self.num_tokens == len(stored),
            "end after the last token": self.end > int(stored.max(initial=-1)),
            "forgotten before the end": self.forgotten.end <= self.end,
            "dense only when it is": dense or not self.is_dense,
            "pending slots empty": all(positions[i] < 0 for i in self.pending),
            "a used last slot": not len(positions) or positions[-1] >= 0 or len(positions) - 1 in self.pending,
        }
        for fact, holds in facts.items():
            if not holds:
                raise CorruptState(f"sequence breaks '{fact}': {self!r}")

    def __repr__(self) -> str:
        return (
            f"Sequence(block_size={self.block_size}, table={self.table.view.tolist()}, "
            f"positions={self.positions.view.tolist()}, end={self.end}, forgotten={self.forgotten}, "
            f"num_tokens={self.num_tokens}, is_dense={self.is_dense}, pending={self.pending})"
        )

    def _settle(self) -> None:
        positions = self.positions.view
        self.is_dense = not len(positions) or (positions[0] >= 0 and bool((np.diff(positions) == 1).all()))

    def _padded(self, per_slot: NDArray[np.generic], fill: int) -> NDArray[np.generic]:
        """Per-slot values [num_slots] as [blocks, block_size]."""
        padded = np.full(len(self.table) * self.block_size, fill, per_slot.dtype)
        padded[: len(per_slot)] = per_slot
        return padded.reshape(-1, self.block_size)

    def _take_out(self, indices: Indices[int]) -> tuple[list[int], NDArray[np.int32]]:
        """Take entries out of the table, anywhere: their block ids and the positions they held. O(slots)."""
        keep = np.ones(len(self.table), bool)
        keep[list(indices)] = False
        blocks = [int(b) for b in self.table.view[~keep]]
        slots = np.repeat(keep, self.block_size)[: self.num_slots]
        dropped = self.positions.view[~slots].copy()
        if self.pending:
            renumbered = np.cumsum(slots) - 1
            self.pending = [int(renumbered[i]) for i in self.pending]
        self.table.replace(self.table.view[keep])
        self.positions.replace(self.positions.view[slots])
        return blocks, dropped


def moved(position: int, begin: int, end: int) -> int:
    """Where a position stands after [begin, end) was removed: positions inside fall to `begin`."""
    return position - (end - begin) if position >= end else min(position, begin)
