"""How the layers of a packed pass are read: in place by rows, or whole histories side by side where a model insists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache.caches import Cache, CausalCache, EncoderCache
from kvcache.errors import NotSupported
from kvcache.hf.attention import Call, Gathered, Reader
from kvcache.spans import Sliding
from kvcache.spec import Batch

__all__ = ["BiasedReader", "Columns", "RowReader", "Step", "put_rows"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One call of the model, of B sequences with n tokens each, or of one ragged row of T (then B is 1).

    batch: its T rows; sequences: distinct, in the order of their rows; positions: int64 [T], on the model's device;
    is_fresh: no sequence has a past; has_media: some sequence sees media; new_media: the pass brings encoder states.
    """

    batch: Batch
    sequences: Sequence[int]
    positions: Tensor
    is_fresh: bool
    has_media: bool = False
    new_media: bool = False


@final
class RowReader(Reader):
    """Reads one layer of one member for whatever pass is under way there. Cross attention sees all media."""

    __slots__ = ("_is_cross", "_layer", "_member", "_window")

    def __init__(self, member: Cache, layer: int) -> None:
        self._member = member
        self._layer = layer
        self._is_cross = isinstance(member, EncoderCache)
        span = member.span if isinstance(member, CausalCache) else None
        self._window = span.window if isinstance(span, Sliding) else None

    @property
    def window(self) -> int | None:
        return self._window

    def attend(self, call: Call) -> Tensor | None:
        # T5 hands zeros as the position bias of its cross attention, and cross attention is never causal.
        if call.mask is not None or call.dropout or not (self._is_cross or call.is_plain):
            return None
        B, Hq, n, D = call.queries.shape
        rows = call.queries.transpose(1, 2).reshape(B * n, Hq, D)
        self._member.set_layer(self._layer)  # not always the last one put: Gemma's later layers read earlier ones
        out: Tensor = self._member.attend(rows, scale=call.scale, softcap=call.softcap, sinks=call.sinks)
        return out.view(B, n, Hq, -1)

    def gather(self) -> Gathered:
        _refuse_call()

    def knows_padding(self, attention_mask: Tensor | None) -> bool:
        return True


@final
class BiasedReader(Reader):
    """Reads whole histories side by side, and adds the bias that the model computed for exactly these columns."""

    __slots__ = ("_layer", "columns")

    window = None

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.columns: Columns

    def attend(self, call: Call) -> Tensor | None:
        if call.mask is not None or call.softcap is not None or call.sinks is not None or call.dropout:
            return None
        keys, values = self.columns.gather(self._layer, call.queries.dtype)
        bias = self.columns.mask if call.position_bias is None else self.columns.biased(call.position_bias)
        out = F.scaled_dot_product_attention(
            call.queries,
            keys,
            values,
            attn_mask=bias,
            scale=call.scale,
            enable_gqa=keys.shape[1] != call.queries.shape[1],
        )
        return out.transpose(1, 2)

    def gather(self) -> Gathered:
        _refuse_call()

    def knows_padding(self, attention_mask: Tensor | None) -> bool:
        return True


@final
class Columns:
    """Whole histories of a pass side by side: which columns they are, and who sees which. O(T * S), once per pass.

    slots: int64 [S] in the member's storage; mask: bool [1,1,T,S]; offsets: int64 [T,S], what a model that takes column
    minus row for (key - query) must add to its rows to be right: T5's length of the past.
    """

    __slots__ = ("_biased", "_member", "mask", "offsets", "slots")

    def __init__(self, member: CausalCache, step: Step) -> None:
        tables = member.tables.sequences
        parts = []
        for number, sequence in enumerate(step.sequences):
            table = tables[sequence]
            indices = table.indices_between(0, table.end)
            parts.append((table.slots(indices), table.positions.view[indices], np.full(len(indices), number)))
        slots, positions, owners = (np.concatenate([part[i] for part in parts]).astype(np.int64) for i in range(3))
        queries = np.asarray(step.batch.positions)[:, None]
        numbers = {sequence: number for number, sequence in enumerate(step.sequences)}
        own = np.array([numbers[sequence] for sequence in step.batch.sequences])[:, None]
        seen = (owners == own) & (positions <= queries) & (positions >= member.span.begin(queries))
        rows, columns = np.arange(len(queries))[:, None], np.arange(len(positions))
        device = step.positions.device
        self._member = member
        self._biased: tuple[Tensor, Tensor] | None = None
        self.slots = slots
        self.mask = torch.from_numpy(seen)[None, None].to(device)
        self.offsets = torch.from_numpy(queries - positions + columns - rows).to(device)

    def __len__(self) -> int:
        return len(self.slots)

    def biased(self, bias: Tensor) -> Tensor:
        """`bias` [1,Hq,T,S] with -inf where nothing is seen. The layers of T5 share one bias: it is masked once."""
        if self._biased is None or self._biased[0] is not bias:
            self._biased = (bias, bias.masked_fill(~self.mask, -torch.inf))
        return self._biased[1]

    def gather(self, layer: int, dtype: torch.dtype) -> Gathered:
        """Keys [1,H,S,D] and values [1,H,S,Dv] of a layer in the model's element type. A copy."""
        storage = self._member.storage
        stored = storage.layer(layer)
        keys, values = (
            part.format.decode(storage.backend.gather_rows(part.array, self.slots), part.head_dim)
            for part in (stored.keys, stored.values)
        )
        return Gathered(*(part.to(dtype).transpose(0, 1)[None] for part in (keys, values)))


def put_rows(member: Cache, layer: int, keys: Tensor, values: Tensor) -> None:
    """Store keys [B,H,n,D] and values [B,H,n,Dv] as the T = B * n rows of the pass."""
    member.set_layer(layer)
    member.put(keys.transpose(1, 2).flatten(0, 1), values.transpose(1, 2).flatten(0, 1))


def _refuse_call() -> NoReturn:
    raise NotSupported(
        "the model asks for attention under a mask of its own (bidirectional image blocks, dropout, a position bias), "
        "which packed rows do not support; run such prompts through generate() with cache_for"
    )
