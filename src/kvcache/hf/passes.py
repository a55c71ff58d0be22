"""One forward over a transformers cache: which tokens it adds to which rows, and how each layer is stored and read.

A batch [B,q] of `generate` is rectangular and padded on the left; the core sees T tokens of B sequences, no padding:

    columns    0 1 2 3 4      stored as          positions
    row 0      a b c d e      sequence 7         0 1 2 3 4
    row 1      . . f g h      sequence 8         0 1 2          padding 2: column c is position c - 2

`Rows` is what a cache remembers between forwards, `Pass` what holds for one. Padding is never stored; where models want
rectangles (whole keys, the output of attention) it comes back as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kvcache import kernels
from kvcache.caches import CausalCache
from kvcache.formats import Format
from kvcache.hf.attention import Call, Gathered, Reader
from kvcache.hf.gather import Columns, columns_of
from kvcache.hf.pool import NewTokens, Pool
from kvcache.hf.states import LentStates
from kvcache.hf.windowed import windowed_attention
from kvcache.kernels import AttentionBatch, Segment
from kvcache.spans import Chunked, Sliding, Span

__all__ = ["LayerReader", "Pass", "Rows", "first_column"]


@final
@dataclass(slots=True)
class Rows:
    """The rows of a cache: a sequence of the pool and its padding (columns on the left that hold nothing) each.

    length: columns of every row, padding included.
    """

    sequences: list[int] = field(default_factory=list)
    padding: list[int] = field(default_factory=list)
    length: int = 0

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each row."""
        return [max(0, self.length - padding) for padding in self.padding]


def first_column(span: Span, num_columns: int) -> int:
    """The first column that a mask of this span has when `num_columns` are stored, as transformers' own layers do."""
    match span:
        case Sliding(window, _) | Chunked(window):
            return max(0, num_columns - window + 1)
    return 0


