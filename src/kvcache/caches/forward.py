"""One pass over a cache: which tokens, in which slots, and who sees what. Index arithmetic in NumPy, no tensors.

What a query sees is two numbers, `[begin, end)` in positions of its own sequence: the span gives the lower one,
causality the upper one, and an exception from causality lifts the upper one to `UNBOUNDED`. From these come, each made
once per pass and shared by all layers: the columns and the mask of `get`, and the segments of `attend`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from kvcache.kernels import AttentionBatch, Kernel, Segment, Writer
from kvcache.sequences import Sequence
from kvcache.spans import Span
from kvcache.spec import Array, Batch, Device, integer

__all__ = ["UNBOUNDED", "Columns", "Forward", "Padded", "group_rows"]

UNBOUNDED = np.iinfo(np.int32).max


class Columns(NamedTuple):
    """What `get` shows: `slots` int64 [S], ascending, and `visible` bool [T,S]."""

    slots: NDArray[np.int64]
    visible: NDArray[np.bool_]


class Padded(NamedTuple):
    """A pass with more rows than its batch: `slots` int64 [T], -1 for the rows of nobody, and what attention reads."""

    slots: NDArray[np.int64]
    attention: AttentionBatch


@final
class Forward:
    """One started pass.

    `slots` int64 [T], T = `num_rows`; `rows` are the batch rows of each sequence; `written` says which layers were put,
    in which shapes; `masks` keeps the mask made for each device, `kernels` and `writers` what was chosen for each kind
    of layers and rows.
    """

    __slots__ = (
        "_attention",
        "_columns",
        "_span",
        "_tables",
        "batch",
        "excepted",
        "is_reserved",
        "kernels",
        "masks",
        "num_rows",
        "rows",
        "slots",
        "writers",
        "written",
    )

    def __init__(
        self,
        batch: Batch,
        rows: Mapping[int, list[int]],
        slots: NDArray[np.int64],
        tables: Mapping[int, Sequence],
        span: Span,
        *,
        is_reserved: bool = False,
    ) -> None:
        self.batch = batch
        self.num_rows = len(batch)
        self.rows = rows
        self.slots: Array = slots
        self.is_reserved = is_reserved
        self.written: dict[int, tuple[int, int, int]] = {}  # layer: heads, head_dim, value_dim
        self.masks: dict[Device, Array] = {}
        self.kernels: dict[object, Kernel] = {}
        self.writers: dict[object, Writer] = {}
        self.excepted: tuple[int, ...] = ()
        self._tables = tables
        self._span = span
        self._columns: Columns | None = None
        self._attention: AttentionBatch | None = None

    def except_from_causality(self, rows: object) -> None:
        """Let these rows of the batch see later positions too. Raises `ValueError` for rows outside the batch."""
        try:
            excepted = tuple(integer(row, "an index in except_") for row in rows)  # type: ignore[attr-defined]
        except TypeError as error:
            raise TypeError(f"except_ is {rows!r}; expected indices into the batch") from error
        if any(row >= len(self.batch) for row in excepted):
            raise ValueError(
                f"except_ is {excepted} in a batch of {len(self.batch)} tokens; expected indices into the batch"
            )
        self.excepted = excepted
        self._columns = self._attention = None
        self.masks.clear()

    def columns(self) -> Columns:
        """The slots that any query sees, and which query sees which. O(T * S)."""
        if self._columns is None:
            begins, ends = self._bounds()
            parts = []
            for sequence, rows in self.rows.items():
                table = self._tables[sequence]
                indices = table.indices_between(int(begins[rows].min()), int(ends[rows].max()))
                positions = table.positions.view[indices]
                parts.append((rows, table.slots(indices), positions))
            # A slot that two sequences share is one column; ascending order lets adjacent slots be shown without a
            # copy.
            slots, inverse = np.unique(np.concatenate([part[1] for part in parts]), return_inverse=True)
            visible = np.zeros((len(self.batch), len(slots)), bool)
            start = 0
            for rows, own, positions in parts:
                where = inverse[start : start + len(own)]
                start += len(own)
                seen = (positions >= begins[rows][:, None]) & (positions < ends[rows][:, None])
                visible[np.asarray(rows)[:, None], where] = seen
            self._columns = Columns(slots, visible)
        return self._columns

    def attention(self, block_size: int) -> AttentionBatch:
        """The segments for kernels. O(T + sequences)."""
        if self._attention is None:
            begins, ends = self._bounds()
            segments = []
            for sequence, rows in self.rows.items():
                table = self._tables[sequence]
                segments.append(
                    Segment(
                        rows=np.asarray(rows, np.int64),
                        block_table=table.table.view,
                        num_slots=table.num_slots,
                        first_position=table.positions[0],
                        positions=None if table.is_dense else table.positions.view,
                    )
                )
            self._attention = AttentionBatch(segments, begins, ends, block_size)
        return self._attention

    def pad(self, num_rows: int, slots: Array, block_size: int) -> Padded:
        """Add rows of nobody, which see nothing, up to `num_rows`; `put` goes to `slots` from now on."""
        own, missing = self.attention(block_size), num_rows - self.num_rows
        nobody = [Segment(np.array([row]), np.empty(0, np.int32), 0, 0, None) for row in range(self.num_rows, num_rows)]
        begins, ends = (np.pad(bounds, (0, missing)) for bounds in (own.query_begins, own.query_ends))
        self._attention = AttentionBatch([*own.segments, *nobody], begins, ends, block_size)
        padded = Padded(np.pad(self.slots, (0, missing), constant_values=-1), self._attention)
        self.num_rows, self.slots = num_rows, slots
        return padded

    def _bounds(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        positions = np.asarray(self.batch.positions, np.int64)  # a window may be wider than 32 bits
        begins = np.maximum(self._span.begin(positions), 0).astype(np.int32)
        ends = (positions + 1).astype(np.int32)
        ends[list(self.excepted)] = UNBOUNDED
        return begins, ends


def group_rows(batch: Batch) -> dict[int, list[int]]:
    """Rows of the batch by sequence, in order of appearance. O(T)."""
    groups: dict[int, list[int]] = {}
    for row, sequence in enumerate(batch.sequences):
        groups.setdefault(sequence, []).append(row)
    return groups