@final
class Pass:
    """A pass over B rows by q new columns, started on creation. Raises `CacheFull`, and then nothing has changed."""

    def __init__(self, pool: Pool, rows: Rows, num_columns: int, device: torch.device) -> None:
        self.pool = pool
        self.begin = rows.length
        self.num_columns = num_columns
        self.sequences = tuple(rows.sequences)
        self.padding = tuple(rows.padding)
        self.seen: set[int] = set()
        self.is_open = True
        self._device = device
        end = self.begin + num_columns
        self.new = [
            NewTokens(sequence, max(self.begin, padding) - padding, end - padding)
            for sequence, padding in zip(self.sequences, self.padding, strict=True)
            if padding < end
        ]
        self._columns: dict[int, Columns] = {}
        self._tails = self._tail_indices()
        self._before = {
            member: self._columns_of(member, first_column(pool.causal(member).tables.span, self.begin), self.begin)
            for member in self._tails
        }
        if self.new:
            pool.start(self.new)
        self._kept = self._kept_indices(num_columns)
        self.states = self._lend() if pool.layout.has_states else None

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.sequences)

    def put(self, layer: int, keys: Tensor, values: Tensor) -> Gathered | None:
        """Store new keys [B,H,q,D] and values [B,H,q,Dv]. Answers with all columns where blocks will not show them."""
        self.seen.add(layer)
        member = self.pool.member_of(layer)
        cache = self.pool.causal(member)
        whole = None
        if member in self._tails:
            whole = self._with_before(member, layer, keys, values)
        if self.new:
            index = self._tails.get(member, self._kept)
            cache.set_layer(layer)
            cache.put(_rows(keys, index), _rows(values, index))
        return whole

    def gather(self, layer: int, keys: Tensor, values: Tensor) -> Gathered:
        """All columns that masks of this layer have; `keys` and `values` are the new ones, put before."""
        member = self.pool.member_of(layer)
        cache = self.pool.causal(member)
        if not self.new:  # padding alone, and before it, too
            before = self.begin - first_column(cache.tables.span, self.begin)
            return Gathered(F.pad(keys, (0, 0, before, 0)), F.pad(values, (0, 0, before, 0)))
        stored = cache.storage.layer(layer)
        if not self.begin and self._kept is None and self.pool.keeps(keys.dtype):
            return Gathered(keys, values)  # the columns are the new tokens, and storing has not changed them
        if member not in self._columns:
            begin = first_column(cache.tables.span, self.begin)
            self._columns[member] = self._columns_of(member, begin, self.begin + self.num_columns)
        columns = self._columns[member]
        return Gathered(columns.read(stored.keys, keys.dtype), columns.read(stored.values, values.dtype))

    def attend(self, layer: int, call: Call, values: Tensor, whole: Gathered | None) -> Tensor:
        """Attention [B,q,Hq,Dv] over the blocks of a layer, or over `whole` where they do not show everything.

        `values` [B,H,q,Dv] are the new ones, put before.
        """
        member = self.pool.member_of(layer)
        cache = self.pool.causal(member)
        queries = call.queries
        B, Hq, q, _ = queries.shape
        if whole is not None:
            first = self.begin + self.num_columns - whole.keys.shape[2]
            return windowed_attention(
                queries,
                whole,
                span=cache.tables.span,
                padding=[padding - first for padding in self.padding],
                scale=call.scale,
                softcap=call.softcap,
                sinks=call.sinks,
            )
        if not self.new:
            return queries.new_zeros((B, q, Hq, values.shape[3]))
        if q == self.num_columns:
            kept = self._kept
            cache.set_layer(layer)
            rows = _rows(queries, kept)
            output: Tensor = cache.attend(rows, scale=call.scale, softcap=call.softcap, sinks=call.sinks)
        else:
            kept = self._kept_indices(q)
            output = self._attend_last(cache, layer, call, _rows(queries, kept))
        if kept is not None:
            padded = output.new_zeros((B * q, *output.shape[1:]))
            output = padded.index_copy_(0, kept.to(output.device), output)
        return output.view(B, q, Hq, output.shape[-1])

    def _attend_last(self, cache: CausalCache, layer: int, call: Call, rows: Tensor) -> Tensor:
        """Attention of the last columns only: before its shared layers Gemma 4 drops queries that nobody needs."""
        q, tables = call.queries.shape[2], cache.tables
        segments: list[Segment] = []
        positions: list[NDArray[np.int32]] = []
        first = 0
        for new in self.new:
            own = np.arange(max(new.begin, new.end - q), new.end, dtype=np.int32)
            table = tables.sequences[new.sequence]
            dense = None if table.is_dense else table.positions.view
            numbers = np.arange(first, first + len(own))
            segments.append(Segment(numbers, table.table.view, table.num_slots, table.positions[0], dense))
            positions.append(own)
            first += len(own)
        ends = np.concatenate(positions) + 1
        begins = np.maximum(tables.span.begin(ends - 1), 0).astype(np.int32)
        batch = AttentionBatch(segments, begins, ends, tables.block_size)
        stored = cache.storage.layer(layer)
        scale = rows.shape[2] ** -0.5 if call.scale is None else call.scale
        kernel = kernels.choose(rows, stored.keys, stored.values)
        output: Tensor = kernel.attend(
            rows, stored.keys, stored.values, batch, scale=scale, softcap=call.softcap, sinks=call.sinks
        )
        return output

    def _columns_of(self, member: int, begin: int, end: int) -> Columns:
        tables = self.pool.causal(member).tables
        return columns_of(tables, self.sequences, self.padding, begin, end, self._device)

    def _with_before(self, member: int, layer: int, keys: Tensor, values: Tensor) -> Gathered:
        """New keys and values after the stored ones that they see; encoded and back, as later passes will see them."""
        storage = self.pool.causal(member).storage
        new = (_as_stored(keys, storage.key_format), _as_stored(values, storage.value_format))
        before = self._before[member]
        if not before.num_columns or layer not in storage.layers:
            return Gathered(*new)
        stored = storage.layer(layer)
        old = (before.read(stored.keys, keys.dtype), before.read(stored.values, values.dtype))
        return Gathered(*(torch.cat(pair, dim=2) for pair in zip(old, new, strict=True)))

    def _kept_indices(self, num_last: int) -> Tensor | None:
        """Which of the flattened last columns [B*num_last] are tokens; `None`: all."""
        end = self.begin + self.num_columns
        if all(padding <= end - num_last for padding in self.padding):
            return None
        columns = torch.arange(end - num_last, end)
        flags = columns >= torch.tensor(self.padding)[:, None]
        return flags.flatten().nonzero().squeeze(1).to(self._device)

    def _tail_indices(self) -> dict[int, Tensor]:
        """For members that store only tails: which of the B*q flattened columns those are."""
        indices = {}
        for member in self.pool.tails(self.new):
            parts = []
            rows = (row for row, padding in enumerate(self.padding) if padding < self.begin + self.num_columns)
            for row, new in zip(rows, self.new, strict=True):
                end = (row + 1) * self.num_columns
                parts.append(torch.arange(end - (new.end - self.pool.tail_begin(member, new)), end))
            indices[member] = torch.cat(parts).to(self._device)
        return indices

    def _lend(self) -> LentStates | None:
        if not self.new:
            return None
        has_tokens = [padding < self.begin + self.num_columns for padding in self.padding]
        rows = None if all(has_tokens) else torch.tensor(has_tokens).nonzero().squeeze(1).to(self._device)
        return LentStates(self.pool.states, rows, self.num_rows)


@final
class LayerReader(Reader):
    """One layer of a pass, for the attention function."""

    def __init__(self, current: Pass, layer: int, new: Gathered, whole: Gathered | None) -> None:
        self._pass = current
        self._layer = layer
        self._new = new
        self._whole = whole

    @property
    def window(self) -> int | None:
        span = self._pass.pool.layout.layers[self._layer].span
        return span.window if isinstance(span, Sliding) else None

    def attend(self, call: Call) -> Tensor | None:
        return self._pass.attend(self._layer, call, self._new.values, self._whole) if call.is_plain else None

    def gather(self) -> Gathered:
        return self._whole or self._pass.gather(self._layer, self._new.keys, self._new.values)

    def knows_padding(self, attention_mask: Tensor | None) -> bool:
        return attention_mask is None  # the mask asked `_MaskReader`, before keys were stored


def _rows(tensor: Tensor, index: Tensor | None) -> Tensor:
    """[B,H,q,D] as rows [B*q,H,D], or those of `index`."""
    rows = tensor.transpose(1, 2).flatten(0, 1)
    return rows if index is None else rows.index_select(0, index.to(rows.device))


def _as_stored(tensor: Tensor, form: Format) -> Tensor:
    """What reading back would give."""
    stored: Tensor = form.encode(tensor if form.is_native else tensor.contiguous())
    decoded: Tensor = stored if form.is_native else form.decode(stored, tensor.shape[-1])
    return decoded.to(tensor.dtype)
